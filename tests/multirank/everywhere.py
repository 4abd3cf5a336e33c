"""What the cases assert of all ranks, whatever they exchange with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import hvdcomp
from hvdcomp.communicators.horovod_ranks import process_set_of


def raised_everywhere(kind: type[Exception], work: Callable[[], object], gather: Callable[[Any], list[Any]]) -> str:
    """The message of the error of this kind that `work` raises; every rank must raise one.

    Args:
        gather: the objects that all ranks give, by rank.
    """
    message = None
    try:
        work()
    except kind as error:
        message = str(error)
    everyone = gather(message)
    assert all(everyone), f"raised only on some ranks: {everyone}"
    assert message is not None
    return message


def assert_same_tensors(sizes: Sequence[tuple[str, int]], ranks: Sequence[np.ndarray]) -> None:
    """Asserts that the ranks' values are finite and the same, or names the tensors that differ.

    Args:
        sizes: of each tensor, its name and its number of elements.
        ranks: of each rank, the elements of all tensors.
    """
    names, counts = zip(*sizes, strict=True)
    ends = np.cumsum(counts)
    for rank, vector in enumerate(ranks):
        differing = []
        for name, first, own in zip(names, np.split(ranks[0], ends), np.split(vector, ends), strict=False):
            assert np.isfinite(own).all(), f"{name} of rank {rank} is not finite"
            if count := np.count_nonzero(first != own):
                differing.append(f"{name} in {count} of {len(own)} elements, by up to {abs(first - own).max():g}")
        assert not differing, f"ranks 0 and {rank} differ: {'; '.join(differing)}"


def halves(hvd: Any) -> list[Any]:
    """Horovod's process sets of the first and of the second half of the ranks. Two levels may have made them before."""
    half = hvd.size() // 2
    return [process_set_of(hvd, list(range(half))), process_set_of(hvd, list(range(half, hvd.size())))]


def assert_metrics(compression: hvdcomp.Compression, dense_bytes: int) -> None:
    """Asserts that `Compression.metrics` says of the latest step what is in the ledger, with times, and nothing else.

    Args:
        dense_bytes: of all gradients of the step.
    """
    told, last = compression.metrics(), compression.ledger.last
    assert last is not None
    assert all(map(math.isfinite, told.values())), told
    assert told["hvdcomp/dense_bytes"] == dense_bytes
    assert told["hvdcomp/bytes_sent"] == last.bytes_sent
    assert told["hvdcomp/compression_factor"] == dense_bytes / last.bytes_sent > 1
    for phase in ("encode", "communicate", "decode"):
        assert told[f"hvdcomp/{phase}_seconds"] == getattr(last, f"{phase}_seconds") > 0


def assert_goes_on_with_other_ranks(state: dict[str, Any], gather: Callable[[Any], list[Any]], summed: bool) -> None:
    """Asserts that `hvdcomp.state_for` hands on to any number of ranks what all of these had left to send.

    Args:
        state: of this rank.
        gather: as in `raised_everywhere`.
        summed: whether the training takes the sum of the gradients, and not their mean.
    """
    states = gather(state)
    assert ("op" in state["own"]) == summed

    def pending(of: list[dict[str, Any]]) -> dict[str, np.ndarray]:
        share = 1 if summed else 1 / len(of)
        return {
            name: share * np.sum([np.asarray(one["own"]["residuals"][name]["arrays"][-1], float) for one in of], axis=0)
            for name in of[0]["own"]["residuals"]
        }

    before = pending(states)
    assert any(values.any() for values in before.values())
    for ranks in (1, len(states), len(states) + 1):
        after = pending([hvdcomp.state_for(iter(states), rank, ranks) for rank in range(ranks)])
        assert after.keys() == before.keys()
        for name, values in before.items():
            np.testing.assert_allclose(after[name], values, rtol=1e-4, atol=1e-6)
