"""The page of all tables and figures, with reversed results first, and the CSV of all rows."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from hvdcomp.files import commits_in_words
from hvdcomp.tools.reproduce.outcome import (
    AS_PUBLISHED,
    IN_PART,
    NOT_SHOWN,
    REVERSED,
    VERDICTS,
    Outcome,
    Row,
)
from hvdcomp.tools.reproduce.published import PAPERS, Artefact, artefacts

NOT_RUN = "not run yet"
BAR = "\\|"  # within a cell of a table
_HEADINGS = {
    REVERSED: "Reversed: the contrary was found",
    IN_PART: "In part",
    AS_PUBLISHED: "As published",
    NOT_RUN: "Not run yet",
    NOT_SHOWN: "Cannot be shown here",
}
_HEAD = """# Tables and figures of the papers, reproduced

Made by `hvdcomp reproduce --page docs/reproduction.md --output docs/reproduction` from the results in
[reproduction](reproduction). [reproduction.csv](reproduction.csv) has every row of every result, with the control, the
command and the commit. `hvdcomp reproduce NAME` makes one result again; `hvdcomp reproduce` lists the names.

The numbers beside the published ones are counted from shapes, predicted by the
[performance model](performance-model.md), or means of small trainings on [simulated ranks](simulated-ranks.md) with the
95 % interval of Student's t. These trainings have neither the authors' GPUs nor CIFAR, ImageNet or Penn Treebank.

- A row *holds* if both numbers agree: to the share that the row names, in order, or in sign. A row is *open* if the
  interval does not decide.
- A result is *as published* if every row that the paper states holds. It is *reversed* if no row holds, or if the main
  claim of the table or figure does not hold. Otherwise it is *in part*.

