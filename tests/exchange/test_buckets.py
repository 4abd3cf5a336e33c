"""Buckets against the plain statement: the same steps with every tensor compressed by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdcomp import ErrorFeedback, MomentumCorrection, TopK, kernels
from hvdcomp.adaptation.gradient_sums import AccumulatedGradients
from hvdcomp.adaptation.look import Look, observe
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors import COMPRESSORS
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.tensor_state import TensorState
from tests.harness import (
    Run,
    as_numpy,
    assert_same_on_all_ranks,
    bits,
    copy,
    densify,
    in_turns,
    infos,
    make,
    previews_of,
    run_engines,
    some_of,
    states_of,
    torch,
)

SHAPES = {"matrix": (6, 8), "long": (3, 30_001), "vector": (77,), "odd": (5, 7, 3), "one": (1,), "scalar": ()}
EVERY = sorted(spec for kind in COMPRESSORS.values() for spec in kind.examples)
BUCKETED = [spec for spec in EVERY if parse_compressor(spec).has_bucket_form]
LOSSY = [spec for spec in EVERY if not parse_compressor(spec).lossless]
ADDED = "nothing", "gradients", "results"
BACKENDS = ["numpy"] if torch is None else ["numpy", "torch"]
needs_kernels = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}")


@cache
def _drawn(rank: int, step: int, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in shapes}


def gradients(backend: str) -> Any:
    def of(rank: int, step: int) -> dict[str, Any]:
        return {name: make(backend, values) for name, values in _drawn(rank, step, (*SHAPES.items(),)).items()}

    return of


def run(backend: str, spec: str, ranks: int = 2, steps: int = 3, **options: Any) -> list[Run]:
    return list(run_engines(ranks, infos(SHAPES), parse_compressor(spec), gradients(backend), steps, **options))


class Recorded:
    """What each rank of a run kept before each of its steps.

    From it, another run can take every step as the first did. Where a method goes on from what it found in the step
    before, as PowerSGD does, the last bits would grow from step to step.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], dict[str, TensorState]] = {}

    def keep(self, engine: Engine, step: int) -> None:
        """Before a step of the run that is recorded."""
        self._states[engine.communicator.rank, step] = {
            name: TensorState(copies(state.memory), state.keeper, state.method, copies(state.compressor))
            for name, state in engine.states.items()
        }

    def set(self, engine: Engine, step: int) -> None:
        """Before a step of the other run."""
        engine.states.update(self._states[engine.communicator.rank, step])


