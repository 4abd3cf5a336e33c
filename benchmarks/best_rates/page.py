"""Writes the page of best learning rates, docs/best-rates.md, and the CSV file next to it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.best_rates.outcomes import FORGIVING, Outcome, Row, interval_of, outcomes_of, row_of
from benchmarks.best_rates.rows import (
    DENSE,
    LONG,
    MANY_RANKS,
    SEEDS_OF_VARIANTS,
    TRAINED,
    WORKLOADS,
    WORKLOADS_OF_OTHERS,
    is_accuracy,
    rate_of,
    rivals_of,
)
from benchmarks.best_rates.rule import BOUNDS
from benchmarks.best_rates.search import FARTHEST, HELD_OUT, MORE_SEEDS, SEARCH_SEEDS, TIE
from benchmarks.pages import MEASURED, filled, findings_of, formerly, verdict, with_interval
from benchmarks.trainings import RECORDS, ROOT, kept_records
from hvdcomp.files import commits_in_words, csv_of, provenance_last, replace_files

ByWorkload = Mapping[str, Mapping[str, Outcome]]


def write_page(file: Path, runs: Path, seeds: Sequence[int]) -> bool:
    """Writes the page of all training runs in the file of records, and a CSV file next to the page. Returns False if
    there are no training runs."""
    records = [one for one in kept_records(runs).values() if one["workload"] not in WORKLOADS_OF_OTHERS]
    if not records:
        return False
    found = {name: outcomes_of(name, runs, seeds) for name in WORKLOADS}
    lines = [
        *_beginning(commits_in_words(record["commit"] for record in records)),
        findings_of(file),
        "",
        "<!-- made: tables -->",
        *_summary(found),
        *_explanation(seeds),
        *(line for name, outcomes in found.items() for line in section_of(name, outcomes)),
        *_variants(found, runs, LONG, "Three times as many steps", _LONG_IN_WORDS),
        *_variants(found, runs, MANY_RANKS, "Sixteen ranks", _MANY_RANKS_IN_WORDS),
        *_for_reviewers(records, seeds),
        "<!-- end of tables -->",
    ]
    rows = [record_of(outcome, outcomes[DENSE]) for outcomes in found.values() for outcome in outcomes.values()]
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines).rstrip() + "\n"
    replace_files({file: provenance_last(text).encode(), file.with_suffix(".csv"): csv_of(rows)})
    return True


def _beginning(commits: str) -> list[str]:
    return [
        "# Each method at its own best learning rate",
        "",
        filled(
            "This page shows how much quality a model loses with each compression method if each method is trained at "
            "its own best learning rate. The best learning rate of uncompressed training was searched for in the same "
            "way. Other pages compare all methods at a single learning rate, which favors some of the methods."
        ),
        "",
        f"Made by `python -m benchmarks.best_rates`,\nat commit {commits}. "
        f"{formerly('python ./benchmarks/best_rates.py')}",
        "",
    ]


def _summary(found: ByWorkload) -> list[str]:
    lines = [
        "## What is measured so far",
        "",
        filled(
            "The tables on this page have a row for each method on each training task (workload), but only if the row "
            "is complete. A row is complete if the search has found a best learning rate between two worse learning "
            f"rates, and if the method was then trained at the best learning rate with {len(HELD_OUT)} other seeds. "
            "The results of some quick workloads differ much between seeds, so these workloads need more seeds "
            f"({_more_seeds()}). The workload's row of uncompressed training must also be complete. This table counts "
            "the rows of each workload:"
        ),
        "",
        "| workload | complete rows | begun | not begun |",
        "|---|--:|--:|--:|",
    ]
    for name, outcomes in found.items():
        complete = sum(not outcome.lacks for outcome in outcomes.values())
        begun = sum(outcome.is_begun for outcome in outcomes.values())
        lines.append(f"| {name} | {complete} | {begun - complete} | {len(outcomes) - begun} |")
    return [*lines, ""]


def _explanation(seeds: Sequence[int]) -> list[str]:
    items = (
        "**times fewer bytes**: the bytes of uncompressed gradients, divided by the bytes that a rank sent in the "
        "whole training run. Small tensors, which most methods send uncompressed, are included.",
        "**lost**: how much worse the method is than uncompressed training, with each at its own best learning rate. "
        "The number is the mean of the differences over the held-out seeds, with its 95 % confidence interval "
        "(Student's t).",
        "**lost at dense's best rate**: how much worse the method is than uncompressed training if both use the best "
        "learning rate of uncompressed training.",
        f"**good rates**: the learning rates at which the method loses at most {FORGIVING:g} % of the loss, or "
        f"{FORGIVING:g} point of accuracy, compared with its best learning rate. This column uses only the seeds of "
        "the search.",
        "**`compressed-adam`**: these rows use the optimizer `CompressedAdam` instead of AdamW, and are compared with "
        "uncompressed training with AdamW. The row `compressed-adam none` shows the effect of `CompressedAdam` without "
        "compression.",
        "**`local-steps`, `diloco` and `sparseloco`**: in these rows, the ranks exchange the changes of their weights "
        "instead of gradients, either after each step or after several steps ([compressed steps](compressed-steps.md), "
        "[local steps](local-steps.md)). The settings of DiLoCo and SparseLoCo are chosen so that they send about the "
        "same number of bytes as `local-steps=4 efsignsgd`.",
        "**`budget topk:ratio=0.01`**: in this row, the policy [`budget`](policy-budget.md) chooses the compression "
        "level of each tensor in such a way that the ranks send as many bytes as with `topk:ratio=0.01`.",
        "**`powersgd`** uses the lowest rank that does not send fewer bytes than the method that it is compared with.",
    )
    return ["## How to read the tables", "", *(filled(item, bullet=True) for item in items), ""]


def section_of(workload: str, outcomes: Mapping[str, Outcome]) -> list[str]:
    options = ", ".join(f"{key} {value}" for key, value in WORKLOADS[workload].items() if key != "lr")
    complete = {spec: outcome for spec, outcome in outcomes.items() if not outcome.lacks}
    lines = [f"## {workload}", "", filled(f"The options of `hvdcomp train` are: {options}."), ""]
    if complete:
        lines += [*_table(workload, complete), *_pairs(workload, complete)]
    else:
        lines += [f"No row of the workload `{workload}` is complete yet.", ""]
    return [*lines, *_missing(outcomes)]


def _table(workload: str, complete: Mapping[str, Outcome]) -> list[str]:
    quality, unit = ("accuracy (%)", "points") if is_accuracy(workload) else ("validation loss", "%")
    head = ["method", "times fewer bytes", "best rate", quality, f"lost ({unit})", "lost at dense's best rate"]
    lines = [f"| {' | '.join([*head, 'good rates'])} |", f"|---|{'--:|' * len(head)}"]
    dense = complete[DENSE].complete
    for spec, outcome in complete.items():
        own, good = outcome.complete, outcome.good
        cells = [
            f"`{spec}`",
            f"{own.factor:.1f}",
            f"{rate_of(workload, own.doublings):g}",
            own.shown,
            "" if spec == DENSE else with_interval(own.lost_beside(dense), "+.2f"),
            "" if outcome.same is None else with_interval(outcome.same.lost_beside(dense), "+.2f"),
            f"{good[0]:g} to {good[1]:g}" if good[0] < good[1] else "this one",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _pairs(workload: str, complete: Mapping[str, Outcome]) -> list[str]:
    """A table in Markdown that compares methods with their rivals."""
    unit = "points" if is_accuracy(workload) else "%"
    lines = []
    for spec in complete:
        for rival in rivals_of(workload, spec):
            if rival in complete:
                own, other = complete[spec].complete, complete[rival].complete
                lost = own.lost_beside(other)
                lines.append(
                    f"| `{spec}` | `{rival}` | {own.factor / other.factor:.0%} | {with_interval(lost, '+.2f')} "
                    f"| {verdict([-difference for difference in lost])} |"
                )
    head = [
        f"| method | compared with | bytes relative to the method | lost ({unit}) | |",
        "|---|---|--:|--:|---|",
    ]
    return [*head, *lines, ""] if lines else []


def _missing(outcomes: Mapping[str, Outcome]) -> list[str]:
    """A list, in Markdown, of what is missing in the rows that are not complete."""
    begun = [outcome for outcome in outcomes.values() if outcome.lacks and outcome.is_begun]
    others = [f"`{outcome.spec}`" for outcome in outcomes.values() if not outcome.is_begun]
    lines = [
        filled(f"The row `{outcome.spec}` still lacks {in_one_sentence(outcome.lacks)}.", bullet=True)
        for outcome in begun
    ]
    lines += [filled(f"These rows have no training run yet: {in_one_sentence(others)}.", bullet=True)] if others else []
    return ["Rows that are not complete yet:", "", *lines, ""] if lines else []


_LONG_IN_WORDS = (
    "The methods that the README recommends are also trained for three times as many steps. The last column shows how "
    "much each seed lost compared with uncompressed training of the same length."
)
_MANY_RANKS_IN_WORDS = (
    "The rotated quantizer and `terngrad` are also trained with 16 ranks. The batch of all 16 ranks together is four "
    "times larger. The last column shows how much each seed lost compared with uncompressed training with 16 ranks."
)


def _variants(found: ByWorkload, runs: Path, kind: str, title: str, text: str) -> list[str]:
    """A section about one kind of variant, such as longer training, with a result for each seed. Two seeds are too few
    for a confidence interval.

    Args:
        kind: end of the names of these variants, such as "-long".
        text: the first sentences of the section.
    """
    lines = []
    for name in (name for name in found if name + kind in TRAINED):
        complete = {spec: outcome.complete for spec, outcome in found[name].items() if not outcome.lacks}
        rows = {
            spec: row_of(name + kind, spec, own.doublings, runs, SEEDS_OF_VARIANTS) for spec, own in complete.items()
        }
        dense = rows.pop(DENSE, None)
        options = TRAINED[name + kind]
        for spec, row in rows.items():
            if dense is not None and row is not None:
                unit = "points" if is_accuracy(name) else "%"
                shown = ", ".join(f"{lost:+.2f}" for lost in row.lost_beside(dense)) or "diverged"
                way = f"{options['simulate_ranks']} | {options['steps']}"
                lines.append(f"| {name} | `{spec}` | {way} | {shown} {unit} |")
    head = ["| workload | method | ranks | steps | lost |", "|---|---|--:|--:|---|"]
    seeds = in_one_sentence(list(map(str, SEEDS_OF_VARIANTS)))
    text += f" The seeds are {seeds}, and the learning rates are the best rates from the tables above."
    body = [*head, *lines] if lines else ["Nothing has been trained yet."]
    return [f"## {title}", "", filled(text), "", *body, ""]


def in_one_sentence(words: Sequence[str]) -> str:
    """Joins words into a list for a sentence, such as "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _search_seeds() -> str:
    """Sentences that name the seeds of the search for each workload."""
    named: dict[int, list[str]] = {}
    for workload, count in SEARCH_SEEDS.items():
        named.setdefault(count, []).append(f"`{workload}`")
    every = [f"For {in_one_sentence(names)}, these are the seeds 0 to {count - 1}." for count, names in named.items()]
    return " ".join([*every, "For other workloads, the search uses only seed 0."])