**The trainings are small:** 1,920 steps of a net with 108,000 parameters, 840 of an LSTM; Accordion's have 29,400. They
are long enough, and their learning rates low enough, that low compression loses little beside dense gradients. Beside
each policy stands its [control](#policies-beside-their-controls), a training that sends as many floats without a look
at gradients. Whoever has CIFAR or WikiText-2 gives `--data-dir FOLDER`: Accordion's trainings are then the authors'
own, as by their table 7, on simulated ranks; that takes hours on a GPU, and has not been run.

Of Bagpipe there is the exchange of embeddings, in [LookAhead](look-ahead.md), and only the abstract's numbers are
compared. Figures 5 and 13 to 16 of On the Utility of Gradient Compression, which cannot be shown here, say that on the
authors' GPUs encoding during the backward pass takes longer than after it. On processors it was
[shorter](exchange-measured.md#overlap); on one GPU it took longer, as published
([encoding.md](encoding.md#where-the-time-goes-on-a-gpu)).
"""
_MOST_BESIDE = 5
"""Percent by which a control's floats may differ from the policy's."""
_COMMITS = "The results were made at commit {commits}.\n"
_QUICK = """{quick} results were made with `--quick`: their trainings are a third as long, with two seeds in place of
five.
"""


def page(outcomes: Mapping[str, Outcome]) -> str:
    """The page, from the outcomes by name."""
    groups = _groups(outcomes)
    quick = sum(str(outcome.about.get("command", "")).endswith("--quick") for outcome in outcomes.values())
    found = {commit for outcome in outcomes.values() for commit in outcome.about.get("commit", "").split(", ")} - {""}
    commits = [_COMMITS.format(commits=commits_in_words(found))] if found else []
    lines = [_HEAD, *commits, *([_QUICK.format(quick=quick)] if quick else []), *_counts(groups), ""]
    for verdict, names in groups.items():
        if not names:
            continue
        lines += [f"## {_HEADINGS[verdict]}", ""]
        if verdict == REVERSED:
            lines += ["| result | the paper shows | decided by | published | found |", "|---|---|---|--:|--:|"]
            lines += [line for name in names for line in _decided(artefacts()[name], outcomes[name])]
        elif verdict == IN_PART:
            lines += ["| result | rows that hold | do not | open |", "|---|--:|--:|--:|"]
            lines += [_summed(outcomes[name]) for name in names]
        else:
            lines += [", ".join(f"`{name}`" for name in names) + "."]
        lines += [""]
    lines += _beside_controls(outcomes)
    return "\n".join(lines).rstrip("\n") + "\n"


def rows_as_csv(outcomes: Mapping[str, Outcome]) -> str:
    """All rows of all results as CSV; a result without rows has a line with the reason."""
    target = io.StringIO()
    columns = ["name", "place", "shows", "verdict", "why", "trained", *Row.__dataclass_fields__, "command", "commit"]
    writer = csv.DictWriter(target, columns, lineterminator="\n")
    writer.writeheader()
    for verdict, names in _groups(outcomes).items():
        for name in names:
            artefact, outcome = artefacts()[name], outcomes.get(name, Outcome(name=name))
            why = artefact.why or (outcome.reason if verdict == NOT_SHOWN else "")
            of_all = {"name": name, "place": artefact.place, "shows": artefact.shows, "verdict": verdict, "why": why}
            made = {"trained": outcome.ours, **{key: outcome.about.get(key) for key in ("command", "commit")}}
            writer.writerows({**of_all, **made, **row} for row in [asdict(row) for row in outcome.rows] or [{}])
    return target.getvalue()


def _beside_controls(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The section of the policies beside their controls, each comparison once."""
    rows = [row for outcome in outcomes.values() for row in outcome.rows if row.control and row.half is not None]
    # The same pair has other names in other figures.
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        found.setdefault((row.control, with_half(row)), row)
    if not found:
        return []
    signs = [_sign(row) for row in found.values() if abs(_percent(row) - 100) <= _MOST_BESIDE]
    counts = f"better in {signs.count(1)} of {len(signs)} comparisons, and worse in {signs.count(-1)}"
    head = ["| policy - control | the control | its floats | difference |", "|---|---|--:|--:|"]
    lines = [
        _line(row.what.rpartition(": ")[2], row.control, f"{_percent(row)}%", with_half(row)) for row in found.values()
    ]
    said = (
        f"With as many floats (within {_MOST_BESIDE} %) a policy is {counts}; in the others the interval holds 0. A "
        "control that sends more or fewer is not counted."
    )
    table = ["<!-- made: controls -->", *head, *lines, "<!-- end of controls -->"]
    return ["## Policies beside their controls", "", said, "", *table]


def _percent(row: Row) -> int:
    """Floats of the control in percent of the policy's."""
    assert row.share is not None
    return round(100 * row.share)


def _sign(row: Row) -> int:
    """1 if the interval of a row lies above 0, -1 if it lies below, else 0."""
    assert row.ours is not None
    assert row.half is not None
    return (row.ours - row.half > 0) - (row.ours + row.half < 0)


def _groups(outcomes: Mapping[str, Outcome]) -> dict[str, list[str]]:
    """The names of all tables and figures by verdict, in the order of the page."""
    groups: dict[str, list[str]] = {verdict: [] for verdict in (*VERDICTS[:3], NOT_RUN, NOT_SHOWN)}
    for name, artefact in artefacts().items():
        if artefact.counterpart is None:
            groups[NOT_SHOWN].append(name)
        else:
            groups[outcomes[name].verdict if name in outcomes else NOT_RUN].append(name)
    return groups


def _counts(groups: Mapping[str, list[str]]) -> list[str]:
    lines = ["| paper | " + " | ".join(groups) + " |", "|---|" + "--:|" * len(groups)]
    for paper, title in PAPERS.items():
        counts = [str(sum(name.startswith(f"{paper}-") for name in names)) for names in groups.values()]
        lines.append(f"| {title} | {' | '.join(counts)} |")
    return lines


def _decided(artefact: Artefact, outcomes: Outcome) -> Iterator[str]:
    """A line for each row that decides a reversed result."""
    main = [row for row in outcomes.rows if row.main]
    head = (_link(artefact.name), artefact.shows)
    for row in main or [row for row in outcomes.rows if row.holds is False]:
        yield _line(*head, row.what, number(row.published), with_half(row) + " (open)" * row.open)
        head = ("", "")


def _summed(outcome: Outcome) -> str:
    answers = [holds_text(row) for row in outcome.rows]
    return _line(_link(outcome.name), *(str(answers.count(word)) for word in ("yes", "no", "open")))


def _link(name: str) -> str:
    return f"[{name}](reproduction/{name}.json)"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def number(value: float | None, sign: bool = False) -> str:
    """The value with at most four significant digits; "-" for None."""
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value)
    if (size >= 1e6 and value != int(value)) or size >= 1e10 or 0 < size < 1e-3:
        return format(value, "+.3g" if sign else ".3g")
    digits = max(0, 3 - len(str(int(size)))) if value != int(value) else 0
    return format(value, f"{'+' if sign else ''},.{digits}f")


def with_half(row: Row) -> str:
    return number(row.ours) + ("" if row.half is None else f" ± {number(row.half)}")


def holds_text(row: Row) -> str:
    return "open" if row.open else {True: "yes", False: "no", None: "-"}[row.holds]
