"""The engine: inputs, outputs, plans and repeatability, with every compressor."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hvdcomp import FP16, Compressor, ErrorFeedback, NoCompression, NoMemory, PowerSGD, RandomK, TopK
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Aggregation, AllReduce, Context, Outcome, TensorInfo
from hvdcomp.exchange.engine import Engine
from tests.harness import (
    BACKENDS,
    BACKENDS_AND_DTYPES,
    SPECS,
    Run,
    as_numpy,
    assert_same_on_all_ranks,
    bits,
    copy,
    infos,
    make,
    run_engines,
    states_of,
    torch,
)

SHAPES = {"conv": (4, 3, 2, 2), "linear": (6, 8), "bias": (6,), "scale": ()}
needs_torch = pytest.mark.skipif(torch is None, reason="needs PyTorch")
every_spec = pytest.mark.parametrize("spec", SPECS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def gradients_of(backend: str, rank: int, step: int, dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng([rank, step])
    return {name: make(backend, rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def results_of(run: Run) -> list[dict[str, bytes]]:
    return [{name: bits(x) for name, x in step.items()} for step in run.results]


@every_spec
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_inputs_stay_and_results_are_fresh(backend: str, dtype: str, spec: str) -> None:
    """Spoiling results and inputs after each step changes nothing later; inputs are as they were."""

    def run(spoil: bool) -> Any:
        def work(communicator: Any) -> Run:
            engine = Engine(communicator, infos(SHAPES, dtype), parse_compressor(spec), min_numel=0, min_ndim=0)
            kept = []
            for step in range(4):
                gradients = gradients_of(backend, communicator.rank, step, dtype)
                before = {name: bits(x) for name, x in gradients.items()}
                results = engine.step(gradients)
                assert {name: bits(x) for name, x in gradients.items()} == before
                kept.append({name: copy(x) for name, x in results.items()})
                if spoil:
                    for array in (*results.values(), *gradients.values()):
                        array[...] = 12345
            return Run(engine, kept)

        return run_ranks(2, work)

    spoiled, plain = run(True), run(False)
    assert_same_on_all_ranks(spoiled)
    assert results_of(spoiled[0]) == results_of(plain[0])
    assert states_of(spoiled[1].engine) == states_of(plain[1].engine)


@needs_torch
@every_spec
def test_results_have_the_layout_of_the_gradients(spec: str) -> None:
    shapes = {"channels_last": (4, 3, 2, 5), "transposed": (6, 8), "strided": (4, 5), "expanded": (3, 4)}

    def gradients_of(rank: int, step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(10 * rank + step)
        return {
            "channels_last": torch.randn(4, 3, 2, 5, generator=generator).to(memory_format=torch.channels_last),
            "transposed": torch.randn(8, 6, generator=generator).t(),
            "strided": torch.randn(4, 10, generator=generator)[:, ::2],
            "expanded": torch.randn(3, 1, generator=generator).expand(3, 4),
        }

    def contiguous(rank: int, step: int) -> dict[str, torch.Tensor]:
        return {name: x.contiguous() for name, x in gradients_of(rank, step).items()}

    compressor = parse_compressor(spec)
    runs = run_engines(2, infos(shapes), compressor, gradients_of, 3)
    plain = run_engines(2, infos(shapes), compressor, contiguous, 3)
    assert_same_on_all_ranks(runs)
    assert results_of(runs[0]) == results_of(plain[0])
    for name in ("channels_last", "transposed"):
        assert runs[0].results[0][name].stride() == gradients_of(0, 0)[name].stride()
        assert plain[0].results[0][name].is_contiguous()


@every_spec
@every_backend
def test_tensors_may_be_missing_and_come_in_any_order(backend: str, spec: str) -> None:
    """Ranks name and hand in tensors in different orders; one is absent every other step, on all ranks."""

    def run(shuffle: bool) -> Any:
        def work(communicator: Any) -> Run:
            order = random.Random(communicator.rank)
            tensors = infos(SHAPES)
            if shuffle:
                order.shuffle(tensors)
            engine = Engine(communicator, tensors, parse_compressor(spec), min_numel=0)
            results = []
            for step in range(4):
                items = list(gradients_of(backend, communicator.rank, step).items())
                items = [item for item in items if step % 2 == 0 or item[0] != "linear"]
                if shuffle:
                    order.shuffle(items)
                before = states_of(engine)["linear"]
                results.append(engine.step(dict(items)))
                assert set(results[-1]) == {name for name, _ in items}
                assert step % 2 == 0 or states_of(engine)["linear"] == before
            return Run(engine, results)

        return run_ranks(3, work)

    shuffled, plain = run(True), run(False)
    assert_same_on_all_ranks(shuffled)
    assert results_of(shuffled[0]) == results_of(plain[0])


@every_backend
def test_no_gradients_no_step(backend: str) -> None:
    (run,) = run_engines(1, infos(SHAPES), TopK(0.1), lambda rank, step: {})
    assert run.results == [{}]
    assert run.engine.step_number == run.engine.ledger.steps == 0


@every_spec
@every_backend
def test_zero_gradients_give_zero_and_keep_zero(backend: str, spec: str) -> None:
    zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    runs = run_engines(
        2, infos(SHAPES), parse_compressor(spec), lambda r, s: {name: make(backend, x) for name, x in zeros.items()}, 3
    )
    for run in runs:
        for result in run.results:
            assert not any(as_numpy(x).any() for x in result.values())
        for state in run.engine.states.values():
            assert not any(as_numpy(array).any() for array in state.memory)


@every_spec
@every_backend
def test_constant_gradients_arrive_in_the_long_run(backend: str, spec: str) -> None:
    """With error feedback the mean of the results over many steps is the gradient."""
    steps = 60
    g = {name: np.full(shape, 2.0) for name, shape in SHAPES.items()}
    runs = run_engines(
        2, infos(SHAPES), parse_compressor(spec),
        lambda r, s: {name: make(backend, x * (1 + r)) for name, x in g.items()}, steps,
    )  # fmt: skip
    for name in SHAPES:
        mean = np.mean([as_numpy(result[name]) for result in runs[0].results], axis=0)
        # What is missing is one residual, shared out over the steps; RandomK's may be some ten steps old.
        np.testing.assert_allclose(mean, 3, atol=3 * (20 if spec.startswith("randomk") else 5) / steps)
        kept = sum(as_numpy(run.engine.states[name].memory[0]) for run in runs if run.engine.states[name].memory)
        np.testing.assert_allclose(mean * steps + kept / 2, 3 * steps, rtol=1e-5)


@every_spec
@every_backend
def test_one_element_and_empty_tensors(backend: str, spec: str) -> None:
    shapes = {"one": (1,), "none": (0, 4), "scalar": (), "square": (1, 1)}
    runs = run_engines(
        2, infos(shapes), parse_compressor(spec),
        lambda r, s: {name: make(backend, np.full(shape, 2.0 * r)) for name, shape in shapes.items()}, 2,
    )  # fmt: skip
    assert_same_on_all_ranks(runs)
    for result in runs[0].results:
        for name, shape in shapes.items():
            assert tuple(result[name].shape) == shape
            np.testing.assert_allclose(as_numpy(result[name]), np.full(shape, 1.0), rtol=1e-6)


@every_backend
def test_small_and_flat_tensors_go_dense_but_casts_stay(backend: str) -> None:
    tensors = infos({"matrix": (32, 32), "narrow": (31, 33), "vector": (5000,)})
    plans = {
        spec: {name: kind.name for name, kind in run_engines(1, tensors, parse_compressor(spec), lambda r, s: {}, 0,
                                                              min_numel=1024, min_ndim=2)[0].engine.plan.items()}
        for spec in ("topk:ratio=0.1", "powersgd:rank=2", "fp16")
    }  # fmt: skip
    assert plans["topk:ratio=0.1"] == {"matrix": "topk", "narrow": "none", "vector": "none"}
    assert plans["powersgd:rank=2"] == {"matrix": "powersgd", "narrow": "none", "vector": "none"}
    assert plans["fp16"] == {"matrix": "fp16", "narrow": "fp16", "vector": "fp16"}


# Plans


@every_backend
def test_a_plan_set_in_the_middle_of_a_step_waits_for_the_next(backend: str) -> None:
    """While the first step waits for its collective, another thread sets another method and another level."""
    new = {"linear": PowerSGD(1), "conv": RandomK(0.5)} | dict.fromkeys(("bias", "scale"), NoCompression())

    def interrupt(engine: Engine, step: int) -> None:
        def change() -> None:
            thread = threading.Thread(target=engine.set_plan, args=(new,))
            thread.start()
            thread.join()

        engine.communicator.at_wait = change if step == 1 else None  # type: ignore[attr-defined]

    def between(engine: Engine, step: int) -> None:
        if step == 2:
            engine.set_plan(new)

    interrupted, orderly = (
        run_engines(2, infos(SHAPES), TopK(0.2), lambda r, s: gradients_of(backend, r, s), 4, before=before)
        for before in (interrupt, between)
    )
    for one, other in zip(interrupted, orderly, strict=True):
        assert results_of(one) == results_of(other)
        assert states_of(one.engine) == states_of(other.engine)
        assert one.engine.ledger.tensors.keys() == other.engine.ledger.tensors.keys()
        assert one.engine.ledger.totals.bytes_sent == other.engine.ledger.totals.bytes_sent
    assert dict(interrupted[0].engine.plan) == new


@every_backend
def test_a_plan_set_after_begin_waits_for_the_next_step(backend: str) -> None:
    (run,) = run_engines(1, infos(SHAPES), TopK(0.2), lambda r, s: {}, 0)
    engine = run.engine
    assert engine.begin() is engine.plan
    engine.set_level(0.5)
    assert engine.plan["linear"] == TopK(0.2)
    engine.step(gradients_of(backend, 0, 0))
    assert engine.ledger.last.tensors["linear"].floats_sent == 10
    assert engine.begin()["linear"] == TopK(0.5)
    engine.step(gradients_of(backend, 0, 1))
    assert engine.ledger.last.tensors["linear"].floats_sent == 24


def test_a_plan_is_a_snapshot_of_exactly_the_tensors() -> None:
    (run,) = run_engines(1, infos(SHAPES), TopK(0.2), lambda r, s: {}, 0)
    plan = dict.fromkeys(SHAPES, NoCompression())
    run.engine.set_plan(plan)
    plan["bias"] = TopK(0.1)  # type: ignore[assignment]
    assert run.engine.begin()["bias"] == NoCompression()
    with pytest.raises(TypeError):
        run.engine.plan["bias"] = TopK(0.1)  # type: ignore[index]
    for wrong in ({"bias": TopK(0.1)}, plan | {"other": TopK(0.1)}):
        with pytest.raises(ValueError, match="these tensors, and for no others: bias, conv, linear, scale"):
            run.engine.set_plan(wrong)


@every_backend
def test_a_dense_step_keeps_the_warm_start_of_powersgd(backend: str) -> None:
    tensors = infos({"w": (8, 9)})
    gradients = [np.random.default_rng(s).normal(size=(8, 9)) for s in range(3)]

    def plan(engine: Engine, step: int) -> None:
        engine.set_plan({"w": NoCompression() if step == 1 else PowerSGD(2)})
        warm.append(states_of(engine)["w"])

    warm: list[tuple[bytes, ...]] = []
    (run,) = run_engines(1, tensors, PowerSGD(2), lambda r, s: {"w": make(backend, gradients[s])}, 3, before=plan)
    assert len(warm[1]) == 2  # residual and Q
    assert warm[2] == (warm[1][1],)  # the residual is gone, Q is there
    assert run.engine.states["w"].method == "powersgd"


@dataclass(frozen=True)
class Counts(Compressor):
    """Sends how often it was used, which is its state."""

    def prepare(self, xp: Any, x: Any, state: tuple, context: Context) -> tuple:
        return state or (xp.zeros((1,), like=x),)

    def aggregate(self, xp: Any, x: Any, state: tuple, context: Context) -> Aggregation:
        count = state[0] + 1
        mean = yield AllReduce(x * 0 + count)
        return Outcome(mean, x * 0, (count,))


class Apples(Counts):
    name = "apples"


class Pears(Counts):
    name = "pears"


@every_backend
def test_a_method_is_never_given_the_state_of_another(backend: str) -> None:
    plans = [Apples(), Apples(), NoCompression(), Apples(), Pears(), TopK(0.1), Pears(), Pears()]

    def plan(engine: Engine, step: int) -> None:
        engine.set_plan({"w": plans[step]})

    (run,) = run_engines(
        1, infos({"w": (3,)}), NoCompression(), lambda r, s: {"w": make(backend, np.zeros(3))}, len(plans),
        before=plan, memory=NoMemory,
    )  # fmt: skip
    counts = [as_numpy(result["w"])[0] for result in run.results]
    assert counts == [1, 2, 0, 3, 1, 0, 1, 2]  # a dense step only interrupts; another method starts anew


# Repeatability


@every_spec
@every_backend
def test_global_random_state_is_neither_read_nor_changed(backend: str, spec: str) -> None:
    def states() -> tuple[Any, ...]:
        generators = np.random.get_state()
        return random.getstate(), generators[1].tobytes(), generators[2:], torch and bits(torch.get_rng_state())

    def run(seed: int) -> Run:
        random.seed(seed)
        np.random.seed(seed)
        if torch:
            torch.manual_seed(seed)
        before = states()
        runs = run_engines(2, infos(SHAPES), parse_compressor(spec), lambda r, s: gradients_of(backend, r, s), 3)
        assert states() == before
        return runs[0]

    assert results_of(run(1)) == results_of(run(2))


@pytest.mark.parametrize("spec", ["randomk:ratio=0.3", "powersgd:rank=2"])
@every_backend
def test_runs_repeat_with_the_seed_and_differ_with_another(backend: str, spec: str) -> None:
    def run(seed: int) -> Run:
        return run_engines(
            2, infos(SHAPES), parse_compressor(spec), lambda r, s: gradients_of(backend, r, s), 3, seed=seed
        )[0]

    assert results_of(run(5)) == results_of(run(5))
    one, other = results_of(run(5))[0], results_of(run(6))[0]
    assert one["linear"] != other["linear"]
    assert one["conv"] != other["conv"]


@every_spec
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_every_backend_gives_the_same(backend: str, spec: str) -> None:
    numpy_run, other_run = (
        run_engines(2, infos(SHAPES), parse_compressor(spec), lambda r, s, b=b: gradients_of(b, r, s), 4)[0]
        for b in ("numpy", backend)
    )
    for ours, theirs in zip(numpy_run.results, other_run.results, strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(as_numpy(theirs[name]), ours[name], rtol=0, atol=1e-5)


# Steps that Horovod carries itself


def test_only_casts_and_their_costs() -> None:
    tensors = [TensorInfo("a", (10, 10)), TensorInfo("b", (3,), "bfloat16")]
    for spec, casts in {"none": True, "fp16": True, "bf16": False, "topk:ratio=0.1": False}.items():
        (run,) = run_engines(1, tensors, parse_compressor(spec), lambda r, s: {}, 0)
        assert run.engine.passthrough is casts, spec
    (run,) = run_engines(1, tensors, parse_compressor("fp16"), lambda r, s: {}, 0, memory=ErrorFeedback)
    assert not run.engine.passthrough
    (run,) = run_engines(1, tensors, parse_compressor("none"), lambda r, s: {}, 0)
    run.engine.enter_casts({"a", "b"})
    assert run.engine.ledger.last.bytes_sent == 400 + 12
    assert run.engine.ledger.last.dense_bytes == 400 + 6
    assert run.engine.step_number == 1


@every_backend
def test_residuals_must_be_sent_before_casts_are_left_to_others(backend: str) -> None:
    def plan(engine: Engine, step: int) -> None:
        if step == 1:
            engine.set_plan({"w": NoCompression()})
            engine.begin()
            assert engine.has_residuals
            assert not engine.passthrough

    (run,) = run_engines(
        1, infos({"w": (4, 4)}), TopK(0.1), lambda r, s: {"w": make(backend, np.ones((4, 4)))}, 2, before=plan
    )
    assert run.engine.passthrough
    np.testing.assert_array_equal(sum(as_numpy(result["w"]) for result in run.results), np.full((4, 4), 2))


@every_backend
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "efsignsgd", "powersgd:rank=1"])
def test_a_step_beside_residuals_neither_sends_nor_changes_them(backend: str, spec: str) -> None:
    def run(steps: list[int], beside: int | None) -> list[Run]:
        def plan(engine: Engine, step: int) -> None:
            engine.planner.compress_by(*((NoCompression(), True) if step == beside else (None, False)))
            engine.begin()
            if step == beside:
                assert engine.has_residuals
                assert engine.passthrough
                before.append(states_of(engine))
            elif beside is not None and step == beside + 1:
                assert not engine.passthrough
                after.append(states_of(engine))

        before: list[Any] = []
        after: list[Any] = []
        given = lambda rank, step: gradients_of(backend, rank, steps[step])  # noqa: E731
        done = run_engines(2, infos(SHAPES), parse_compressor(spec), given, len(steps), before=plan, min_numel=20)
        assert sorted(map(str, before)) == sorted(map(str, after))
        return done

    runs, without = run([0, 1, 2, 3], 2), run([0, 1, 3], None)
    assert_same_on_all_ranks(runs)
    for name in SHAPES:
        mean = (as_numpy(gradients_of(backend, 0, 2)[name]) + as_numpy(gradients_of(backend, 1, 2)[name])) / 2
        np.testing.assert_allclose(as_numpy(runs[0].results[2][name]), mean, rtol=1e-6, atol=1e-7)
    assert results_of(runs[0])[3] == results_of(without[0])[2]


@every_backend
@pytest.mark.parametrize("memory", [None, ErrorFeedback])
def test_a_cast_sends_residuals_too_and_keeps_its_rounding_error_only_if_told_to(backend: str, memory: Any) -> None:
    def plan(engine: Engine, step: int) -> None:
        if step == 1:
            engine.set_plan({"w": FP16()})
            engine.begin()
            assert engine.has_residuals

    (run,) = run_engines(
        1, infos({"w": (4, 4)}), TopK(0.1), lambda r, s: {"w": make(backend, np.full((4, 4), 0.1))}, 2,
        before=plan, **({} if memory is None else {"memory": memory}),
    )  # fmt: skip
    arrived = sum(as_numpy(result["w"]) for result in run.results)
    np.testing.assert_allclose(arrived, np.full((4, 4), 0.2), rtol=1e-3)
    assert run.engine.has_residuals is not (memory is None)
    assert run.engine.passthrough is (memory is None)
