"""GraVAC's two compressions in the engine: what is sent, what is left, and what rank 0 learns of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from hvdcomp.adaptation.energies import Energies
from hvdcomp.adaptation.gains import CompressionGains
from hvdcomp.adaptation.look import Look, observe
from hvdcomp.adaptation.plans import Plans, levelled_tensors
from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import number_of_elements
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.choice import Plan
from hvdcomp.compressors.memory import ErrorFeedback
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies.decisions import MultiLevel
from tests.driven import COMPRESSED, SHAPES, gradients_of, random_gradients
from tests.harness import (
    BACKENDS,
    INSTALLED,
    as_numpy,
    bits,
    copy,
    densify,
    infos,
    make,
    run_engines,
    some_of,
    states_of,
)
from tests.policies.test_policies_every_compressor import LEVELLED
from tests.two_levels import Model

every_backend = pytest.mark.parametrize("backend", BACKENDS)
SENDING = ["minimum", "candidate", "candidate", "dense", "candidate", "minimum", "dense"]


def attach(engine: Engine, observer: CompressionGains) -> None:
    observe(engine, observer.before_compress)


def watch_previews(
    monkeypatch: pytest.MonkeyPatch, plans: Plans, note: Callable[[Collection[str], Plan], None]
) -> None:
    """Has a function called with the names of the tensors and the plan of each preview."""
    real = plans.previews

    def kept(look: Look, plan: Plan, names: Sequence[str], *others: Any) -> Any:
        note(names, plan)
        return type(real).kept(real, look, plan, names, *others)

    def lost(look: Look, plan: Plan, names: Sequence[str], *others: Any) -> Any:
        note(names, plan)
        return type(real).lost(real, look, plan, names, *others)

    monkeypatch.setattr(real, "kept", kept)
    monkeypatch.setattr(real, "lost", lost)


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
        plans = Plans(engine, levelled_tensors(engine))
        assert plans.names == COMPRESSED
        models = [Model(rank) for rank in range(2)]
        for step, what in enumerate(SENDING):
            for model in models:
                model.begin(step, minimum, candidate)
            decision = MultiLevel(minimum, candidate, what)  # type: ignore[arg-type]
            observer = CompressionGains(plans, decision, communicator.rank == 0)
            attach(engine, observer)
            engine.set_plan(decision.plan(plans))
            engine.begin()
            result = engine.step(gradients_of(backend, communicator.rank, step))
            told = observer.gains()
            assert told.ranks == 2
            right = models[0].gains() if communicator.rank == 0 else (1.0, 1.0)  # nothing was looked at
            np.testing.assert_allclose([told.minimum, told.candidate], right, rtol=1e-5)
            assert communicator.rank == 0 or observer.seconds() == 0
            check_step(engine, models, what, result, f"{step} {what}")
            check_bytes(engine, {"minimum": minimum, "candidate": candidate, "dense": 1}[what])

    run_ranks(2, work)


@every_backend
@pytest.mark.parametrize("what", ["dense", "minimum"])
def test_without_a_candidate_only_the_first_gain_is_measured(backend: str, what: Any) -> None:
    (run,) = run_engines(1, infos(SHAPES), parse_compressor("topk:ratio=0.5"), lambda r, s: {}, 0, min_numel=16)
    engine, plans = run.engine, Plans(run.engine, COMPRESSED)
    decision = MultiLevel(4.0, None, what)
    observer = CompressionGains(plans, decision, True)
    attach(engine, observer)
    engine.set_plan(decision.plan(plans))
    engine.begin()
    engine.step(gradients_of(backend, 0, 0))
    model = Model(0)
    model.begin(0, 4.0, 4.0)
    assert observer.gains().minimum == pytest.approx(model.gains()[0], rel=1e-5)
    assert observer.gains().candidate is None
    engine.step({"bias": gradients_of(backend, 0, 1)["bias"]})
    assert observer.gains().minimum == 1.0  # nothing to compress, nothing lost
    assert observer.seconds() == 0


@every_backend
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("what", ["dense", "minimum", "candidate"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of what is meant to happen here
def test_gains_of_what_is_not_finite_are_nan(backend: str, what: Any, bad: float) -> None:
    """And a gradient of another rank that is not finite changes nothing of this rank's own."""

    def work(communicator: InProcessCommunicator) -> None:
        engine = Engine(communicator, infos(SHAPES), parse_compressor("topk:ratio=0.5"), min_numel=16)
        plans, decision = Plans(engine, COMPRESSED), MultiLevel(4.0, 20.0, what)
        observer = CompressionGains(plans, decision, True)
        attach(engine, observer)
        engine.set_plan(decision.plan(plans))
        engine.begin()
        values = random_gradients(communicator.rank, 0)
        if communicator.rank == 0:
            values["linear"][3, 5] = bad
        engine.step({name: make(backend, x) for name, x in values.items()})
        told = observer.gains()
        if communicator.rank == 0:
            assert np.isnan([told.minimum, told.candidate]).all()
        else:
            model = Model(1)
            model.begin(0, 4.0, 20.0)
            assert (told.minimum, told.candidate) == pytest.approx(model.gains(), rel=1e-5)

    run_ranks(2, work)


