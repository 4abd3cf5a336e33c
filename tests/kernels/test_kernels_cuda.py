"""Buckets on CUDA devices: the same kernels in Triton's interpreter, on the CPU."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdcomp import ErrorFeedback, kernels
from hvdcomp.adaptation.look import Look, observe
from hvdcomp.arrays import arrays_for
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors.memory import MomentumCorrection
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.kernels import cuda, tables
from tests.cuda_kernels import SPECS, launches
from tests.exchange import test_buckets
from tests.exchange.test_buckets import Recorded, assert_close, gradients, run
from tests.gpu.cases import FORMS
from tests.harness import as_numpy, infos, states_of
from tests.interpreted import needs_triton

torch = pytest.importorskip("torch")
pytestmark = needs_triton

SHAPES = {"matrix": (6, 8), "long": (3, 3_001), "vector": (77,), "odd": (5, 7, 3), "one": (1,), "scalar": ()}


@pytest.fixture(autouse=True)
def _shapes(in_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_buckets, "SHAPES", SHAPES)


def test_fields_of_the_table_have_the_names_of_the_segment() -> None:
    from hvdcomp.kernels.cuda import x

    unions = {names[0]: names for names in tables.UNIONS}
    for place, field in enumerate(x.FIELDS):
        for name in unions.pop(field, (field,)):
            assert getattr(x, name.upper()).value == place
    assert not unions


def off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDCOMP_KERNELS", "off")
    kernels.reset()


def quick_are(*specs: str) -> list[Any]:
    """All methods' forms, of which those that are not named run in `make test-all` only."""
    return [pytest.param(one, marks=[pytest.mark.thorough] * (one not in specs)) for one in FORMS if one != "none"]


