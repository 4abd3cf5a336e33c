"""Writes the page of all tables and figures, beginning with the results that do not hold, and the CSV of all rows."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from benchmarks.pages import formerly
from benchmarks.reproduce.compared import QUICK_SEEDS, SEEDS
from benchmarks.reproduce.outcome import (
    AS_PUBLISHED,
    IN_PART,
    NOT_CONFIRMED,
    NOT_HELD,
    NOT_SHOWN,
    VERDICTS,
    Outcome,
    Row,
)
from benchmarks.reproduce.published import PAPERS, Artifact, artifacts
from hvdcomp.files import commits_in_words, provenance_last
from hvdcomp.tools.train.spread import seeds_needed

NOT_RUN = "not run yet"
BAR = "\\|"  # within a cell of a table
_HEADINGS = {
    NOT_HELD: "Does not hold here",
    NOT_CONFIRMED: "Not confirmed by a small training",
    IN_PART: "In part",
    AS_PUBLISHED: "As published",
    NOT_RUN: "Not run yet",
    NOT_SHOWN: "Cannot be shown here",
}
_HEAD = """# Tables and figures of the papers, reproduced

Made by `python -m benchmarks.reproduce --page docs/reproduction.md --output docs/reproduction` from the results in
[reproduction](reproduction). The file [reproduction.csv](reproduction.csv) contains every row of every result, with the
control, the command and the commit. `python -m benchmarks.reproduce NAME` repeats one result, and
`python -m benchmarks.reproduce` lists the names.