@every_backend
@pytest.mark.parametrize(
    "spec", ["qsgd:bits=4", "powersgd:rank=2", "randomk:ratio=0.5,unbiased=true", "globalqsgd:bits=8"]
)
def test_two_levels_of_any_method_keep_a_share_and_send_the_smaller_thing(backend: str, spec: str) -> None:
    compressor = parse_compressor(spec)

    def work(communicator: InProcessCommunicator) -> list[bytes]:
        engine = Engine(communicator, infos(SHAPES), compressor, memory=ErrorFeedback(), min_numel=16)
        decision = MultiLevel(2.0, 6.0, "candidate")
        plans = Plans(engine, COMPRESSED)
        observer = CompressionGains(plans, decision, communicator.rank == 0)
        attach(engine, observer)
        engine.set_plan(decision.plan(plans))
        out = []
        for step in range(3):
            engine.begin()
            result = engine.step(gradients_of(backend, communicator.rank, step))
            out += [as_numpy(x).tobytes() for x in result.values()]
            told = observer.gains()
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
@pytest.mark.parametrize("spec", ["randomk:ratio=0.5", "qsgd:bits=8", "atomo:rank=8"])
def test_what_is_sent_is_the_second_compression_of_the_first_on_every_rank(spec: str, backend: str) -> None:
    """With methods whose second compression of x itself would be something else than that of the first."""
    compressor = parse_compressor(spec)

    def work(communicator: InProcessCommunicator) -> None:
        measures = communicator.rank == 0
        engine = Engine(communicator, infos(SHAPES), compressor, memory=ErrorFeedback(), min_numel=16)
        plans = Plans(engine, COMPRESSED)
        levels = [plans.at_factor(factor) for factor in (3.0, 8.0)]
        observer = CompressionGains(plans, MultiLevel(3.0, 8.0, "candidate"), measures)
        x: dict[str, Any] = {}
        kept: list[dict[str, np.ndarray]] = []

        def look(x_of: Look) -> Mapping[str, Any]:
            x.update((name, copy(x_of[name])) for name in COMPRESSED)
            source, found = dict(x), {}
            for plan in levels:
                for name in COMPRESSED:
                    sent = plans.previews.kept_alone(x_of.xp, {name: source[name]}, plan, x_of.context)[name]
                    found[name] = densify(sent, SHAPES[name])
                    source[name] = make(backend, found[name])
                kept.append(dict(found))
            return observer.before_compress(x_of)

        observe(engine, look)
        engine.set_plan(levels[1])
        for step in range(3):
            engine.begin()
            kept.clear()
            engine.step(gradients_of(backend, communicator.rank, step))
            for name in COMPRESSED:
                residual = as_numpy(engine.states[name].memory[0])
                np.testing.assert_allclose(residual, as_numpy(x[name]) - kept[1][name], atol=1e-6)
            if measures:
                inputs = {name: as_numpy(each).astype(float) for name, each in x.items()}
                energy = sum(np.sum(each**2) for each in inputs.values())
                lost = [sum(np.sum((inputs[name] - sent[name]) ** 2) for name in COMPRESSED) for sent in kept]
                told = observer.gains()
                right = [max(0.0, 1 - each / energy) for each in lost]
                np.testing.assert_allclose([told.minimum, told.candidate], right, atol=1e-5)

    run_ranks(2, work)


# What measuring costs and changes ------------------------------------------------------------------------------------

# How often each of the two levels is compressed only to learn gains, by what is sent.
COMPRESSIONS = {"dense": (1, 1), "minimum": (0, 1), "candidate": (0, 0)}