def _for_reviewers(records: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[str]:
    searched = sum(record["seed"] < HELD_OUT[0] for record in records)
    hours = sum(record["seconds"] or 0 for record in records) / 3600
    raw = f"[{RECORDS}](../{MEASURED.relative_to(ROOT)}/best-rates/{RECORDS})"
    items = (
        "**What was tuned**: only the learning rate. The search begins with three rates that differ by factors of two, "
        "around the best rate of uncompressed training. For compressed steps, the search begins around twice the best "
        "rate of uncompressed training. The search continues until the best rate is between two worse rates, but stops "
        f"{FARTHEST} factors of two away from the workload's first rate. Levels, warm-ups, schedules and optimizers "
        "were not tuned for any row.",
        "**Where the best rate comes from**: from the validation data at the end of training. The best rate is the one "
        f"with the best mean over the seeds of the search. Rates whose means differ from the best mean by at most "
        f"{TIE:g} % or points count as equally good, and the lowest of them is used. {_search_seeds()}",
        f"**What was held out**: the seeds {_in_words(seeds)}. Some workloads have more seeds, from {HELD_OUT[0]} on "
        f"({_more_seeds()}). The held-out seeds were not used for any choice, with one exception: the rule for equally "
        "good rates was added after the held-out seeds of `int4:exchange=scatter` on `gpt` were trained. The rule "
        "changed the best rate of this row and of four others. All "
        "results in the tables come from the held-out seeds. A seed determines the initial weights, the order of "
        "the batches and the random numbers of the compressor. The data are the same for all seeds. The results come "
        "from the same validation data as the best rate. The test data were not used.",
        f"**How many training runs**: {len(records)} runs, in {hours:.1f} core hours. The search for learning rates "
        f"used {searched} of these runs. Other programs used the same cores, so the number of core hours is an upper "
        "bound.",
        f"**Raw records**: {raw} has a line for each training run. The line contains the workload, the method with its "
        "learning rate, the seed, the commit, the duration in seconds, the compression factor, the bytes that a rank "
        "sent, and the final loss and accuracy. An empty loss means that the training run diverged. The CSV file of "
        "this page contains the rows of the tables.",
        "**To repeat the training runs of a row**, use an empty folder. The following command repeats one row, and "
        "also the row of uncompressed training for comparison. If the README recommends the method, the command also "
        "repeats the long training runs. In the command, replace the workload and the method with those of your row.",
    )
    return [
        "## How the README chooses",
        "",
        filled(
            "For each optimizer, the README recommends the method that sends the fewest bytes, among all methods that "
            "lose little quality on every task with this optimizer. A method loses little if the upper end of the 95 % "
            f"interval of the lost quality is at most {BOUNDS[0]:g} % (or {BOUNDS[0]:g} point of accuracy). The README "
            f"also recommends a second method if it sends even fewer bytes and loses at most {BOUNDS[1]:g} % (or "
            f"{BOUNDS[1]:g} points). "
            "`python -m benchmarks.best_rates.which_method` writes the README's table from the records. The same "
            "program writes the numbers that `auto`, `hvdcomp advise`, `hvdcomp profile` and the [warning about "
            "Adam](adam.md#when-hvdcomp-warns-you) are based on. For tasks without complete rows, hvdcomp uses [older "
            "results](convergence.md), which were measured at one learning rate."
        ),
        "",
        "## For reviewers",
        "",
        *(filled(item, bullet=True) for item in items),
        "",
        "  ```",
        "  python -m benchmarks.best_rates --runs again --table again/page.md --workload gpt --only eden:bits=1",
        "  ```",
        "",
        filled(
            "All training runs used `hvdcomp train` on [simulated ranks](simulated-ranks.md), which end with the same "
            "weights as real ranks. With `--dry-run`, the command only prints the first training runs."
        ),
        "",
    ]


def _in_words(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, seeds))


