"""GraVAC: looks, while it trains, for the compression factor with the best product of speed and fidelity.

Every step compresses twice: to a modest factor that is known to be good, and from there to a candidate factor. How
much of the gradient each keeps (its gain) decides which of them is sent; how fast the steps are decides where the
search ends.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, get_args

from hvdcomp.errors import SpecError
from hvdcomp.policies.base import Policy
from hvdcomp.policies.decisions import Gain, MultiLevel
from hvdcomp.policies.removed import refuse_removed
from hvdcomp.policies.request import GravacGains, Period, Request, Statistic, Statistics, Timing
from hvdcomp.specs.described import SHARE, Rule, Share, at_least, number, or_none
from hvdcomp.specs.levels import Unit

WINDOWS = {"exponential": 500, "geometric": 2000}
"""Steps for which a candidate is evaluated, by how the candidates follow on each other."""

SELDOM = 10
"""Steps of which one measures gains, and gains that a window has at least, unless `every` says otherwise."""


def error_gain(energy: float, error_energy: float) -> float:
    """The compression gain 1 - ||x - C(x)||^2 / ||x||^2 within [0, 1].

    Where C(x) keeps some elements and drops the others, this is the gain ||C(x)||^2 / ||x||^2 of Tyagi and Swany (2023,
    arXiv:2305.12201, section III). Of quantizers that round at random and of signs of unit size, where C(x) may have
    more energy than x, theirs would say nothing.

    Args:
        energy: ||x||^2, summed over all tensors of the model.
        error_energy: ||x - C(x)||^2, likewise.

    Returns:
        1.0 if there is nothing to send: nothing is lost then. NaN if x is not finite.
    """
    if not math.isfinite(energy):
        return math.nan
    if energy == 0:
        return 1.0 if error_energy == 0 else 0.0
    share = 1.0 - error_energy / energy
    return share if math.isnan(share) else min(1.0, max(0.0, share))


def raw_gain(energy: float, error_energy: float, gradient_energy: float) -> float:
    """The energy that compression keeps of x = g + r, against that of the gradient g alone: `error_gain` times
    ||x||^2 / ||g||^2.

    Where C(x) keeps some elements and drops the others, or projects x, this is ||C(x)||^2 / ||g||^2. It exceeds 1 where
    the residual r brings in more energy than compression loses.

    Args:
        energy, error_energy: as of `error_gain`.
        gradient_energy: ||g||^2, likewise.

    Returns:
        1.0 if there is nothing to send. NaN if x or g is not finite, or if g alone is zero.
    """
    if energy == gradient_energy == 0:
        return error_gain(energy, error_energy)
    if gradient_energy == 0 or not math.isfinite(gradient_energy):
        return math.nan
    return error_gain(energy, error_energy) * (energy / gradient_energy)


@dataclass(frozen=True)
class GraVACState:
    """The state of `GraVAC`. Factors are compression factors against the dense size.

    Attributes:
        minimum: factor of the first compression.
        candidate: factor of the second; None if there is nothing to evaluate.
        send: what is sent, as in `MultiLevel`.
        gains: smoothed, by factor, of those two as far as they are known.
        throughput: samples/s times gain, by factor, when the factor was last sent; 1.0 for dense.
        steps: that ended.
        ended: whether the search has.
    """

    minimum: float
    candidate: float | None
    send: Literal["dense", "minimum", "candidate"]
    gains: Mapping[float, float] = field(default_factory=dict)
    throughput: Mapping[float, float] = field(default_factory=dict)
    steps: int = 0
    ended: bool = False


@dataclass(frozen=True, kw_only=True)
class GraVAC(Policy[GraVACState]):
    """GraVAC (Tyagi and Swany 2023, arXiv:2305.12201, algorithm 1).

    Smoothing starts anew for each factor, with its first gain: what was measured for one candidate says nothing of
    the next. A factor whose gain is not known yet is not sent. A step whose gain is not finite changes no gain. Of a
    step's time, what was spent only to learn gains is left out. If the search ends at a factor that is not above the
    first one, that is all there is to send, and nothing is evaluated any more.

    Attributes:
        min: the first compression's factor at the beginning.
        max: the largest factor.
        epsilon: the gain from which on a factor may be sent.
        omega: relative difference below which two gains, or two throughputs, are the same.
        scaling: "exponential", candidates 2, 4, 16, 256... times `min`, or "geometric", 2, 4, 8, 16... times; `max` is
            the last.
        window: steps for which each candidate is evaluated; None for 500 (exponential) or 2000 (geometric).
        smoothing: weight of a new gain in the moving average; None for N/100 with N ranks, at most 1, for each of
            `every` steps.
        every: gains are measured, and what to send is decided, in one of `every` steps; 1 for the published algorithm,
            which costs much where steps are short. None for 10 if that divides the window into 10 or more parts, and
            for 1 otherwise.
        factor: what factors count, of what is dense and of what is sent: "bytes", with those of indices, or "elements",
            without indices, as published. Where no element is left out, "elements" are as many numbers of 32 bits.
        gain: "error_feedback", the share of x = g + r that is kept (`error_gain`), as in the published text, or "raw",
            what is kept of x against the gradient g alone (`raw_gain`), as in the published code.
        lag: 1: steps obey what the one before them showed; all are dense until gains are first measured.
    """

    min: Annotated[float, number(lambda factor: factor > 1, "a compression factor above 1")] = 10.0
    max: Annotated[float, number(lambda factor: factor <= 1e12, "a compression factor of at most 1e12")] = 1000.0
    epsilon: Share = 0.7
    omega: Annotated[float, number(lambda omega: omega >= 0, "a number of at least 0, such as 0.01 for 1 %")] = 0.01
    scaling: Annotated[str, Rule(WINDOWS.__contains__, " or ".join(WINDOWS))] = "exponential"
    window: Annotated[int | None, or_none(at_least(1))] = None
    smoothing: Annotated[float | None, or_none(SHARE)] = None
    every: Annotated[int | None, or_none(at_least(1))] = None
    factor: Annotated[Unit, Rule(get_args(Unit).__contains__, " or ".join(get_args(Unit)))] = "bytes"
    gain: Annotated[Gain, Rule(get_args(Gain).__contains__, " or ".join(get_args(Gain)))] = "error_feedback"

    name: ClassVar[str] = "gravac"
    examples: ClassVar[tuple[str, ...]] = ("gravac:min=10,max=1000",)
    state_type: ClassVar[type] = GraVACState

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_removed(str(self))
        if self.max < self.min:
            raise SpecError(f"{self.name}: min={self.min},max={self.max} is not allowed; max must not be below min")
        if self.every is not None:
            self.require(self._window % self.every == 0, "every", f"a divisor of the window, {self._window} steps")

    @property
    def candidates(self) -> tuple[float, ...]:
        """The factors to evaluate, in order; none if `min` is `max`."""
        factors: list[float] = []
        exponent = 1
        while (factors or [self.min])[-1] < self.max:
            factors.append(float(min(self.max, self.min * 2**exponent)))
            exponent = exponent * 2 if self.scaling == "exponential" else exponent + 1
        return tuple(factors)

    @property
    def _window(self) -> int:
        return WINDOWS[self.scaling] if self.window is None else self.window

    @property
    def _every(self) -> int:
        if self.every is not None:
            return self.every
        parts, rest = divmod(self._window, SELDOM)
        return SELDOM if parts >= SELDOM and not rest else 1

    def request(self, state: GraVACState) -> Request:
        return Request(frozenset({Statistic.GAINS, Statistic.TIMING}), Period(steps=self._every))

    def initial_state(self, tensors: Sequence[str]) -> GraVACState:
        first = next(iter(self.candidates), None)
        return GraVACState(minimum=float(self.min), candidate=first, send="dense")

    def decision(self, state: GraVACState) -> MultiLevel:
        return MultiLevel(state.minimum, state.candidate, state.send, self.factor, self.gain)

    def update(self, state: GraVACState, statistics: Statistics) -> GraVACState:
        assert statistics.gains is not None
        assert statistics.timing is not None
        state = self._smooth(state, statistics.gains)
        return self._choose(self._look(self._record(state, statistics.timing)))

    def _smooth(self, state: GraVACState, measured: GravacGains) -> GraVACState:
        if (measured.candidate is None) != (state.candidate is None):
            raise ValueError(f"{self.name}: candidate {state.candidate}, but its gain is told as {measured.candidate}")
        new = {state.minimum: measured.minimum}
        if state.candidate is not None and measured.candidate is not None:
            new[state.candidate] = measured.candidate
        if not all(map(math.isfinite, new.values())):
            return state
        weight = self.smoothing
        if weight is None:
            weight = min(1.0, measured.ranks / 100)
            if self._every > 1:  # as if the gains of the steps between had been the same
                weight = 1 - (1 - weight) ** self._every
        old = state.gains
        gains = {cf: weight * value + (1 - weight) * old[cf] if cf in old else value for cf, value in new.items()}
        return dataclasses.replace(state, gains=gains)

    def _choose(self, state: GraVACState) -> GraVACState:
        """Sends the smallest of what keeps enough."""
        send: Literal["dense", "minimum", "candidate"] = "dense"
        if state.candidate is not None and state.gains.get(state.candidate, -math.inf) >= self.epsilon:
            send = "candidate"
        elif state.gains.get(state.minimum, -math.inf) >= self.epsilon:
            send = "minimum"
        return dataclasses.replace(state, send=send)

    def _record(self, state: GraVACState, timing: Timing) -> GraVACState:
        """Enters the throughput of what was sent. A time that cannot be is left out."""
        state = dataclasses.replace(state, steps=state.steps + self._every)
        cf = self.decision(state).sent
        seconds = timing.seconds - timing.evaluation_seconds
        if not seconds > 0:
            return state
        kept = 1.0 if state.send == "dense" else state.gains[cf]
        return dataclasses.replace(state, throughput={**state.throughput, cf: timing.samples / seconds * kept})

    def _look(self, state: GraVACState) -> GraVACState:
        """At the end of a window: promotes the minimum, turns to the next candidate, ends the search."""
        if state.ended or state.steps % self._window:
            return state
        minimum, candidate = state.minimum, state.candidate
        if candidate is not None:
            if self._same(state.gains.get(candidate), state.gains.get(minimum)):
                minimum = candidate
            candidate = next((cf for cf in self.candidates if cf > candidate), candidate)
        ideal = self._ideal(state.throughput)
        if ideal is not None:
            minimum, candidate = min(minimum, ideal), ideal
        if candidate == minimum:
            candidate = None
        gains = {cf: value for cf, value in state.gains.items() if cf in (minimum, candidate)}
        return dataclasses.replace(state, minimum=minimum, candidate=candidate, gains=gains, ended=ideal is not None)

    def _ideal(self, throughput: Mapping[float, float]) -> float | None:
        """The lower of the two factors with the best throughput, dense left out, if that is the same for both."""
        best = sorted((cf for cf in throughput if cf > 1), key=lambda cf: (-throughput[cf], cf))[:2]
        if len(best) == 2 and self._same(throughput[best[0]], throughput[best[1]]):
            return min(best)
        return None

    def _same(self, value: float | None, reference: float | None) -> bool:
        if value is None or reference is None or not reference > 0:
            return False
        return abs(value - reference) / reference <= self.omega