def copies(arrays: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(copy(array) for array in arrays)


def assert_close(runs: list[Run], plain: list[Run], atol: float = 1e-6) -> None:
    """Sums run in another order, so that the last bits may differ."""
    for mine, theirs in zip(runs, plain, strict=True):
        for step, (found, expected) in enumerate(zip(mine.results, theirs.results, strict=True)):
            for name, one in expected.items():
                where = f"{name} in step {step}"
                np.testing.assert_allclose(as_numpy(found[name]), as_numpy(one), rtol=2e-5, atol=atol, err_msg=where)
        for name, state in theirs.engine.states.items():
            for found, expected in zip(mine.engine.states[name].memory, state.memory, strict=True):
                np.testing.assert_allclose(as_numpy(found), as_numpy(expected), rtol=2e-5, atol=atol, err_msg=name)
        assert mine.engine.ledger.last.tensors.keys() == theirs.engine.ledger.last.tensors.keys()
        for name, cost in theirs.engine.ledger.last.tensors.items():
            assert mine.engine.ledger.last.tensors[name].bytes_sent == cost.bytes_sent, name


@needs_kernels
@pytest.mark.parametrize(("spec", "backend"), in_turns(BUCKETED))
def test_a_bucket_does_what_its_tensors_do_by_themselves(
    spec: str, backend: str, request: pytest.FixtureRequest
) -> None:
    recorded = Recorded()
    found = run(backend, spec, before=recorded.keep)
    assert_same_on_all_ranks(found)
    assert found[0].engine.buckets.with_kernels, "no tensor went into a bucket"
    request.getfixturevalue("without_kernels")
    seeded = {"before": recorded.set} if parse_compressor(spec).keeps_state else {}
    assert_close(found, run(backend, spec, **seeded))


@needs_kernels
@pytest.mark.parametrize(("spec", "nesterov"), some_of(2, [spec for spec in LOSSY if spec in BUCKETED], (False, True)))
def test_momentum_is_corrected_as_for_tensors_by_themselves(
    spec: str, nesterov: bool, request: pytest.FixtureRequest
) -> None:
    """Of clipped gradients, too; and with masking, where there is no Nesterov momentum."""
    recorded = Recorded()
    options: dict[str, Any] = {"memory": lambda: MomentumCorrection(0.75, nesterov, 200.0, not nesterov)}
    found = run("numpy", spec, before=recorded.keep, **options)
    assert found[0].engine.buckets.with_kernels, "no tensor went into a bucket"
    request.getfixturevalue("without_kernels")
    assert_close(found, run("numpy", spec, before=recorded.set, **options))


@needs_kernels
@pytest.mark.parametrize("memory", [ErrorFeedback(0.5), MomentumCorrection(0.75)], ids=str)
@pytest.mark.parametrize("spec", ["efsignsgd", "onebit", "signsgd"])
def test_zero_has_one_sign_in_what_is_sent_and_in_what_is_left(
    spec: str, memory: Memory, request: pytest.FixtureRequest
) -> None:
    def of(rank: int, step: int) -> dict[str, np.ndarray]:
        return {name: np.asarray(one * (np.abs(one) < 1)) for name, one in gradients("numpy")(rank, step).items()}

    def runs() -> list[Run]:
        return list(run_engines(2, infos(SHAPES), parse_compressor(spec), of, 3, memory=lambda: memory))

    found = runs()
    assert found[0].engine.buckets.with_kernels, "no tensor went into a bucket"
    request.getfixturevalue("without_kernels")
    assert_close(found, runs())


@needs_kernels
@pytest.mark.parametrize("spec", BUCKETED)
def test_instruction_sets_and_threads_change_no_bit(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernels.instruction_set()
    runs = []
    try:
        for instruction_set in kernels.instruction_sets():
            for threads in ("1", "3"):
                monkeypatch.setenv("HVDCOMP_THREADS", threads)
                kernels.use(instruction_set)
                runs.append(run("numpy", spec, steps=2))
    finally:
        kernels.use(before or "plain")
    first = [[{name: bits(x) for name, x in step.items()} for step in one.results] for one in runs[0]]
    for other in runs[1:]:
        assert [[{name: bits(x) for name, x in step.items()} for step in one.results] for one in other] == first
        assert [states_of(one.engine) for one in other] == [states_of(one.engine) for one in runs[0]]


class Watch:
    """Keeps x, what this rank by itself would send of it, and the residuals of each step of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps: list[dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]] = []
        observe(engine, self._before)
        self.x: dict[str, np.ndarray] = {}
        self.sent: dict[str, np.ndarray] = {}

    def _before(self, look: Look) -> dict[str, Any]:
        self.x = {name: as_numpy(x).copy() for name, x in look.items()}
        kept = previews_of(self.engine).kept(look, self.engine.plan, list(look))
        self.sent = {name: densify(sent, SHAPES[name]).copy() for name, sent in kept.items()}
        return {}

    def end(self) -> None:
        kept = {name: [as_numpy(one).copy() for one in state.memory] for name, state in self.engine.states.items()}
        self.steps.append({name: (x, self.sent[name], kept[name][-1]) for name, x in self.x.items() if kept[name]})


@needs_kernels
@pytest.mark.parametrize(("spec", "decay", "backend"), in_turns(LOSSY, (1.0, 0.5)))
def test_what_was_not_sent_is_kept_exactly(spec: str, decay: float, backend: str) -> None:
    """x = gradient + decay * residual, and the next residual is x - C(x), element by element and bit by bit; and the
    step is the same whether or not somebody looks at x."""

    def work(communicator: Any) -> tuple[Watch, list[Any], list[Any]]:
        watched, plain = (
            Engine(communicator, infos(SHAPES), parse_compressor(spec), ErrorFeedback(decay), min_numel=0, min_ndim=0)
            for _ in range(2)
        )
        watch, results = Watch(watched), []
        for step in range(3):
            results.append([])
            for engine in (watched, plain):
                engine.begin()
                found = engine.step(gradients(backend)(communicator.rank, step))
                results[-1].append({name: bits(x) for name, x in found.items()})
            watch.end()
        return watch, results, [states_of(engine) for engine in (watched, plain)]

    for rank, (watch, results, states) in enumerate(run_ranks(2, work)):
        assert all(looked == other for looked, other in results)
        assert states[0] == states[1]
        before = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for step, kept in enumerate(watch.steps):
            for name, (x, sent, after) in kept.items():
                gradient = as_numpy(gradients(backend)(rank, step)[name])
                np.testing.assert_array_equal(x, gradient + before[name] * np.float32(decay), err_msg=f"{name} {step}")
                if parse_compressor(spec).sent_is_own:
                    np.testing.assert_array_equal(after, x - sent, err_msg=f"{name} in step {step}")
                before[name] = after


@needs_kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("spec", "added", "backend"), in_turns(EVERY, ADDED))
def test_results_may_take_the_gradients_place(spec: str, added: str, backend: str) -> None:
    """They are the same bits, also where gradients or results are added up, which a step that does not count does not
    do."""

    def work(communicator: Any) -> None:
        def engine() -> Engine:
            return Engine(communicator, infos(SHAPES), parse_compressor(spec), min_numel=0, min_ndim=0)

        fresh, in_place = engine(), engine()
        totals = [AccumulatedGradients(), AccumulatedGradients()]
        right = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for step in range(4):
            given = gradients(backend)(communicator.rank, step)
            if step == 2:
                given["one"][0] = float("inf") if communicator.rank else 1.0
            summed = {name: as_numpy(x) for name, x in given.items()}
            of_fresh, of_in_place = (
                None if added == "nothing" else each.of_step(0.25, of_results=added == "results") for each in totals
            )
            fresh.begin()
            expected = fresh.step(given, sums=of_fresh)
            if added == "results":
                summed = {name: as_numpy(x) for name, x in expected.items()}
            if step != 2:
                for name, x in summed.items():
                    right[name] += np.float32(0.25) * x
            in_place.begin()
            found = in_place.step(given, in_place=True, sums=of_in_place)
            assert {name: bits(x) for name, x in found.items()} == {name: bits(x) for name, x in expected.items()}
            assert all(found[name] is given[name] for name in given)
        for each in totals:
            assert each.sums.keys() == (set() if added == "nothing" else SHAPES.keys())
            for name, total in each.sums.items():
                np.testing.assert_allclose(as_numpy(total), right[name], rtol=1e-6, atol=1e-7)

    run_ranks(2, work)


@needs_kernels
@settings(max_examples=40)
@given(
    plans=st.lists(
        st.dictionaries(st.sampled_from(list(SHAPES)), st.sampled_from(EVERY)),
        min_size=2,
        max_size=5,
    ),
    backend=st.sampled_from(BACKENDS),
    failing=st.sets(st.integers(0, 4)),
)
def test_residuals_follow_tensors_into_buckets_and_out(
    plans: list[dict[str, str]], backend: str, failing: set[int]
) -> None:
    """Whatever methods tensors get from step to step, in buckets or by themselves: x is the gradient with what the step
    before kept, and a step that does not count changes nothing. A dense tensor with a residual sends it."""

    def kept_by(engine: Engine) -> dict[tuple[str, str], list[bytes]]:
        return {
            (name, kind): [bits(one) for one in arrays]
            for name, state in engine.states.items()
            for kind, arrays in (("residual", state.memory), ("warm start", state.compressor))
        }

    def work(communicator: Any) -> None:
        engine = Engine(communicator, infos(SHAPES), parse_compressor("none"), ErrorFeedback(), min_numel=0, min_ndim=0)
        watch = Watch(engine)
        kept = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for step, plan in enumerate(plans):
            engine.set_plan({name: parse_compressor(plan.get(name, "none")) for name in SHAPES})
            engine.begin()
            given = gradients(backend)(communicator.rank, step)
            if step in failing and communicator.rank == 1:
                given["odd"][0, 0, 0] = float("inf")
            before = kept_by(engine)
            engine.step(given)
            if step in failing:
                after = kept_by(engine)
                changed = {  # where the method changes, one may be made anew, or be gone
                    key for key, arrays in before.items() if len(arrays) == len(after[key]) and arrays != after[key]
                }
                assert not changed, f"step {step} does not count, and changed {changed}"
                continue
            for name, state in engine.states.items():
                x, sent = watch.x[name], watch.sent[name]
                np.testing.assert_array_equal(x, as_numpy(given[name]) + kept[name], err_msg=f"{name} in step {step}")
                residuals = [as_numpy(one).copy() for one in state.memory]
                kept[name] = residuals[-1] if residuals else np.zeros(SHAPES[name], np.float32)
                if residuals and engine.plan[name].sent_is_own:
                    np.testing.assert_array_equal(kept[name], x - sent, err_msg=f"{name} in step {step}")
                elif not residuals:
                    assert plan.get(name, "none") == "none"

    run_ranks(2, work)


def test_a_method_that_is_derived_from_another_does_not_get_its_form() -> None:
    """It may have changed what the form does."""

    @dataclasses.dataclass(frozen=True)
    class FirstK(TopK):
        def choose(self, xp: Any, vector: Any, k: int) -> Any:
            return xp.from_numpy(np.arange(k, dtype=np.int32), like=vector)

    try:
        (run,) = run_engines(1, infos(SHAPES), FirstK(0.1), gradients("numpy"))
        assert as_numpy(run.results[0]["vector"]).nonzero()[0].tolist() == list(range(8))
    finally:
        COMPRESSORS["topk"] = TopK
