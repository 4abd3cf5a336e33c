"""What compression would keep: previews of every compressor, GraVAC's two compressions, and probes of many factors."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.collectives import TensorInfo, number_of_elements
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors import COMPRESSORS
from hvdcomp.engine import Engine
from hvdcomp.gains import LevelProbe, TwoLevels
from hvdcomp.levels import levelled_tensors, plan_at_factor, plan_of
from hvdcomp.memory import ErrorFeedback
from hvdcomp.policies.decisions import MultiLevel, Probe
from hvdcomp.spec import parse_compressor
from hvdcomp.statistics import error_energy
from tests.driven import COMPRESSED, SHAPES, random_gradients
from tests.harness import BACKENDS, SpyFeedback, as_numpy, copy, densify, infos, make, run_engines, states_of, torch
from tests.test_every_compressor import EXAMPLES

every_backend = pytest.mark.parametrize("backend", BACKENDS)
MATRIX = (37, 29)  # nothing divides it


def gradients_of(backend: str, rank: int, step: int) -> dict[str, Any]:
    return {name: make(backend, values) for name, values in random_gradients(rank, step).items()}


def numbers(x: Any) -> np.ndarray:
    return as_numpy(x).astype(np.float64)


# Previews ------------------------------------------------------------------------------------------------------------


def test_every_registered_compressor_is_previewed() -> None:
    assert {spec.partition(":")[0] for spec in EXAMPLES} == set(COMPRESSORS)


def random_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch and torch.get_rng_state().tolist()


@every_backend
@pytest.mark.parametrize("spec", EXAMPLES)
def test_a_preview_is_what_one_rank_then_sends_and_leaves_no_trace(spec: str, backend: str) -> None:
    """In three steps, so that random choices, residuals, warm starts and alternation are those of the step."""
    gradients = [np.random.default_rng(step).normal(size=MATRIX) for step in range(3)]
    spy = SpyFeedback()
    previews: list[Any] = []
    energies: list[tuple[float, float, float]] = []

    def look(xp: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        x = inputs["w"]
        before = (states_of(engine), engine.step_number, engine.ledger.steps, as_numpy(x).tobytes(), random_states())
        twice = [engine.preview(xp, "w", x, engine.plan["w"]) for _ in range(2)]
        first, again = (densify(sent, MATRIX) for sent in twice)
        after = (states_of(engine), engine.step_number, engine.ledger.steps, as_numpy(x).tobytes(), random_states())
        assert before == after
        np.testing.assert_array_equal(first, again)
        previews.append(first)
        energy = xp.norm([x]) ** 2
        lost = float(error_energy(xp, x, energy, twice[0]))
        energies.append((float(energy), lost, float(np.sum((numbers(x) - first) ** 2))))
        return {}

    def before(made: Engine, step: int) -> None:
        nonlocal engine
        engine = made
        engine.stage = look

    engine: Engine
    run_engines(
        1, infos({"w": MATRIX}), parse_compressor(spec), lambda rank, step: {"w": make(backend, gradients[step])}, 3,
        before=before, memory=lambda: spy, seed=5,
    )  # fmt: skip
    assert len(previews) == 3
    if spec == "none":
        np.testing.assert_array_equal(previews, np.asarray(gradients, np.float32))
    else:
        for preview, kept in zip(previews, spy.log, strict=True):
            np.testing.assert_array_equal(preview, densify(kept.sent, MATRIX))
    for energy, lost, right in energies:
        assert abs(lost - right) <= 1e-5 * max(energy, right)


@every_backend
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "randomk:ratio=0.1", "qsgd:bits=3", "natural", "atomo:rank=2"])
def test_a_preview_makes_the_random_choices_of_its_own_rank(spec: str, backend: str) -> None:
    """With two ranks too it is what this rank sends; methods whose ranks act on each other's parts have no such C."""

    def work(communicator: InProcessCommunicator) -> None:
        spy, found = SpyFeedback(), []
        engine = Engine(communicator, infos({"w": MATRIX}), parse_compressor(spec), memory=spy, seed=3)

        def look(xp: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
            found.append(densify(engine.preview(xp, "w", inputs["w"], engine.plan["w"]), MATRIX))
            return {}

        engine.stage = look
        for step in range(2):
            values = np.random.default_rng([communicator.rank, step]).normal(size=MATRIX)
            engine.step({"w": make(backend, values)})
        for preview, kept in zip(found, spy.log, strict=True):
            np.testing.assert_array_equal(preview, densify(kept.sent, MATRIX))

    run_ranks(2, work)


@every_backend
def test_a_preview_of_powersgd_starts_from_the_warm_columns_whatever_its_rank(backend: str) -> None:
    (run,) = run_engines(
        1, infos({"w": MATRIX}), parse_compressor("powersgd:rank=3"),
        lambda rank, step: {"w": make(backend, np.random.default_rng(step).normal(size=MATRIX))}, 2, seed=1,
    )  # fmt: skip
    (q,) = run.engine.states["w"].compressor
    x = make(backend, np.random.default_rng(9).normal(size=MATRIX))
    for rank in (1, 2, 3):
        sent = run.engine.preview(arrays_for(x), "w", x, parse_compressor(f"powersgd:rank={rank}"))
        m = numbers(x)
        start, _ = np.linalg.qr(numbers(q)[:, :rank])
        p, _ = np.linalg.qr(m @ start)
        np.testing.assert_allclose(as_numpy(sent), p @ (p.T @ m), atol=1e-4)


# GraVAC's two compressions -------------------------------------------------------------------------------------------


def top(x: np.ndarray, factor: float) -> np.ndarray:
    """The elements of `x` that TopK keeps at a compression factor.

    A value takes four bytes and its index two, so that k of d elements take 6 k bytes instead of 4 d.
    """
    k = max(1, math.floor(4 * x.size / factor / 6))
    flat = x.reshape(-1)
    kept = np.zeros_like(flat)
    largest = np.argsort(-np.abs(flat), kind="stable")[:k]
    kept[largest] = flat[largest]
    return kept.reshape(x.shape)


def gain_of(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Of (x, C(x)): the share of the energy of all x that all C(x) keep."""
    energy, kept = (sum(np.sum(pair[place].astype(float) ** 2) for pair in pairs) for place in (0, 1))
    return float(kept / energy)


class Model:
    """The NumPy statement of a step on one rank: x = g + r of each tensor, and both compressions of it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.r = {name: np.zeros(SHAPES[name], np.float32) for name in COMPRESSED}

    def begin(self, step: int, minimum: float, candidate: float) -> None:
        self.gradients = random_gradients(self.rank, step)
        self.x = {name: self.gradients[name] + self.r[name] for name in COMPRESSED}
        self.first = {name: top(x, minimum) for name, x in self.x.items()}
        self.second = {name: top(x, candidate) for name, x in self.first.items()}

    def gains(self) -> tuple[float, float]:
        pairs = [[(self.x[name], kept[name]) for name in COMPRESSED] for kept in (self.first, self.second)]
        return gain_of(pairs[0]), gain_of(pairs[1])

    def send(self, what: str | None) -> dict[str, np.ndarray]:
        sent = {"dense": self.x, "minimum": self.first, "candidate": self.second}[what or ""]
        self.r = {name: self.x[name] - sent[name] for name in COMPRESSED}
        return {**sent, "bias": self.gradients["bias"]}


SENDING = ["minimum", "candidate", "candidate", "dense", "candidate", "minimum", "dense"]


def check_step(engine: Engine, models: Sequence[Model], what: str | None, result: Mapping[str, Any], mark: str) -> None:
    """Results, residuals and bytes of one step on one rank against the models of all ranks."""
    sent = [model.send(what) for model in models]
    for name in SHAPES:
        mean = np.mean([each[name] for each in sent], axis=0)
        np.testing.assert_allclose(as_numpy(result[name]), mean, atol=1e-6, err_msg=f"{mark} {name}")
    mine = models[engine.communicator.rank]
    for name in COMPRESSED:
        memory = engine.states[name].memory
        kept = as_numpy(memory[0]) if memory else np.zeros(SHAPES[name], np.float32)
        np.testing.assert_allclose(kept, mine.r[name], atol=1e-6, err_msg=f"{mark} {name}")
        assert bool(memory) == (what != "dense")


def check_bytes(engine: Engine, factor: float) -> None:
    """The payload of each compressed tensor is that of its factor."""
    assert engine.ledger.last is not None
    for name in COMPRESSED:
        size = number_of_elements(SHAPES[name])
        expected = 4 * size if factor == 1 else 6 * max(1, math.floor(4 * size / factor / 6))
        assert engine.ledger.last.tensors[name].bytes_sent == expected


@every_backend
def test_two_levels_of_gravac_are_those_of_numpy_in_all_three_modes(backend: str) -> None:
    """Two ranks, decisions from the step before; only rank 0 measures, and all send the smaller thing."""
    minimum, candidate = 3.0, 16.0

    def work(communicator: InProcessCommunicator) -> None:
        engine = Engine(communicator, infos(SHAPES), parse_compressor("topk:ratio=0.5"), min_numel=16)
        names = levelled_tensors(engine)
        assert names == COMPRESSED
        models = [Model(rank) for rank in range(2)]
        for step, what in enumerate(SENDING):
            for model in models:
                model.begin(step, minimum, candidate)
            decision = MultiLevel(minimum, candidate, what)  # type: ignore[arg-type]
            stage = TwoLevels(engine, names, decision, communicator.rank == 0, None)
            engine.stage = stage
            engine.set_plan(plan_of(decision, engine, names))
            engine.begin()
            result = engine.step(gradients_of(backend, communicator.rank, step))
            told = stage.gains()
            assert told.ranks == 2
            right = models[0].gains() if communicator.rank == 0 else (1.0, 1.0)  # nothing was looked at
            np.testing.assert_allclose([told.minimum, told.candidate], right, rtol=1e-5)
            assert communicator.rank == 0 or stage.seconds() == 0
            check_step(engine, models, what, result, f"{step} {what}")
            check_bytes(engine, {"minimum": minimum, "candidate": candidate, "dense": 1}[what])

    run_ranks(2, work)


@every_backend
def test_two_levels_decided_in_the_step_itself(backend: str) -> None:
    """What is sent is told in the middle of the step; rank 0 has then gone on to factors of which it tells the others
    only now, as at the end of GraVAC's windows."""
    factors = [(3.0, 16.0), (3.0, 16.0), (2.0, 40.0), (4.0, 8.0), (4.0, 8.0), (5.0, 25.0), (5.0, 25.0)]

    def work(communicator: InProcessCommunicator) -> None:
        engine = Engine(communicator, infos(SHAPES), parse_compressor("topk:ratio=0.5"), min_numel=16)
        models = [Model(rank) for rank in range(2)]
        measures = communicator.rank == 0
        heard = MultiLevel(*factors[0], None)
        for step, what in enumerate(SENDING):
            for model in models:
                model.begin(step, *factors[step])
            known = MultiLevel(*factors[step], None) if measures else heard
            now = MultiLevel(*factors[step], what)  # type: ignore[arg-type]

            def decide(now: MultiLevel = now) -> MultiLevel:
                if measures:
                    told = stage.gains()  # noqa: B023
                    np.testing.assert_allclose([told.minimum, told.candidate], models[0].gains(), rtol=1e-5)
                engine.set_plan(plan_of(now, engine, COMPRESSED))
                engine.begin()
                return now

            stage = TwoLevels(engine, COMPRESSED, known, measures, decide)
            engine.stage = stage
            engine.set_plan(plan_of(heard, engine, COMPRESSED))
            engine.begin()
            result = engine.step(gradients_of(backend, communicator.rank, step))
            check_step(engine, models, what, result, f"{step} {what}")
            check_bytes(engine, now.sent or 0)
            heard = MultiLevel(*factors[step], None)

    run_ranks(2, work)


@every_backend
def test_without_a_candidate_only_the_first_gain_is_measured(backend: str) -> None:
    (run,) = run_engines(1, infos(SHAPES), parse_compressor("topk:ratio=0.5"), lambda r, s: {}, 0, min_numel=16)
    stage = TwoLevels(run.engine, COMPRESSED, MultiLevel(4.0, None, "dense"), True, None)
    inputs = gradients_of(backend, 0, 0)
    assert stage(arrays_for(inputs["bias"]), inputs) == {}
    model = Model(0)
    model.begin(0, 4.0, 4.0)
    assert stage.gains().minimum == pytest.approx(model.gains()[0], rel=1e-5)
    assert stage.gains().candidate is None
    assert stage({}, {}) == {}  # type: ignore[arg-type]
    assert stage.gains().minimum == 1.0  # nothing to compress, nothing lost
    assert stage.seconds() == 0


@every_backend
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of what is meant to happen here
def test_gains_of_what_is_not_finite_are_nan(backend: str, bad: float) -> None:
    (run,) = run_engines(1, infos(SHAPES), parse_compressor("topk:ratio=0.5"), lambda r, s: {}, 0, min_numel=16)
    stage = TwoLevels(run.engine, COMPRESSED, MultiLevel(4.0, 20.0, "minimum"), True, None)
    probe = LevelProbe(run.engine, COMPRESSED, Probe((2.0, 8.0), 1, send=2.0))
    inputs = gradients_of(backend, 0, 0)
    inputs["linear"][3, 5] = bad
    for look in (stage, probe):
        look(arrays_for(inputs["bias"]), inputs)  # type: ignore[operator]
    told = stage.gains()
    assert np.isnan([told.minimum, told.candidate]).all()
    assert np.isnan(list(probe.gains()["linear"].values())).all()
    assert np.isfinite(list(probe.gains()["conv"].values())).all()


@every_backend
@pytest.mark.parametrize(
    "spec", ["qsgd:bits=4", "powersgd:rank=2", "randomk:ratio=0.5,unbiased=true", "globalqsgd:bits=8"]
)
def test_two_levels_of_any_method_keep_a_share_and_send_the_smaller_thing(backend: str, spec: str) -> None:
    compressor = parse_compressor(spec)

    def work(communicator: InProcessCommunicator) -> list[bytes]:
        engine = Engine(communicator, infos(SHAPES), compressor, memory=ErrorFeedback(), min_numel=16)
        decision = MultiLevel(2.0, 6.0, "candidate")
        stage = TwoLevels(engine, COMPRESSED, decision, communicator.rank == 0, None)
        engine.stage = stage
        plan = plan_of(decision, engine, COMPRESSED)
        engine.set_plan(plan)
        out = []
        for step in range(3):
            engine.begin()
            result = engine.step(gradients_of(backend, communicator.rank, step))
            out += [as_numpy(x).tobytes() for x in result.values()]
            told = stage.gains()
            assert told.candidate is not None
            assert 0 <= told.candidate <= told.minimum + 1e-9 <= 1 + 1e-9
            assert engine.ledger.last is not None
            for name in COMPRESSED:
                level = compressor.level_for(6.0, SHAPES[name])
                expected = compressor.at_level(level).payload_bytes(SHAPES[name])
                assert engine.ledger.last.tensors[name].bytes_sent == expected
        return out

    first, second = run_ranks(2, work)
    assert first == second


@every_backend
@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("spec", ["randomk:ratio=0.5", "qsgd:bits=8", "atomo:rank=8"])
def test_what_is_sent_is_the_second_compression_of_the_first_on_every_rank(
    spec: str, in_step: bool, backend: str
) -> None:
    """With methods whose second compression of x itself would be something else than that of the first.

    Decided in the step, the other rank has heard of another minimum before.
    """
    compressor = parse_compressor(spec)
    now = MultiLevel(3.0, 8.0, "candidate")

    def work(communicator: InProcessCommunicator) -> None:
        measures = communicator.rank == 0
        engine = Engine(communicator, infos(SHAPES), compressor, memory=ErrorFeedback(), min_numel=16)
        plans = [plan_at_factor(engine, COMPRESSED, factor) for factor in (3.0, 8.0)]
        heard = MultiLevel(3.0 if measures else 2.0, 8.0, None) if in_step else now
        decide = (lambda: now) if in_step else None
        stage = TwoLevels(engine, COMPRESSED, heard, measures, decide)
        x: dict[str, Any] = {}
        kept: list[dict[str, np.ndarray]] = []

        def look(xp: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
            x.update((name, copy(inputs[name])) for name in COMPRESSED)
            source, found = dict(x), {}
            for plan in plans:
                for name in COMPRESSED:
                    found[name] = densify(engine.preview(xp, name, source[name], plan[name]), SHAPES[name])
                    source[name] = make(backend, found[name])
                kept.append(dict(found))
            return stage(xp, inputs)

        engine.stage = look
        engine.set_plan(plans[1])
        for step in range(3):
            engine.begin()
            kept.clear()
            engine.step(gradients_of(backend, communicator.rank, step))
            for name in COMPRESSED:
                residual = as_numpy(engine.states[name].memory[0])
                np.testing.assert_allclose(residual, as_numpy(x[name]) - kept[1][name], atol=1e-6)
            if measures:
                energy = sum(np.sum(numbers(x[name]) ** 2) for name in COMPRESSED)
                lost = [sum(np.sum((numbers(x[name]) - sent[name]) ** 2) for name in COMPRESSED) for sent in kept]
                told = stage.gains()
                right = [max(0.0, 1 - each / energy) for each in lost]
                np.testing.assert_allclose([told.minimum, told.candidate], right, atol=1e-5)

    run_ranks(2, work)


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize(("what", "seconds"), [("dense", 11), ("minimum", 11), ("candidate", 1)])
def test_only_what_a_steady_state_would_not_do_counts_as_evaluation(what: str, seconds: int, in_step: bool) -> None:
    """On a clock that only compressions move: the first takes 10 s for each tensor, the second 1 s.

    When the candidate is sent, it is compressed from the result of the first compression, which is then needed.
    """
    (run,) = run_engines(1, infos(SHAPES), parse_compressor("topk:ratio=0.5"), lambda r, s: {}, 0, min_numel=16)
    engine = run.engine
    clock = 0.0
    real = engine.preview
    minimum = plan_at_factor(engine, COMPRESSED, 4.0)

    def preview(xp: Any, name: str, x: Any, compressor: Any) -> Any:
        nonlocal clock
        clock += 10 if compressor == minimum[name] else 1
        return real(xp, name, x, compressor)

    engine.preview = preview  # type: ignore[method-assign]
    xp = SimpleNamespace(**{**vars(numpy_arrays), "mark": lambda like: clock})
    decided = MultiLevel(4.0, 20.0, what)  # type: ignore[arg-type]
    told = MultiLevel(4.0, 20.0, None) if in_step else decided
    stage = TwoLevels(engine, COMPRESSED, told, True, (lambda: decided) if in_step else None)
    stage(xp, random_gradients(0, 0))  # type: ignore[arg-type]
    assert stage.seconds() == len(COMPRESSED) * seconds


# Probes --------------------------------------------------------------------------------------------------------------


def probe_on(backend: str, factors: tuple[float, ...], every: int, spec: str = "topk:ratio=0.5") -> LevelProbe:
    (run,) = run_engines(1, infos(SHAPES), parse_compressor(spec), lambda r, s: {}, 0, min_numel=16)
    return LevelProbe(run.engine, COMPRESSED, Probe(factors, every, send=factors[0]))


def look(probe: LevelProbe, inputs: Mapping[str, Any]) -> None:
    assert probe(arrays_for(inputs["bias"]), inputs) == {}


@every_backend
@pytest.mark.parametrize("every", [1, 2, 3])
def test_probes_sum_energies_over_the_measured_steps(backend: str, every: int) -> None:
    factors = (2.0, 8.0, 64.0)
    probe = probe_on(backend, factors, every)

    def right(steps: Sequence[int]) -> dict[str, dict[float, float]]:
        xs = {name: [random_gradients(0, step)[name] for step in steps] for name in COMPRESSED}
        return {
            name: {factor: gain_of([(x, top(x, factor)) for x in xs[name]]) for factor in factors}
            for name in COMPRESSED
        }

    for step in range(5):
        look(probe, gradients_of(backend, 0, step))
        gains, expected = probe.gains(), right(range(0, step + 1, every))
        assert gains.keys() == expected.keys()
        for name in COMPRESSED:
            assert gains[name] == pytest.approx(expected[name], rel=1e-5)
    probe.clear()
    assert probe.gains() == {}
    for step in (5, 6):  # the first step of the new period is measured again
        look(probe, gradients_of(backend, 0, step))
    expected = right([5, 6] if every == 1 else [5])
    for name in COMPRESSED:
        assert probe.gains()[name] == pytest.approx(expected[name], rel=1e-5)


@every_backend
def test_probes_of_zeros_and_of_missing_tensors(backend: str) -> None:
    probe = probe_on(backend, (2.0, 8.0), 1)
    inputs = gradients_of(backend, 0, 0)
    inputs["linear"] *= 0
    del inputs["conv"]
    look(probe, inputs)
    gains = probe.gains()
    assert gains.keys() == {"linear"}  # the bias is not compressed
    assert np.isnan(list(gains["linear"].values())).all()
    inputs["linear"] += 1
    look(probe, inputs)
    k = math.floor(4 * 384 / 8 / 6)
    assert probe.gains()["linear"][8.0] == pytest.approx(k / 384, rel=1e-5)  # the step of zeros weighs nothing
    assert probe.costs().keys() == set(COMPRESSED)


@every_backend
def test_costs_are_bytes_over_dense_bytes(backend: str) -> None:
    assert probe_on(backend, (2.0, 8.0), 1).costs() == {
        name: {factor: 6 * math.floor(4 * size / factor / 6) / (4 * size) for factor in (2.0, 8.0)}
        for name, size in (("conv", 288), ("linear", 384))
    }
    costs = probe_on(backend, (2.0, 8.0, 1000.0), 1, "powersgd:rank=1").costs()
    assert costs["linear"] == {2.0: 4 * 40 / 384, 8.0: 40 / 384, 1000.0: 40 / 384}
    half = [TensorInfo("w", (16, 24), "float16")]
    (run,) = run_engines(1, half, parse_compressor("topk:ratio=0.5"), lambda r, s: {}, 0)
    probe = LevelProbe(run.engine, ("w",), Probe((8.0,), 1, send=8.0))
    assert probe.costs()["w"][8.0] == 32 * (2 + 2) / (2 * 384)  # k as for single precision, values half as long


@every_backend
def test_probing_sends_nothing_and_changes_no_step(backend: str) -> None:
    def results(probing: bool) -> Any:
        def before(engine: Engine, step: int) -> None:
            if probing and step == 0 and engine.communicator.rank == 0:
                engine.stage = LevelProbe(engine, COMPRESSED, Probe((2.0, 8.0), 2, send=2.0))

        gradients: Callable[[int, int], Any] = lambda rank, step: gradients_of(backend, rank, step)  # noqa: E731
        runs = run_engines(
            2, infos(SHAPES), parse_compressor("powersgd:rank=2"), gradients, 4, before=before, min_numel=16
        )
        return [
            (states_of(run.engine), run.engine.communicator.started, run.engine.ledger.totals.bytes_sent)
            for run in runs
        ]

    assert results(True) == results(False)


@every_backend
def test_a_probe_goes_on_from_its_state(backend: str) -> None:
    whole, first = probe_on(backend, (2.0, 8.0), 2), probe_on(backend, (2.0, 8.0), 2)
    places: set[str] = set()

    def place(array: Any, name: str) -> Any:
        places.add(name)
        return copy(array)

    for step in range(5):
        for probe in (whole, first):
            look(probe, gradients_of(backend, 0, step))
        state = first.state(copy)
        kept = first.gains()
        look(first, gradients_of(backend, 1, step))  # nobody looks at this one any more
        first = probe_on(backend, (2.0, 8.0), 2)
        first.restore(state, place)
        assert first.gains() == kept == whole.gains()
    assert places == set(COMPRESSED)