@pytest.mark.parametrize(
    "spec",
    ["none", *quick_are("efsignsgd", "powersgd:rank=4")],
)
def test_a_bucket_does_what_its_tensors_do_by_themselves(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = SHAPES
    if spec.startswith("randomk"):  # whose draws from few elements are repeated many times, slowly here
        shapes = {name: shape for name, shape in SHAPES.items() if np.prod(shape) > 32}
        monkeypatch.setattr(test_buckets, "SHAPES", shapes)
    recorded = Recorded()
    found = run("torch", spec, steps=2, before=recorded.keep)
    assert all(one.bucket.device is not None for run in found for one in run.engine.buckets.with_kernels)
    assert {name for one in found[0].engine.buckets.with_kernels for name in one.names} == shapes.keys()
    off(monkeypatch)
    if parse_compressor(spec).keeps_state:
        plain = run("torch", spec, steps=2, before=recorded.set)
    else:
        plain = run("numpy", spec, steps=2)
    assert all(one.bucket.device is None for one in plain[0].engine.buckets.with_kernels)
    assert_close(found, plain, atol=5e-6)
    monkeypatch.undo()
    kernels.reset()


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        ("efsignsgd:exchange=scatter", 2),
        ("two_level(fp16)", 4),
        *(
            pytest.param(spec, ranks, marks=pytest.mark.thorough)
            for spec, ranks in (
                ("two_level(powersgd:rank=2)", 2),
                ("onebit:exchange=scatter", 3),
                *((f"two_level({one})", 4) for one in ("efsignsgd:exchange=scatter", "topk:ratio=0.1")),
                ("two_level(powersgd:rank=2,alternating=True)", 4),
                *((f"two_level({one})", 4) for one in ("signsgd", "randomk:ratio=0.2")),
            )
        ),
    ],
)
@pytest.mark.parametrize("replaced", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.usefixtures("spoiled")
def test_a_bucket_that_is_cut_does_what_it_does_on_the_host(spec: str, ranks: int, replaced: bool) -> None:
    """Also where something else is compressed in place of x. An even number of ranks is two on each node."""
    shapes = {"a": (3, 5), "b": (12, 13), "c": (1,)}

    def work(communicator: Any, backend: Any) -> tuple[list[Any], list[Any]]:
        engine = Engine(communicator, infos(shapes), parse_compressor(spec), ErrorFeedback(), min_numel=0, min_ndim=0)
        if replaced:
            observe(engine, lambda look: {"b": look["b"] * 0.5})
        results = []
        for step in range(2):
            engine.begin()
            rng = np.random.default_rng([communicator.rank, step])
            given = {name: backend(rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}
            found = engine.step(given)
            results += [as_numpy(found[name]).copy() for name in shapes]
        assert {name for group in engine.buckets.with_kernels for name in group.names} == {*shapes}
        on_device = backend is torch.from_numpy
        assert all(one.on_device == on_device for one in engine.buckets.with_kernels)
        return results, [as_numpy(one).copy() for name in shapes for one in engine.states[name].memory]

    per_node = None if ranks % 2 else 2
    runs = (run_ranks(ranks, functools.partial(work, backend=one), per_node) for one in (torch.from_numpy, np.array))
    for device, host in zip(*runs, strict=True):
        for mine, theirs in zip(device, host, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize(("spec", "dtype"), [("fp16:exchange=scatter", "bfloat16"), ("int8", "float16")])
def test_of_16_bits_a_bucket_makes_what_it_makes_on_the_host(spec: str, dtype: str) -> None:
    shapes = {"a": (3, 5), "b": (12, 13), "c": (1,)}

    def work(communicator: Any) -> list[Any]:
        tensors, memory = infos(shapes, dtype), ErrorFeedback()
        engine = Engine(communicator, tensors, parse_compressor(spec), memory, min_numel=0, min_ndim=0)
        results = []
        for step in range(2):
            engine.begin()
            rng = np.random.default_rng([communicator.rank, step])
            given = {
                name: torch.from_numpy(rng.normal(size=shape)).to(getattr(torch, dtype))
                for name, shape in shapes.items()
            }
            results += [one.float().clone() for one in engine.step(given).values()]
        assert (engine.buckets.with_kernels[0].bucket.device is not None) == cuda.serves_host()
        return results + [one.clone() for name in shapes for one in engine.states[name].memory]

    device = run_ranks(2, work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_serves_host", False)
        host = run_ranks(2, work)
    for mine, theirs in zip(device, host, strict=True):
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize(
    ("spec", "memory"),
    [
        ("efsignsgd", MomentumCorrection(0.9, nesterov=True, clip=1.0)),
        # The interpreter takes ten seconds for each of these; `tests.exchange.test_engine_faults` has them without it.
        pytest.param("topk:ratio=0.1", MomentumCorrection(0.9), marks=pytest.mark.thorough),
        pytest.param("powersgd:rank=2", ErrorFeedback(0.5), marks=pytest.mark.thorough),
    ],
)
def test_a_step_that_does_not_count_leaves_everything_as_it_was(spec: str, memory: Any) -> None:
    """In no rank, although one alone has met an inf; and the host does not ask whether it counts."""

    def work(communicator: Any) -> None:
        engine = Engine(communicator, infos(SHAPES), parse_compressor(spec), memory, min_numel=0, min_ndim=0)
        for step in range(4):
            engine.begin()
            given = gradients("torch")(communicator.rank, step)
            if step == 2 and communicator.rank == 1:
                given["odd"][0, 0, 0] = float("inf")
            before = states_of(engine)
            found = engine.step(given)
            assert engine.found_inf is not None
            assert bool(torch.isnan(engine.found_inf)) == (step == 2)
            for name, result in found.items():
                assert bool(torch.isnan(result).any()) == (step == 2), name
            if step == 2:
                assert states_of(engine) == before

    run_ranks(2, work)


@pytest.mark.parametrize("spec", quick_are("fp16", "onebit", "qsgd:bits=4", "topk:ratio=0.01"))
def test_what_was_not_sent_is_kept_exactly(spec: str) -> None:
    """Of a rank that is alone the result is C(x), so that the residual is x less the result, bit by bit."""

    def work(communicator: Any) -> None:
        engine = Engine(communicator, infos(SHAPES), parse_compressor(spec), ErrorFeedback(), min_numel=0, min_ndim=0)
        before = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for step in range(2):
            engine.begin()
            given = gradients("torch")(0, step)
            kept = {name: one.numpy().copy() for name, one in given.items()}
            found = engine.step(given, in_place=True)
            assert all(found[name] is given[name] for name in given)
            for name, result in found.items():
                after = [one.numpy().copy() for one in engine.states[name].memory] or [0 * kept[name]]
                np.testing.assert_array_equal(after[0], kept[name] + before[name] - result.numpy(), err_msg=name)
                before[name] = after[0]
            assert any(after.any() for after in before.values())

    run_ranks(1, work)


def test_residuals_are_sent_by_dense_steps_and_taken_over_by_other_methods() -> None:
    """And a dense step that does not count drops nothing."""

    def work(communicator: Any) -> None:
        engine = Engine(communicator, infos(SHAPES), parse_compressor("none"), ErrorFeedback(), min_numel=0, min_ndim=0)
        before = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        specs = ["efsignsgd", "topk:ratio=0.1", "onebit", "none", "none", "sidco:ratio=0.1", "fp16"]
        for step, spec in enumerate(specs):
            engine.set_plan(dict.fromkeys(SHAPES, parse_compressor(spec)))
            engine.begin()
            given = gradients("torch")(0, step)
            if step == 3:
                given["one"][0] = float("nan")
            found = engine.step(given)
            for name, result in found.items():
                kept = [one.numpy().copy() for one in engine.states[name].memory] or [0 * result.numpy()]
                if step == 3:
                    np.testing.assert_array_equal(kept[-1], before[name], err_msg=name)
                else:
                    x = given[name].numpy() + before[name]
                    np.testing.assert_array_equal(kept[-1], x - result.numpy(), err_msg=f"{name} of {spec}")
                before[name] = kept[-1]

    run_ranks(1, work)


def test_while_somebody_looks_at_x_tensors_stay_in_their_bucket() -> None:
    """And x is the gradient with what was kept, and what is kept is x less what was sent."""

    def work(communicator: Any) -> None:
        engine = Engine(communicator, infos(SHAPES), parse_compressor("fp16"), ErrorFeedback(), min_numel=0, min_ndim=0)
        before = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        seen: list[dict[str, Any]] = []

        def look(look: Look) -> dict[str, Any]:
            seen.append({name: x.clone() for name, x in look.items()})
            return {}

        for step in range(4):
            observe(engine, look if step % 2 else None)
            engine.begin()
            given = gradients("torch")(0, step)
            found = engine.step(given)
            for name, result in found.items():
                assert engine.states[name].is_flat
                (after,) = (one.numpy().copy() for one in engine.states[name].memory)
                x = given[name].numpy() + before[name]
                np.testing.assert_array_equal(after, x - result.numpy(), err_msg=name)
                if step % 2:
                    np.testing.assert_array_equal(seen[-1][name].numpy(), x, err_msg=name)
                before[name] = after

    run_ranks(1, work)


@pytest.mark.parametrize("spec", SPECS)
def test_the_number_of_launches_depends_on_no_number_of_tensors_or_ranks(spec: str) -> None:
    most = 1000 if spec in ("fp16", "topk:ratio=0.01") else 100  # the table of tensors is that of all methods
    chosen = (10, 1), (most, 1), (10, 3)
    counts = {len(launches(spec, [(3, 5)] * tensors, steps=2, ranks=ranks)) for tensors, ranks in chosen}
    assert len(counts) == 1
    assert counts.pop() <= 2 * 16


@pytest.mark.parametrize("spec", ["fp16:exchange=scatter", "efsignsgd:exchange=scatter"])
def test_as_many_are_launched_however_many_chunks_there_are(spec: str) -> None:
    counts = {len(launches(spec, [(30, 50)] * tensors, ranks=ranks)) for tensors, ranks in ((10, 2), (50, 9))}
    assert len(counts) == 1
    assert counts.pop() <= 16


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_every_kernel_compiles_for_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed for that; the registers that kernels take are printed."""
    monkeypatch.delenv("TRITON_INTERPRET")
    command = [sys.executable, "-m", "tests.cuda_kernels", "70", "80", "90"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    print(run.stdout)
    assert run.returncode == 0, run.stderr


def test_a_step_of_more_calls_than_flags_ends() -> None:
    def work(communicator: Any) -> Any:
        method = parse_compressor("powersgd:rank=1,iterations=40")
        engine = Engine(communicator, infos({"w": (6, 5)}), method, min_numel=0)
        engine.begin()
        return engine.step({"w": torch.ones(6, 5)})["w"]

    (mean,) = run_ranks(1, work)
    torch.testing.assert_close(mean, torch.ones(6, 5))


def test_one_storage_is_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on two GPUs: what lies on the other one is not for the first one's kernels."""
    monkeypatch.setattr(cuda, "_is_served_device", lambda array: True)
    tensors = infos({"a": (6, 5)}, "bfloat16") + infos({"b": (6, 5)})
    engine = Engine(LoopbackCommunicator(), tensors, parse_compressor("int8"), min_numel=0)
    engine.begin()
    gradients = {"a": torch.ones(6, 5, dtype=torch.bfloat16, device="meta"), "b": torch.ones(6, 5)}
    engine.buckets.of_step(arrays_for(gradients["b"]), ["a", "b"], gradients, engine.plan)
    assert [bucket.names for bucket in engine.buckets.with_kernels] == [["b"]]
    assert [group.names for group in engine.buckets.tensor_groups] == [["a"]]
