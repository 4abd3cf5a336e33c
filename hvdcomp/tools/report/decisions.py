"""Reads the decisions of a run's policy, which `hvdcomp train` writes to decisions.jsonl, into arrays over time.

A decision begins with the first step that uses it. A resumed run may have made some decisions twice. In this case, the
later decisions count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdcomp.adaptation.decision_log import (
    DecisionLogError,
    RemovedPolicyError,
    Start,
    read_decisions,
    with_numbers,
)
from hvdcomp.policies import decision_from_json

_COLUMNS = ("minimum", "candidate", "sent", "accumulation", "critical")
MOST_STEPS = 2**53  # larger integers are not exact as floats
_TABLES = ("levels", "factors", "gains", "throughput", "chosen", "predicted", "measured")


@dataclass(frozen=True, eq=False)
class Decisions:
    """The decisions of a run. There are n decisions, and each is in force until the next one.

    Every array has n elements. An element is NaN if the decision does not have this value. Arrays for other kinds of
    policies contain only NaN.

    Attributes:
        policy, compressor: the spec strings of the policy and of the compressor in the last start line.
        tensors: names of the compressed tensors.
        count: the number of logged decisions; None if it is not known.
        steps: for each decision, the first step, counted from 0, that uses it.
        end: the number of completed steps at the last line.
        levels, factors: for each tensor, by name, its level or its compression factor after each decision.
        minimum, candidate, sent: compression factors of the whole model after each decision: the minimum and the
            candidate of the policy GraVAC, and the factor with which gradients are sent. 1 means dense.
        accumulation: after each decision, the number of batches that are accumulated for one update.
        critical: after each decision, the share of tensors whose regime is critical, 0 to 1.
        gains, throughput: for each compression factor and after each decision, the smoothed gain, and the number of
            samples per second multiplied by the gain.
        chosen, predicted, measured: for each candidate of the policy `auto` and after each decision, whether the
            candidate is used (1 or 0), and the predicted and the measured seconds of a step.
        left_out: the reason why the decisions are unknown (for example, the policy was removed); empty if they are
            known.
    """

    policy: str
    compressor: str
    tensors: tuple[str, ...]
    count: int | None
    steps: np.ndarray
    end: int
    levels: dict[str, np.ndarray]
    factors: dict[str, np.ndarray]
    minimum: np.ndarray
    candidate: np.ndarray
    sent: np.ndarray
    accumulation: np.ndarray
    critical: np.ndarray
    gains: dict[float, np.ndarray]
    throughput: dict[float, np.ndarray]
    chosen: dict[str, np.ndarray]
    predicted: dict[str, np.ndarray]
    measured: dict[str, np.ndarray]
    left_out: str = ""

    def in_force(self, steps: np.ndarray) -> np.ndarray:
        """The index of the decision that is in force in each of these steps; at least 0. Steps are counted from 0."""
        return np.maximum(np.searchsorted(self.steps, steps, side="right") - 1, 0)


def load_decisions(path: Path) -> Decisions | None:
    """Reads a decision log with its older parts. Returns None if the log has no line yet. An incomplete last line is
    left out. If hvdcomp no longer has one of the policies in the log, the result has no decisions.

    Raises:
        DecisionLogError: if the file is damaged, or contains decisions that cannot be shown. The message names the
            line.
        OSError: if the file cannot be read.
    """
    try:
        return _read(path)
    except RemovedPolicyError as error:
        return _decisions(error.start, None, [], [], error.start.step, error.reason)


def _read(path: Path) -> Decisions | None:
    start: Start | None = None
    steps: list[int] = []
    rows: list[dict[str, Any]] = []
    count = end = 0
    for line in read_decisions(path):
        place = f"{line.file}, line {line.line}"
        if isinstance(line, Start):
            continues = start is not None and line.continues
            start = line
            if continues:
                continue
        else:
            count += 1
        assert start is not None
        first = line.step if isinstance(line, Start) else line.from_step
        if not (0 <= first <= MOST_STEPS and 0 <= line.step <= MOST_STEPS):
            raise DecisionLogError(f"{place}: the step number is out of range")
        while steps and steps[-1] >= first:
            steps.pop()
            rows.pop()
        try:
            rows.append(_row(with_numbers(line.decision), with_numbers(line.state), tuple(start.tensors)))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DecisionLogError(
                f"{place}: its decision and state do not have the format that hvdcomp writes: {error!r}"
            ) from None
        steps.append(first)
        end = line.step
    return None if start is None else _decisions(start, count, steps, rows, end)


def _decisions(
    start: Start, count: int | None, steps: list[int], rows: list[dict[str, Any]], end: int, left_out: str = ""
) -> Decisions:
    columns: dict[str, Any] = {key: np.array([row.get(key, np.nan) for row in rows], dtype=float) for key in _COLUMNS}
    tables: dict[str, Any] = {key: _table([row.get(key, {}) for row in rows]) for key in _TABLES}
    return Decisions(
        policy=start.policy,
        compressor=start.compressor,
        tensors=tuple(start.tensors),
        count=count,
        steps=np.array(steps),
        end=end,
        left_out=left_out,
        **columns,
        **tables,
    )


def _row(decision: Mapping[str, Any], state: Mapping[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """The numbers in a line of the log. The keys are names of attributes of `Decisions`.

    Raises:
        LookupError, TypeError, ValueError, AttributeError, OverflowError: if a value is missing or is not a number.
    """
    row = decision_from_json(decision).row(state, tensors)
    return {
        key: {name: _number(entry) for name, entry in value.items()} if key in _TABLES else _number(value)
        for key, value in row.items()
    }


def _number(value: Any) -> float:
    return np.nan if value is None else float(value)


def _table(rows: list[dict[Any, float]]) -> dict[Any, np.ndarray]:
    """An array for each key, in the order in which keys first occur."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: np.array([row.get(key, np.nan) for row in rows], dtype=float) for key in keys}
