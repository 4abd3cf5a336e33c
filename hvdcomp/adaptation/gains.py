"""Measures how much of the gradients compression keeps, or would keep.

Both observers look at x = g + r of every tensor before it is compressed. `TwoLevels` looks at C(x) as well, when it has
been sent: where C(x) follows from this rank's x alone, it shows its gain, and nothing is compressed to learn that.
Everything else is compressed for measuring only, by `Engine.preview`: as if the rank were alone, so that no other rank
takes part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Set
from types import ModuleType
from typing import Any, ClassVar

from hvdcomp.adaptation.gradient_sums import densified, error_energy, error_terms
from hvdcomp.adaptation.observer import Observer
from hvdcomp.adaptation.plans import Plans
from hvdcomp.adaptation.step_counter import StepClock
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array, dtype_bytes
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.choice import Plan
from hvdcomp.compressors.protocol import SparseVector
from hvdcomp.policies.decisions import MultiLevel, Probe
from hvdcomp.policies.gravac import error_gain
from hvdcomp.policies.request import GravacGains, Statistic, Timing

Sent = dict[str, Array | SparseVector]  # C(x) by tensor name
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
        self._candidate = decision.candidate and plans.at_factor(decision.candidate)
        self._norms: Array | None = None  # of some arrays of each tensor, (arrays,)
        self._weights: list[list[float]] = []  # of each array's energy in those of x, and of what each level loses
        self._span: tuple[Any, Any] | None = None  # before and after what was done only to learn gains
        self._first: Sent = {}  # what was compressed once before it was sent, for `after_sent`

    def begin_step(self, period_ends: bool) -> None:
        self.due = period_ends

    def before_compress(self, xp: ModuleType, inputs: Mapping[str, Array]) -> Mapping[str, Array | SparseVector]:
        self._norms, self._weights, self._span = None, [], None
        xs = {name: inputs[name] for name in self._plans.names if name in inputs}
        first: Sent = {}
        decision = self._decision
        if self._decide is not None:
            marks = self._measure(xp, xs, first, {}) if self._measures and xs else None
            decision = self._decide()
            if marks is not None:
                start, between, end = marks
                self._span = (between if decision.send == "candidate" else start, end)
        if decision.send != "candidate":
            return {}
        # What is sent was compressed twice, so every rank compresses a first time, unless that changes nothing. The
        # minimum is that of the latest decision: if it was made just now, rank 0 may have changed it.
        minimum = self._plans.at_factor(decision.minimum)
        nested = {name for name in xs if self._nests(minimum[name], self._engine.plan[name])}
        twice = {name: x for name, x in xs.items() if self._measures or name not in nested}
        self._compress(xp, twice, minimum, first)
        self._first = first
        return {name: first[name] if name in nested else densified(xp, x, first[name]) for name, x in twice.items()}

    def after_sent(self, xp: ModuleType, sent: Mapping[str, tuple[Array, Array | SparseVector]]) -> None:
        first, self._first = self._first, {}
        xs = {name: sent[name][0] for name in self._plans.names if name in sent}
        if not self._measures or self._decide is not None or not xs:
            return
        own = {name: sent[name][1] for name in xs if self._engine.plan[name].sent_is_own}
        if self._decision.send == "minimum":
            first = own
        start, _, end = self._measure(xp, xs, first, own if self._decision.send == "candidate" else {})
        self._span = (start, end)

    @property
    def _measures(self) -> bool:
        return self._measuring and self.due

    @staticmethod
    def _nests(first: Compressor, second: Compressor) -> bool:
        """Whether the second compression of the first is that of x itself, found among what the first keeps."""
        return first.nested and type(first) is type(second)

    def _compress(self, xp: ModuleType, xs: Mapping[str, Array], plan: Plan, kept: Sent) -> None:
        """Adds to `kept` what compression keeps of each tensor that `kept` lacks."""
        kept |= self._engine.preview(xp, {name: x for name, x in xs.items() if name not in kept}, plan)

    def _measure(self, xp: ModuleType, xs: Mapping[str, Array], first: Sent, second: Sent) -> tuple[Any, Any, Any]:
        """Notes what both compressions lose.

        Args:
            xs: x by tensor name, at least one.
            first: what the first compression keeps, of the tensors where that is known; the others are added.
            second: what is kept after both, of the tensors where that is known.

        Returns:
            Marks before, between and after the two compressions.
        """
        like = next(iter(xs.values()))
        start = xp.mark(like)
        minimum = self._plans.at_factor(self._decision.minimum)
        self._compress(xp, xs, minimum, first)
        between = xp.mark(like)
        twice = self._compress_again(xp, xs, first, second, minimum) if self._candidate else {}
        arrays: list[Array] = []
        for name, x in xs.items():
            kept = [first[name], twice[name]] if self._candidate else [first[name]]
            arrays += self._weigh([[(1.0, x)], *(error_terms(xp, x, one) for one in kept)])
        self._norms = xp.norms(arrays)
        return start, between, xp.mark(like)

    def _compress_again(
        self, xp: ModuleType, xs: Mapping[str, Array], first: Sent, second: Sent, minimum: Plan
    ) -> Sent:
        """The second compression of what the first one, by `minimum`, has kept: of the tensors that `second` lacks."""
        assert self._candidate
        sources: dict[str, Array] = {}
        among: dict[str, Array] = {}
        for name, x in xs.items():
            kept = first[name]
            if name in second:
                continue
            if isinstance(kept, SparseVector) and self._nests(minimum[name], self._candidate[name]):
                sources[name], among[name] = x, kept.indices
            else:
                sources[name] = densified(xp, x, kept)
        return second | self._engine.preview(xp, sources, self._candidate, among)

    def _weigh(self, sums: list[list[tuple[float, Array]]]) -> list[Array]:
        """Notes the weights of all arrays of one tensor's sums; returns the arrays, each once."""
        rows: dict[int, tuple[Array, list[float]]] = {}
        for place, terms in enumerate(sums):
            for weight, array in terms:
                _, weights = rows.setdefault(id(array), (array, [0.0] * len(sums)))
                weights[place] += weight
        self._weights += [weights for _, weights in rows.values()]
        return [array for array, _ in rows.values()]

    def statistics(self, asked: Set[Statistic], batches: int) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if Statistic.GAINS in asked:
            told["gains"] = self.gains()  # first, because it waits for the device: then times are known too
        if Statistic.TIMING in asked:
            samples = batches * self._engine.communicator.world_size
            told["timing"] = Timing(samples, self._clock.lap(), self.seconds())
        return told

    def gains(self) -> GravacGains:
        """The gains of the whole model in the last step, which was due; 1.0 if there was nothing to compress.

        Waits for the device.
        """
        energies = [0.0] * (3 if self._candidate else 2)
        if self._norms is not None:
            norms = arrays_for(self._norms).to_list(self._norms)
            for norm, weights in zip(norms, self._weights, strict=True):
                for place, weight in enumerate(weights):
                    if weight:  # 0 times an infinity would be NaN
                        energies[place] += weight * norm * norm
        energy, *lost = energies
        first, *second = (error_gain(energy, each) for each in lost)
        return GravacGains(first, second[0] if second else None, self._engine.communicator.world_size)

    def seconds(self) -> float:
        """What the last step spent only to learn gains; 0.0 where the device has not come that far yet."""
        if self._span is None or self._norms is None:
            return 0.0
        return arrays_for(self._norms).seconds_between(*self._span) or 0.0


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
        self._energies: dict[str, dict[float, Array]] = {}  # (2,): of x, and of what compression loses

    def before_compress(self, xp: ModuleType, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        if self._steps % self._every == 0:
            self._measure(xp, {name: inputs[name] for name in self._names if name in inputs})
        self._steps += 1
        return {}

    def _measure(self, xp: ModuleType, xs: Mapping[str, Array]) -> None:
        energies = {name: xp.norm([x]) ** 2 for name, x in xs.items()}
        for factor, plan in self._plans.items():
            for name, sent in self._engine.preview(xp, xs, plan).items():
                both = xp.stack([energies[name], error_energy(xp, xs[name], energies[name], sent)])
                sums = self._energies.setdefault(name, {})
                sums[factor] = sums[factor] + both if factor in sums else both

    def statistics(self, asked: Set[Statistic], batches: int) -> dict[str, Any]:
        return {"level_gains": self.gains(), "level_costs": self.costs()}

    def state(self, copy: Callable[[Array], Array]) -> dict[str, Any]:
        return {"steps": self._steps, "energies": _table(self._energies, lambda _, both: copy(both))}

    def restore(self, state: Mapping[str, Any], place: Callable[[Array, str], Array]) -> None:
        self._steps = state["steps"]
        self._energies = _table(state["energies"], lambda name, both: place(both, name))

    def gains(self) -> dict[str, dict[float, float]]:
        """By tensor name and factor; NaN for a tensor of zeros, which has no gain. Waits for the device."""

        def gain(_: str, both: Array) -> float:
            energy, lost = arrays_for(both).to_list(both)
            return error_gain(energy, lost) if energy else math.nan

        return _table(self._energies, gain)

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


def _table(values: Mapping[str, Mapping[float, Array]], function: Callable[[str, Array], Any]) -> Any:
    """By tensor name and factor, what a function makes of the name and the array that stands there."""
    return {name: {factor: function(name, one) for factor, one in row.items()} for name, row in values.items()}