def _more_seeds() -> str:
    return ", ".join(f"`{workload}` {seeds}" for workload, seeds in MORE_SEEDS.items())


def record_of(outcome: Outcome, dense: Outcome) -> dict[str, Any]:
    """A line of the CSV file. The line has figures only if the row is complete."""
    workload = outcome.workload
    figures = dict.fromkeys(_FIGURES) if outcome.lacks else _figures(outcome, outcome.complete, dense.complete)
    head = {"workload": workload, "method": outcome.spec, "ranks": WORKLOADS[workload]["simulate_ranks"]}
    return {**head, **figures, "lacks": in_one_sentence(outcome.lacks)}


_FIGURES = (
    "factor", "rate", "lowest_good_rate", "highest_good_rate", "seeds", "diverged", "metric", "quality", "lost",
    "half_interval", "lost_at_the_rate_of_dense", "half_interval_there",
)  # fmt: skip


def _figures(outcome: Outcome, own: Row, dense: Row) -> dict[str, Any]:
    def mean_and_half(values: Sequence[float]) -> tuple[float | None, float | None]:
        return interval_of(values) or (None, None)

    lost, half = mean_and_half(own.lost_beside(dense))
    lost_same, half_same = mean_and_half([] if outcome.same is None else outcome.same.lost_beside(dense))
    finished = [value for value in own.qualities.values() if not math.isnan(value)]
    values = (
        own.factor, rate_of(own.workload, own.doublings), *outcome.good, len(own.qualities), own.diverged,
        "accuracy in percent" if is_accuracy(own.workload) else "loss", statistics.mean(finished) if finished else None,
        lost, half, lost_same, half_same,
    )  # fmt: skip
    return dict(zip(_FIGURES, values, strict=True))
