"""Rank 0 decides, every rank obeys in the same step.

Rank 0 runs the policy. After each moment of decision it broadcasts the policy's new state as JSON, and every rank
reads the decision off that state, so that all ranks can go on from it. The coordinator counts steps and epochs, sees
to it that what the policy wants is gathered, and nothing else, and puts decisions into the engine's plan.

With `lag=1` a decision is made at the end of a step and taken up when the next one begins, so that its broadcast
hides behind the optimizer's step and the forward pass. What depends on the learning rate of the step after a period is
decided at the end of that step. With `lag=0` it is decided in that step itself, before anything is compressed; the
ranks then wait for the broadcast.
"""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from hvdcomp.adaptation.channel import Broadcaster, MessageChannel
from hvdcomp.adaptation.decision_log import DecisionLog
from hvdcomp.adaptation.gains import LevelProbe, TwoLevels
from hvdcomp.adaptation.gradient_sums import AccumulatedGradients
from hvdcomp.adaptation.plans import Plans, levelled_tensors
from hvdcomp.adaptation.step_counter import Progress, StepClock
from hvdcomp.arrays.types import Array
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import require_same_levels
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies.base import Policy
from hvdcomp.policies.decisions import BatchSize, Decision, MultiLevel, Probe
from hvdcomp.policies.request import Candidates, LearningRates, Period, Request, Statistic, Statistics, Timing

Rates = tuple[float, ...]
_SUMS = frozenset({Statistic.NORMS, Statistic.MODEL_NORM, Statistic.MEAN_TO_STD})


