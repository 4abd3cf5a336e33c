"""When what a policy decides is obeyed: coordinators driven by hand on ranks in one process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hvdcomp import TopK
from hvdcomp.adaptation.decision_log import DecisionLog, with_numbers
from hvdcomp.adaptation.plans import Plans
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.policies import parse_policy
from hvdcomp.policies.base import Policy
from hvdcomp.policies.decisions import BatchSize, Decision
from hvdcomp.policies.request import Period, Request, Statistic, Statistics
from hvdcomp.tools.report.replay import replay
from tests.decision_lines import whole_lines
from tests.driven import COMPRESSED, SHAPES, Driven
from tests.harness import BACKENDS, copy
from tests.spy_policy import EPOCH, Spy, at_ratio, drive

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_lag = pytest.mark.parametrize("lag", [0, 1])
RATES, NORMS = Statistic.LEARNING_RATES, Statistic.NORMS


def test_a_log_that_a_full_disk_does_not_even_let_begin_stops_nobody(tmp_path: Path) -> None:
    """Rank 0 alone has the log: an error there would leave the others waiting."""
    logs = [DecisionLog(tmp_path / name) for name in ("decisions.jsonl", "others.jsonl")]
    for log in logs:
        log.path.symlink_to("/dev/full")
    policy = {"asked": frozenset({NORMS}), "often": Period(steps=2), "decisions": at_ratio(0.5, 0.1)}
    with pytest.warns(UserWarning, match=r"hvdcomp has stopped writing the decision log, .* No space left on device"):
        runs = drive(policy, "numpy", 4, log=logs[0])
    assert [len(driven.plans) for driven, _ in runs] == [4, 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as by python -W error
        runs = drive(policy, "numpy", 4, log=logs[1])
    assert [len(driven.plans) for driven, _ in runs] == [4, 4]


@every_lag
@every_backend
@pytest.mark.parametrize("asked", [{NORMS}, {NORMS, RATES}])
@pytest.mark.parametrize("decisions", ["levels", "batches"])
def test_a_decision_is_obeyed_from_the_step_that_the_log_names(
    decisions: str, asked: set[Statistic], backend: str, lag: int, tmp_path: Path
) -> None:
    """On every rank: the first step after the period, or the second where the learning rate of the first counts."""
    batches = [BatchSize(count, float(count)) for count in (1, 2, 3, 4)]
    made: Sequence[Decision] = batches if decisions == "batches" else at_ratio(0.5, 0.1, 0.25, 0.75)
    policy = {"asked": frozenset(asked), "often": Period(steps=3), "lag": lag, "decisions": made}
    log = DecisionLog(tmp_path / "decisions.jsonl")
    runs = drive(policy, backend, 11, log=log)
    start, *decided = whole_lines(log.path)
    assert start["kind"] == "start"
    assert (start["step"], start["epoch"], start["ranks"], start["steps_per_epoch"]) == (0, 0, 2, EPOCH)
    assert start["tensors"] == {name: list(SHAPES[name]) for name in COMPRESSED}
    late = lag if RATES in asked else 0
    assert [(line["step"], line["from_step"]) for line in decided] == [(n, n + late) for n in (3, 6, 9)]
    for driven, _ in runs:
        obeyed = [str([plan, batch]) for plan, batch in zip(driven.plans, driven.batches, strict=True)]
        changes = [step for step in range(1, 11) if obeyed[step] != obeyed[step - 1]]
        assert changes == [line["from_step"] for line in decided]
        assert obeyed == [str([plan, batch]) for plan, batch in zip(runs[0][0].plans, runs[0][0].batches, strict=True)]
        assert driven.result_bits() == runs[0][0].result_bits()
        if decisions == "levels":
            # With lag 0 the step that waits for the decision cannot be left to Horovod's own allreduce.
            assert driven.needed_engine == [lag == 0 and step in (3, 6, 9) for step in range(11)]


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        *(("topk:ratio=0.1", f"accordion:low=0.5,high=0.02,interval=1,eta=0.3,lag={lag}") for lag in (0, 1)),
        *(("powersgd:rank=2", f"adaqs:start=8,fall=0.01,steps=3,lag={lag}") for lag in (0, 1)),
        ("topk:ratio=0.1", "gravac:min=2,max=64,window=4,omega=0,epsilon=0.5,smoothing=0.3"),
    ],
)
def test_the_log_of_every_policy_tells_the_levels_of_every_step(spec: str, policy: str, tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl")
    chosen = parse_policy(policy)
    assert isinstance(chosen, Policy)

    def work(communicator: InProcessCommunicator) -> Driven:
        def rates(step: int) -> tuple[float, ...]:
            return (1 / (1 + step // 8),)

        return Driven(communicator, chosen, "numpy", spec=spec, steps_per_epoch=EPOCH, log=log, rates=rates).run(14)

    runs = run_ranks(2, work)
    assert runs[0].plans == runs[1].plans
    assert runs[0].result_bits() == runs[1].result_bits()
    assert replay(log.path).difference is None
    lines = whole_lines(log.path)
    states = [(line.get("from_step", 0), chosen.from_json(with_numbers(line["state"]))) for line in lines]
    decided = [(step, chosen.decision(state)) for step, state in states]
    engine = runs[0].engine
    for step, plan in enumerate(runs[0].plans):
        told = [each for begin, each in decided if begin <= step]
        right = told[-1].plan(Plans(engine, COMPRESSED))
        assert plan == {name: str(compressor) for name, compressor in right.items()}, step
    assert len({str(plan) for plan in runs[0].plans}) > 1


# One rank, no period, a decision that needs two messages --------------------------------------------------------------


@every_lag
@every_backend
def test_one_rank_decides_for_itself(backend: str, lag: int) -> None:
    policy = {"asked": frozenset({NORMS, RATES}), "often": Period(steps=2), "lag": lag, "decisions": at_ratio(0.5, 0.1)}
    ((driven, spy),) = drive(policy, backend, 7, size=1)
    assert [told.step for told in spy.seen] == [2, 4, 6]
    assert driven.plans[0]["conv"] == str(TopK(0.5))
    assert driven.plans[2 + lag]["conv"] == str(TopK(0.1))
    assert driven.plans[1 + lag]["conv"] == str(TopK(0.5))


def test_a_policy_without_a_period_is_never_asked_and_accumulates_nothing() -> None:
    constant = parse_policy("constant:level=0.5")
    assert isinstance(constant, Policy)
    for driven in run_ranks(2, lambda communicator: Driven(communicator, constant, "numpy").run(3)):
        assert driven.plans == [{"bias": "none", "conv": "topk:ratio=0.5", "linear": "topk:ratio=0.5"}] * 3
        assert not any(driven.observed)


@dataclass(frozen=True)
class Growing:
    """The state of `Talkative`."""

    text: str = ""


class Talkative(Spy):
    """Has a state that outgrows every buffer."""

    state_type: ClassVar[type] = Growing

    def request(self, state: Any) -> Request:
        return Request(period=self.often)

    def initial_state(self, tensors: Sequence[str]) -> Any:
        return Growing()

    def decision(self, state: Any) -> Decision:
        return self.decisions[len(state.text) % len(self.decisions)]

    def update(self, state: Any, statistics: Statistics) -> Any:
        return Growing(state.text + "x" * 1001)


@every_lag
def test_a_state_that_grows_reaches_all_ranks(lag: int) -> None:
    def work(communicator: InProcessCommunicator) -> tuple[Driven, Any]:
        spy = Talkative(asked=frozenset(), often=Period(steps=1), decisions=at_ratio(0.5, 0.1), lag=lag)
        driven = Driven(communicator, spy, "numpy").run(6)
        driven.coordinator.settle(lambda: (0.1,))
        return driven, driven.coordinator.channel.state

    (first, mine), (second, theirs) = run_ranks(2, work)
    assert mine == theirs == Growing("x" * 1001 * (6 if lag else 5))
    assert first.plans == second.plans
    assert [plan["conv"] for plan in first.plans] == [str(TopK(ratio)) for ratio in (0.5, 0.1) * 3]


def test_what_is_asked_between_two_steps_shares_nothing_with_the_coordinator() -> None:
    """`own_state` copies sums, so that a checkpoint stays what it was."""
    policy = {"asked": frozenset({NORMS}), "often": Period(steps=8), "decisions": at_ratio(0.5)}
    (first, _), _ = drive(policy, "numpy", 1)
    sums = first.coordinator.own_state(copy)["sums"]
    for array in sums.values():
        array[...] = 0
    assert all(array.any() for array in first.coordinator.own_state(copy)["sums"].values())
