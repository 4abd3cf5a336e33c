"""Makes the decisions of a decision log again, from the logged statistics, and compares.

Policies read no clock and no file, so that the same state and statistics give the same decision on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdcomp.adaptation.decision_log import Decided, DecisionLogError, Start, read_decisions, to_json, with_numbers
from hvdcomp.policies import Policy, parse_policy

ABSENT = object()
"""In place of a value that one of the two sides does not have."""

_REFUSALS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What a policy may raise if a damaged log gives it a state whose fields hold what they cannot."""


@dataclass(frozen=True)
class Part:
    """Something small that differs, as JSON.

    Attributes:
        place: the keys that lead to it, "decision" or "state" first, or "statistics" where the policy refuses these.
        logged, recomputed: the values; `ABSENT` where there is none.
    """

    place: tuple[str, ...]
    logged: Any
    recomputed: Any


@dataclass(frozen=True)
class Difference:
    """The first line whose decision or state is not what the policy makes.

    Attributes:
        file, line: where it stands; lines are counted from 1.
        step: as logged.
        parts: what differs; or empty where the policy refuses the statistics.
        refusal: what the policy says to the logged statistics, if it refuses them.
    """

    file: Path
    line: int
    step: int
    parts: tuple[Part, ...] = ()
    refusal: str | None = None


@dataclass
class Replay:
    """What came of a replay.

    Attributes:
        policies: of the start lines, each named once.
        starts: number of start lines, without those of new files in which a run goes on.
        decisions: number of decision lines that were made again, the differing one not counted.
        first_step, last_step: of these; None if there are none.
        difference: where the log and the policy part, and the replay ended; None if they agree.
    """

    policies: list[str] = field(default_factory=list)
    starts: int = 0
    decisions: int = 0
    first_step: int | None = None
    last_step: int | None = None
    difference: Difference | None = None


def replay(path: Path) -> Replay:
    """Makes all decisions of a log again, up to the first that differs.

    Args:
        path: as for `read_decisions`. Where the first files are gone, the state that the next begins with is believed.

    Raises:
        DecisionLogError: if it is not a decision log, or a line is damaged, or names an unknown policy.
        OSError: if the file cannot be read.
    """
    done = Replay()
    policy: Policy[Any] | None = None
    state: Any = None
    for record in read_decisions(path):
        if isinstance(record, Start):
            before = state
            policy, state = _begin(record)
            if record.continues and done.starts:
                state = before
            else:
                done.starts += 1
            if record.step == 0 and not record.continues:
                state = policy.initial_state(tuple(record.tensors))
            if record.policy not in done.policies:
                done.policies.append(record.policy)
            done.difference = _compare(policy, state, policy.decision(state), record)
        else:
            assert policy is not None
            try:
                state, decision = policy.decide(state, record.statistics)
            except _REFUSALS as error:
                refusal = f"{type(error).__name__}: {error}"
                done.difference = Difference(record.file, record.line, record.step, refusal=refusal)
            else:
                done.difference = _compare(policy, state, decision, record)
        if done.difference is not None:
            return done
        if isinstance(record, Decided):
            done.decisions += 1
            done.first_step = record.step if done.first_step is None else done.first_step
            done.last_step = record.step
    if policy is None:
        raise DecisionLogError(f"{path} holds no whole line of a decision log")
    return done


def _begin(start: Start) -> tuple[Policy[Any], Any]:
    """The policy and the state of a start line."""
    try:
        policy = parse_policy(start.policy)
        if not isinstance(policy, Policy):
            raise ValueError(f"{start.policy!r} is a schedule, which decides nothing")
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
    parts = [part for name, (logged, made) in pairs.items() for part in _parts((name,), logged, made)]
    return Difference(record.file, record.line, record.step, tuple(parts)) if parts else None


def _parts(place: tuple[str, ...], logged: Any, made: Any) -> list[Part]:
    """What differs between two JSON values. True is not 1, but 1.0 is."""
    if isinstance(logged, Mapping) and isinstance(made, Mapping):
        keys = [*logged, *(key for key in made if key not in logged)]
        return [
            part for key in keys for part in _parts((*place, key), logged.get(key, ABSENT), made.get(key, ABSENT))
        ]
    same = logged == made and isinstance(logged, bool) == isinstance(made, bool)
    return [] if same else [Part(place, logged, made)]
