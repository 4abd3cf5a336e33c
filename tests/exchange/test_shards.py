"""Reduce-scatter of sharded trainings: exact within a node, quantized between nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from hvdcomp import ErrorFeedback, NoMemory, kernels
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.ledger import Ledger
from hvdcomp.exchange.shards import ShardReducer
from tests.harness import BACKENDS, as_numpy, make
from tests.interpreted import needs_triton
from tests.two_hops import stated

LENGTH = 301  # of whole blocks and a rest
METHODS = [
    "int8", "int4", "int4:block=100", "fp8", "bf16", "fp16", "int4:rounding=stochastic", "qsgd:bits=4", "natural",
    "eden", "terngrad", "onebit", "efsignsgd",
]  # fmt: skip


def gradient(rank: int, ranks: int, step: int = 0) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=(ranks, LENGTH)).astype(np.float32)


def reducer(communicator: Any, spec: str, memory: Memory | None, like: Any, **options: Any) -> ShardReducer:
    options = {"seed": 0, "min_numel": 0, "ledger": Ledger(), **options}
    return ShardReducer(communicator, parse_compressor(spec), memory, like=like, **options)


def run(
    spec: str, nodes: int, places: int, steps: int = 3, memory: Memory | None = None, backend: str = "numpy"
) -> Any:
    """Of each rank: its rows by step, its residual, its ledger."""

    def work(communicator: InProcessCommunicator) -> Any:
        own = reducer(communicator, spec, memory, make(backend, []))
        rows = []
        for step in range(steps):
            given = gradient(communicator.rank, communicator.world_size, step)
            assert own.compresses("w", given.size)
            rows.append(as_numpy(own.reduce("w", make(backend, given), given.nbytes)))
            own.end_step()
        return rows, [as_numpy(one) for one in own.states["w"]], own.ledger

    return run_ranks(nodes * places, work, places)


@pytest.mark.parametrize("in_kernels", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize(("nodes", "places"), [(2, 2), (3, 2), (2, 1)])
def test_it_is_what_was_stated(
    spec: str, nodes: int, places: int, backend: str, in_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "available", lambda: in_kernels)
    check(spec, nodes, places, backend)


@needs_triton
@pytest.mark.parametrize(
    "spec",
    [pytest.param(one, marks=[pytest.mark.thorough] * (one not in ("int8", "int4", "fp8", "bf16"))) for one in METHODS],
)
def test_kernels_of_devices_do_what_was_stated(
    spec: str, in_interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hvdcomp.kernels.cuda.device import DeviceKernels

    launched, call = set(), DeviceKernels.call

    def counted(on: DeviceKernels, name: str, *arguments: Any, **options: Any) -> Any:
        launched.add(name.rpartition("_")[2])
        return call(on, name, *arguments, **options)

    monkeypatch.setattr(DeviceKernels, "call", counted)
    check(spec, 2, 2, "torch")
    assert {"encode", "decode"} <= launched


def check(spec: str, nodes: int, places: int, backend: str) -> None:
    """That ranks get what `stated` says, and keep it."""
    method, ranks = parse_compressor(spec), nodes * places
    assert isinstance(method, Gathering)
    memory = ErrorFeedback() if method.biased else NoMemory()
    off = 1e-5 if spec in ("onebit", "efsignsgd") else 0  # whose means are added up in an order of the library's
    results = run(spec, nodes, places, memory=memory, backend=backend)
    residuals = np.zeros((nodes, places, nodes, LENGTH), np.float32)
    for step in range(3):
        gradients = [gradient(rank, ranks, step) for rank in range(ranks)]
        rows, left = stated(method, gradients, residuals, step)
        residuals = left if method.biased else residuals
        for rank, (got, _, _) in enumerate(results):
            np.testing.assert_allclose(got[step], rows[rank], rtol=0, atol=off)
    for rank, (_, kept, _) in enumerate(results):
        assert len(kept) == method.biased
        for one in kept:
            node, place = divmod(rank, places)
            np.testing.assert_allclose(one, np.delete(residuals[node, place], node, 0), rtol=0, atol=off)


@pytest.mark.parametrize("in_kernels", [True, False])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_residuals_are_rounded_where_the_memory_says_so(
    dtype: str, in_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(kernels, "available", lambda: in_kernels)
    element = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    results = run("int4", 2, 2, memory=ErrorFeedback(dtype=dtype), backend="torch")
    residuals = np.zeros((2, 2, 2, LENGTH), np.float32)
    for step in range(3):
        rows, left = stated(parse_compressor("int4"), [gradient(rank, 4, step) for rank in range(4)], residuals, step)
        residuals = torch.from_numpy(left).to(element).float().numpy()
        for rank, (got, _, _) in enumerate(results):
            np.testing.assert_array_equal(got[step], rows[rank])
    for rank, (_, (kept,), _) in enumerate(results):
        node, place = divmod(rank, 2)
        assert kept.itemsize == 2 or dtype == "bf16"  # which NumPy does not have
        np.testing.assert_array_equal(kept.astype(np.float32), np.delete(residuals[node, place], node, 0))


def test_what_is_left_is_all_that_rows_lack_and_no_larger_than_a_part_of_a_node() -> None:
    nodes, places, steps = 2, 2, 5
    results = run("int4", nodes, places, steps)
    for rank, (rows, _, _) in enumerate(results):
        true = sum(gradient(one, 4, step)[rank] for one in range(4) for step in range(steps)) / 4
        other = 1 - rank // places
        left = results[other * places + rank % places][1][0][0]
        np.testing.assert_allclose(sum(rows) + left / nodes, true, atol=1e-5)
    for _, (residual,), _ in results:
        assert residual.shape == (nodes - 1, LENGTH)


def test_where_a_rank_is_a_node_nothing_is_kept_unless_asked_for() -> None:
    assert run("int4", 3, 1)[0][1] == []
    assert run("int4", 3, 1, memory=ErrorFeedback())[0][1][0].shape == (2, LENGTH)


def test_bytes_are_those_of_both_levels() -> None:
    for places, least in ((1, 6), (2, 12)):
        (_, _, ledger), *_ = run("int4", 2, places, steps=2)
        dense, ranks = 4 * 2 * places * LENGTH, 2 * places
        payload = -(-LENGTH // 2) + 4 * -(-LENGTH // 128)
        assert ledger.totals.dense_bytes == 2 * dense == 2 * 4 * ranks * LENGTH
        assert ledger.last.bytes_in_node == (dense if places > 1 else 0)
        leaving = ledger.last.bytes_sent - ledger.last.bytes_in_node
        assert 0 <= leaving - 2 * payload < 2 * 8  # rows end at whole eight bytes
        assert ledger.totals.compression_factor > least
        assert ledger.tensors["w"].bytes_sent == ledger.totals.bytes_sent


def test_small_lossless_and_single_nodes_are_left_to_somebody_else() -> None:
    def work(communicator: InProcessCommunicator) -> tuple[bool, ...]:
        def takes(spec: str) -> bool:
            return reducer(communicator, spec, None, make("numpy", []), min_numel=100).compresses("w", 100)

        small = reducer(communicator, "int4", None, make("numpy", []), min_numel=101).compresses("w", 100)
        return takes("int4"), takes("none"), small

    assert run_ranks(4, work, 2) == [(True, False, False)] * 4
    assert run_ranks(4, work, 4) == [(False, False, False)] * 4


def test_rows_of_another_length_begin_anew_with_a_warning() -> None:
    def work(communicator: InProcessCommunicator) -> Any:
        own = reducer(communicator, "int4", ErrorFeedback(), make("numpy", []))
        given = gradient(communicator.rank, 2)
        own.reduce("w", given, given.nbytes)
        return own.reduce("w", given[:, :77], given.nbytes), own.states["w"][0].shape

    with pytest.warns(UserWarning, match="w: the rows of the gradient have 77 elements"):
        results = run_ranks(2, work, 1)
    method, nothing = parse_compressor("int4"), np.zeros((2, 1, 2, 77), np.float32)
    assert isinstance(method, Gathering)
    rows, _ = stated(method, [gradient(rank, 2)[:, :77] for rank in range(2)], nothing)
    for rank, (row, shape) in enumerate(results):
        np.testing.assert_array_equal(row, rows[rank])
        assert shape == (1, 77)


@pytest.mark.parametrize("spec", ["int4", "onebit", "efsignsgd"])
@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=needs_triton)])
def test_no_infinity_stays_in_a_residual(spec: str, on_device: bool, request: pytest.FixtureRequest) -> None:
    if on_device:
        request.getfixturevalue("in_interpreter")
    backend = "torch" if on_device else "numpy"

    def work(communicator: InProcessCommunicator) -> Any:
        own = reducer(communicator, spec, None, make(backend, []))
        given = gradient(communicator.rank, 4)
        if communicator.rank == 3:
            given[0, 5] = np.inf
        with np.errstate(invalid="ignore"):
            row = own.reduce("w", make(backend, given), given.nbytes)
        return as_numpy(row), as_numpy(own.states["w"][0])

    results = run_ranks(4, work, 2)
    assert not np.isfinite(results[0][0]).all()
    assert all(np.isfinite(kept).all() for _, kept in results)


@pytest.mark.parametrize(("spec", "levels"), [("qsgd:bits=8", (8, 2)), ("eden:bits=4", (4, 1))])
def test_a_level_holds_from_the_next_step_on(spec: str, levels: tuple[int, int]) -> None:
    def work(communicator: InProcessCommunicator) -> list[int]:
        own = reducer(communicator, spec, None, make("numpy", []))
        given, sent = gradient(communicator.rank, 2), []
        for bits in levels:
            own.set_level(bits)
            own.compresses("w", given.size)
            own.reduce("w", given, given.nbytes)
            own.end_step()
            sent.append(own.ledger.last.bytes_sent)
            assert own.plan["w"] == dataclasses.replace(own.compressor, bits=bits)
        return sent

    assert all(large > 3 * small for large, small in run_ranks(2, work, 1))
