"""`auto` driven by a coordinator on ranks in one process: candidates, the clock of rank 0, and restarts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdcomp.adaptation.decision_log import DecisionLog
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.policies.auto import Auto
from hvdcomp.policies.request import Candidate, Candidates, Period, Request, Statistic
from hvdcomp.tools.report.replay import replay
from tests.decision_lines import whole_lines
from tests.driven import SHAPES, Driven
from tests.harness import BACKENDS, as_numpy
from tests.spy_policy import Spy, SpyState, at_ratio, drive

CANDIDATES = Candidates(
    ("linear", "conv"),
    {
        "dense": Candidate(1.0, 0, "none"),
        "fp16": Candidate(0.95, 0, "fp16"),
        "compressed": Candidate(0.9, 0, None),
        "compressed and dense": Candidate(1.02, 1, "none"),
    },
)
PLANS = {
    "dense": ("none", "none", "none"),
    "fp16": ("fp16", "fp16", "fp16"),
    "compressed": ("none", "topk:ratio=0.2", "topk:ratio=0.2"),
    "compressed and dense": ("none", "none", "topk:ratio=0.2"),
}
AUTO = Auto(calibration="nowhere.json", window=3, every=6)


class Clock:
    """Goes on by what the step took that has just ended; says who looked at it."""

    def __init__(self, times: Callable[[str], float]) -> None:
        self.now = 0.0
        self.looked = 0
        self.times = times
        self.driven: Driven | None = None

    def __call__(self) -> float:
        self.looked += 1
        if self.driven is not None:
            plan = tuple(str(compressor) for compressor in self.driven.engine.plan.values())
            self.now += self.times(next(name for name, one in PLANS.items() if one == plan))
        return self.now


def run(
    steps: int, backend: str = "numpy", log: DecisionLog | None = None, states: Any = None, end: Any = None
) -> list[Any]:
    """Drives two ranks, for which only fp16 is fast; returns them with their clocks, or what `end` makes of each."""

    def work(communicator: InProcessCommunicator) -> Any:
        clock = Clock(lambda name: {"dense": 1.0, "fp16": 0.5, "compressed": 1.1, "compressed and dense": 1.2}[name])
        state = None if states is None else states[communicator.rank]
        driven = Driven(communicator, AUTO, backend, log=log, candidates=CANDIDATES, clock=clock, state=state)
        clock.driven = driven
        driven.run(steps)
        return (driven, clock) if end is None else end(driven)

    return list(run_ranks(2, work))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranks_change_in_the_same_step_to_what_the_log_names(backend: str, tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl")
    (first, clock), (second, other) = run(40, backend, log)
    assert first.plans == second.plans
    assert first.result_bits() == second.result_bits()
    assert (clock.looked, other.looked) == (40, 0)
    start, first_decision, *decided = whole_lines(log.path)
    assert (start["step"], first_decision["step"], first_decision["from_step"]) == (0, 0, 0)
    assert first_decision["statistics"]["survey"]["order"] == ["linear", "conv"]
    assert "survey" not in decided[0]["statistics"]
    obeyed = [tuple(plan.values()) for plan in first.plans]
    chosen = {line["from_step"]: line["state"]["chosen"] for line in (first_decision, *decided)}
    for step, plan in enumerate(obeyed):
        name = chosen[max(begin for begin in chosen if begin <= step)]
        assert plan == PLANS[name], step
    assert set(chosen.values()) == set(PLANS)
    assert obeyed[-1] == PLANS["fp16"]
    assert replay(log.path).difference is None
    # Only the first step, in which the candidates are told, needs the engine whatever its plan.
    assert first.needed_engine == second.needed_engine == [True] + [False] * 39


def test_all_ranks_exchange_as_rank_0_has_found_faster() -> None:
    """The tensors that a candidate names get the method that it names, until that is found slow."""
    told = {
        "dense": Candidate(9.0, 0, "none"),
        "scattered and dense": Candidate(1.0, 1, "none", "natural:exchange=scatter"),
        "gathered and dense": Candidate(1.05, 1, "none", "natural"),
    }

    def work(communicator: InProcessCommunicator) -> tuple[Driven, list[str]]:
        offered = Candidates(("linear", "conv"), told)
        sent: list[str] = []
        times = {"none": 9.0, "natural": 1.0, "natural:exchange=scatter": 3.0}
        seconds = [0.0]

        def clock() -> float:
            if made:
                sent.append(str(made[0].engine.plan["linear"]))
                seconds[0] += times[sent[-1]]
            return seconds[0]

        made: list[Driven] = []
        policy = Auto(calibration="nowhere.json", window=3, every=6)
        driven = Driven(communicator, policy, "numpy", spec="natural:exchange=auto", candidates=offered, clock=clock)
        made.append(driven)
        return driven.run(40), sent

    (first, sent), (second, _) = run_ranks(2, work)
    assert sent[0] == "natural:exchange=scatter"
    assert sent[-1] == "natural"
    assert first.plans == second.plans
    assert first.result_bits() == second.result_bits()
    assert {plan["conv"] for plan in first.plans} == {"none"}


def test_times_are_told_to_rank_0_and_of_every_step_once() -> None:
    policy = {"asked": frozenset({Statistic.STEP_TIMES}), "often": Period(steps=3), "decisions": at_ratio(0.5)}
    now = iter(range(0, 1000, 7))
    (_, spy), (_, other) = drive(policy, "numpy", 10, clock=lambda: float(next(now)) ** 2)
    told = [seconds for each in spy.seen for seconds in each.step_times or ()]
    marks = [float(mark) ** 2 for mark in range(0, 63, 7)]
    assert [len(each.step_times or ()) for each in spy.seen] == [3, 3, 3]
    assert np.isnan(told[0])
    assert told[1:] == [after - before for before, after in pairwise(marks)]
    assert not other.seen


def test_no_clock_is_read_for_policies_that_want_no_times() -> None:
    def clock() -> float:
        raise AssertionError

    policy = {"asked": frozenset({Statistic.NORMS}), "often": Period(steps=2), "decisions": at_ratio(0.5)}
    drive(policy, "numpy", 5, clock=clock)


def test_a_period_that_the_state_names_ends_on_all_ranks_alike() -> None:
    class Fitful(Spy):
        """Decides after 2, 3, 5, 9... steps."""

        def request(self, state: SpyState) -> Request:
            return Request(period=Period(until=1 + 2**state.decided))

    def work(communicator: InProcessCommunicator) -> tuple[Driven, Spy]:
        spy = Fitful(asked=frozenset(), often=Period(until=2), decisions=at_ratio(0.5, 0.1, 0.2))
        return Driven(communicator, spy, "numpy").run(20), spy

    (first, spy), (second, _) = run_ranks(2, work)
    assert [told.step for told in spy.seen] == [2, 3, 5, 9, 17]
    assert first.plans == second.plans
    changes = [step for step in range(1, 20) if first.plans[step] != first.plans[step - 1]]
    assert changes == [2, 3, 5, 9, 17]


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 7, 8, 20, 30])
def test_resumed_anywhere_it_goes_on(stop: int, tmp_path: Path) -> None:
    """The first step after a restart has no time; so decisions may come a step later, but rank 0 loses no others."""
    log = DecisionLog(tmp_path / "decisions.jsonl")
    whole = [driven for driven, _ in run(40, log=log)]
    states = run(stop, end=Driven.state)
    decided = [line["step"] for line in whole_lines(log.path)]
    kept = states[0]["own"]["coordinator"]["step_times"]
    assert len(kept) == stop - max(step for step in decided if step <= stop)
    assert not states[1]["own"]["coordinator"]["step_times"]
    resumed_log = DecisionLog(tmp_path / "resumed.jsonl")
    resumed = [driven for driven, _ in run(40 - stop, states=states, log=resumed_log)]
    _, first, *_ = whole_lines(resumed_log.path)
    assert len(first["statistics"]["step_times"]) == first["step"] - max(step for step in decided if step <= stop)
    assert first["statistics"]["step_times"][len(kept)] == "NaN"
    assert resumed[0].plans == resumed[1].plans
    assert resumed[0].result_bits() == resumed[1].result_bits()
    assert resumed[0].plans[0] == whole[0].plans[stop]
    assert tuple(resumed[0].plans[-1].values()) == PLANS["fp16"]


def test_residuals_are_sent_on_the_way_to_fp16_and_then_horovod_can_carry_the_gradients() -> None:
    driven, _ = run(40)[0]
    engine = driven.engine
    assert tuple(driven.plans[-1].values()) == PLANS["fp16"]
    assert any(tuple(plan.values()) == PLANS["compressed"] for plan in driven.plans)
    assert not engine.has_residuals
    assert engine.passthrough
    sent = sum(results["linear"].astype(float) for results in driven.results)
    gradients = sum(
        as_numpy(driven._gradients(rank, step)["linear"]).astype(float) / 2 for rank in (0, 1) for step in range(40)
    )
    assert sent.shape == SHAPES["linear"]
    np.testing.assert_allclose(sent, gradients, atol=40 * 4e-3)


def test_what_is_logged_names_predictions_measurements_and_the_reason(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl")
    run(40, log=log)
    last = whole_lines(log.path)[-1]["state"]
    assert last["candidates"]["fp16"] == {"seconds": 0.95, "compressed": 0, "rest": "fp16"}
    assert last["measured"]["fp16"]["seconds"] == pytest.approx(0.5)
    assert last["measured"]["compressed"]["seconds"] == pytest.approx(1.1)
    assert last["why"] == "fp16 is the fastest measured: 500 ms, then dense: 1000 ms"
