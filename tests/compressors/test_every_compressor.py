"""What every registered compressor must do, whatever its method; a new one is covered by its examples."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import wide_dtype
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors import COMPRESSORS
from hvdcomp.compressors.memory import ErrorFeedback, NoMemory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import AllGather, AllReduce, Context, TensorInfo
from hvdcomp.compressors.sizes import payload_of
from hvdcomp.compressors.sparsification import ByRatio
from hvdcomp.exchange.engine import Engine
from tests.harness import (
    BACKENDS,
    DTYPES,
    EXAMPLES,
    INSTALLED,
    TWO_LEVELS,
    SpyFeedback,
    as_numpy,
    bits,
    densify,
    dtype_of,
    in_turns,
    make,
    needing,
    random_states_untouched,
)

SHAPE = (37, 29)  # nothing divides it
EVERY = [*EXAMPLES, *TWO_LEVELS]
# In the quick tests with PyTorch's float32, and with one of NumPy's types in turns.
every_type = pytest.mark.parametrize(
    ("spec", "backend", "dtype"),
    [
        needing(
            backend, spec, backend, dtype,
            thorough=dtype != ("float32" if backend == "torch" else ("float16", "float32", "float64")[place % 3]),
        )
        for place, spec in enumerate(EVERY)
        for backend, dtypes in DTYPES.items()
        for dtype in dtypes
    ],
)  # fmt: skip
OF_ELEMENTS = [spec for spec in EXAMPLES if isinstance(parse_compressor(spec), ByRatio)]


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_registered_compressor_has_examples(name: str) -> None:
    kind = COMPRESSORS[name]
    examples = [parse_compressor(spec) for spec in getattr(kind, "examples", ())]
    assert examples, f"{kind.__name__} needs `examples`: specs by which it is tested, measured and shown"
    assert {type(example) for example in examples} == {kind}
    assert [str(example) for example in examples] == list(kind.examples)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("spec", EVERY)
def test_a_tensor_without_elements_takes_no_bytes_at_a_level_that_the_method_has(
    spec: str, shape: tuple[int, ...]
) -> None:
    method = parse_compressor(spec)
    for level in (None, method.level_for(10, shape), method.level_for_elements(10, shape)):
        assert method.at_level(level).payload_bytes(shape, ranks=3) == 0
    assert method.payload_floats(shape) >= 0


def engine_of(communicator: Any, spec: str, shape: tuple[int, ...], **options: Any) -> Engine:
    tensors = [TensorInfo("w", shape, options.pop("dtype", "float32"))]
    return Engine(communicator, tensors, parse_compressor(spec), min_numel=0, min_ndim=0, **options)


def normal(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def results(spec: str, backend: str, dtype: str, gradients: list[list[np.ndarray]], **options: Any) -> list[list[Any]]:
    """What each rank gets in each step; `gradients[rank][step]`."""

    def work(communicator: InProcessCommunicator) -> list[Any]:
        engine = engine_of(communicator, spec, gradients[0][0].shape, dtype=dtype, **options)
        return [engine.step({"w": make(backend, values, dtype)})["w"] for values in gradients[communicator.rank]]

    return list(run_ranks(len(gradients), work, ranks_per_node=2 if len(gradients) == 4 else None))


@every_type
def test_all_ranks_get_the_same_bits_of_the_right_kind(spec: str, backend: str, dtype: str) -> None:
    gradients = [[normal(10 * rank + step) for step in range(3)] for rank in range(4 if spec in TWO_LEVELS else 3)]
    everyone = results(spec, backend, dtype, gradients)
    for step in range(3):
        mine = everyone[0][step]
        assert tuple(mine.shape) == SHAPE
        assert dtype_of(mine) == dtype
        assert np.isfinite(as_numpy(mine)).all()
        assert all(bits(theirs[step]) == bits(mine) for theirs in everyone)


@pytest.mark.parametrize("spec", EVERY)
def test_the_payload_has_the_size_that_was_promised(spec: str) -> None:
    """What running the generator on shapes gives, against what it sends of arrays with elements."""
    kinds = [("numpy", dtype) for dtype in DTYPES["numpy"]] + [("torch", "bfloat16")] * ("torch" in INSTALLED)
    shapes = [SHAPE, (1, 1), (1, 300), (513,), (300, 1, 3), (), (3, 30_000)]
    for (backend, dtype), shape in itertools.product(kinds, shapes):
        engine = engine_of(LoopbackCommunicator(), spec, shape, dtype=dtype)
        sent = []
        for step in range(2):  # two, because an alternating method sends two sizes in turn
            engine.step({"w": make(backend, normal(step, shape), dtype)})
            assert engine.ledger.last is not None
            sent.append(engine.ledger.last.tensors["w"].bytes_sent)
        chosen = engine.plan["w"]
        assert sum(sent) / 2 == chosen.payload_bytes(shape, dtype=dtype), (chosen, shape)


@every_type
def test_zero_and_constant_gradients(spec: str, backend: str, dtype: str) -> None:
    zero, constant = np.zeros(SHAPE, np.float32), np.full(SHAPE, 0.25, np.float32)
    for rank in results(spec, backend, dtype, [[zero, zero], [zero, zero]]):
        assert not np.any([as_numpy(step) for step in rank])
    for rank in results(spec, backend, dtype, [[constant, constant]] * 2):
        assert np.isfinite([as_numpy(step) for step in rank]).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of what is meant to happen here
@pytest.mark.parametrize(("spec", "bad", "backend"), in_turns(itertools.product(EVERY, (np.inf, -np.inf, np.nan))))
def test_a_non_finite_gradient_reaches_all_ranks_and_leaves_no_trace(spec: str, bad: float, backend: str) -> None:
    poisoned = normal(1)
    poisoned[3, 5] = bad
    ranks = [[normal(0), poisoned, normal(2)], [normal(3), normal(4), normal(5)]]
    own = parse_compressor(spec).default_memory
    memory = ErrorFeedback() if own == NoMemory() else own  # so that there is something to spoil

    def work(communicator: InProcessCommunicator) -> tuple[np.ndarray, list[bytes], list[bytes], np.ndarray]:
        engine = engine_of(communicator, spec, SHAPE, memory=memory)
        first, second, third = (make(backend, values) for values in ranks[communicator.rank])
        engine.step({"w": first})
        before = state_of(engine)
        spoilt = as_numpy(engine.step({"w": second})["w"])
        after = state_of(engine)
        return spoilt, before, after, as_numpy(engine.step({"w": third})["w"])

    for spoilt, before, after, later in run_ranks(2, work):
        assert not np.isfinite(spoilt).all()
        assert before == after
        assert np.isfinite(later).all()


def state_of(engine: Engine) -> list[bytes]:
    state = engine.states["w"]
    return [bits(array) for array in (*state.memory, *state.compressor)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", EVERY)
def test_empty_tensors_go_dense(spec: str, backend: str) -> None:
    for rank in results(spec, backend, "float32", [[np.zeros((0, 3), np.float32)] * 2] * 2):
        assert [tuple(step.shape) for step in rank] == [(0, 3), (0, 3)]


@every_type
def test_error_feedback_keeps_exactly_what_was_not_sent(spec: str, backend: str, dtype: str) -> None:
    """x = gradient + residual, and the next residual is x - C(x), and what results of 16 bits lack of the mean."""
    spy = SpyFeedback()

    def work(communicator: InProcessCommunicator) -> None:
        memory = spy if communicator.rank == 0 else SpyFeedback()
        engine = engine_of(communicator, spec, SHAPE, memory=memory, dtype=dtype)
        for step in range(3):
            engine.step({"w": make(backend, normal(10 * communicator.rank + step), dtype)})

    run_ranks(2, work)
    if parse_compressor(spec).lossless:
        assert not spy.log
        return
    assert len(spy.log) == 3
    wide = wide_dtype(dtype)
    residual = make(backend, np.zeros(SHAPE), wide)
    for kept in spy.log:
        assert bits(kept.before) == bits(residual)
        np.testing.assert_array_equal(as_numpy(kept.x), as_numpy(kept.gradient + residual))
        residual = kept.after
        np.testing.assert_array_equal(
            as_numpy(residual), as_numpy(kept.left - make(backend, densify(kept.sent, SHAPE), wide))
        )
        x = as_numpy(kept.x)
        rounding = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 0.0)
        assert np.abs(as_numpy(kept.left) - x).max() <= 4 * rounding * np.abs(x).max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", EVERY)
def test_the_seed_alone_decides_and_no_global_random_state_is_touched(spec: str, backend: str) -> None:
    gradients = [[normal(10 * rank + step) for step in range(2)] for rank in range(2)]
    with random_states_untouched(backend):
        runs = [results(spec, backend, "float32", gradients, seed=seed) for seed in (1, 1)]
    assert [bits(step) for step in runs[0][0]] == [bits(step) for step in runs[1][0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", EVERY)
def test_the_gradient_is_not_changed_and_the_result_is_fresh(spec: str, backend: str) -> None:
    def work(communicator: InProcessCommunicator) -> list[np.ndarray]:
        engine = engine_of(communicator, spec, SHAPE)
        found = []
        for step in range(3):
            gradient = make(backend, normal(step))
            result = engine.step({"w": gradient})["w"]
            assert bits(gradient) == bits(make(backend, normal(step)))
            found.append(as_numpy(result))
            gradient[...] = 1e9  # nobody may look at either again
            result[...] = 1e9
        return found

    plain = [as_numpy(step) for step in results(spec, backend, "float32", [[normal(step) for step in range(3)]])[0]]
    np.testing.assert_array_equal(run_ranks(1, work)[0], plain)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", OF_ELEMENTS)
def test_sparsifiers_send_exactly_k_different_elements(spec: str, backend: str) -> None:
    """Also where all magnitudes are tied, and where the ratio asks for everything."""
    context = Context("w", step=0, seed=0, rank=0, world_size=1)
    for values in (normal(0), np.full(SHAPE, -0.5, np.float32), np.zeros(SHAPE, np.float32)):
        for ratio, k in ((1e-6, 1), (0.1, 108), (1.0, 1073)):
            x = make(backend, values)
            chosen = parse_compressor(spec).at_level(ratio)
            generator = chosen.aggregate(arrays_for(x), x, chosen.prepare(arrays_for(x), x, (), context), context)
            request = next(generator)
            assert payload_of(request).bytes == chosen.payload_bytes(SHAPE)
            indices = indices_sent(generator, request)
            assert len(indices) == len(set(indices)) == k
            assert 0 <= min(indices) <= max(indices) < values.size


def indices_sent(generator: Any, request: AllGather | AllReduce) -> list[int]:
    """The places that the method says it sent, when it is the only rank."""
    with pytest.raises(StopIteration) as stop:
        generator.send([request.parts] if isinstance(request, AllGather) else request.array)
    return as_numpy(stop.value.value.sent.indices).tolist()
