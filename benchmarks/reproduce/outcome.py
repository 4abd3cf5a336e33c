"""The result for a table or figure: the published numbers, hvdcomp's numbers, and a verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdcomp.files import replace_text

AS_PUBLISHED, IN_PART, NOT_SHOWN = "as published", "in part", "cannot be shown here"
NOT_HELD, NOT_CONFIRMED = "does not hold here", "not confirmed"
VERDICTS = (NOT_HELD, NOT_CONFIRMED, IN_PART, AS_PUBLISHED, NOT_SHOWN)
"""The verdicts in the order of the page."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A number of the paper, together with hvdcomp's number.

    If a row has `more_than` or `less_than`, this bound determines `holds` and `open` from `ours` and `half`, whenever
    the row is created, even from a file.

    Attributes:
        what: the quantity, with its unit.
        published: the paper's number; None if the paper does not state it.
        ours: hvdcomp's number; None if there is none.
        half: half of the 95 % confidence interval of `ours` over seeds; None if there is only one value.
        more_than, less_than: the bound of a claim of the form "more than" or "less than" about `ours`; None if there is
            no such claim.
        holds: whether `ours` confirms the paper's claim; None if this is open, or if there is no claim.
        open: whether the confidence interval of `ours` leaves it open if the paper's claim is true.
        main: whether the claim is the paper's main conclusion from the table or figure.
        note: how `ours` was determined, or why there is no such number.
        control: a description of the control, if the row compares a policy with its control.
        share: floats of the control divided by floats of the policy.
        trainings: names of the training runs that the row compares.
    """

    what: str
    published: float | None = None
    ours: float | None = None
    half: float | None = None
    more_than: float | None = None
    less_than: float | None = None
    holds: bool | None = None
    open: bool = False
    main: bool = False
    note: str = ""
    control: str = ""
    share: float | None = None
    trainings: Sequence[str] = ()

    def __post_init__(self) -> None:
        claimed = self.more_than is not None or self.less_than is not None
        if claimed and self.ours is not None:
            holds = _within_bounds(self.ours, self.half or 0.0, self.more_than, self.less_than)
            object.__setattr__(self, "holds", holds)
            object.__setattr__(self, "open", holds is None)

    @property
    def difference(self) -> float | None:
        """`ours` minus `published`."""
        return None if self.published is None or self.ours is None else self.ours - self.published


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line of a plot. If `x` are texts, the values are drawn as bars."""

    label: str
    x: Sequence[Any]
    y: Sequence[float | None]
    published: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of the counterpart of a table or figure.

    Attributes:
        name: name of the table or figure.
        rows: the numbers that are compared.
        curves: the curves of each plot, by the label of its y axis.
        x: label of the x axis of all plots.
        why: the reason why nothing could be shown; None if something was shown.
        ours: a sentence about the origin of hvdcomp's numbers.
        about: further facts, such as command, commit, seconds and seeds.
    """

    name: str
    rows: Sequence[Row] = ()
    curves: Mapping[str, Sequence[Curve]] = field(default_factory=dict)
    x: str = ""
    why: str | None = None
    ours: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The verdict, which is one of `VERDICTS`.

        Only the main rows decide, or all rows if there is no main row. The verdict is "does not hold here" if none of
        the deciding rows holds. It is "not confirmed" if the confidence intervals leave all deciding rows open. It is
        at best "in part" if a published number has no counterpart, or if a row is open.
        """
        claims = [row for row in self.rows if row.holds is not None or row.open]
        if not claims:
            return NOT_SHOWN
        deciding = [row for row in claims if row.main] or claims
        if all(row.open for row in deciding):
            return NOT_CONFIRMED
        if not any(row.holds for row in deciding):
            return NOT_HELD
        lacking = any(row.ours is None and row.published is not None for row in self.rows)
        return AS_PUBLISHED if all(row.holds for row in claims) and not lacking else IN_PART

    @property
    def reason(self) -> str:
        """The reason why nothing could be shown."""
        return self.why or "no row tests a claim of the paper"


def _within_bounds(value: float, half: float, more_than: float | None, less_than: float | None) -> bool | None:
    """True if the interval around a value is within the bounds, False if it is completely outside, None otherwise."""
    least, most = value - half, value + half
    if (more_than is not None and most < more_than) or (less_than is not None and least > less_than):
        return False
    inside = (more_than is None or least > more_than) and (less_than is None or most < less_than)
    return True if inside else None


def within(ours: float, published: float, share: float) -> bool:
    """Whether the relative difference between `ours` and the published number is at most `share`."""
    return math.isclose(ours, published, rel_tol=share)


def write(outcome: Outcome, folder: Path) -> Path:
    """Writes the outcome to NAME.json in a folder; raises OSError if the file cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{outcome.name}.json"
    content = {"verdict": outcome.verdict, **asdict(outcome)}
    replace_text(file, json.dumps(_finite(content), indent=1, ensure_ascii=False) + "\n")
    return file


def read(file: Path) -> Outcome:
    """Reads an outcome from a file that `write` wrote."""
    content = json.loads(file.read_text())
    del content["verdict"]
    content["rows"] = [Row(**row) for row in content["rows"]]
    content["curves"] = {label: [Curve(**curve) for curve in curves] for label, curves in content["curves"].items()}
    return Outcome(**content)


def _finite(value: Any) -> Any:
    """The value with six digits. Numbers that are not finite become None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
