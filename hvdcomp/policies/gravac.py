"""GraVAC searches, during training, for the compression factor with the best product of speed and compression gain.

Every step compresses twice. The first compression of the gradient uses a moderate factor that is known to be good. The
second compresses the result further, with a candidate factor. A compression gain is the share of the gradient's energy
(sum of squares) that a compression keeps. The gains decide which result is sent, and the throughput decides when the
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
"""For each `scaling`, the default number of steps for which a candidate is evaluated."""

SELDOM = 10
"""The default of `every`, if a window of steps is a multiple of it and contains at least this number of measurements.
Otherwise, the default is 1."""


def error_gain(energy: float, error_energy: float) -> float:
    """The compression gain 1 - ||x - C(x)||^2 / ||x||^2 within [0, 1].

    For methods that keep some elements and drop the others, this is the gain ||C(x)||^2 / ||x||^2 of Tyagi and Swany
    (2023, arXiv:2305.12201, section III). The definition of Tyagi and Swany is not meaningful for stochastic quantizers
    and for signs of magnitude 1, because C(x) may have more energy than x.

    Args:
        energy: the sum of ||x||^2 over all tensors, where x is the gradient plus the residual.
        error_energy: the sum of ||x - C(x)||^2 over all tensors.

    Returns:
        The gain; 1.0 if x is zero, because nothing is lost, and NaN if x is not finite.
    """
    if not math.isfinite(energy):
        return math.nan
    if energy == 0:
        return 1.0 if error_energy == 0 else 0.0
    share = 1.0 - error_energy / energy
    return share if math.isnan(share) else min(1.0, max(0.0, share))


def raw_gain(energy: float, error_energy: float, gradient_energy: float) -> float:
    """The energy of x = g + r that compression keeps, divided by the energy of the gradient g. The result is
    `error_gain` times ||x||^2 / ||g||^2.

    For methods that project x, or keep some elements and drop the others, this is ||C(x)||^2 / ||g||^2. The result
    exceeds 1 if the residual r adds more energy than compression loses.

    Args:
        energy, error_energy: the sums of ||x||^2 and of ||x - C(x)||^2, as in `error_gain`.
        gradient_energy: the sum of ||g||^2 over all tensors, where g is the gradient alone.

    Returns:
        The gain; 1.0 if x and g are zero, and NaN if x or g is not finite, or if only g is zero.
    """
    if energy == gradient_energy == 0:
        return error_gain(energy, error_energy)
    if gradient_energy == 0 or not math.isfinite(gradient_energy):
        return math.nan
    return error_gain(energy, error_energy) * (energy / gradient_energy)


@dataclass(frozen=True)
class GraVACState:
    """The state of `GraVAC`. Factors are compression factors relative to the uncompressed size.

    Attributes:
        minimum: the factor of the first compression.
        candidate: the factor of the second compression; None if there is nothing to evaluate.
        send: which result is sent, as in `MultiLevel.send`.
        gains: the smoothed gain of each of the two factors, by factor, if it is known.
        throughput: for each factor, the samples per second times the gain, in the last steps that sent this factor.
            Factor 1.0 means no compression.
        steps: the number of steps that have ended.
        ended: whether the search has ended.
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

    For each factor, smoothing starts with the first gain of this factor, because gains of other factors are not
    meaningful for it. A factor is not sent before its gain is known. Gains that are not finite are ignored. The time
    that is spent only on measuring gains is subtracted from the time of a step. If the search ends at a factor that is
    not above the first factor, the rest of the training run uses this factor. Gains are then no longer measured.

    Attributes:
        min: the factor of the first compression at the start of training.
        max: the largest compression factor.
        epsilon: smallest gain with which a factor may be used.
        omega: two gains, or two throughputs, count as equal if their relative difference is at most this number.
        scaling: with "exponential", the candidates are 2, 4, 16, 256... times `min`. With "geometric", the candidates
            are 2, 4, 8, 16... times `min`. The last candidate is `max`.
        window: the number of steps for which each candidate is evaluated; None for 500 (exponential) or 2000
            (geometric).
        smoothing: the weight of a new gain in the moving average. With None, the weight of one step is N/100 for N
            ranks, but at most 1. A new gain then gets the combined weight of `every` steps.
        every: one of `every` steps measures gains and decides which result to send. The published algorithm uses 1,
            which is costly if steps are short. None means 10 if the window consists of at least 10 parts of 10 steps
            each; otherwise it means 1.
        factor: how compression factors are counted. "bytes" counts bytes, and includes indices. "elements" counts
            elements, without indices, as published. For methods that send all elements, "elements" counts 32-bit
            numbers.
        gain: "error_feedback" is the share of the energy of x = g + r that is kept (`error_gain`), as in the text of
            the paper. "raw" is the kept energy of x divided by the energy of the gradient g (`raw_gain`), as in the
            authors' code.
        lag: with 1, a step uses the decision of the previous step. Steps are uncompressed until gains are measured for
            the first time.

    Example:
        >>> str(GraVAC(min=10, max=500))
        'gravac:max=500'
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
        """The factors to evaluate, in order. The function returns no factors if `min` equals `max`."""
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
        parts, remainder = divmod(self._window, SELDOM)
        return SELDOM if parts >= SELDOM and not remainder else 1

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
            raise ValueError(
                f"{self.name}: the candidate is {state.candidate}, but the measured gain is that of "
                f"{measured.candidate}"
            )
        new = {state.minimum: measured.minimum}
        if state.candidate is not None and measured.candidate is not None:
            new[state.candidate] = measured.candidate
        if not all(map(math.isfinite, new.values())):
            return state
        weight = self.smoothing
        if weight is None:
            weight = min(1.0, measured.ranks / 100)
            if self._every > 1:  # the steps between two measurements count as if they had the same gains
                weight = 1 - (1 - weight) ** self._every
        old = state.gains
        gains = {cf: weight * value + (1 - weight) * old[cf] if cf in old else value for cf, value in new.items()}
        return dataclasses.replace(state, gains=gains)

    def _choose(self, state: GraVACState) -> GraVACState:
        """Chooses to send the most compressed result whose gain is large enough."""
        send: Literal["dense", "minimum", "candidate"] = "dense"
        if state.candidate is not None and state.gains.get(state.candidate, -math.inf) >= self.epsilon:
            send = "candidate"
        elif state.gains.get(state.minimum, -math.inf) >= self.epsilon:
            send = "minimum"
        return dataclasses.replace(state, send=send)

    def _record(self, state: GraVACState, timing: Timing) -> GraVACState:
        """Records the throughput of the result that was sent. An invalid time is ignored."""
        state = dataclasses.replace(state, steps=state.steps + self._every)
        cf = self.decision(state).sent
        seconds = timing.seconds - timing.evaluation_seconds
        if not seconds > 0:
            return state
        kept = 1.0 if state.send == "dense" else state.gains[cf]
        return dataclasses.replace(state, throughput={**state.throughput, cf: timing.samples / seconds * kept})

    def _look(self, state: GraVACState) -> GraVACState:
        """At the end of a window, raises the minimum, changes to the next candidate, or ends the search."""
        if state.ended or state.steps % self._window:
            return state
        minimum, candidate = state.minimum, state.candidate
        if candidate is not None:
            if self._is_close(state.gains.get(candidate), state.gains.get(minimum)):
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
        """The lower of the two factors with the best throughputs, if the two throughputs are close. Factor 1.0, which
        means no compression, is not considered."""
        best = sorted((cf for cf in throughput if cf > 1), key=lambda cf: (-throughput[cf], cf))[:2]
        if len(best) == 2 and self._is_close(throughput[best[0]], throughput[best[1]]):
            return min(best)
        return None

    def _is_close(self, value: float | None, reference: float | None) -> bool:
        if value is None or reference is None or not reference > 0:
            return False
        return abs(value - reference) / reference <= self.omega
