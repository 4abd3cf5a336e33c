"""Kernels in NumPy are those in C, bit for bit; steps without compiled kernels have NumPy's bits in every framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdcomp import kernels
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.casts import NoCompression
from hvdcomp.compressors.memory import ErrorFeedback, Memory, MomentumCorrection, NoMemory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.kernels import in_numpy
from hvdcomp.kernels.tables import EVERYTHING, NOTHING

SIZES = (1, 15, 4096, 70_001)  # the last is longer than a block, and than a task
MEMORIES = (
    NoMemory(), ErrorFeedback(), ErrorFeedback(decay=0.75), MomentumCorrection(), MomentumCorrection(nesterov=True),
)  # fmt: skip
SHAPES = {"a": (20, 30), "b": (9, 7), "c": (64, 1024), "d": (11,)}  # of a larger one, the framework does the arithmetic
RANKS, STEPS = 2, 3

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}")


def filled(memory: Memory, seed: int, *, holds: bool, sourced: bool, factor: float) -> tuple[Bucket, dict[str, Any]]:
    """A bucket whose step has begun, and the arrays of each column that its table points to."""
    rng = np.random.default_rng(seed)
    tensors = [TensorInfo(f"t{size}", (size,)) for size in SIZES]
    bucket = Bucket(tensors, tuple(NoCompression() for _ in tensors), memory)
    bucket.begin(Context("", 0, 0, 0, 1), np.float32(factor))
    columns = ["gradient", "result", "total"]
    if bucket.keeps:
        columns += ["x", *["kept"] * holds]
        if memory.is_momentum:
            columns += ["next_velocity", *["velocity"] * holds]
    columns += ["source"] * sourced
    arrays = {name: [rng.standard_normal(size).astype(np.float32) for size in SIZES] for name in columns}
    for name, vectors in arrays.items():
        bucket.segments[name] = [vector.ctypes.data for vector in vectors]
    ends = np.cumsum(SIZES)
    bucket.segments["values"] = ends - SIZES
    bucket.segments["rule"] = [NOTHING, EVERYTHING, NOTHING, EVERYTHING]
    bucket.segments["sent_rule"] = [EVERYTHING, NOTHING, NOTHING, NOTHING]
    bucket.table.bucket.share = 0.3
    arrays["wire"] = [np.zeros(ends[-1] + 2, np.float32)]
    arrays["mean"] = [rng.standard_normal(ends[-1]).astype(np.float32)]
    return bucket, arrays


def in_c(bucket: Bucket) -> tuple[Callable[..., Any], Callable[[str], Any]]:
    return bucket.call, bucket.sums_of


def without(bucket: Bucket) -> tuple[Callable[..., Any], Callable[[str], Any]]:
    return (
        lambda kernel, *arguments: in_numpy.call(kernel, bucket.table, *arguments),
        lambda kernel: in_numpy.sums_of(kernel, bucket.table),
    )


@needs_kernels
@pytest.mark.parametrize("bad", [None, np.nan, np.inf, 3e38])
@pytest.mark.parametrize(("holds", "sourced", "factor"), [(True, False, 1.0), (False, False, 0.5), (True, True, 1.0)])
@pytest.mark.parametrize("memory", MEMORIES, ids=str)
def test_they_do_what_kernels_in_c_do(
    memory: Memory, holds: bool, sourced: bool, factor: float, bad: float | None
) -> None:
    made = []
    for functions in (in_c, without):
        bucket, arrays = filled(memory, 1, holds=holds, sourced=sourced, factor=factor)
        if bad is not None:
            arrays["gradient"][3][69_000] = arrays["mean"][0][5] = bad
            if holds and "kept" in arrays:
                arrays["kept"][2][4] = bad
        call, sums_of = functions(bucket)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = [sums_of("make_x"), *([sums_of("measure_left")] if bucket.keeps else [])]
            flags = [call("make_x"), call("dense_encode", arrays["wire"][0]), call("dense_decode", arrays["mean"][0])]
            call("end_step", True, True)
        flags += [in_numpy.holds_inf(bucket.table, "result"), bucket.holds_inf("total")]
        made.append((flags, {name: [one.tobytes() for one in vectors] for name, vectors in arrays.items()}, sums))
    (flags, arrays, sums), (own_flags, own_arrays, own_sums) = made
    assert own_flags == flags
    assert own_arrays == arrays
    np.testing.assert_allclose(own_sums, sums, rtol=1e-12)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.1", "efsignsgd", "qsgd:bits=4", "powersgd:rank=2"])
def test_a_step_without_compiled_kernels_has_the_bits_of_numpy(spec: str) -> None:
    """Of results, residuals and warm starts; the arrays are PyTorch's."""
    torch = pytest.importorskip("torch")

    def run(communicator: InProcessCommunicator, of: Any) -> list[Any]:
        tensors = [TensorInfo(name, shape) for name, shape in SHAPES.items()]
        engine = Engine(communicator, tensors, parse_compressor(spec), min_numel=0, min_ndim=2)
        bits: list[Any] = []
        for step in range(STEPS):
            engine.begin()
            rng = np.random.default_rng([communicator.rank, step])
            values = {name: rng.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()}
            if step == 1:
                values["b"][0, 0] = np.nan * communicator.rank
            given = {name: of(np.array(one)) for name, one in values.items()}
            results = engine.step(given)
            kept = [array for state in engine.states.values() for array in (*state.memory, *state.compressor)]
            assert {type(array) for array in (*results.values(), *kept)} == {type(of(np.zeros(1)))}
            bits += [np.asarray(array).tobytes() for array in (*results.values(), *kept)]
            for array in results.values():
                array[...] = 7  # as whoever gets the results may do
            assert all((np.asarray(given[name]) == values[name]).all() for name in ("a", "c", "d"))
        return bits

    def work(communicator: InProcessCommunicator) -> None:
        assert run(communicator, torch.from_numpy) == run(communicator, np.asarray)

    run_ranks(RANKS, work)
