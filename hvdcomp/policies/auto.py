"""Auto chooses the fastest of no compression, fp16 and some compressors, so that compression never costs time.

The performance model lists the candidates and predicts the time of a step for each (`hvdcomp.adaptation.candidates`).
Training begins with the candidate that has the shortest predicted time, and the policy measures it. If the predicted
time of another candidate is close to the best time, the policy tries this candidate for a few steps. The steps before
and after the trial use the best candidate. Because the speed of a machine changes, only measurements that directly
follow each other can be compared. The policy keeps the candidate with the shortest measured time. The cost of all
trials stays below a small share of the training time. A trial therefore begins only when its expected cost fits into
this share. If step times have changed since the candidate was chosen, all candidates may be tried again. If the trial
of a candidate was long ago, the candidate is tried once more.

This policy was developed for hvdcomp and is not from a paper.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from hvdcomp.policies.auto_state import (
    DOUBT,
    LEAST,
    NOTICEABLE,
    PATIENCE,
    SETTLING,
    SURE,
    AutoState,
    Measured,
    Trial,
    known_before,
)
from hvdcomp.policies.base import Policy
from hvdcomp.policies.decisions import Methods
from hvdcomp.policies.request import Candidates, Period, Request, Statistic, Statistics
from hvdcomp.policies.schedules import Levelled
from hvdcomp.specs.described import Rule, at_least, number

WARM_UP = 10
"""The number of steps that are not counted at the start of a training run, before the `SETTLING` steps. Caches,
allocators and the exchange of names slow these steps down, so that the first candidate would look worse than it is."""

DENSE_CANDIDATE = "dense"
"""Name of the candidate without compression."""

_HOPELESS = 1.5  # a trial ends early if its steps are slower, or faster, than the best candidate's by this factor
_FEW = 4  # after this number of measured windows, a trial is never free
_MOST = 16  # largest number of windows to measure a candidate that cannot be distinguished from the best
# smallest standard error of a trial's ratio, because the speed of a machine changes from minute to minute
_UNEVEN = 0.05
_MOST_PATIENCE = 64  # largest value of `AutoState.patience`, in decisions in a row
_LOOK_S = 1.0  # approximate seconds between decisions, because a decision costs time
_AGAIN = 100  # after this number of windows, a candidate whose time is known is tried once more


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) for text in value)


_Compressors = Annotated[tuple[str, ...], Rule(_are_texts, 'a list, such as ["topk:ratio=0.01", "qsgd:bits=8"]')]
_Excess = Annotated[float, number(lambda value: value > 0, "above 0, such as 0.15 for 15 %")]


@dataclass(frozen=True, kw_only=True)
class Auto(Policy[AutoState]):
    """Chooses no compression, fp16 or a compressor for each set of tensors, so that steps are as fast as possible.

    The compressors to choose from are the training run's own compressor and `compressors`. Levels do not change. If a
    compressor has `exchange="auto"`, the policy also chooses the faster of "gather" and "scatter".

    Attributes:
        calibration: a calibration file, or the name of a preset of `hvdcomp.perfmodel`. Only rank 0 reads it.
        compressors: further compressors, or their specs, from which to choose. The compressors are stored as specs.
        loss: the policy also considers compressors that raised the loss by at most this share in our measurements
            (`hvdcomp.compressors.evidence`). 0 adds no compressors.
        model: the model in the calibration; empty for the model whose tensors have the same shapes as in this training
            run.
        batch: the batch size of one rank, if it differs from the batch size of the calibration; otherwise 0.
        window: the number of steps for which a candidate is measured. A few steps before the window do not count.
        every: the number of steps between two decisions while no candidate is tried. If these steps take less than a
            second, the number is larger.
        margin: a candidate is tried if its steps are expected to be slower than the best steps by at most this share.
        budget: the share of the training time that trials may cost.
        drift: a share of the step time. At each decision, the step time is compared with the step time when the current
            candidate was chosen. If the two differ by more than this share at four decisions in a row, all candidates
            may be tried again.

    Example:
        >>> str(Auto(calibration="calibration.json"))
        'auto:calibration=calibration.json'
    """

    calibration: Annotated[str, Rule(bool, "a calibration file or the name of a preset")]
    compressors: _Compressors = ()
    loss: Annotated[float, number(lambda share: 0 <= share < 1, "from 0 to below 1, such as 0.02 for 2 %")] = 0.0
    model: str = ""
    batch: Annotated[int, at_least(0)] = 0
    window: Annotated[int, at_least(3)] = 5
    every: Annotated[int, at_least(5)] = 20
    margin: _Excess = 0.25
    budget: Annotated[float, number(lambda share: 0 < share < 1, "a share of the time, above 0 and below 1")] = 0.01
    drift: _Excess = 0.15

    name: ClassVar[str] = "auto"
    examples: ClassVar[tuple[str, ...]] = (
        "auto:calibration=calibration.json",
        "auto:calibration=calibration.json,loss=0.02",
        "auto:calibration=calibration.json,compressors=(topk:ratio=0.01|qsgd:bits=8,exchange=scatter)",
    )
    state_type: ClassVar[type] = AutoState
    state_growth: ClassVar[int] = 4096

    def __post_init__(self) -> None:
        if isinstance(self.compressors, list | tuple):
            object.__setattr__(self, "compressors", tuple(map(str, self.compressors)))  # the dataclass is frozen
        super().__post_init__()
        waits = "1, because auto measures whole steps, and a step that waits for a decision takes longer"
        self.require(self.lag == 1, "lag", waits)

    def request(self, state: AutoState) -> Request:
        next_read = Statistic.STEP_TIMES if state.candidates else Statistic.CANDIDATES
        known = frozenset({Statistic.CANDIDATES, Statistic.STEP_TIMES})
        return Request(frozenset({next_read}), Period(until=max(1, state.until)), ever=known)

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        """Accepts any compressor. Rank 0 checks the calibration later, when the tensors are known."""

    def initial_state(self, tensors: Sequence[str]) -> AutoState:
        return AutoState(tuple(tensors))

    def decision(self, state: AutoState) -> Methods:
        if not state.candidates:
            return Methods({}, "none")
        chosen = state.candidates[state.chosen]
        return Methods(dict.fromkeys(state.order[: chosen.compressed], chosen.method), chosen.rest)

    def update(self, state: AutoState, statistics: Statistics) -> AutoState:
        step = statistics.step
        if not state.candidates:
            assert statistics.candidates is not None
            return self._begin(state, statistics.candidates, step)
        assert statistics.step_times is not None
        state, times = state.with_times(statistics.step_times, step)
        trial = state.trial
        if trial.trying:
            trial = dataclasses.replace(trial, times=(*trial.times, *times))
            state = dataclasses.replace(state, trial=trial)
            missing = self._missing(state)
            if missing:
                why = f"measures {state.chosen} for {missing} more steps"
                return dataclasses.replace(state, until=step + missing, why=why)
            latest = Measured.of(trial.times)
            if trial.rival and latest.seconds * _HOPELESS > trial.of_rival.seconds:
                return self._return(state, step)
            # This is the first candidate, or the trial was so much faster that the rival need not be measured again.
            state = self._compare(state, state.chosen, latest, []) if trial.rival else self._note(state, latest)
            state = dataclasses.replace(state, trial=Trial(latest=latest), usual={})
        elif trial.tried:
            if len(times) < LEAST:  # some times were invalid
                return dataclasses.replace(state, until=step + self.window)
            after = Measured.of(times)
            state = self._note(self._compare(state, trial.tried, Measured.of(trial.times), [after]), after)
            state = dataclasses.replace(state, trial=Trial(latest=after))
        elif len(times) >= LEAST:
            latest = Measured.of(times)
            usual = state.usual.get(state.chosen, latest.seconds)
            state = dataclasses.replace(state, trial=Trial(latest=latest), usual={**state.usual, state.chosen: usual})
            if abs(latest.seconds - usual) > max(self.drift * usual, SURE * latest.error):
                state = dataclasses.replace(state, drifted=state.drifted + 1)
                if state.drifted < state.patience:
                    why = f"steps take {_ms(latest.seconds)}, {_ms(usual)} before: looks once more at {state.chosen}"
                    return dataclasses.replace(state, until=step + self._until_look(latest.seconds), why=why)
                state = state.opened_again(latest)
            else:
                state = dataclasses.replace(self._note(state, latest), drifted=0)
        return self._go_on(state, step)

    # Measurements.

    def _begin(self, state: AutoState, offer: Candidates, step: int) -> AutoState:
        """Chooses the candidate that the model predicts to be fastest."""
        self.of_tensors(dict.fromkeys(offer.order), dict.fromkeys(state.order), "candidates")
        candidates = offer.candidates
        if not candidates or not all(0 < candidate.seconds < math.inf for candidate in candidates.values()):
            raise ValueError(f"{self.name} needs candidates with positive finite times, not {dict(candidates)}")
        state = dataclasses.replace(state, order=tuple(offer.order), candidates=candidates)
        first = min(candidates, key=lambda name: candidates[name].seconds)
        why = f"begins with {first}: predicted {_ms(candidates[first].seconds)}, the fastest of {len(candidates)}"
        tried = state.trying(first, step, why)
        return dataclasses.replace(tried, since=tried.since + WARM_UP, until=tried.until + WARM_UP)

    def _missing(self, state: AutoState) -> int:
        """The number of steps that the trial still needs."""
        trial = state.trial
        enough = trial.rival and len(trial.times) >= LEAST
        if enough and min(trial.times) > _HOPELESS * trial.of_rival.seconds:
            return 0
        return max(0, self.window - len(trial.times))

    def _note(self, state: AutoState, latest: Measured) -> AutoState:
        """Records the time of the chosen candidate, and scales the times of all other candidates in proportion."""
        old = state.measured.get(state.chosen)
        merged = latest if old is None else old.with_more(latest, _MOST * self.window)
        factor = 1.0 if old is None else merged.seconds / old.seconds
        rescaled = {name: measured.scaled(factor) for name, measured in state.measured.items()}
        return dataclasses.replace(state, measured={**rescaled, state.chosen: merged})

    def _compare(self, state: AutoState, name: str, trial: Measured, after: Sequence[Measured]) -> AutoState:
        """Records a trial as the ratio between its step time and the step time of the rival before and after the
        trial."""
        sides = [state.trial.of_rival, *after]
        seconds = sum(side.seconds for side in sides) / len(sides)
        change = sides[-1].seconds - sides[0].seconds
        error = math.hypot(*(side.error for side in sides), change) / len(sides)
        doubt = math.hypot(trial.error / trial.seconds, error / seconds, _UNEVEN)
        rival = state.trial.rival or state.chosen
        scaled = trial.seconds * state.measured[rival].seconds / seconds
        result = Measured(scaled, doubt * scaled, trial.steps, state.since)
        old = known_before(state.measured.get(name), state.expected(rival, name), result)
        merged = result if old is None else old.with_more(result, _MOST * self.window)
        return dataclasses.replace(state, measured={**state.measured, name: merged})

    # Next steps.

    def _go_on(self, state: AutoState, step: int) -> AutoState:
        """Begins a trial if one is affordable, or stays with the best candidate."""
        best = state.best()
        if best != state.chosen or state.trial.latest is None:  # the best candidate must be measured first
            return self._stay(state, best, step, None)
        near = self._open(state, best)
        offers = sorted((self._price(state, best, name), state.expected(best, name), name) for name in near)
        for price, _, name in offers:
            free = state.reopened and name not in state.measured
            if free or self._short_of(state, name, price) <= 0:
                return state.trying(name, step, _why_try(state, best, name))
        if state.reopened:
            patience = min(2 * state.patience, _MOST_PATIENCE) if best == state.reopened else PATIENCE
            state = dataclasses.replace(state, reopened="", patience=patience)
        name = "" if offers else state.longest_ago(best, step - _AGAIN * self.window)
        if name and self._short_of(state, name, self._price(state, best, name)) <= 0:
            return state.trying(name, step, _why_try(state, best, name))
        short = min((self._short_of(state, name, price) for price, _, name in offers), default=None)
        return self._stay(state, best, step, short)

    def _open(self, state: AutoState, best: str) -> list[str]:
        """The candidates that may be noticeably faster than the best candidate."""
        due = []
        limit = state.measured[best]
        for name in state.candidates:
            measured = state.measured.get(name)
            if measured is None:
                # Uncompressed gradients are always tried, because the policy promises never to be slower than without
                # compression. After step times have drifted, predictions and earlier trials are no longer valid, so all
                # candidates are tried.
                if name == DENSE_CANDIDATE or state.reopened or state.is_near(best, name, self.margin):
                    due.append(name)
            elif name != best and measured.steps < _MOST * self.window:
                gain = limit.seconds - measured.seconds + 2 * measured.error
                if gain > NOTICEABLE * limit.seconds:
                    due.append(name)
        return due

    def _price(self, state: AutoState, best: str, name: str) -> float:
        """The expected cost of a trial, in seconds."""
        expected = state.expected(best, name) * (1 if name in state.measured else 1 - DOUBT)
        return max(0.0, expected - state.measured[best].seconds) * (SETTLING + self.window)

    def _short_of(self, state: AutoState, name: str, price: float) -> float:
        """The seconds of training until a trial is affordable. 0 for the first trials if their expected cost is 0."""
        is_new = name not in state.measured or state.measured[name].steps < _FEW * self.window
        return 0.0 if is_new and price == 0 else (state.spent + price) / self.budget - state.elapsed

    def _return(self, state: AutoState, step: int) -> AutoState:
        """Ends a trial, and measures the rival a second time."""
        rival = state.trial.rival
        return dataclasses.replace(
            state,
            chosen=rival,
            why=f"compares {state.chosen} with {rival} before and after",
            since=step,
            until=step + SETTLING + self.window,
            trial=dataclasses.replace(state.trial, trying=False, rival="", tried=state.chosen),
        )

    def _stay(self, state: AutoState, best: str, step: int, short: float | None) -> AutoState:
        """Stays with the best candidate, or returns to it, until the next decision or until a trial is affordable."""
        seconds = state.measured[best].seconds
        changed = best != state.chosen
        wait = self._until_look(seconds)
        if changed:
            wait = SETTLING + self.window  # these steps are measured for the comparison
        elif short is not None and short < wait * seconds:
            wait = max(self.window, math.ceil(short / seconds))
        return dataclasses.replace(
            state,
            chosen=best,
            why=_why_stay(state, best),
            since=step if changed else state.since,
            until=step + wait,
            trial=Trial() if changed else Trial(latest=state.trial.latest),
            usual={} if changed else state.usual,
        )

    def _until_look(self, seconds: float) -> int:
        """The number of steps until the next decision. `seconds` is the time of a step."""
        return max(self.every, math.ceil(_LOOK_S / seconds))

    # States as JSON, in which the fields of the trial are next to the fields of the state.

    def to_json(self, state: AutoState) -> dict[str, Any]:
        data = super().to_json(state)
        trial = data.pop("trial")
        return data | trial

    def fields_of(self, data: Mapping[str, Any]) -> dict[str, Any]:
        fields = dict(data)
        if vars(Trial()).keys() <= fields.keys():  # if a field is missing, the base class reports it
            fields["trial"] = {name: fields.pop(name) for name in vars(Trial())}
        return super().fields_of(fields)


def _why_try(state: AutoState, best: str, name: str) -> str:
    known = state.measured[best]
    if name in state.measured:
        return f"tries {name} again: {_ms(state.measured[name].seconds)} is too near {best} to be told apart"
    text = f"tries {name}: {_ms(state.expected(best, name))} expected, {best} takes {_ms(known.seconds)}"
    return f"steps have changed; {text}" if state.reopened else text


def _why_stay(state: AutoState, best: str) -> str:
    seconds_of = {name: measured.seconds for name, measured in state.measured.items() if name != best}
    seconds = _ms(state.measured[best].seconds)
    if not seconds_of:
        return f"{best} takes {seconds}; nothing else promises to be faster at a price that is low enough"
    second = min(seconds_of, key=lambda name: seconds_of[name])
    if seconds_of[second] < state.measured[best].seconds:
        return f"{best} stays at {seconds}: {second} takes {_ms(seconds_of[second])}, a difference that may be chance"
    return f"{best} is the fastest measured: {seconds}, then {second}: {_ms(seconds_of[second])}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g} ms"
