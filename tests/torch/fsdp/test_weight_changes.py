"""The all-gather of weights' changes, beside a plain statement of it, on ranks in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcomp.arrays import numpy_arrays
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Context
from hvdcomp.exchange.ledger import Ledger
from hvdcomp.exchange.shards import ShardReducer

torch = pytest.importorskip("torch")

from hvdcomp.torch.fsdp.weight_changes import WeightChanges  # noqa: E402

RANKS, LENGTH, STEPS = 3, 301, 6
METHODS = ["int8", "int4", "int4:rounding=stochastic", "fp8", "bf16", "eden:bits=4"]


def weights(rank: int, step: int) -> np.ndarray:
    start = np.random.default_rng(rank).normal(size=LENGTH)
    steps = [np.random.default_rng([rank, one]).normal(size=LENGTH) / 100 for one in range(step)]
    return np.sum([start, *steps], 0, dtype=np.float32)


def gathered(spec: str, rows: Any, dtype: Any = torch.float32, changed: Any = lambda step: True) -> list[Any]:
    """Of each rank, by step: the rows that it has, and the bytes that it has sent; `rows(rank, step)` has its own."""

    def work(communicator: InProcessCommunicator) -> Any:
        method, like = parse_compressor(spec), torch.empty(0)
        reducer = ShardReducer(communicator, method, None, 0, 0, Ledger(), like)
        own, results = WeightChanges(reducer, method, "w", 0), []
        for step in range(STEPS):
            row = torch.from_numpy(rows(communicator.rank, step)).to(dtype)
            rest, sent = own.gather(row.clone(), changed(step))
            results.append((torch.stack(rest), sent.bytes))
            reducer.end_step()
        return results

    return run_ranks(RANKS, work, 1)


@pytest.mark.parametrize("spec", METHODS)
def test_it_is_what_was_stated(spec: str) -> None:
    results, method = gathered(spec, weights), parse_compressor(spec)
    stated = np.stack([weights(rank, 0) for rank in range(RANKS)])
    for step in range(STEPS):
        for rank in range(RANKS if step else 0):
            change = weights(rank, step) - stated[rank]
            context = Context("w weights", step, 0, rank, RANKS)
            parts = method.encode(numpy_arrays, change, context)
            stated[rank] += method.decoded(numpy_arrays, parts, (LENGTH,), context)
        for result in results:
            np.testing.assert_array_equal(result[step][0].numpy(), stated)
            sent = method.payload_bytes((LENGTH,)) if step else 4 * LENGTH
            assert result[step][1] == -(-sent // 8) * 8  # collectives of bytes have a multiple of 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_errors_do_not_pile_up(dtype: Any) -> None:
    """After many small changes the error is that of one of them; in bfloat16 it is what rounding leaves."""
    for result in gathered("int8", weights, dtype):
        for step, (rows, _) in enumerate(result):
            true = torch.stack([torch.from_numpy(weights(rank, step)).to(dtype) for rank in range(RANKS)])
            # The largest change is below 0.06, of which int8 loses 1/254 at most.
            assert rows.dtype == dtype
            assert (rows - true).abs().max() < (2.5e-4 if dtype != torch.bfloat16 else 2e-2)


def test_weights_that_have_not_changed_stay_as_they_are_everywhere() -> None:
    """In the same pass nothing is sent; in another pass zeros, of a rank whose weights are the same."""

    def only_of_rank_0(rank: int, step: int) -> np.ndarray:
        return weights(rank, 1 if rank and step else step)

    for result in gathered("int4", only_of_rank_0, changed=lambda step: step != 5):
        for step in range(2, 5):
            assert torch.equal(result[step][0][1:], result[1][0][1:])
            assert not torch.equal(result[step][0][0], result[step - 1][0][0])
        assert torch.equal(result[5][0], result[4][0])
        assert result[5][1] == 0


def test_weights_that_were_not_finite_are_gathered_when_they_are_again() -> None:
    def spoiled(rank: int, step: int) -> np.ndarray:
        return weights(rank, step) * np.float32(np.nan if step == 2 and rank == 1 else 1)

    for result in gathered("int8", spoiled):
        assert torch.isnan(result[2][0][1]).all()
        assert torch.isfinite(result[2][0][0]).all()
        np.testing.assert_allclose(result[5][0][1], weights(1, 5), atol=1e-3)
