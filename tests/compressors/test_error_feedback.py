"""The invariant of error feedback: what was sent plus what is kept is the gradient plus what was kept before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hvdcomp import ErrorFeedback, NoMemory, SpecError
from hvdcomp.arrays.types import wide_dtype
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors import MEMORIES
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import SparseVector
from hvdcomp.exchange.engine import Engine
from tests.harness import (
    BACKENDS,
    DTYPES,
    INSTALLED,
    Kept,
    Run,
    SpyFeedback,
    as_numpy,
    assert_same_on_all_ranks,
    bits,
    densify,
    dtype_of,
    infos,
    make,
    run_engines,
    set_to,
)

KINDS = [(backend, dtype) for backend in INSTALLED for dtype in DTYPES[backend]]
LOSSY = ["fp16", "bf16", "topk:ratio=0.02", "topk:ratio=0.3", "topk:ratio=1", "randomk:ratio=0.3", "randomk:ratio=1",
         "powersgd:rank=1", "powersgd:rank=3"]  # fmt: skip
SHAPES = st.sampled_from([(), (1,), (7,), (1, 9), (4, 5), (6, 1), (2, 3, 2, 2)])
ELEMENTS = st.floats(-100, 100, width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-24])


def check(kept: Kept, dtype: str, decay: float = 1.0) -> None:
    """Holds one passage of a gradient of an element type to the invariant, in the arithmetic of what is kept."""
    shape = tuple(kept.x.shape)
    exact = wide_dtype(dtype) == dtype
    assert dtype_of(kept.x) == dtype_of(kept.before) == dtype_of(kept.after) == wide_dtype(dtype)
    assert bits(kept.x) == bits(kept.gradient + kept.before * decay)
    if exact:
        assert bits(kept.left) == bits(kept.x)
    left, after, sent = as_numpy(kept.left), as_numpy(kept.after), densify(kept.sent, shape)
    np.testing.assert_array_equal(after, left - sent)
    if not isinstance(kept.sent, SparseVector):
        return
    chosen = np.zeros(left.size, bool)
    chosen[as_numpy(kept.sent.indices)] = True
    chosen = chosen.reshape(shape)
    assert bits(after[~chosen]) == bits(left[~chosen])
    if exact:
        np.testing.assert_array_equal(sent + after, left)
        assert not after[chosen].any()


def follow(specs: list[str]) -> Callable[[Engine, int], None]:
    """Sets the plan of each step."""

    def before(engine: Engine, step: int) -> None:
        set_to(engine, parse_compressor(specs[step]))

    return before


def check_run(run: Run, gradients: list[np.ndarray], specs: list[str], dtype: str, backend: str, decay: float) -> None:
    """Replays the residual from step to step, through steps that keep none."""
    log = iter(run.engine.memory.log)
    residual = None
    for spec, gradient in zip(specs, gradients, strict=True):
        if spec == "none" and residual is None:
            continue  # nothing kept, nothing to send: not through the memory
        kept = next(log)
        check(kept, dtype, decay)
        np.testing.assert_array_equal(as_numpy(kept.gradient), as_numpy(make(backend, gradient, dtype)))
        assert bits(kept.before) == (bits(residual) if residual is not None else bytes(len(bits(kept.before))))
        residual = kept.after
        if spec == "none":
            # All was sent, as far as the gradient's type holds it.
            rounding = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 0.0)
            assert np.abs(as_numpy(residual)).max() <= rounding * 1000
            residual = None
    assert next(log, None) is None
    memory = run.engine.states["w"].memory
    assert [bits(array) for array in memory] == ([] if residual is None else [bits(residual)])


@settings(max_examples=120)
@given(st.data())
def test_invariant_through_changes_of_level_method_and_dense_steps(data: st.DataObject) -> None:
    backend, dtype = data.draw(st.sampled_from(KINDS))
    shape = data.draw(SHAPES)
    size = data.draw(st.integers(1, 2))
    specs = data.draw(st.lists(st.sampled_from([*LOSSY, "none"]), min_size=1, max_size=5))
    decay = data.draw(st.sampled_from([1.0, 1.0, 0.5, 0.9]))
    values = data.draw(hnp.arrays(np.float64, (size, len(specs), *shape), elements=ELEMENTS))
    runs = run_engines(
        size, infos({"w": shape}, dtype), parse_compressor(specs[0]),
        lambda rank, step: {"w": make(backend, values[rank, step], dtype)}, len(specs),
        before=follow(specs), memory=lambda: SpyFeedback(decay=decay),
    )  # fmt: skip
    assert_same_on_all_ranks(runs)
    for rank, run in enumerate(runs):
        check_run(run, list(values[rank]), specs, dtype, backend, decay)


@settings(max_examples=40)
@given(st.data())
def test_receivers_get_the_mean_of_what_was_kept_account_of(data: st.DataObject) -> None:
    """The aggregate is the mean of C(x) as error feedback counts it; else what is kept would not be what is missing."""
    backend = data.draw(st.sampled_from(INSTALLED))
    shape, size = data.draw(SHAPES), data.draw(st.integers(1, 4))
    spec = data.draw(st.sampled_from(LOSSY))
    values = data.draw(hnp.arrays(np.float64, (size, 2, *shape), elements=ELEMENTS))
    runs = run_engines(
        size, infos({"w": shape}), parse_compressor(spec),
        lambda rank, step: {"w": make(backend, values[rank, step])}, 2,
        before=follow([spec] * 2), memory=SpyFeedback,
    )  # fmt: skip
    for step in range(2):
        mean = np.mean([densify(run.engine.memory.log[step].sent, shape).astype(float) for run in runs], axis=0)
        scale = np.abs(values).max() * 2 + 1
        np.testing.assert_allclose(
            as_numpy(runs[0].results[step]["w"]), mean, atol=scale * (2e-3 if spec == "fp16" else 1e-5)
        )


@pytest.mark.parametrize("spec", LOSSY)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_rank_gets_exactly_what_was_kept_account_of(backend: str, spec: str) -> None:
    values = np.random.default_rng(3).normal(size=(3, 6, 7))
    (run,) = run_engines(
        1, infos({"w": (6, 7)}), parse_compressor(spec), lambda rank, step: {"w": make(backend, values[step])}, 3,
        before=follow([spec] * 3), memory=SpyFeedback,
    )  # fmt: skip
    for result, kept in zip(run.results, run.engine.memory.log, strict=True):
        np.testing.assert_array_equal(as_numpy(result["w"]), densify(kept.sent, (6, 7)))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "specs",
    [
        ["topk:ratio=0.1", "topk:ratio=0.02", "topk:ratio=0.3", "none"],
        ["randomk:ratio=0.1", "randomk:ratio=0.02", "none", "none", "randomk:ratio=0.2", "none"],
        ["topk:ratio=0.1", "bf16", "fp16", "randomk:ratio=0.1", "none", "topk:ratio=0.1", "none"],
        ["none", "topk:ratio=0.01", "none"],
    ],
    ids="-".join,
)
def test_after_a_dense_step_all_gradients_have_arrived(specs: list[str], backend: str, size: int) -> None:
    """Exactly: the gradients are small whole numbers, whose sums and halves floating point holds without rounding."""
    rng = np.random.default_rng(1)
    values = rng.integers(-8, 9, (size, len(specs), 10, 12)).astype(float)
    runs = run_engines(
        size, infos({"w": (10, 12)}), parse_compressor(specs[0]),
        lambda rank, step: {"w": make(backend, values[rank, step])}, len(specs),
        before=follow(specs), memory=ErrorFeedback,
    )  # fmt: skip
    arrived = sum(as_numpy(result["w"]) for result in runs[0].results)
    np.testing.assert_array_equal(arrived, values.sum(axis=1).mean(axis=0))
    assert not runs[0].engine.has_residuals


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_dense_step_all_gradients_have_arrived_with_powersgd(backend: str) -> None:
    specs = ["powersgd:rank=1", "powersgd:rank=2", "topk:ratio=0.1", "powersgd:rank=1", "none"]
    values = np.random.default_rng(2).normal(size=(3, len(specs), 10, 12))
    runs = run_engines(
        3, infos({"w": (10, 12)}, "float64"), parse_compressor(specs[0]),
        lambda rank, step: {"w": make(backend, values[rank, step], "float64")}, len(specs), before=follow(specs),
    )  # fmt: skip
    arrived = sum(as_numpy(result["w"]) for result in runs[0].results)
    np.testing.assert_allclose(arrived, values.sum(axis=1).mean(axis=0), rtol=0, atol=1e-13)


def test_without_memory_the_rest_is_lost() -> None:
    values = np.arange(1.0, 11.0)
    (run,) = run_engines(
        1, infos({"w": (10,)}), parse_compressor("topk:ratio=0.2"), lambda r, s: {"w": make("numpy", values)}, 2,
        memory=NoMemory,
    )  # fmt: skip
    for result in run.results:
        np.testing.assert_array_equal(result["w"], [0] * 8 + [9, 10])
    assert run.engine.states["w"].memory == ()


@pytest.mark.parametrize("backend", BACKENDS)
def test_decay_weighs_what_was_kept(backend: str) -> None:
    (run,) = run_engines(
        1, infos({"w": (3,)}), parse_compressor("topk:ratio=0.3"),
        lambda r, s: {"w": make(backend, [8.0, 4.0, 0.0])}, 2, memory=lambda: ErrorFeedback(decay=0.25),
    )  # fmt: skip
    assert as_numpy(run.results[1]["w"]).tolist() == [8, 0, 0]
    assert as_numpy(run.engine.states["w"].memory[0]).tolist() == [0, 5, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_residuals_follow_a_change_of_the_loss_scale(backend: str) -> None:
    def halve(engine: Engine, step: int) -> None:
        if step == 1:
            engine.scale_residuals(0.5)

    (run,) = run_engines(
        1, infos({"w": (3,)}), parse_compressor("topk:ratio=0.3"),
        lambda r, s: {"w": make(backend, [8.0, 4.0, 2.0])}, 2, before=halve,
    )  # fmt: skip
    assert as_numpy(run.engine.states["w"].memory[0]).tolist() == [0, 6, 3]


def test_a_residual_is_of_single_precision_and_no_more_travels() -> None:

    def work(communicator: InProcessCommunicator) -> None:
        memory = ErrorFeedback(decay=0.9)
        engine = Engine(communicator, infos({"w": (40, 50)}, "bfloat16"), parse_compressor("topk:ratio=0.1"), memory)
        sent = []
        for step in range(3):
            if step == 2:
                engine.scale_residuals(0.5)
            engine.begin()
            engine.step({"w": make("numpy", np.random.default_rng(step).normal(size=(40, 50)), "bfloat16")})
            sent.append(engine.ledger.last.bytes_sent)
            assert engine.states["w"].memory[0].dtype.name == "float32"
        assert len(set(sent)) == 1

    run_ranks(1, work)


@pytest.mark.parametrize("decay", [0, -1, 1.5, float("nan")])
def test_wrong_decay(decay: float) -> None:
    with pytest.raises(SpecError, match=r"error_feedback: decay=.* is not allowed; it must be above 0 and at most 1"):
        ErrorFeedback(decay=decay)


@pytest.mark.parametrize("dtype", ["int8", "float16", "", 16, []])
def test_wrong_dtype(dtype: Any) -> None:
    with pytest.raises(SpecError, match=r"error_feedback: dtype=.* is not allowed; it must be float32, fp16 or bf16"):
        ErrorFeedback(dtype=dtype)


def test_memories_by_name() -> None:
    assert {"error_feedback", "none"} <= set(MEMORIES)
    assert all(kind.name == name for name, kind in MEMORIES.items())
