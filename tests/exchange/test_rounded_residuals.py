"""Error feedback that keeps residuals in 16 bits: the bits of error feedback whose residuals are rounded in NumPy
between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdcomp import ErrorFeedback
from hvdcomp.adaptation.look import observe
from hvdcomp.bindings.checkpoint import restore, state_of
from hvdcomp.bindings.world import state_for
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange import buckets
from hvdcomp.exchange.engine import Engine
from tests.exchange.test_buckets import BACKENDS, needs_kernels
from tests.harness import Run, as_numpy, assert_same_on_all_ranks, copy, infos, make, run_engines, set_to
from tests.interpreted import needs_triton

Shapes = dict[str, tuple[int, ...]]

SHAPES: Shapes = {"matrix": (6, 8), "long": (3, 22_001), "vector": (77,), "one": (1,)}  # the second one: of two tasks
SMALL: Shapes = {"matrix": (6, 8), "odd": (5, 7, 3), "vector": (77,), "one": (1,)}
STEPS, FAILING = 5, 2
# All ways to say what was sent of x: nothing is left to be said, either kind of signs, factors, all of it.
SPECS = ["topk:ratio=0.05", "efsignsgd", "onebit", "powersgd:rank=2", "int4", "efsignsgd:exchange=scatter",
         "two_level(topk:ratio=0.05)", "atomo:rank=1"]  # fmt: skip

types = pytest.mark.parametrize("dtype", ["fp16", "bf16"])


def rounded(x: Any, dtype: str) -> np.ndarray:
    """To nearest, ties to even."""
    x = as_numpy(x).astype(np.float32)
    if dtype == "fp16":
        return x.clip(-65504, 65504).astype(np.float16).astype(np.float32)
    bits = x.reshape(-1).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).reshape(x.shape)


def gradients(backend: str, shapes: Shapes, of: str, rank: int, step: int) -> dict[str, Any]:
    """Some beyond half precision; the step that does not count has a NaN on one rank."""
    rng = np.random.default_rng([rank, step])
    values = {name: 3000 * rng.standard_t(3, size=shape) for name, shape in shapes.items()}
    if step == FAILING and rank == 1:
        values["vector"][7] = np.nan
    return {name: make(backend, x, of) for name, x in values.items()}


def run(
    backend: str,
    spec: str,
    memory: ErrorFeedback,
    rounds_to: str = "",
    shapes: Shapes = SHAPES,
    of: str = "float32",
    also: Callable[[Engine, int], None] = lambda engine, step: None,
) -> list[Run]:
    """rounds_to: between two steps, by this test; empty for not at all. also: done before each step."""

    def before(engine: Engine, step: int) -> None:
        also(engine, step)
        for state in engine.states.values():
            if rounds_to and state.memory:
                state.memory = tuple(make(backend, rounded(one, rounds_to), "float32") for one in state.memory)

    ranks = 4 if spec.startswith("two_level") else 2
    tensors = infos(shapes, of)
    return list(
        run_engines(
            ranks, tensors, parse_compressor(spec), lambda r, s: gradients(backend, shapes, of, r, s), STEPS,
            before=before, memory=lambda: memory,
        )
    )  # fmt: skip


def assert_rounds(dtype: str, found: list[Run], plain: list[Run]) -> None:
    assert_same_on_all_ranks(found)
    for mine, theirs in zip(found, plain, strict=True):
        for step, results in enumerate(theirs.results):
            for name, one in results.items():
                where = f"{name} in step {step}"
                np.testing.assert_array_equal(as_numpy(mine.results[step][name]), as_numpy(one), err_msg=where)
        for name, state in theirs.engine.states.items():
            for kept, right in zip(mine.engine.states[name].memory, state.memory, strict=True):
                np.testing.assert_array_equal(as_numpy(kept), rounded(right, dtype), err_msg=name)
    assert any((as_numpy(kept) != rounded(kept, dtype)).any() for kept in every_residual(plain)), "nothing was rounded"


def every_residual(runs: list[Run]) -> list[Any]:
    return [one for run in runs for state in run.engine.states.values() for one in state.memory]


@needs_kernels
@types
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", SPECS)
def test_what_is_left_is_rounded(spec: str, backend: str, dtype: str) -> None:
    """In buckets, and in a group: atomo has no bucket form."""
    found = run(backend, spec, ErrorFeedback(dtype=dtype))
    assert bool(found[0].engine.buckets.tensor_groups) == (spec == "atomo:rank=1")
    assert_rounds(dtype, found, run(backend, spec, ErrorFeedback(), dtype))


@needs_kernels
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "efsignsgd"])
def test_the_decay_is_of_what_was_rounded(spec: str) -> None:
    found, plain = run("numpy", spec, ErrorFeedback(0.7, "bf16")), run("numpy", spec, ErrorFeedback(0.7), "bf16")
    assert_rounds("bf16", found, plain)


@needs_kernels
def test_a_dense_step_sends_it_and_somebody_may_replace_x() -> None:
    def change(engine: Engine, step: int) -> None:
        observe(engine, lambda look: {"matrix": look["matrix"] * np.float32(0.5)})
        set_to(engine, parse_compressor("none" if step == 3 else "efsignsgd"))

    found = run("numpy", "efsignsgd", ErrorFeedback(dtype="bf16"), also=change)
    assert_rounds("bf16", found, run("numpy", "efsignsgd", ErrorFeedback(), "bf16", also=change))


@needs_kernels
def test_gradients_of_16_bits_are_compressed_with_what_is_rounded() -> None:
    pytest.importorskip("torch")
    for spec in ("topk:ratio=0.05", "efsignsgd"):
        found = run("torch", spec, ErrorFeedback(dtype="bf16"), of="bfloat16")
        assert_rounds("bf16", found, run("torch", spec, ErrorFeedback(), "bf16", of="bfloat16"))


@types
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "efsignsgd", "powersgd:rank=2"])
def test_so_do_tensors_by_themselves(spec: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(buckets, "KNOWN_TO_KERNELS", ())
    found = run("torch", spec, ErrorFeedback(dtype=dtype))
    name = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[dtype]
    assert {str(one.dtype) for one in every_residual(found)} == {name}
    assert_rounds(dtype, found, run("torch", spec, ErrorFeedback(), dtype))


@needs_triton
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        pytest.param(spec, dtype, marks=[pytest.mark.thorough] * ((spec, dtype) != ("efsignsgd", "bf16")))
        for spec in SPECS
        if "atomo" not in spec
        for dtype in ("fp16", "bf16")
    ],
)
@pytest.mark.usefixtures("in_interpreter")
def test_so_do_kernels_on_a_device(spec: str, dtype: str) -> None:
    pytest.importorskip("torch")
    found = run("torch", spec, ErrorFeedback(dtype=dtype), shapes=SMALL)
    assert all(group.bucket.device is not None for group in found[0].engine.buckets.with_kernels)
    assert_rounds(dtype, found, run("torch", spec, ErrorFeedback(), dtype, SMALL))


@needs_kernels
@types
def test_two_bytes_a_parameter_stay_on_the_host(dtype: str) -> None:
    shapes = {"a": (32, 100), "b": (16, 20)}  # of whole cache lines

    def work(communicator: InProcessCommunicator) -> None:
        engine = Engine(
            communicator, infos(shapes), parse_compressor("topk:ratio=0.1"), ErrorFeedback(dtype=dtype), 0, 0, 0
        )
        within: list[int] = []
        observe(engine, lambda look: within.append(engine.buckets.kept_bytes) or {})
        for step in range(3):
            engine.begin()
            engine.step({name: np.full(shape, step, np.float32) for name, shape in shapes.items()})
            assert engine.buckets.kept_bytes == 2 * 3_520
        assert within == [6 * 3_520] * 3  # with x

    run_ranks(1, work)


@pytest.mark.parametrize("way", ["kernels", "none"])
@pytest.mark.parametrize(("first", "second"), [("bf16", "bf16"), ("float32", "fp16"), ("fp16", "float32")])
def test_a_checkpoint_holds_float32_and_goes_on_in_any_type(
    first: str, second: str, way: str, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("torch")
    if way == "none":
        request.getfixturevalue("without_kernels")

    def work(communicator: InProcessCommunicator) -> None:
        def engine(dtype: str) -> Engine:
            memory = ErrorFeedback(dtype=dtype)
            return Engine(communicator, infos(SMALL), parse_compressor("topk:ratio=0.1"), memory, 0, 0, 0)

        def step(one: Engine, number: int) -> dict[str, Any]:
            one.begin()
            return one.step(gradients("torch", SMALL, "float32", 0, number))

        before, after = engine(first), engine(second)
        step(before, 0)
        state = state_of(before, None, copy)
        kept = {name: one["arrays"][0] for name, one in state["own"]["residuals"].items()}
        assert {str(one.dtype) for one in kept.values()} == {"torch.float32"}
        doubled = state_for([state], 0, 2)["own"]["residuals"]
        assert all((2 * kept[name] == one["arrays"][0]).all() for name, one in doubled.items())
        restore(state, after, None, lambda array, name: copy(array))
        plain = engine("float32")
        restore(state, plain, None, lambda array, name: copy(array))
        if second != "float32":
            for one in plain.states.values():
                one.memory = tuple(make("torch", rounded(array, second), "float32") for array in one.memory)
        expected, found = step(plain, 1), step(after, 1)
        assert all((found[name] == one).all() for name, one in expected.items())

    run_ranks(1, work)


@needs_kernels
@types
def test_a_loss_scale_multiplies_what_is_kept(dtype: str) -> None:
    found, plain = (run("numpy", "topk:ratio=0.05", ErrorFeedback(dtype=dtype)) for _ in range(2))
    before = [as_numpy(one).copy() for one in every_residual(plain)]
    for one in found:
        one.engine.scale_residuals(3.0)
    for one, old in zip(every_residual(found), before, strict=True):
        np.testing.assert_array_equal(one, rounded(old * np.float32(3), dtype))
