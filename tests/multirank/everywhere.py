"""What the cases assert of all ranks, whatever they exchange with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hvdcomp


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
