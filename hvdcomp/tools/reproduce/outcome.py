"""What came of a table or figure: the published numbers beside ours, and what is to be said of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdcomp.files import replace_text

AS_PUBLISHED, IN_PART, REVERSED, NOT_SHOWN = "as published", "in part", "reversed", "cannot be shown here"
VERDICTS = (REVERSED, IN_PART, AS_PUBLISHED, NOT_SHOWN)
"""In the order of the page."""


CONTROL = "the control"
"""With this begins the note of a row that is one."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A number of the paper beside ours.

    Attributes:
        what: of which it is, with its unit.
        published: the paper's; None if it states none.
        ours: None if we have none.
        half: half of the 95 % interval of ours, over seeds; None of what has no spread.
        holds: whether ours says what the paper says; None if it does not say, or if the paper says nothing of it.
        open: the paper says something of it, and the spread of ours leaves it open.
        main: it is what the paper draws from the table or figure.
        note: how ours was found, or why there is none.
    """

    what: str
    published: float | None = None
    ours: float | None = None
    half: float | None = None
    holds: bool | None = None
    open: bool = False
    main: bool = False
    note: str = ""

    @property
    def is_control(self) -> bool:
        """Whether it is the control of another row."""
        return self.note.startswith(CONTROL)

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.published is None or self.ours is None else self.ours - self.published


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line of a plot, or bars where `x` are texts."""

    label: str
    x: Sequence[Any]
    y: Sequence[float | None]
    published: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a counterpart found.

    Attributes:
        name: of the artefact.
        rows: what is compared.
        curves: of the plot, by the label of its y axis; with `x` of the x axis.
        why: nothing could be shown, if so.
        ours: what ours is of, in a sentence.
        about: command, commit, seconds, seeds and the like.
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
        """One of `VERDICTS`, by the rows that say whether they hold.

        Reversed is a result of which no row holds or, where some are main ones, none of these. Where a published number
        has none of ours, or the spread leaves a row open, a result is in part at most.
        """
        said = [row.holds for row in self.rows if row.holds is not None]
        if not said:
            return NOT_SHOWN
        main = [row for row in self.rows if row.main]
        decided = [row.holds for row in main or self.rows if row.holds is not None]
        if decided and not any(decided):
            return REVERSED
        whole = not any(row.open or (row.ours is None and row.published is not None) for row in self.rows)
        return AS_PUBLISHED if all(said) and whole else IN_PART

    @property
    def reason(self) -> str:
        """Why nothing could be shown."""
        return self.why or "no row tells: all differences are within their spread"


def within(ours: float, published: float, share: float) -> bool:
    """Whether ours is the published number, to a share of it."""
    return math.isclose(ours, published, rel_tol=share)


def write(outcome: Outcome, folder: Path) -> Path:
    """Writes it to NAME.json in a folder. Raises OSError if that cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{outcome.name}.json"
    content = {"verdict": outcome.verdict, **asdict(outcome)}
    replace_text(file, json.dumps(_finite(content), indent=1, ensure_ascii=False) + "\n")
    return file


def read(file: Path) -> Outcome:
    """What `write` wrote."""
    content = json.loads(file.read_text())
    del content["verdict"]
    content["rows"] = [Row(**row) for row in content["rows"]]
    content["curves"] = {label: [Curve(**curve) for curve in curves] for label, curves in content["curves"].items()}
    return Outcome(**content)


def _finite(value: Any) -> Any:
    """With None for what JSON cannot hold, and no more digits than mean anything."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