class Coordinator:
    """Drives one policy for one engine.

    Args:
        policy: the same on all ranks.
        engine: whose plan follows the decisions.
        make_broadcaster: makes what carries the decisions, when the first one is to be sent.
        like: an array of the framework and place that the engine's communicator works on.
        steps_per_epoch: None if the policy counts no epochs.
        log: where rank 0 writes decisions; None for nowhere.
        candidates: that rank 0's policy is told of before the first exchange, if it asks for them.
        clock: seconds, by which steps are timed.

    Attributes:
        state: of the policy, as of the decision in force.
        decision: in force.
        batch_size: the part of it that is about the batch.
        progress: steps and epochs that ended.
        clock: that times the steps.
    """

    state: Any
    _request: Request  # of that state
    _latest: Any  # on rank 0 ahead of it while a broadcast is under way
    _request_latest: Request

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
    ) -> None:
        self.policy = policy
        self.names = levelled_tensors(engine)
        self.progress = Progress(steps_per_epoch)
        self._engine = engine
        self._plans = Plans(engine, self.names)
        self._like = like
        self._log = log
        self._candidates = candidates
        self._decides = engine.communicator.rank == 0
        self._go_on_from(policy.initial_state(self.names))
        self._channel = MessageChannel(make_broadcaster, self._room())
        self._in_flight = False
        self._ended: Statistics | None = None  # a period that is over, and waits for the learning rate that follows
        self._period_rates: Rates | None = None  # at the first step of the period
        self._rates: Rates = ()  # at the latest step
        self._sums = AccumulatedGradients()
        self._stage: TwoLevels | LevelProbe | None = None
        self.clock = StepClock(clock)
        self._step_times: list[float] = []
        self.decision: Decision = BatchSize()
        self.batch_size = BatchSize()
        self._obey(policy.decision(self.state))

    # In the order in which a step goes through them.

    def settle(self, rates: Callable[[], Rates]) -> None:
        """Takes up what was decided, before a step begins; with lag=0 a decision about the batch is made here."""
        self.receive()
        if self._ended is not None and self.policy.lag == 0 and self._changes_batch:
            self._decide_now(rates())

    def receive(self) -> None:
        """Takes up a decision that is on its way, between two steps."""
        if self._in_flight:
            self._receive()

    def begin_step(self, rates: Callable[[], Rates]) -> None:
        """To be called when a step begins, before the engine's `begin`."""
        self.settle(rates)
        if isinstance(self._stage, TwoLevels):
            self._stage.due = self._gains_are_due
        self._rates = rates()
        if self._period_rates is None:
            self._period_rates = self._rates

    @property
    def needs_engine(self) -> bool:
        """Whether the step that has begun takes more than its plan says: a decision on the way, or measurements."""
        waits = self._asks_for_candidates or (self.policy.lag == 0 and self._ended is not None)
        return waits or self.decision.measures(self._gains_are_due)

    @property
    def _asks_for_candidates(self) -> bool:
        return Statistic.CANDIDATES in self._request.statistics

    @property
    def _gains_are_due(self) -> bool:
        """Whether the step that has begun, or comes next, is one whose gains are measured; the same on all ranks."""
        return self.progress.next_ends(self._request.period)

    def before_exchange(self) -> None:
        """To be called when all gradients of a step are there, before the engine's step."""
        if self._ended is not None and self.policy.lag == 0:
            self._decide_now(self._rates)
            self._take_up_in_step()
        elif self._asks_for_candidates:
            # Not earlier: until the ranks have compared their settings, others may not know that there are candidates.
            progress = self.progress
            self._decide(Statistics(step=progress.step, epoch=progress.epoch_or_none, candidates=self._candidates))
            self._receive()
            self._take_up_in_step()

    def observe(self, gradients: Mapping[str, Array], factor: float, found_inf: Array | None) -> None:
        """Adds gradients of a step to what is accumulated: this rank's own, or the aggregated ones, as `source` says.

        Args:
            factor: what they are multiplied with, beside the number of batches that they are the mean of.
            found_inf: the element that is NaN if the step does not count; None where that is not known.
        """
        if self.observes:
            self._sums.add(gradients, factor * self.batch_size.accumulation, found_inf)

    @property
    def observes(self) -> bool:
        """Whether gradients are to be accumulated on this rank in this step."""
        # While a decision is on its way, nobody knows yet whether the next one wants them.
        request = self._request_latest
        asked = request.statistics if self._ended is None else request.ever
        return self._decides and bool(_SUMS & asked)

    @property
    def source(self) -> str:
        """Whose gradients are to be observed, as in `Request.source`."""
        return self._request_latest.source

    def end_step(self) -> None:
        """To be called at the end of a step, when its results are there."""
        period = self._request.period
        self._time_step()
        epoch_ended = self.progress.advance(self.batch_size.accumulation)
        if self._ended is not None and self.policy.lag:
            statistics, self._ended = self._with_rates(self._ended, self._rates), None
            self._decide(statistics)
        if period is None or not self.progress.ends(period, epoch_ended):
            return
        statistics = self._period_statistics(period)
        self._sums.clear()
        if isinstance(self._stage, LevelProbe):
            self._stage.clear()
        if Statistic.LEARNING_RATES in self._request.ever:
            self._ended = statistics
        elif self.policy.lag:
            self._decide(statistics)
        elif self._told_in_step:
            self._update(statistics)  # all ranks hear of it with the next step's gains
            self._await_gains()
        else:
            self._ended = statistics
        if self._ended is None:
            self._period_rates = None

    def start_log(self) -> None:
        """Writes down, on rank 0, where this run begins or is resumed."""
        if self._log is not None:
            self._write_down(
                self._log.start,
                step=self.progress.step,
                epoch=self.progress.epoch_or_none,
                policy=str(self.policy),
                compressor=str(self._engine.compressor),
                tensors={name: self._engine.tensors[name].shape for name in self.names},
                steps_per_epoch=self.progress.steps_per_epoch,
                ranks=self._engine.communicator.world_size,
                state=self.policy.to_json(self._latest),
                decision=self.policy.decision(self._latest).to_json(),
            )

    # What is gathered.

    def _period_statistics(self, period: Period) -> Statistics:
        """What is known at the end of a period; without numbers on ranks other than 0."""
        step, epoch = self.progress.step, self.progress.epoch_or_none
        if not self._decides:
            return Statistics(step, epoch)
        wanted = self._request_latest.statistics
        known = self._gains_and_timing(period.steps)
        if Statistic.NORMS in wanted:
            known["norms"] = self._sums.norms(self.names)
        if Statistic.MODEL_NORM in wanted:
            known["model_norm"] = self._sums.model_norm()
        if Statistic.MEAN_TO_STD in wanted:
            known["mean_to_std"] = self._sums.mean_to_std(self.names)
        if Statistic.LEVEL_GAINS in wanted and isinstance(self._stage, LevelProbe):
            known |= {"level_gains": self._stage.gains(), "level_costs": self._stage.costs()}
        if Statistic.STEP_TIMES in wanted:
            known["step_times"], self._step_times = tuple(self._step_times), []
        return Statistics(step, epoch, **known)

    def _gains_and_timing(self, steps: int) -> dict[str, Any]:
        """Gains of the step that ends and times of the so many of its period, where they are wanted."""
        if not isinstance(self._stage, TwoLevels):
            return {}
        told: dict[str, Any] = {}
        if self.policy.lag:
            told["gains"] = self._stage.gains()  # first, because it waits for the device: then times are known too
        seconds = self.clock.lap()
        samples = steps * self._engine.communicator.world_size * self.batch_size.accumulation
        told["timing"] = Timing(samples, seconds, self._stage.seconds())
        return told

    def _time_step(self) -> None:
        """Notes how long the step that ends took. The host's clock: on an accelerator true on average."""
        if self._decides and Statistic.STEP_TIMES in self._request.ever:
            self._step_times.append(self.clock.lap())

    def _with_rates(self, statistics: Statistics, following: Rates) -> Statistics:
        now, self._period_rates = self._period_rates, following
        assert now is not None
        return dataclasses.replace(statistics, learning_rates=LearningRates(now=now, next=following))

    # How a decision is made and obeyed.

    @property
    def _changes_batch(self) -> bool:
        return self.decision.sets_batch_size

    def _decide_now(self, following: Rates) -> None:
        assert self._ended is not None
        statistics, self._ended = self._with_rates(self._ended, following), None
        self._decide(statistics)
        self._receive()

    def _decide(self, statistics: Statistics) -> None:
        """Makes a decision on rank 0 and starts its broadcast."""
        self._update(statistics)
        self._tell()
        self._in_flight = True
        if not self.observes:
            self._sums.clear()

    def _update(self, statistics: Statistics) -> None:
        """Makes a decision on rank 0, for the step that comes next or is under way."""
        if not self._decides:
            return
        state, decision = self.policy.decide(self._latest, statistics)
        self._be_ahead(state)
        if self._log is not None:
            self._write_down(
                self._log.decision,
                step=statistics.step,
                epoch=statistics.epoch,
                from_step=self.progress.step,
                statistics=statistics,
                state=self.policy.to_json(self._latest),
                decision=decision.to_json(),
            )

    def _write_down(self, write: Callable[..., None], **record: Any) -> None:
        """Adds a line to the log. A full disk must not end the training, nor leave the other ranks waiting."""
        try:
            write(**record)
        except ConfigurationError as error:
            warnings.warn(f"decisions are no longer logged: {error}", stacklevel=3)
            self._log = None

    def _room(self) -> int:
        """Bytes that a message is sent with at once."""
        return len(self._message()) + 32 * len(self.names) + self.policy.state_growth

    def _message(self) -> bytes:
        return json.dumps(self.policy.to_json(self._latest)).encode()

    def _tell(self) -> None:
        """Starts sending rank 0's state to all ranks."""
        self._channel.start(self._message() if self._decides else b"")

    def _hear(self) -> None:
        """Waits for rank 0's state, and goes on from it."""
        self._go_on_from(self.policy.from_json(json.loads(self._channel.finish())))

    def _go_on_from(self, state: Any) -> None:
        """Enters a state that all ranks know."""
        self.state = state
        self._request = self.policy.request(state)
        self._latest, self._request_latest = state, self._request

    def _be_ahead(self, state: Any) -> None:
        """Enters a state on rank 0 that the others have yet to hear of."""
        self._latest, self._request_latest = state, self.policy.request(state)

    def _receive(self) -> None:
        self._in_flight = False
        self._hear()
        self._obey(self.policy.decision(self.state))

    def _obey(self, decision: Decision) -> None:
        if decision == self.decision:
            return
        if decision.batch() != self.batch_size:
            self.progress.grow(decision.batch().accumulation)
        self._put_in_force(decision)

    def _put_in_force(self, decision: Decision) -> None:
        self.decision = decision
        self.batch_size = decision.batch()
        self._engine.set_plan(decision.plan(self._plans))
        self._set_stage(decision)

    def _set_stage(self, decision: Decision) -> None:
        self._stage = None
        if isinstance(decision, MultiLevel):
            decide = self._decide_in_step if self._told_in_step else None
            self._stage = TwoLevels(self._plans, decision, self._decides, decide)
        elif isinstance(decision, Probe) and self._decides:
            self._stage = LevelProbe(self._plans, decision)
        self._engine.stage = None if self._stage is None else self._stage.stage
        self._engine.witness = self._stage.witness if isinstance(self._stage, TwoLevels) else None

    # What outlives a restart.

    def shared_state(self) -> dict[str, Any]:
        """What all ranks know, between two steps, after `receive`."""
        return {
            "policy": str(self.policy),
            "state": self.policy.to_json(self.state),
            "progress": [self.progress.step, self.progress.epoch, self.progress.taken],
            "ended": None if self._ended is None else [self._ended.step, self._ended.epoch],
            "period_rates": self._period_rates,
        }

    def own_state(self, copy: Callable[[Array], Array]) -> dict[str, Any]:
        """What only rank 0 knows."""
        return {
            "latest": self.policy.to_json(self._latest),
            "ended": None if self._ended is None else self._ended.known(),
            "sums": {name: copy(array) for name, array in self._sums.sums.items()},
            "probe": self._stage.state(copy) if isinstance(self._stage, LevelProbe) else None,
            "step_times": list(self._step_times),
        }

    def restore(
        self, shared: Mapping[str, Any], own: Mapping[str, Any] | None, place: Callable[[Array, str], Array]
    ) -> None:
        """Goes on from `shared_state` and, on rank 0, from its `own_state`."""
        if own is None and self._decides:
            raise ConfigurationError("rank 0 has to load the checkpoint that rank 0 wrote")
        self._go_on_from(self.policy.from_json(shared["state"]))
        self.progress.step, self.progress.epoch, self.progress.taken = shared["progress"]
        self._put_in_force(self.policy.decision(self.state))
        self._ended = None if shared["ended"] is None else Statistics(*shared["ended"])
        self._period_rates = shared["period_rates"] and tuple(shared["period_rates"])
        if own is not None and self._decides:
            self._be_ahead(self.policy.from_json(own["latest"]))
            self._ended = None if own["ended"] is None else Statistics(**own["ended"])
            self._sums.sums = {name: place(array, name) for name, array in own["sums"].items()}
            self._step_times = list(own["step_times"])
            if isinstance(self._stage, LevelProbe):
                self._stage.restore(own["probe"], place)
        if self._told_in_step:
            self._await_gains()

    # GraVAC to the letter: what a step sends is decided from its own gains.

    @property
    def _told_in_step(self) -> bool:
        return self.policy.lag == 0 and Statistic.GAINS in self._request.ever

    def _await_gains(self) -> None:
        """Prepares for a step of which nobody knows yet what it sends."""
        heard = self.policy.decision(self.state)
        assert isinstance(heard, MultiLevel)
        # Rank 0 knows more than what was heard, but the ranks compare their plans when the step begins.
        self._engine.set_plan(dataclasses.replace(heard, send=None).plan(self._plans))
        self._set_stage(self.policy.decision(self._latest))

    def _decide_in_step(self) -> MultiLevel:
        stage = self._stage
        assert isinstance(stage, TwoLevels)
        if self._decides:
            gains = stage.gains()
            self._update(Statistics(step=self.progress.step, epoch=self.progress.epoch_or_none, gains=gains))
        self._tell()
        self._hear()
        self.decision = self.policy.decision(self.state)
        assert isinstance(self.decision, MultiLevel)
        self._engine.set_plan(self.decision.plan(self._plans))
        self._take_up_in_step()
        return self.decision

    def _take_up_in_step(self) -> None:
        """Goes over to a plan that was decided in the step under way, when all ranks have the same one."""
        self._engine.begin()
        require_same_levels(self._engine.communicator, self._engine.digest, self._like)
