"""The page of all tables and figures: those whose result is reversed come first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hvdcomp.reproduce.outcome import AS_PUBLISHED, IN_PART, NOT_SHOWN, REVERSED, VERDICTS, Outcome, Row
from hvdcomp.reproduce.published import PAPERS, Artefact, artefacts

NOT_RUN = "not run yet"
BAR = "\\|"  # within a cell of a table
_HEADINGS = {
    REVERSED: "Reversed: ours says the contrary",
    IN_PART: "In part",
    AS_PUBLISHED: "As published",
    NOT_RUN: "Not run yet",
    NOT_SHOWN: "Cannot be shown here",
}
_HEAD = """# Tables and figures of the papers, beside ours

Made by `hvdcomp reproduce --page docs/reproduction.md --output docs/reproduction`, from the results in
[reproduction](reproduction). `hvdcomp reproduce NAME` finds the counterpart of a table or figure anew and prints it;
`hvdcomp reproduce` lists the names. Published numbers are those of the papers; ours are never from their trainings:
they are counted from shapes, predicted by the [performance model](performance-model.md), or of small trainings on
[simulated ranks](simulated-ranks.md), which have neither the authors' GPUs nor CIFAR, ImageNet or Penn Treebank.

A row **holds** if ours says what the paper says: a number to the share that is named, an order, or a sign. Of
trainings ours are means over seeds with the 95 % interval of Student's t, and a row is **open** if the interval leaves
it open. A result is *as published* if every row holds that the paper says something of, *reversed* if none does, or if
what the paper draws from it (in **bold**, where a row says that) does not, and else *in part*. A row without a
published number is a control or a claim in words. Shown are the rows in bold, those that do not hold or are open, and
controls; what holds otherwise is in the file beside a result, and in what `hvdcomp reproduce NAME` prints.

Our trainings are short: 640 steps, and 210 of the LSTM, where Accordion's have 29,400. What compression holds back is
not made up by then, so that low and high compression lie further apart than in the papers. A reversed result of a
training says that the paper's finding does not carry over to so short a training, and not that it is wrong.
"""
_QUICK = """In {quick} results, whose command ends in `--quick`, trainings have few seeds. Without it they have ten,
which has not been run yet.
"""


def page(found: Mapping[str, Outcome]) -> str:
    """The page, from outcomes by name; what has none and needs no run is found now."""
    groups: dict[str, list[str]] = {verdict: [] for verdict in (*VERDICTS[:3], NOT_RUN, NOT_SHOWN)}
    for name, artefact in artefacts().items():
        if artefact.counterpart is None:
            groups[NOT_SHOWN].append(name)
        else:
            groups[found[name].verdict if name in found else NOT_RUN].append(name)
    quick = sum(str(one.about.get("command", "")).endswith("--quick") for one in found.values())
    text = [_HEAD, *([_QUICK.format(quick=quick)] if quick else []), _counts(groups)]
    for verdict, names in groups.items():
        if names:
            text.append(f"## {_HEADINGS[verdict]}\n")
            text += [_section(artefacts()[name], found.get(name)) for name in names]
    return "\n".join(text)


def _counts(groups: Mapping[str, Sequence[str]]) -> str:
    lines = ["| paper | " + " | ".join(groups) + " |", "|---|" + "--:|" * len(groups)]
    for paper, title in PAPERS.items():
        counts = [str(sum(name.startswith(f"{paper}-") for name in names)) for names in groups.values()]
        lines.append(f"| {title} | {' | '.join(counts)} |")
    return "\n".join(lines) + "\n"


def _section(artefact: Artefact, found: Outcome | None) -> str:
    lines = [f"### {artefact.name}", "", f"{artefact.place[0].upper()}{artefact.place[1:]}. {artefact.shows}.", ""]
    if artefact.counterpart is None:
        return "\n".join([*lines, f"Cannot be shown here, because {artefact.why}.", ""])
    if found is None:
        return "\n".join([*lines, f"Not run yet: `hvdcomp reproduce {artefact.name}`.", ""])
    if found.verdict == NOT_SHOWN:
        lines += [f"Cannot be shown here, because {found.reason}.", ""]
    if found.ours:
        lines += [found.ours, ""]
    told = [row for row in found.rows if row.main or row.open or row.holds is False or row.is_control]
    told = told or [row for row in found.rows if row.holds][:1]
    lines += table(told)
    about = found.about
    rest = len(found.rows) - len(told)
    more = f" {rest} more row{'s' * (rest > 1)} in [{found.name}.json](reproduction/{found.name}.json)." if rest else ""
    lines += ["", f"`{about['command']}`, at commit `{about['commit']}`.{more}", ""]
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of a Markdown table of rows."""
    lines = ["| | published | ours | difference | holds | |", "|---|--:|--:|--:|---|---|"]
    for row in rows:
        what = f"**{row.what}**" if row.main else row.what
        numbers = number(row.published), with_half(row), number(row.difference, sign=True)
        cells = (what, *numbers, said(row), row.note)
        lines.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    return lines


def number(value: float | None, sign: bool = False) -> str:
    """With four digits that mean something; "-" for none."""
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value)
    if (size >= 1e6 and value != int(value)) or size >= 1e10 or 0 < size < 1e-3:
        return format(value, "+.3g" if sign else ".3g")
    digits = max(0, 3 - len(str(int(size)))) if value != int(value) else 0
    return format(value, f"{'+' if sign else ''},.{digits}f")


def with_half(row: Row) -> str:
    return number(row.ours) + ("" if row.half is None else f" ± {number(row.half)}")


def said(row: Row) -> str:
    return "open" if row.open else {True: "yes", False: "no", None: "-"}[row.holds]