This page compares each published number of four papers with our own number. We get our numbers in three ways: we count
them from the shapes of tensors, we predict them with the [performance model](performance-model.md), or we train small
models on [simulated ranks](simulated-ranks.md). If we train, our number is the mean over five seeds, with its 95 %
confidence interval (Student's t). Differences in quality are in points of accuracy on the test data, or, for text, in
percent of the perplexity. A negative difference means that quality was lost. We do not use the authors' GPUs or
networks, and we do not use CIFAR, ImageNet or Penn Treebank.

Each row compares one number:

- A row *holds* if all numbers in our confidence interval satisfy the claim of the row, such as "no more than 1 lost".
  It *does not hold* if no number in the interval satisfies the claim. If only some numbers in the interval satisfy the
  claim, the row is *open*.
- If our number has no confidence interval, the row *holds* if our number agrees with the published number. Depending on
  the row, "agrees" means within a given percentage, in the same order, or with the same sign.

Each table or figure of a paper has one result, which depends on its rows:

- If a table or figure has a main claim, the rows of this claim decide. Otherwise, all of its rows decide.
- The result *does not hold here* if none of the deciding rows holds. The result *is not confirmed* if all deciding rows
  are open.
- The result is *as published* if all rows hold, and each published number has a counterpart. In all other cases, the
  result holds *in part*.

Our training runs use different networks and different data than the papers. So our runs do not show what happened in
the authors' own runs.

**Our training runs are small and few.** Instead of the papers' images, we use MNIST-1D, and train a convolutional
network with 108,000 parameters for 1,920 steps. (Accordion's authors train ResNet-18 and other networks for 29,400
steps.) Instead of the papers' text, we use the source code of Python's library, and train an LSTM with 249,000
parameters for 840 steps. We chose enough steps and low enough learning rates so that low compression loses little
quality compared with dense gradients.

We use the same few training runs in place of the networks of many tables and figures. The column *distinct training
runs* counts them, each with five seeds. Rows with the same number in the column *comparison* use [the same training
runs](#the-comparisons). So several rows with the same number are only one finding.

We compare each policy with a [control](#policies-compared-with-their-controls), a training run that sends the same
number of floats but ignores the gradients. If you have CIFAR or WikiText-2, pass `--data-dir FOLDER`. With this option,
hvdcomp repeats Accordion's original experiments, with the settings of Accordion's table 7, on simulated ranks. The
original experiments take hours on a GPU, and we have not run them.

From the paper on Bagpipe, we implement only the embedding exchange, [LookAhead](look-ahead.md), and we compare only the
numbers in its abstract.

Figures 5 and 13 to 16 of *On the Utility of Gradient Compression* show that, on the authors' GPUs, encoding takes
longer during the backward pass than after it. We cannot reproduce these figures with our machines. On CPUs, encoding
during the backward pass made a step [shorter](exchange-measured.md#overlap). On one GPU, it made a step longer, as in
the paper ([encoding](encoding.md#where-the-time-goes-on-a-gpu)).
"""
_INTRODUCED = {
    NOT_HELD: "In this table, our number does not satisfy the claim of the paper. If our number has a confidence "
    "interval, no part of the interval satisfies the claim, except in rows marked (open).",
    NOT_CONFIRMED: "In this table, only a part of our confidence interval satisfies the claim of the paper, so our "
    "training runs do not show whether the claim is true.",
}
_OF_COMPARISONS = (
    "The table describes each training run by its network (`images` or `text`) and its options of `hvdcomp train`."
)
_MOST_BESIDE = 5
"""The floats of a control may differ from those of its policy by at most this number of percent."""
_COMMITS = f"The results were made at commit {{commits}}. {formerly('hvdcomp reproduce NAME')}\n"
_QUICK = """{quick} results were made with `--quick`. Their training runs have a third of the steps, and two seeds
instead of five.
"""


def page(outcomes: Mapping[str, Outcome]) -> str:
    """The page, from the outcomes by name."""
    groups = _groups(outcomes)
    deciding = [row for verdict in _INTRODUCED for name in groups[verdict] for row in _deciding(outcomes[name])]
    pairs = dict.fromkeys(tuple(row.trainings) for row in deciding if row.trainings)
    numbers = {pair: at for at, pair in enumerate(pairs, 1)}
    quick = sum(map(_is_quick, outcomes.values()))
    found = {commit for outcome in outcomes.values() for commit in outcome.about.get("commit", "").split(", ")} - {""}
    commits = [_COMMITS.format(commits=commits_in_words(found))] if found else []
    lines = [_HEAD, *([_QUICK.format(quick=quick)] if quick else []), *_counts(groups, outcomes), ""]
    for verdict, names in groups.items():
        if not names:
            continue
        lines += [f"## {_HEADINGS[verdict]}", ""]
        if verdict in (NOT_HELD, NOT_CONFIRMED):
            deciding = [row for name in names for row in _deciding(outcomes[name])]
            lines += [f"{_INTRODUCED[verdict]} {_resting_on(deciding)}".strip(), ""]
            head = "| result | the paper shows | claim | published | found | comparison |"
            decided = [line for name in names for line in _decided(artifacts()[name], outcomes[name], numbers)]
            lines += _marked(verdict, [head, "|---|---|---|--:|--:|--:|", *decided])
        elif verdict == IN_PART:
            lines += ["| result | rows that hold | rows that do not hold | open rows |", "|---|--:|--:|--:|"]
            lines += [_summed(outcomes[name]) for name in names]
        else:
            lines += [", ".join(f"`{name}`" for name in names) + "."]
        lines += [""]
    lines += [*_comparisons(numbers), *_beside_controls(outcomes)]
    return "\n".join([provenance_last("\n".join(lines)), *commits])


def rows_as_csv(outcomes: Mapping[str, Outcome]) -> str:
    """All rows of all results as CSV; a result without rows has a line with the reason."""
    target = io.StringIO()
    columns = ["name", "place", "shows", "verdict", "why", "trained", *Row.__dataclass_fields__, "command", "commit"]
    writer = csv.DictWriter(target, columns, lineterminator="\n")
    writer.writeheader()
    for verdict, names in _groups(outcomes).items():
        for name in names:
            artifact, outcome = artifacts()[name], outcomes.get(name, Outcome(name=name))
            why = artifact.why or (outcome.reason if verdict == NOT_SHOWN else "")
            of_all = {"name": name, "place": artifact.place, "shows": artifact.shows, "verdict": verdict, "why": why}
            origin = {"trained": outcome.ours, **{key: outcome.about.get(key) for key in ("command", "commit")}}
            rows = [{**asdict(row), "trainings": "; ".join(row.trainings)} for row in outcome.rows]
            writer.writerows({**of_all, **origin, **row} for row in rows or [{}])
    return target.getvalue()


def _beside_controls(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The section that compares policies with their controls. Each comparison appears only once."""
    # A policy and its control may have different names in different figures, so the key contains no name.
    found: dict[tuple[str, str], tuple[Row, int]] = {}
    for outcome in outcomes.values():
        for row in outcome.rows:
            if row.control and row.half is not None:
                found.setdefault((row.control, with_half(row)), (row, QUICK_SEEDS if _is_quick(outcome) else SEEDS))
    if not found:
        return []
    signs = [_sign(row) for row, _ in found.values() if abs(_percent(row) - 100) <= _MOST_BESIDE]
    counts = f"better than the control in {signs.count(1)} of {len(signs)} comparisons, and worse in {signs.count(-1)}"
    head = ["| policy - control | control | control's floats | difference | seeds for ± 1 |", "|---|---|--:|--:|--:|"]
    lines = [
        _line(_compared(row), row.control, f"{_percent(row)}%", with_half(row), _seeds_for_one(row, seeds))
        for row, seeds in found.values()
    ]
    said = (
        "We compared policies with controls. For these counts, we use only controls that send the same number of "
        f"floats as the policy (within {_MOST_BESIDE} %). The policy is {counts}. In the other comparisons, the "
        "confidence interval of the difference contains 0. The last column shows how many seeds an interval of at most "
        "± 1 point or ± 1 % needs, if the results of further seeds vary like these results. With that many seeds, a "
        "true difference of 1 point or 1 % would be shown in about half of all cases, and a true difference of 2 "
        "points or 2 % in almost all cases."
    )
    return ["## Policies compared with their controls", "", said, "", *_marked("controls", [*head, *lines])]


def _is_quick(outcome: Outcome) -> bool:
    return str(outcome.about.get("command", "")).endswith("--quick")


def _marked(name: str, table: Sequence[str]) -> list[str]:
    """A table between two marks, which contain its name."""
    return [f"<!-- made: {name} -->", *table, f"<!-- end of {name} -->"]


def _percent(row: Row) -> int:
    """The floats of the control, in percent of the floats of the policy."""
    assert row.share is not None
    return round(100 * row.share)


def _compared(row: Row) -> str:
    """The names of the policy and of its control."""
    return row.what.rpartition(": ")[2]


def _seeds_for_one(row: Row, seeds: int) -> str:
    """The number of seeds that an interval of at most ± 1 point or ± 1 % needs; at least the number of seeds so far."""
    assert row.half is not None
    return str(max(seeds, seeds_needed(row.half, seeds, 1)))


def _sign(row: Row) -> int:
    """1 if the interval of a row lies above 0, -1 if it lies below, else 0."""
    assert row.ours is not None
    assert row.half is not None
    return (row.ours - row.half > 0) - (row.ours + row.half < 0)


def _groups(outcomes: Mapping[str, Outcome]) -> dict[str, list[str]]:
    """The names of all tables and figures by verdict, in the order of the page."""
    groups: dict[str, list[str]] = {verdict: [] for verdict in (*VERDICTS[:-1], NOT_RUN, NOT_SHOWN)}
    for name, artifact in artifacts().items():
        if artifact.counterpart is None:
            groups[NOT_SHOWN].append(name)
        else:
            groups[outcomes[name].verdict if name in outcomes else NOT_RUN].append(name)
    return groups


def _counts(groups: Mapping[str, list[str]], outcomes: Mapping[str, Outcome]) -> list[str]:
    lines = ["| paper | " + " | ".join(groups) + " | distinct training runs |", "|---|" + "--:|" * (len(groups) + 1)]
    for paper, title in PAPERS.items():
        counts = [str(sum(name.startswith(f"{paper}-") for name in names)) for names in groups.values()]
        rows = [row for name, outcome in outcomes.items() if name.startswith(f"{paper}-") for row in outcome.rows]
        lines.append(f"| {title} | {' | '.join(counts)} | {len(_trainings(rows))} |")
    return lines


def _trainings(rows: Iterable[Row]) -> set[str]:
    """The distinct training runs that some rows use."""
    return {training for row in rows for training in row.trainings}


def _resting_on(rows: Sequence[Row]) -> str:
    """A sentence with the number of distinct training runs that some rows use; "" if no row uses a training run."""
    trained = [row for row in rows if row.trainings]
    if not trained:
        return ""
    pairs, trainings = {tuple(row.trainings) for row in trained}, _trainings(trained)
    networks = {training.split()[0] for training in trainings}
    some = f"{len(trained)} of these {len(rows)} rows" if len(trained) < len(rows) else f"These {len(rows)} rows"
    counts = {"comparison": len(pairs), "distinct training run": len(trainings), "network": len(networks)}
    return f"{some} use {' of '.join(_counted(count, noun) for noun, count in counts.items())}."


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _deciding(outcome: Outcome) -> list[Row]:
    """The rows that decide the verdict of a result that does not hold or is not confirmed."""
    return [row for row in outcome.rows if row.main] or [row for row in outcome.rows if row.holds is False or row.open]


def _decided(artifact: Artifact, outcome: Outcome, numbers: Mapping[tuple[str, ...], int]) -> Iterator[str]:
    """A line for each row that decides the verdict of a result. `numbers` has the number of each comparison."""
    head = (_link(artifact.name), artifact.shows)
    for row in _deciding(outcome):
        claim = f"{row.what}; {row.note}" if row.note else row.what
        found, comparison = with_half(row) + " (open)" * row.open, numbers.get(tuple(row.trainings), "-")
        yield _line(*head, claim, number(row.published), found, str(comparison))
        head = ("", "")


def _comparisons(numbers: Mapping[tuple[str, ...], int]) -> list[str]:
    """The section of the comparisons that are used by rows that do not hold or are not confirmed."""
    if not numbers:
        return []
    lines = [_line(str(at), f"`{pair[0]}`", *(f"`{other}`" for other in pair[1:])) for pair, at in numbers.items()]
    head = ["| comparison | training | compared with |", "|--:|---|---|"]
    return ["## The comparisons", "", _OF_COMPARISONS, "", *_marked("comparisons", [*head, *lines]), ""]


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
