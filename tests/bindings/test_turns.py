"""Compressors that take turns in one training: residuals are handed on, and warm starts are not."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies.auto import Auto
from hvdcomp.policies.request import Candidate, Candidates
from tests.driven import SHAPES, Driven, gradients_of, random_gradients
from tests.harness import BACKENDS, as_numpy, bits, copy, infos

OWN = "topk:ratio=0.2"
OTHERS = ("powersgd:rank=2", "two_level(topk:ratio=0.2)", "two_level(powersgd:rank=2)", "efsignsgd:exchange=scatter")
SECONDS = {"none": 0.5, OWN: 1.0, **dict.fromkeys(OTHERS, 0.9), OTHERS[-1]: 0.7}
# Those that send more seldom are thought the faster, so that all are tried.
TOLD = Candidates(
    ("linear", "conv"),
    {
        "dense": Candidate(1.3, 0, "none"),
        OWN: Candidate(1.2, 0, None),
        **{spec: Candidate(1.1 - 0.01 * place, 0, spec) for place, spec in enumerate(OTHERS)},
        f"{OTHERS[0]} and dense": Candidate(1.15, 1, "none", OTHERS[0]),
    },
)
STEPS = 100


def run(steps: int, backend: str, states: Any = None) -> list[tuple[Driven, Any]]:
    """Four ranks, two on each node, with their checkpoints. In the end dense is found to be the fastest."""

    def work(communicator: InProcessCommunicator) -> tuple[Driven, Any]:
        now, made = [0.0], []

        def clock() -> float:
            if made:
                now[0] += SECONDS[str(made[0].engine.plan["linear"])]
            return now[0]

        policy = Auto(calibration="nowhere.json", compressors=OTHERS, window=3, every=6, margin=10.0, budget=0.9)
        state = None if states is None else states[communicator.rank]
        made.append(Driven(communicator, policy, backend, spec=OWN, candidates=TOLD, clock=clock, state=state))
        return made[0].run(steps), made[0].state()

    return list(run_ranks(4, work, ranks_per_node=2))


@cache
def never_stopped(backend: str) -> list[Driven]:
    """The ranks of a whole training, which several tests look at."""
    return [driven for driven, _ in run(STEPS, backend)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_that_was_kept_is_sent_whatever_has_followed(backend: str) -> None:
    ranks = never_stopped(backend)
    used = {plan["linear"] for plan in ranks[0].plans}
    assert used == {"none", OWN, *OTHERS}
    for other in ranks[1:]:
        assert other.plans == ranks[0].plans
        assert other.result_bits() == ranks[0].result_bits()
    assert ranks[0].plans[-1]["linear"] == "none"
    assert not any(one.engine.has_residuals for one in ranks)
    for name in ("linear", "conv"):
        sent = sum(results[name].astype(float) for results in ranks[0].results)
        gradients = [random_gradients(rank, step)[name].astype(float) for rank in range(4) for step in range(STEPS)]
        np.testing.assert_allclose(sent, sum(gradients) / 4, atol=2e-4)


@pytest.mark.parametrize("stop", [13, 29, 47])
def test_resumed_in_the_middle_all_ranks_go_on_alike(stop: int) -> None:
    whole, *_ = never_stopped("numpy")
    first, states = zip(*run(stop, "numpy"), strict=True)
    resumed = [driven for driven, _ in run(STEPS - stop, "numpy", states)]
    assert {plan["linear"] for plan in resumed[0].plans} <= {"none", OWN, *OTHERS}
    assert resumed[0].plans[0] == whole.plans[stop]
    assert resumed[0].result_bits()[0] == whole.result_bits()[stop]
    for other in resumed[1:]:
        assert other.plans == resumed[0].plans
        assert other.result_bits() == resumed[0].result_bits()
    for name in ("linear", "conv"):
        sent = sum(results[name].astype(float) for results in (*first[0].results, *resumed[0].results))
        gradients = [random_gradients(rank, step)[name].astype(float) for rank in range(4) for step in range(STEPS)]
        np.testing.assert_allclose(sent, sum(gradients) / 4, atol=2e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("spec", "between"),
    [
        ("powersgd:rank=2", OWN),
        ("powersgd:rank=2", "two_level(powersgd:rank=2)"),
        ("two_level(powersgd:rank=2)", "powersgd:rank=2"),
        ("two_level(powersgd:rank=2)", "two_level(topk:ratio=0.2)"),
    ],
)
def test_a_method_that_comes_back_starts_anew_with_what_was_kept(spec: str, between: str, backend: str) -> None:
    def work(communicator: InProcessCommunicator) -> None:
        engine, fresh = (Engine(communicator, infos(SHAPES), parse_compressor(spec), min_numel=16) for _ in range(2))
        for one in (spec, spec, between):
            engine.set_plan(engine.planner.plan_for(parse_compressor(one)))
            engine.begin()
            engine.step(gradients_of(backend, communicator.rank, engine.step_number))
        for name, state in engine.states.items():
            fresh.states[name].memory = tuple(map(copy, state.memory))
            fresh.states[name].keeper = state.keeper
        fresh.step_number = engine.step_number
        engine.set_plan(fresh.plan)
        results = []
        for one in (engine, fresh):
            one.begin()
            made = one.step(gradients_of(backend, communicator.rank, one.step_number))
            results.append({name: bits(as_numpy(x)) for name, x in made.items()})
        assert results[0] == results[1]

    run_ranks(4, work, ranks_per_node=2)
