"""The coordinator of a policy. Rank 0 decides, and every rank applies the decision in the same step.

Rank 0 runs the policy. A `DecisionChannel` sends the policy's decisions, and `Observers` measure the statistics that
the policy requests. The coordinator counts steps and epochs, and sets the plan of the engine according to the
decisions.

A policy decides at the end of a period, which is a number of steps or epochs. With `lag=1`, rank 0 makes the decision
at the end of a step, and the decision takes effect when the next step begins. So the broadcast overlaps with the
optimizer's step and the forward pass. If the decision needs the learning rate of the first step after the period, rank
0 makes the decision at the end of this first step. With `lag=0`, rank 0 makes the decision within the step, before
compression, and the ranks wait for the broadcast.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from hvdcomp.adaptation.channel import Broadcaster, DecisionChannel
from hvdcomp.adaptation.decision_log import DecisionLog
from hvdcomp.adaptation.gradient_sums import AccumulatedGradients
from hvdcomp.adaptation.observers import Observers
from hvdcomp.adaptation.plans import Plans, levelled_tensors
from hvdcomp.adaptation.run_log import RunLog
from hvdcomp.adaptation.step_counter import Progress, Rates, StepClock
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.exchange.agreement import require_same_levels
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.engine_bucket import Sums
from hvdcomp.policies.base import Policy
from hvdcomp.policies.decisions import BatchSize, Decision
from hvdcomp.policies.request import Candidates, LearningRates, Statistic, Statistics


class Coordinator:
    """Runs one policy for one engine.

    Args:
        policy: the policy, the same on all ranks.
        engine: the engine. Decisions change the engine's plan.
        make_broadcaster: function that creates the broadcaster. It is called before the first decision is sent.
        like: an array with the framework and the device of the engine's communicator.
        steps_per_epoch: the number of steps of an epoch; None if the policy does not count epochs.
        log: rank 0's decision log; None for no log.
        candidates: on rank 0, the candidates for the policy's first decision, if the policy requests candidates.
        clock: the clock that times steps, in seconds.
        exchange_seconds: on rank 0, the predicted times of exchanges (`Statistics.exchange_seconds`), if the policy
            requests them.

    Attributes:
        channel: the object that sends the decisions of rank 0. It has the state of the policy that belongs to the
            current decision.
        decision: the current decision.
        progress: the numbers of steps and epochs that have ended.
        clock: the clock that times steps.
    """

    def __init__(
        self,
        policy: Policy[Any],
        engine: Engine,
        make_broadcaster: Callable[[], Broadcaster],
        like: Array,
        steps_per_epoch: int | None = None,
        log: DecisionLog | None = None,
        candidates: Candidates | None = None,
        clock: Callable[[], float] = time.perf_counter,
        exchange_seconds: Mapping[int, float] | None = None,
    ) -> None:
        self.engine = engine
        self.plans = Plans(engine, levelled_tensors(engine))
        self.progress = Progress(steps_per_epoch)
        self.clock = StepClock(clock)
        self.channel = DecisionChannel(policy, self.plans.names, engine.communicator.rank == 0, make_broadcaster)
        self.observers = Observers(self.plans, self.channel.decides, self.clock, exchange_seconds)
        self._log = RunLog(log, self.channel, self.progress)
        self._like = like
        self._candidates = candidates
        # the statistics of a period that has ended; its decision waits for the next learning rate
        self._ended: Statistics | None = None
        self._first_rates: Rates | None = None  # the learning rates at the first step of the current period
        self._rates: Rates = ()  # the learning rates of the latest step
        # whether rank 0 has missed a part of the current period; if so, the period gets no decision
        self._partial = False
        self.decision: Decision = BatchSize()
        self._apply(policy.decision(self.channel.state))

    @property
    def policy(self) -> Policy[Any]:
        """The policy of the training run."""
        return self.channel.policy

    @property
    def batch_size(self) -> BatchSize:
        """The batch size of the current decision."""
        return self.decision.batch()

    def start_log(self) -> None:
        """Writes to the log, on rank 0, that the run begins or is resumed."""
        self._log.start(self.plans)

    # The methods that a step calls, in this order.

    @property
    def follows_rates(self) -> bool:
        """Whether the policy reads learning rates, or multiplies them by a factor."""
        return self.decision.sets_batch_size or Statistic.LEARNING_RATES in self.channel.request.ever

    def settle(self, rates: Callable[[], Rates]) -> None:
        """Applies a decision before a step begins. With lag=0, also makes decisions about the batch size."""
        self.receive()
        if self._decides_before_step and self.decision.sets_batch_size:
            self._decide_by(rates())
            self.receive()

    def give_up_decision(self) -> None:
        """Stops waiting for a decision that was sent to ranks that no longer exist. Rank 0 still applies the
        decision."""
        if self.channel.in_flight:
            self.channel.in_flight = False
            if self.channel.decides:
                self.channel.enter(self.channel.latest)
                self._apply(self.policy.decision(self.channel.state))

    def receive(self) -> None:
        """Receives a decision, if one was sent, and applies it. Call this between two steps."""
        if self.channel.in_flight:
            self._apply(self.channel.receive())

    def begin_step(self, rates: Callable[[], Rates]) -> None:
        """Begins a step. Call this before the engine's `begin`."""
        self.settle(rates)
        self.observers.begin_step(self._period_ends)
        self._rates = rates()
        if self._first_rates is None:
            self._first_rates = self._rates

    @property
    def needs_engine(self) -> bool:
        """Whether the current step needs the engine, for a decision or for measurements. This may be so even if the
        plan only casts the tensors."""
        return self.decides_before_exchange or self.decision.measures(self._period_ends)

    @property
    def decides_before_exchange(self) -> bool:
        """Whether `before_exchange` makes a decision in the current step. The result is the same on all ranks."""
        return self._decides_before_step or Statistic.CANDIDATES in self.channel.request.statistics

    def before_exchange(self) -> None:
        """Makes the decision that this step waits for, if there is one. Call this between the backward pass and the
        exchange."""
        if self._decides_before_step:
            self._decide_by(self._rates)
        elif Statistic.CANDIDATES in self.channel.request.statistics:
            # Rank 0 does not send the candidates earlier, because the other ranks expect them only after all ranks have
            # compared their settings.
            self._decide(Statistics(self.progress.step, self.progress.epoch_or_none, candidates=self._candidates))
        else:
            return
        self.receive()
        # The plan may have changed since the ranks compared their plans.
        self.engine.begin()
        require_same_levels(self.engine.communicator, self.engine.planner.digest, self._like)

    def observe(self, gradients: Mapping[str, Array], factor: float) -> None:
        """Accumulates the gradients of a step that the engine does not handle. `source` determines whether these are
        local or aggregated gradients.

        If any gradient is not finite, no gradient is added.

        Args:
            gradients: either the gradients of this rank, or the means of all ranks' gradients, by tensor name.
            factor: the number by which gradients are multiplied to remove the loss scale. In addition, this method
                multiplies the gradients by the number of accumulated batches.
        """
        if self.observes and gradients:
            arrays = list(gradients.values())
            found_inf = arrays_for(arrays[0]).found_inf(arrays)
            self.observers.sums.add(gradients, factor * self.batch_size.accumulation, found_inf)

    def sums_of_step(self, factor: float) -> Sums | None:
        """The sums that `Engine.step` must accumulate, or None. `factor` is as in `observe`."""
        if not self.observes:
            return None
        return self.observers.sums.of_step(factor * self.batch_size.accumulation, self.source == "aggregated")

    @property
    def observes(self) -> bool:
        """Whether this rank accumulates gradients in this step."""
        request = self.channel.latest_request
        # While a decision is pending, the next request is not yet known.
        statistics = request.statistics if self._ended is None else request.ever
        counts = self.progress.accumulates(request.period)
        return self.channel.decides and counts and bool(self.observers.sums.measures & statistics)

    @property
    def source(self) -> str:
        """Which gradients to accumulate, as in `Request.source`."""
        return self.channel.latest_request.source

    def end_step(self) -> None:
        """Ends a step. Call this when the results of the step are ready."""
        request = self.channel.request
        # After the last decision of a policy, nothing is measured, because nothing would read and clear the results.
        self.observers.end_step(request.ever if request.period is not None else frozenset())
        epoch_ended = self.progress.advance(self.batch_size.accumulation)
        if self._ended is not None and self.policy.lag:
            self._decide_by(self._rates)
        if request.period is None or not self.progress.ends(request.period, epoch_ended):
            return
        partial, self._partial = self._partial, False
        if partial and AccumulatedGradients.measures & request.ever:
            self.observers.clear()
            return
        statistics = self._period_statistics(request.period.steps)
        self.observers.clear()
        self._end_period(statistics)
        if self._ended is None:
            self._first_rates = None

    # Checkpoints.

    def shared_state(self) -> dict[str, Any]:
        """The state that all ranks share. Call this between two steps, after `receive`."""
        return {
            "policy": str(self.policy),
            "state": self.policy.to_json(self.channel.state),
            "progress": [self.progress.step, self.progress.epoch, self.progress.taken],
            "steps_per_epoch": self.progress.steps_per_epoch,
            "ended": None if self._ended is None else [self._ended.step, self._ended.epoch],
            "period_rates": self._first_rates,
            # written only if True, because earlier versions cannot read this key
            **({"partial": True} if self._partial else {}),
        }

    def own_state(self, copy: Callable[[Array], Array]) -> dict[str, Any]:
        """The part of the state that only rank 0 has, for its checkpoint: accumulated statistics, and the newest state
        of the policy."""
        return {
            "latest": self.policy.to_json(self.channel.latest),
            "ended": None if self._ended is None else self._ended.plain(),
            **self.observers.state(copy),
        }

    def restore(
        self, shared: Mapping[str, Any], own: Mapping[str, Any] | None, place: Callable[[Array, str], Array]
    ) -> None:
        """Continues from a `shared_state` and, on rank 0, from an `own_state`."""
        self._partial = shared.get("partial", False)
        self.channel.enter(self.policy.from_json(shared["state"]))
        self.progress.step, self.progress.epoch, self.progress.taken = shared["progress"]
        self._put_in_force(self.policy.decision(self.channel.state))
        self.progress.continue_after(shared.get("steps_per_epoch"), self.batch_size.accumulation)
        self._ended = None if shared["ended"] is None else Statistics(*shared["ended"])
        self._first_rates = shared["period_rates"] and tuple(shared["period_rates"])
        if own is not None and self.channel.decides:
            self.channel.set_latest(self.policy.from_json(own["latest"]))
            self._ended = None if own["ended"] is None else Statistics.of_plain(own["ended"])
            self.observers.restore(own, place)

    @property
    def _period_ends(self) -> bool:
        """Whether the current step is the last step of a period of steps. Between two steps, the current step is the
        step that follows. The result is the same on all ranks."""
        return self.progress.next_ends(self.channel.request.period)

    @property
    def _decides_before_step(self) -> bool:
        """Whether the current step waits for the decision of the previous period. Between two steps, the current step
        is the step that follows."""
        return self.policy.lag == 0 and self._ended is not None

    def _period_statistics(self, steps: int) -> Statistics:
        """The statistics of a period that ends. The statistics have values only on rank 0."""
        known: dict[str, Any] = {}
        if self.channel.decides:
            known = self.observers.statistics(self.channel.latest_request, steps * self.batch_size.accumulation)
        return Statistics(self.progress.step, self.progress.epoch_or_none, **known)

    def _end_period(self, statistics: Statistics) -> None:
        if self.policy.lag and Statistic.LEARNING_RATES not in self.channel.request.ever:
            self._decide(statistics)
        else:
            self._ended = statistics

    def _decide_by(self, following: Rates) -> None:
        """Makes the decision of a period that has ended. `following` are the learning rates of the step after the
        period."""
        assert self._ended is not None
        assert self._first_rates is not None
        statistics, self._ended = self._ended, None
        # `following` is empty if no optimizer is known. This is allowed if the policy does not read learning rates.
        if following:
            # New parameter groups are at the end. If a parameter group did not exist when the period began, its rate
            # counts as unchanged.
            before = (*self._first_rates, *following[len(self._first_rates) :])[: len(following)]
            rates = LearningRates(before, following)
            statistics = dataclasses.replace(statistics, learning_rates=rates)
        self._first_rates = following
        self._decide(statistics)

    def _decide(self, statistics: Statistics) -> None:
        """Makes a decision on rank 0, and starts its broadcast on all ranks."""
        if self.channel.decides:
            try:
                decision = self.channel.decide(statistics)
            except Exception as error:  # all ranks raise this error in `receive`
                self.channel.refuse(error)
            else:
                self._log.decision(statistics, decision)
        self.channel.send()
        if not self.observes:
            self.observers.sums.clear()

    def _apply(self, decision: Decision) -> None:
        if decision == self.decision:
            return
        if decision.batch() != self.batch_size:
            self.progress.grow(decision.batch().accumulation)
        self._put_in_force(decision)

    def _put_in_force(self, decision: Decision) -> None:
        self.decision = decision
        self.engine.set_plan(decision.plan(self.plans))
        self.observers.follow(decision)
