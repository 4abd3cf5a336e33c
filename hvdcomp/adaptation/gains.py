"""Measures how much of the gradients compression keeps, or would keep.

Both observers look at x = g + r of every tensor before it is compressed. Where C(x) follows from this rank's x alone, a
step shows by itself, when it ends, what its C(x) has lost. Everything else is compressed for measuring only: as if the
rank were alone, so that no other rank takes part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from hvdcomp.adaptation.observer import Observer
from hvdcomp.adaptation.plans import Plans
from hvdcomp.adaptation.step_counter import StepClock
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array, dtype_bytes
from hvdcomp.compressors import Compressor
from hvdcomp.exchange.energies import Energies, densified
from hvdcomp.exchange.look import Look
from hvdcomp.exchange.previews import Kept
from hvdcomp.policies.decisions import MultiLevel, Probe
from hvdcomp.policies.gravac import error_gain, raw_gain
from hvdcomp.policies.request import GravacGains, Request, Statistic, Timing

Decide = Callable[[], MultiLevel]


class TwoLevels(Observer):
    """The two compressions of GraVAC (Tyagi and Swany 2023, arXiv:2305.12201, algorithm 1).

    Args:
        plans: of the tensors that are compressed.
        decision: to which factors, and what is sent.
        measuring: whether this rank is to learn the gains.
        decide: called when the gains are known, if the decision leaves open what is sent; returns the decision that
            says it. Without it the gains are known when the step ends.
        clock: that times the steps.

    Attributes:
        due: whether the gains of the step that comes next are asked for, where this rank measures.
    """

    tells: ClassVar[frozenset[Statistic]] = frozenset({Statistic.GAINS, Statistic.TIMING})

    def __init__(
        self,
        plans: Plans,
        decision: MultiLevel,
        measuring: bool,
        decide: Decide | None = None,
        clock: StepClock | None = None,
    ) -> None:
        self._plans = plans
        self._engine = plans.engine
        self._decision = decision
        self._measuring = measuring
        self._decide = decide
        self._clock = clock or StepClock(time.perf_counter)
        self.due = True
        self._candidate = decision.candidate and plans.at_factor(decision.candidate, decision.factor)
        self._energies: list[Energies] = []  # of x, and of what each level loses
        self._of_gradient = Energies()  # of g alone, where gains are raw
        self._spent: Callable[[], float | None] = lambda: None  # seconds of what was done only to learn gains

    def begin_step(self, period_ends: bool) -> None:
        self.due = period_ends

    def before_compress(self, look: Look) -> Mapping[str, Array]:
        self._energies, self._of_gradient, self._spent = [], Energies(), lambda: None
        decision = self._decision
        measures = self._measuring and self.due
        if not measures and self._decide is None and decision.send != "candidate":
            return {}
        names = [name for name in self._plans.names if name in look]
        sources: dict[str, Array] = {}
        marks = None
        if measures and names:
            marks = self._measure(look, names, sources, decision.send if self._decide is None else None)
        if self._decide is not None:
            decision = self._decide()
        if marks is not None:
            start, between, end = marks
            self._spent = partial(look.xp.seconds_between, between if decision.send == "candidate" else start, end)
        if decision.send != "candidate":
            return {}
        # What is sent was compressed twice, so every rank compresses a first time, unless that changes nothing. The
        # minimum is that of the latest decision: if it was made just now, rank 0 may have changed it.
        minimum = self._plans.at_factor(decision.minimum, decision.factor)
        twice = [name for name in names if not self._nests(minimum[name], self._engine.plan[name])]
        return sources if sources.keys() == set(twice) else self._once(look, look.kept(minimum, twice))

    @staticmethod
    def _nests(first: Compressor, second: Compressor) -> bool:
        """Whether the second compression of the first is that of x itself."""
        return first.nested and type(first) is type(second)

    @staticmethod
    def _once(look: Look, kept: Kept) -> dict[str, Array]:
        """What the first compression keeps, for the second."""
        return {name: densified(look.xp, look[name], one) for name, one in kept.items()}

    def _measure(
        self, look: Look, names: Sequence[str], sources: dict[str, Array], sends: str | None
    ) -> tuple[Any, Any, Any]:
        """Notes what both compressions lose.

        Args:
            names: of the tensors to look at.
            sources: gets what is compressed a second time, of the tensors where that is something else than x.
            sends: what this step sends, if that is known.

        Returns:
            Marks before, between and after the two compressions.
        """
        like = look.like
        start = look.xp.mark(like)
        minimum, candidate = self._plans.at_factor(self._decision.minimum, self._decision.factor), self._candidate
        twice = [name for name in names if candidate and not self._nests(minimum[name], candidate[name])]
        once = [name for name in names if name not in set(twice)]
        self._energies = [look.energies(names), self._lost(look, minimum, once, {}, sends == "minimum")]
        sources |= self._once(look, look.kept(minimum, twice, self._energies[1]))
        between = look.xp.mark(like)
        if self._decision.gain == "raw":
            self._of_gradient = look.gradient_energies(names)
        if candidate:
            self._energies.append(self._lost(look, candidate, names, sources, sends == "candidate"))
        return start, between, look.xp.mark(like)

    @staticmethod
    def _lost(
        look: Look, plan: Mapping[str, Compressor], names: Sequence[str], sources: Mapping[str, Array], sent: bool
    ) -> Energies:
        """What compression loses of tensors; of those that show it when they are sent, not before."""
        found, told = look.lost_when_sent(names) if sent else (Energies(), set())
        if len(told) < len(names):
            found.extend(look.lost(plan, [name for name in names if name not in told], sources))
        return found

    def statistics(self, request: Request, batches: int) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if Statistic.GAINS in request.statistics:
            told["gains"] = self.gains()  # first, because it waits for the device: then times are known too
        if Statistic.TIMING in request.statistics:
            samples = batches * self._engine.communicator.world_size
            told["timing"] = Timing(samples, self._clock.lap(), self.seconds())
        return told

    def gains(self) -> GravacGains:
        """The gains of the whole model in the last step, which was due; 1.0 if there was nothing to compress.

        Waits for the device.
        """
        energy, *lost = [each.total() for each in self._energies] or [0.0] * (3 if self._candidate else 2)
        if self._decision.gain == "raw":
            of_gradient = self._of_gradient.total()
            first, *second = (raw_gain(energy, each, of_gradient) for each in lost)
        else:
            first, *second = (error_gain(energy, each) for each in lost)
        return GravacGains(first, second[0] if second else None, self._engine.communicator.world_size)

    def seconds(self) -> float:
        """What the last step spent only to learn gains; 0.0 where the device has not come that far yet."""
        return self._spent() or 0.0


class LevelProbe(Observer):
    """Measures, in some steps, what each of several compression factors would keep of each tensor.

    Args:
        plans: of the tensors that are compressed.
        probe: what to measure, and how often.
    """

    tells: ClassVar[frozenset[Statistic]] = frozenset({Statistic.LEVEL_GAINS})

    def __init__(self, plans: Plans, probe: Probe) -> None:
        self._engine = plans.engine
        self._every = probe.every
        self._plans = {factor: plans.at_factor(factor) for factor in probe.factors}
        self._names = plans.names
        self._steps = 0
        self._energies: dict[float, tuple[Energies, Energies]] = {}  # of x, and of what compression loses

    def before_compress(self, look: Look) -> Mapping[str, Array]:
        if self._steps % self._every == 0:
            self._measure(look, [name for name in self._names if name in look])
        self._steps += 1
        return {}

    def _measure(self, look: Look, names: Sequence[str]) -> None:
        energies = look.energies(names)
        for factor, plan in self._plans.items():
            of_x, lost = self._energies.setdefault(factor, (Energies(), Energies()))
            of_x.merge(energies)
            lost.merge(look.lost(plan, names))

    def statistics(self, request: Request, batches: int) -> dict[str, Any]:
        return {"level_gains": self.gains(), "level_costs": self.costs()}

    def state(self, copy: Callable[[Array], Array]) -> dict[str, Any]:
        energies: dict[str, dict[float, Array]] = {}  # by name and factor, (2,): of x, and of what compression loses
        for factor, pair in self._energies.items():
            of_x, lost = (one.by_name() for one in pair)
            for name, value in lost.items():
                both = arrays_for(value).concatenate([of_x[name].reshape(1), value.reshape(1)])
                energies.setdefault(name, {})[factor] = copy(both)
        return {"steps": self._steps, "energies": energies}

    def restore(self, state: Mapping[str, Any], place: Callable[[Array, str], Array]) -> None:
        self._steps = state["steps"]
        self._energies = {}
        for name, row in state["energies"].items():
            for factor, both in row.items():
                for sums, value in zip(
                    self._energies.setdefault(factor, (Energies(), Energies())), place(both, name), strict=True
                ):
                    sums.add([name], value.reshape(1))

    def gains(self) -> dict[str, dict[float, float]]:
        """By tensor name and factor; NaN for a tensor of zeros, which has no gain. Waits for the device."""
        gains: dict[str, dict[float, float]] = {}
        for factor, pair in self._energies.items():
            of_x, lost = (one.numbers() for one in pair)
            for name, value in lost.items():
                gain = error_gain(of_x[name], value) if of_x[name] else math.nan
                gains.setdefault(name, {})[factor] = gain
        return gains

    def clear(self) -> None:
        self._steps = 0
        self._energies = {}

    def costs(self) -> dict[str, dict[float, float]]:
        """By tensor name and factor, sent bytes / dense bytes."""
        tensors = self._engine.tensors
        return {
            name: {
                factor: plan[name].payload_bytes(tensors[name].shape, dtype=tensors[name].dtype)
                / (tensors[name].size * dtype_bytes(tensors[name].dtype))
                for factor, plan in self._plans.items()
            }
            for name in self._names
        }