@pytest.mark.parametrize("what", COMPRESSIONS)
@pytest.mark.parametrize(("spec", "own"), [("topk:ratio=0.5", True), ("powersgd:rank=2", False)])
def test_only_what_a_steady_state_would_not_do_counts_as_evaluation(
    spec: str, own: bool, what: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that only previews move: the first takes 10 s for each tensor, the second 1 s.

    When the candidate is sent, it is compressed from the result of the first compression, which is then needed. What is
    sent is not compressed once more to be measured, unless it shows nothing of this rank alone.
    """
    (run,) = run_engines(1, infos(SHAPES), parse_compressor(spec), lambda r, s: {}, 0, min_numel=16)
    engine, plans = run.engine, Plans(run.engine, COMPRESSED)
    clock = 0.0

    def note(names: Collection[str], plan: Plan) -> None:
        nonlocal clock
        clock += sum(10 if plan[name] == plans.at_factor(2.0)[name] else 1 for name in names)

    watch_previews(monkeypatch, plans, note)
    monkeypatch.setattr(numpy_arrays, "mark", lambda like, spare=None: clock)
    decided = MultiLevel(2.0, 6.0, what)
    observer = CompressionGains(plans, decided, True)
    attach(engine, observer)
    engine.set_plan(decided.plan(plans))
    engine.begin()
    engine.step(random_gradients(0, 0))
    first, second = COMPRESSIONS[what]
    if not own:
        first, second = max(first, what == "minimum"), max(second, what == "candidate")
    assert observer.seconds() == len(COMPRESSED) * (10 * first + second)


@pytest.mark.parametrize("what", ["dense", "minimum", "candidate"])
@pytest.mark.parametrize(("spec", "nested"), [("topk:ratio=0.5", True), ("topk:ratio=0.5,values=fp16", True),
                                              ("mstopk:ratio=0.5", False)])  # fmt: skip
def test_ranks_that_measure_nothing_compress_no_more_than_they_send(
    spec: str, nested: bool, what: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest of the largest are the largest: TopK's second compression takes no first. Nor does rank 0 need one
    in a step whose gains are not due."""

    def work(communicator: InProcessCommunicator) -> None:
        engine = Engine(communicator, infos(SHAPES), parse_compressor(spec), min_numel=16)
        previews: list[str] = []
        plans = Plans(engine, COMPRESSED)
        watch_previews(monkeypatch, plans, lambda names, plan: previews.extend(names))
        decision = MultiLevel(3.0, 8.0, what)
        observer = CompressionGains(plans, decision, communicator.rank == 0)
        attach(engine, observer)
        engine.set_plan(decision.plan(plans))
        for step, due in enumerate((True, False)):
            observer.due = due
            engine.begin()
            previews.clear()
            engine.step(gradients_of("numpy", communicator.rank, step))
            expected = int(what == "candidate" and not nested)
            if due and communicator.rank == 0:
                # Of what was sent nobody can tell how a second compression would have changed it.
                expected = 2 if what == "dense" or (what == "minimum" and not nested) else 1
            assert len(previews) == expected * len(COMPRESSED)

    run_ranks(2, work)


class Previewing(CompressionGains):
    """Compresses for measuring also what is sent."""

    def _lost(self, look: Look, plan: Plan, names: Sequence[str], sources: Mapping[str, Any], sent: bool) -> Energies:
        return super()._lost(look, plan, names, sources, sent=False)


@pytest.mark.parametrize(
    ("spec", "sent", "backend"),
    some_of(
        5,
        LEVELLED,
        [("dense", None), ("dense", 8.0), ("minimum", None), ("minimum", 8.0), ("candidate", 8.0)],
        INSTALLED,
    ),
    ids=str,
)
def test_gains_of_what_is_sent_are_those_of_compressing_alone_and_change_nothing(
    spec: str, sent: tuple[Any, float | None], backend: str
) -> None:
    """Of two ranks the first measures while it sends. A third training previews both levels in each step, and in a
    fourth nobody looks: results, residuals and warm starts are the same bits in all."""
    what, candidate = sent
    decision = MultiLevel(3.0, candidate, what)
    told: list[tuple[float, float | None]] = []
    previewed: list[tuple[float, float | None]] = []

    def train(looks: str) -> list[Any]:
        def work(communicator: InProcessCommunicator) -> list[Any]:
            engine = Engine(communicator, infos(SHAPES), parse_compressor(spec), memory=ErrorFeedback(), min_numel=16)
            plans, measures = Plans(engine, COMPRESSED), communicator.rank == 0 and looks != "nobody"
            observer = (Previewing if looks == "in the step" else CompressionGains)(plans, decision, measures)
            attach(engine, observer)
            engine.set_plan(decision.plan(plans))
            found: list[Any] = []
            for step in range(3):
                engine.begin()
                results = engine.step(gradients_of(backend, communicator.rank, step))
                found.append(({name: bits(x) for name, x in results.items()}, states_of(engine)))
                if measures:
                    gains = observer.gains()
                    (told if looks == "at the end" else previewed).append((gains.minimum, gains.candidate))
            return found

        return list(run_ranks(2, work))

    assert train("at the end") == train("in the step") == train("nobody")
    assert told == previewed
    assert len(told) == 3
