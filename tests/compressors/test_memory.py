"""What a training holds does not grow with its steps."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import pytest

from hvdcomp.communicators.in_process import InProcessCommunicator, InProcessGroup, run_ranks
from hvdcomp.policies import POLICIES, Policy, parse_policy
from hvdcomp.policies.decisions import MultiLevel
from hvdcomp.policies.request import Candidate, Candidates, Period, Request, Statistic
from tests.driven import COMPRESSED, Driven
from tests.spy_policy import Spy, SpyState, drive

METHODS = (
    "topk:ratio=0.1", "powersgd:rank=2", "qsgd:bits=8", "int8", "efsignsgd", "none", "fp16", "randomk:ratio=0.1",
    "dgc:ratio=0.1", "sidco:ratio=0.1", "stc:ratio=0.1", "terngrad", "signsgd", "onebit",
)  # fmt: skip
TRIED_POLICIES = (
    "accordion_batch_size:low=16,high=32,steps=3",
    "auto:calibration=nowhere.json,window=3,every=5",
    "gravac:min=2,max=8,window=10",
    "accordion:low=0.5,high=0.1,steps=3",
    "increase_batch_size:low=16,high=64,steps=3",
    "adaqs:start=8,fall=0.01,steps=3",
    "lgreco:interval=4,last=2",
    "budget:factor=4,interval=4,last=2",
    "budget:ms=2,calibration=nowhere.json,interval=4,last=2",
    "budget:factor=8,critical=2,interval=4,last=2",
    "constant:level=0.2",
)
CANDIDATES = Candidates(
    COMPRESSED,
    {"dense": Candidate(1.0, 0, "none"), "fp16": Candidate(0.9, 0, "fp16"), "compressed": Candidate(0.8, 2, "fp16")},
)
RANKS = 2
LEAST_LEAK = 2  # bytes a step: a list takes 8 for each number that it keeps


def forget_names() -> None:
    """Empties Python's cache of the names of attributes, which takes in new ones for thousands of steps."""
    clear = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
    clear()


def grown(spec: str, policy: str, steps: int) -> float:
    """Bytes a step by which all that Python holds has grown in that of four stretches of steps in which it grew least.

    What leaks grows in every stretch; what is made once, or when a policy changes its mind, does not.
    """
    group = InProcessGroup(RANKS)

    def make(communicator: InProcessCommunicator) -> Driven:
        made = parse_policy(policy)
        assert isinstance(made, Policy)
        ticks = count()
        return Driven(
            communicator, made, "numpy", spec=spec, steps_per_epoch=50, candidates=CANDIDATES,
            clock=lambda: float(next(ticks)), exchange_seconds={300: 0.001, 1200: 0.003},
        )  # fmt: skip

    def train(communicator: InProcessCommunicator) -> None:
        driven = ranks[communicator.rank]
        for _ in range(steps):
            driven.step()
            for kept in (driven.plans, driven.batches, driven.results, driven.observed, driven.needed_engine):
                kept.clear()

    held: list[int] = []
    tracemalloc.start()
    try:
        ranks = group.run(make)
        for _ in range(4):
            group.run(train)
            gc.collect()
            forget_names()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return min(after - before for before, after in pairwise(held)) / steps


@pytest.mark.thorough
@pytest.mark.parametrize("policy", TRIED_POLICIES)
def test_no_policy_holds_more_after_thousands_of_steps(policy: str) -> None:
    assert grown("topk:ratio=0.2", policy, 1000) < LEAST_LEAK


@pytest.mark.thorough
@pytest.mark.parametrize("spec", METHODS)
def test_no_method_holds_more_after_thousands_of_steps(spec: str) -> None:
    assert grown(spec, "constant", 1000) < LEAST_LEAK


def test_every_policy_is_tried() -> None:
    tried = {parse_policy(policy).name for policy in TRIED_POLICIES}
    ours = {name for name, kind in POLICIES.items() if kind.__module__.startswith("hvdcomp.")}
    assert tried == {name for name in ours if issubclass(POLICIES[name], Policy)}


def test_plans_of_ever_new_factors_are_not_all_kept() -> None:
    decisions = [MultiLevel(2.0 + step / 100, None, "minimum") for step in range(200)]
    policy = {"asked": frozenset({Statistic.LEARNING_RATES}), "often": Period(steps=1), "decisions": decisions}
    for driven, _ in drive(policy, "numpy", 200):
        assert len(set(map(str, driven.plans))) > 20
        assert len(driven.coordinator.plans._at_factor) <= 64


@dataclass(frozen=True, kw_only=True)
class Once(Spy):
    """Asks for step times, decides once, and then never again."""

    name = "once"

    def request(self, state: SpyState) -> Request:
        times = frozenset({Statistic.STEP_TIMES})
        return Request(ever=times) if state.decided else Request(times, Period(steps=2))


def test_times_are_not_kept_for_a_policy_that_has_made_its_last_decision() -> None:
    def work(communicator: InProcessCommunicator) -> tuple[Any, int]:
        policy = Once(asked=frozenset(), often=Period(), decisions=[MultiLevel(2.0, None, "minimum")])
        driven = Driven(communicator, policy, "numpy").run(20)
        return driven.state()["own"], len(policy.seen)

    (own, seen), _ = run_ranks(RANKS, work)
    assert seen == 1
    assert own["coordinator"]["step_times"] == []
