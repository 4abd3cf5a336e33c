"""Makes README's table "which method", and the figures behind hvdcomp's own advice, from the training runs at the best
learning rates.

    python -m benchmarks.best_rates.which_method

It reads benchmarks/measured/best-rates/trainings.csv, and does not train anything. The rule is in rule.py. Until the
rule can decide about an optimizer, README keeps the methods that were chosen at a single learning rate, with a note
about this. Run this program after `python -m benchmarks.best_rates` has added training runs. Otherwise tests fail,
because they compare README and evidence.json with the records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.best_rates.outcomes import Outcome, outcome_of, outcomes_of
from benchmarks.best_rates.page import in_one_sentence
from benchmarks.best_rates.rows import (
    BUDGETS,
    DENSE,
    FROZEN,
    KINDS_OF_OTHERS,
    NAMED,
    OTHER_OPTIMIZERS,
    PRESET_OF_STEPS,
    STEPS,
    TRAINED,
    WORKLOADS,
    WORKLOADS_OF_OTHERS,
    is_accuracy,
    methods_of,
)
from benchmarks.best_rates.rule import (
    BOUNDS,
    OTHER_SITUATIONS,
    SITUATIONS,
    Situation,
    Standing,
    chosen,
    standings_of,
    undecided,
)
from benchmarks.best_rates.search import HELD_OUT
from benchmarks.pages import MEASURED
from benchmarks.quality.convergence import OPTIMIZERS, RANKS
from benchmarks.trainings import ROOT, kept_records
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.files import replace_files

RUNS = MEASURED / "best-rates"
README, EVIDENCE = ROOT / "README.md", ROOT / "hvdcomp/compressors/evidence.json"
MARK = "<!-- which method -->\n"
"""The line before the table in README. An empty line ends the table."""

ONE_RATE = " (measured at one learning rate only)"
AT_ONE_RATE: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "SGD": (
        (
            "SGD with momentum", "`terngrad`", "14 to 15",
            "nothing: the accuracy of a convolutional network was 0.9 points higher, and the loss of an LSTM was the "
            "same",
        ),
        (
            "SGD, if `terngrad` sends too much", "`powersgd:rank=4`", "17 to 19",
            "nothing on the convolutional network; the loss of the LSTM was 6 % higher",
        ),
        (
            "SGD, if `terngrad` sends too much", "`topk:ratio=0.01`", "43 to 48",
            "the accuracy of the convolutional network was 2.7 points lower; the loss of the LSTM was 9 % higher",
        ),
    ),
    "Adam": (
        (
            "Adam or AdamW, as for most transformers", "`int4`", "7",
            "nothing significant: the loss of a GPT was 0.3 % higher",
        ),
        ("Adam or AdamW, to be safe", "`int8`", "3.8", "nothing: the loss of a GPT was the same"),
    ),
    "CompressedAdam": (
        (
            "Adam or AdamW, if `int4` sends too much", "[`CompressedAdam`](docs/adam.md) with `efsignsgd`", "18",
            "nothing: the loss of a GPT was 4 % lower",
        ),
        (
            "Adam or AdamW, if `efsignsgd` sends too much",
            "`CompressedAdam` with `efsignsgd` and four [local steps](docs/adam.md#local-steps)", "53",
            "nothing significant: the loss of a GPT was 0.2 % higher",
        ),
    ),
}  # fmt: skip
"""For each optimizer, the rows of README's table that come from docs/convergence.csv. They are used only until the rule
in rule.py can decide."""

_TASKS = {
    "gpt": "a GPT",
    "lstm": "an LSTM",
    "mnist1d": "a convolutional network",
    "shapes": "a residual network",
    "sorting": "a transformer that sorts",
    "heavy-tails": "a regression with outliers",
}


def table_of(runs: Path) -> str:
    """README's table, in Markdown."""
    rows = [row for situation in SITUATIONS for row in rows_of(situation, runs)]
    lines = [
        "| you train with | method | bytes: times fewer than uncompressed | loss of quality |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def rows_of(situation: Situation, runs: Path) -> list[tuple[str, str, str, str]]:
    """The rows of a situation in README's table: the methods that the rule chooses. If it cannot choose yet, these are
    the methods that were chosen at one learning rate, or else the methods that are not measured yet."""
    standings = standings_of(situation, runs)
    found, missing = chosen(standings), undecided(standings)
    rows: list[tuple[str, str, str, str]] = []
    for bound, standing in found.items():
        after = f", if {rows[-1][1]} sends too much" if rows else ""
        rows.append((situation.name + after, _shown(standing.method), _factors(standing), _quality(standing, bound)))
    if BOUNDS[0] not in found and missing:
        old = AT_ONE_RATE.get(situation.optimizer or "", ())
        rows += [(name, method, factor, quality + ONE_RATE) for name, method, factor, quality in old]
    if missing and not rows:
        first, others = [_shown(standing.method) for standing in missing[:2]], len(missing) - 2
        first += [f"{others} other{'s' if others > 1 else ''}"] if others > 0 else []
        best = "each at its own best learning rate" if len(missing) > 1 else "at its own best learning rate"
        rows.append(
            (situation.name, "not measured yet", "", f"we are still measuring {in_one_sentence(first)}, {best}")
        )
    if not rows:
        most = f"{max(BOUNDS):g} % or {max(BOUNDS):g} points"
        rows.append((situation.name, "none", "1", f"each method may lose more than {most} on some task"))
    return rows


def _shown(method: str) -> str:
    """The name of a method, as in README."""
    if method not in NAMED:
        return f"`{method}`"
    compressor = f"`{NAMED[method]['compression']}`"
    if method in FROZEN:
        return compressor
    every = NAMED[method]["local_steps"]
    beside = {"diloco": "DiLoCo with ", "sparseloco": "SparseLoCo with "}.get(method.split()[0], "")
    return f"{beside}{compressor} after {'every step' if every == 1 else f'{every} steps'}"


def _factors(standing: Standing) -> str:
    values = sorted(standing.factors.values())
    shown = [f"{value:.0f}" if value > 5 else f"{value:.1f}" for value in (values[0], values[-1])]
    return " to ".join(dict.fromkeys(shown))


def _quality(standing: Standing, bound: float) -> str:
    unit = "% or points" if bound != 1 else "% or point"
    parts = []
    for workload, (mean, half) in standing.lost.items():
        task = _TASKS[workload.removesuffix("-muon")]
        parts.append(f"{task}: {lost_in_words(workload, mean, half)}")
    return f"at most {bound:g} {unit} on each task ({'; '.join(parts)})"


def lost_in_words(workload: str, mean: float, half: float) -> str:
    """A loss of quality with its confidence interval, such as "loss 0.3 ± 0.5 % higher"."""
    quality, unit = ("accuracy", "points") if is_accuracy(workload) else ("loss", "%")
    worse, better = ("lower", "higher") if is_accuracy(workload) else ("higher", "lower")
    return f"{quality} {abs(mean):.1f} ± {half:.1f} {unit} {worse if mean >= 0 else better}"


def with_table(text: str, table: str) -> str:
    """README's text, with this table instead of the current one."""
    before, mark, rest = text.partition(MARK)
    _, end, after = rest.partition("\n\n")
    if not mark or not end:
        raise click.ClickException(f"README lacks the line {MARK.strip()} before its table, or an empty line after it")
    return f"{before}{mark}{table}\n{after}"


# The figures behind hvdcomp's own advice.


def evidence_of(runs: Path) -> dict[str, Any]:
    """The content of evidence.json: the methods to try first, and the loss of quality in complete rows with four ranks,
    with compressed gradients and with compressed steps. A row is used only if the method's rows are complete for all
    tasks with this optimizer, or if the method lost more than the largest of `BOUNDS`."""
    names = (*WORKLOADS, *WORKLOADS_OF_OTHERS)
    return {
        "first": _first(runs),
        "trainings": [record for name in names for record in _records_of(name, runs)],
        "steps": [record for name in WORKLOADS for record in _records_of_steps(name, runs)],
    }


def _first(runs: Path) -> dict[str, list[str]]:
    found = {}
    for situation in SITUATIONS:
        standings = standings_of(situation, runs)
        choice, is_decided = chosen(standings), not undecided(standings)
        if situation.optimizer is not None and (BOUNDS[0] in choice or is_decided):
            found[situation.optimizer] = [_spec_of(standing.method) for standing in choice.values()]
    return found


def _spec_of(method: str) -> str:
    return str(parse_compressor(NAMED[method]["compression"] if method in FROZEN else method))


def _records_of(workload: str, runs: Path) -> list[dict[str, Any]]:
    """The records of a workload for its optimizer, and for CompressedAdam if the workload was also trained with it."""
    options = TRAINED[workload]
    if options["simulate_ranks"] != RANKS:
        return []
    labels = [record["label"] for record in kept_records(runs).values() if record["workload"] == workload]
    methods = sorted({label.rpartition(" lr=")[0] for label in labels} - {DENSE, *BUDGETS, *STEPS})
    by_optimizer: dict[str, dict[str, float | None]] = {}
    for method, lost in _evident_losses(workload, methods, runs).items():
        if _spec_of(method) != DENSE:
            by_optimizer.setdefault(_KINDS[NAMED.get(method, options)["optimizer"]], {})[_spec_of(method)] = lost
    metric = _metric_of(workload)
    return [
        {"optimizer": optimizer, "training": workload, "metric": metric, "lost": lost}
        for optimizer, lost in by_optimizer.items()
    ]


def _records_of_steps(workload: str, runs: Path) -> list[dict[str, Any]]:
    """The records of a workload with `hvdcomp.torch.LocalSteps.compressed`, one for each number of steps between two
    exchanges."""
    of_workload = set(methods_of(workload))
    presets = [
        name for name, changes in STEPS.items() if name in of_workload and PRESET_OF_STEPS.items() <= changes.items()
    ]
    by_length: dict[int, dict[str, float | None]] = {}
    for method, lost in _evident_losses(workload, presets, runs).items():
        by_length.setdefault(STEPS[method]["local_steps"], {})[STEPS[method]["compression"]] = lost
    optimizer, metric = _KINDS[TRAINED[workload]["optimizer"]], _metric_of(workload)
    return [
        {"optimizer": optimizer, "training": workload, "metric": metric, "every": every, "lost": lost}
        for every, lost in by_length.items()
    ]


def _metric_of(workload: str) -> str:
    return "accuracy" if is_accuracy(workload) else "loss"


def _evident_losses(workload: str, methods: Sequence[str], runs: Path) -> dict[str, float | None]:
    """For each method whose row becomes evidence, by name, its mean loss of quality (`_mean_lost`)."""
    outcomes = outcomes_of(workload, runs, HELD_OUT, methods)
    complete = [method for method in methods if not outcomes[method].lacks]
    losses = {method: _mean_lost(outcomes[method], outcomes[DENSE]) for method in complete}
    return {
        method: lost
        for method, lost in losses.items()
        if lost is None or lost > max(BOUNDS) / 100 or _is_complete(method, workload, runs)
    }


def _is_complete(method: str, workload: str, runs: Path) -> bool:
    """Whether a method has complete rows of all workloads that are trained with the optimizer of this workload. A
    method that loses nothing on an easy task must not be recommended before its results on the other tasks are
    known."""
    tasks = next(one.workloads for one in (*SITUATIONS, *OTHER_SITUATIONS) if workload in one.workloads)
    return not any(outcome_of(name, method, runs, HELD_OUT).lacks for name in tasks)


_KINDS: Mapping[str, str] = {
    **OPTIMIZERS,
    "muon": "Muon",
    **{OTHER_OPTIMIZERS[name]["optimizer"]: kind for name, kind in KINDS_OF_OTHERS.items()},
}


def _mean_lost(outcome: Outcome, dense: Outcome) -> float | None:
    """The mean loss of quality, in the unit of `hvdcomp.compressors.evidence`; None if a training run diverged."""
    lost: Sequence[float] = outcome.complete.lost_beside(dense.complete)
    return round(math.fsum(lost) / len(lost) / 100, 4) if lost else None


@click.command()
@click.option("--runs", type=click.Path(path_type=Path), default=RUNS, help="The folder of the records.")
@click.option("--readme", type=click.Path(path_type=Path, exists=True), default=README)
@click.option("--evidence", type=click.Path(path_type=Path), default=EVIDENCE)
def main(runs: Path, readme: Path, evidence: Path) -> None:
    """Writes README's table of methods, and the figures behind hvdcomp's own advice, from existing trainings."""
    text = with_table(readme.read_text(encoding="utf-8"), table_of(runs))
    figures = json.dumps(evidence_of(runs), indent=1) + "\n"
    replace_files({readme: text.encode(), evidence: figures.encode()})
    click.echo(f"wrote the table of {readme}, and {evidence}")


if __name__ == "__main__":
    main()
