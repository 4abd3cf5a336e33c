"""Repeats the decisions of a policy from the statistics in its decision log, and compares the results with the logged
decisions.

Policies do not read clocks or files, so the same state and statistics give the same decision on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdcomp.adaptation.decision_log import Decided, DecisionLogError, Start, read_decisions, to_json, with_numbers
from hvdcomp.policies import Policy, parse_policy

ABSENT = object()
"""Marks a value that is missing in the log but not in the replay, or missing in the replay but not in the log."""

_REFUSALS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""Errors that a policy may raise if a state has wrong values, for example because the log is damaged."""


@dataclass(frozen=True)
class Part:
    """A value that differs between the log and the replay, as JSON.

    Attributes:
        place: the keys that lead to the value in the line. The first key is "decision" or "state".
        logged, recomputed: the value in the log, and the value that the replay computed. `ABSENT` means that a value is
            missing.
    """

    place: tuple[str, ...]
    logged: Any
    recomputed: Any


@dataclass(frozen=True)
class Difference:
    """The first line whose decision or state differs from the policy's result.

    Attributes:
        file, line: the file and the number of the line, counted from 1.
        step: the logged number of the step.
        parts: the values that differ; empty if the policy raised an error.
        refusal: the error that the policy raised for the logged statistics; None if it raised no error.
    """

    file: Path
    line: int
    step: int
    parts: tuple[Part, ...] = ()
    refusal: str | None = None


@dataclass
class Replay:
    """The result of a replay.

    Attributes:
        policies: spec strings of the policies in the start lines, without duplicates.
        starts: the number of start lines. Start lines that only begin another file of the log are not counted.
        decisions: the number of repeated decisions. A decision that differs is not counted.
        first_step, last_step: the first and the last step of these decisions; None if there are no decisions.
        difference: the first difference, at which the replay stopped; None if log and policy agree.
    """

    policies: list[str] = field(default_factory=list)
    starts: int = 0
    decisions: int = 0
    first_step: int | None = None
    last_step: int | None = None
    difference: Difference | None = None


def replay(path: Path) -> Replay:
    """Repeats all decisions of a log, up to the first difference.

    Args:
        path: path of the newest file of the log, as in `read_decisions`. If the first files are missing, the replay
            begins with the state at the start of the next file.

    Raises:
        DecisionLogError: if the file is not a decision log, or a line is damaged or names an unknown policy.
        OSError: if the file cannot be read.
    """
    result = Replay()
    policy: Policy[Any] | None = None
    state: Any = None
    for record in read_decisions(path):
        if isinstance(record, Start):
            before = state
            policy, state = _begin(record)
            if record.continues and result.starts:
                state = before
            else:
                result.starts += 1
            if record.step == 0 and not record.continues:
                state = policy.initial_state(tuple(record.tensors))
            if record.policy not in result.policies:
                result.policies.append(record.policy)
            result.difference = _compare(policy, state, policy.decision(state), record)
        else:
            assert policy is not None
            try:
                state, decision = policy.decide(state, record.statistics)
            except _REFUSALS as error:
                refusal = f"{type(error).__name__}: {error}"
                result.difference = Difference(record.file, record.line, record.step, refusal=refusal)
            else:
                result.difference = _compare(policy, state, decision, record)
        if result.difference is not None:
            return result
        if isinstance(record, Decided):
            result.decisions += 1
            result.first_step = record.step if result.first_step is None else result.first_step
            result.last_step = record.step
    if policy is None:
        raise DecisionLogError(f"{path} contains no complete line of a decision log")
    return result


def _begin(start: Start) -> tuple[Policy[Any], Any]:
    """The policy and the state of a start line."""
    try:
        policy = parse_policy(start.policy)
        if not isinstance(policy, Policy):
            raise ValueError(f"{start.policy!r} is a schedule, which makes no decisions")
        state = policy.from_json(with_numbers(start.state))
        policy.decision(state)
    except _REFUSALS as error:
        raise DecisionLogError(f"{start.file}, line {start.line}: {error}") from None
    return policy, state


def _compare(policy: Policy[Any], state: Any, decision: Any, record: Start | Decided) -> Difference | None:
    pairs = {
        "decision": (record.decision, to_json(decision.to_json())),
        "state": (record.state, to_json(policy.to_json(state))),
    }
    parts = [part for name, (logged, recomputed) in pairs.items() for part in _parts((name,), logged, recomputed)]
    return Difference(record.file, record.line, record.step, tuple(parts)) if parts else None


def _parts(place: tuple[str, ...], logged: Any, recomputed: Any) -> list[Part]:
    """The differences between two JSON values. True differs from 1, but 1.0 does not differ from 1."""
    if isinstance(logged, Mapping) and isinstance(recomputed, Mapping):
        keys = [*logged, *(key for key in recomputed if key not in logged)]
        return [
            part for key in keys for part in _parts((*place, key), logged.get(key, ABSENT), recomputed.get(key, ABSENT))
        ]
    same = logged == recomputed and isinstance(logged, bool) == isinstance(recomputed, bool)
    return [] if same else [Part(place, logged, recomputed)]
