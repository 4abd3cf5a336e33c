"""Turns runs into the rows of the report. Runs that differ in nothing but the seed make one group, shown by
its mean and spread; groups of one model and data set make a section, with its table and curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import filesize

from hvdcomp.perfmodel import NOISY
from hvdcomp.report.runs import PHASES, Run, RunError, printable
from hvdcomp.report.turns import RATES, Turns

_NO_BREAK = "\u00a0"  # space within a line of a heading
_WORK_OPTIONS = ("framework", "batch_size", "backward_passes_per_step", "sequence_length", "image_size")
_AVERAGED = (
    *("quality", "ms_per_step", "bytes_sent_per_step", "bytes_in_node_per_step"),
    *("compression_factor", "speed_vs_baseline"),
)


@dataclass(eq=False)
class Group:
    """Runs of one experiment, one for each seed. `label` names it in legends."""

    runs: list[Run]
    label: str = ""
    baseline_ms: float | None = None
    turns: Turns | None = None

    @property
    def turns_ms(self) -> float | None:
        """Median of a step that was measured in turns with the other methods, or None."""
        return None if self.turns is None or self.spec is None else self.turns.ms.get(self.spec)

    @property
    def compared_ms(self) -> float | None:
        """The time of a step that is compared with that of another group."""
        return self.ms_per_step if self.turns_ms is None else self.turns_ms

    def columns(self) -> dict[str, float | None]:
        """What is known of a step in turns and on other networks."""
        predicted = {} if self.turns is None or self.spec is None else self.turns.predicted_ms.get(self.spec, {})
        return {"turns_ms": self.turns_ms, **{f"predicted_ms_{rate}": predicted.get(rate) for rate in RATES}}

    @property
    def setting(self) -> tuple[str | None, ...]:
        """Model, data and number of ranks."""
        return tuple(self.runs[0].text(key) for key in ("model", "data", "world_size"))

    @property
    def work(self) -> tuple[str | None, ...]:
        """What two groups must share for the times of their steps to be compared."""
        options = self.runs[0].compared_options
        return (*self.setting, *(options.get(key) for key in _WORK_OPTIONS))

    @property
    def spec(self) -> str | None:
        return self.runs[0].spec

    @property
    def metric(self) -> str | None:
        return next((run.metric for run in self.runs if run.metric), None)

    @property
    def ms_per_step(self) -> float | None:
        known = [run.ms_per_step for run in self.runs if run.ms_per_step is not None]
        return float(np.mean(known)) if known else None

    @property
    def quality(self) -> float | None:
        """The mean of the runs' last accuracies (0 to 1) or perplexities."""
        known = [run.quality for run in self.runs if run.quality is not None]
        return float(np.mean(known)) if known else None

    @property
    def factor(self) -> float | None:
        """The mean of the runs' compression factors."""
        known = [run.compression_factor for run in self.runs if run.compression_factor is not None]
        return float(np.mean(known)) if known else None

    def phase(self, phase: str) -> float | None:
        """Mean over the runs of the median milliseconds of one of PHASES, or None if it was not measured."""
        known = [ms for run in self.runs if (ms := run.median(f"{phase}_ms")) is not None]
        return float(np.mean(known)) if known else None

    def rows(self) -> list[dict[str, Any]]:
        """One row for the group, of numbers rather than texts; and one for each run if it has several."""
        if len(self.runs) == 1:
            return [_row("run", self.runs[0].name, self.runs, self)]
        average = _row("mean", f"mean of {len(self.runs)} runs", self.runs, self)
        return [average, *(_row("seed", run.name, [run], self) for run in self.runs)]


@dataclass(eq=False)
class Section:
    """The groups that share model and data, and so a table and curves. `reference` is the one that others are compared
    with, of dense training if nothing else was asked for."""

    model: str | None
    data: str | None
    groups: list[Group]
    baseline: str = "dense"
    reference: Group | None = None

    @property
    def metric(self) -> str | None:
        return next((group.metric for group in self.groups if group.metric), None)

    @property
    def title(self) -> str:
        return f"{self.model} on {self.data}" if self.model else "Unfinished runs, model not yet recorded"

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for group in self.groups for row in group.rows()]

    @property
    def headings(self) -> list[str]:
        quality = {"accuracy": "Accuracy %", "perplexity": "Perplexity", None: "Quality"}[self.metric]
        rates = ", ".join(rate.replace(" ", _NO_BREAK) for rate in RATES.values())
        predicted = [f"Predicted ms{_NO_BREAK}at {rates}"] if self.predicted else []
        return ["Run", "Spec", "Ranks", quality, "Sent per step", "CF", "ms per step", *predicted,
                f"Speed vs {self.baseline}", "Ranks agree", "Encode / send / decode ms"]  # fmt: skip

    @property
    def turns(self) -> Turns | None:
        """Where the steps that were measured in turns are from, if any were."""
        return next((group.turns for group in self.groups if group.turns_ms is not None), None)

    @property
    def in_turns(self) -> bool:
        """Whether there are steps that were measured in turns."""
        return self.turns is not None

    @property
    def predicted(self) -> bool:
        """Whether there are predictions that can be trusted."""
        return self.turns is not None and any(self.turns.predicted_ms.values())

    def notes(self) -> list[str]:
        """What has to be said of the table for its times to be read rightly."""
        notes = []
        sizes = {run.count("world_size") for run in self.runs if run.summary}
        if self.runs and all(run.shares_one_machine for run in self.runs if run.summary) and sizes:
            ranks = " or ".join(str(size) for size in sorted(size for size in sizes if size))
            notes.append(
                f"The {ranks} ranks of a run share one machine: they take its cores from each other, and what they "
                "exchange passes through its memory. Compression has little to gain here, and may be slower."
            )
        if self.turns is not None:
            notes.append(
                "ms per step: the methods took turns, a few steps at a time, so that whatever else the machine did "
                "fell on all alike; medians, and those of none and fp16 are Horovod's own. With an asterisk: of its "
                "own training alone, not to be compared."
            )
            notes.append(_predicted_note(self.turns))
        return notes


def _predicted_note(turns: Turns) -> str:
    """What predictions rest on, or why there are none."""
    links = " or ".join(RATES.values())
    worst = next(iter(turns.noisy), None)
    why = ""
    if worst is not None:
        why = (
            f"Measurements of the calibration that differed by more than {NOISY:.0%} when they were repeated: "
            f"{len(turns.noisy)}. What counts most is {worst}: {turns.noisy[worst]:.0%}. "
        )
    if turns.calibrations > 1:
        why += f"So it was calibrated {turns.calibrations} times, and the predictions are compared. "
    if not any(turns.predicted_ms.values()):
        return (
            f"No step is predicted for links of {links}, as the performance model could not be calibrated here. {why}"
            f"A prediction could be wrong by {turns.doubt:.0%}. Try it while nothing else is running."
        )
    said = (
        f"Predicted, not measured: a step of {turns.world_size} such ranks with a link of {links} between them, by "
        f"the performance model, which was calibrated in the same minutes. {why}Predictions may be wrong by "
        f"{turns.noise:.0%}; smaller differences mean nothing."
    )
    if turns.doubt > NOISY:
        said += f" A dash is in place of those that may be wrong by more than {NOISY:.0%}."
    return said


def make_sections(runs: Iterable[Run], baseline: str | None = None, turns: Turns | None = None) -> list[Section]:
    """Group the runs, find each group's baseline and sort them into sections.

    Args:
        baseline: name or spec of the run that the others' speed is compared with; the spec "none" by default.
        turns: steps of these runs that were measured in turns, and then count for their speed.

    Raises:
        RunError: no run is called `baseline`, or `turns` are of none of the runs.
    """
    grouped: dict[Any, Group] = {}
    for run in runs:
        group = Group([run])
        same = (*group.setting, group.spec, frozenset(run.compared_options.items()))
        # Without a summary it is not known what a run was, so it stays alone.
        grouped.setdefault(same if run.summary else run.folder, Group([])).runs.append(run)
    groups = list(grouped.values())
    _set_labels(groups)
    if turns is not None:
        _set_turns(groups, turns)
    references = _set_baselines(groups, baseline)
    sections: dict[Any, Section] = {}
    for group in groups:
        model, data, _ = group.setting
        # A model and its data have one metric, but a run may have ended before its first evaluation.
        key = (model, data) if model else (None, group.metric)
        section = sections.setdefault(key, Section(model, data, [], "dense" if baseline is None else "baseline"))
        section.groups.append(group)
        if section.reference is None and group in references:
            section.reference = group
    return list(sections.values())


def _set_labels(groups: list[Group]) -> None:
    """Label each group with its spec, its policy and the options that tell it from others of that spec."""
    for group in groups:
        rivals = [g for g in groups if g.spec == group.spec and g.setting[:2] == group.setting[:2]]
        described = {id(g): {**g.runs[0].compared_options, "ranks": g.setting[2]} for g in rivals}
        own = described[id(group)]
        telling = [k for k in own if k != "policy" and any(other.get(k) != own[k] for other in described.values())]
        run = group.runs[0]
        group.label = ", ".join(part for part in (run.spec, run.policy) if part)
        if not run.summary or not run.spec:
            group.label = f"{run.name} ({run.status})" + (f": {group.label}" if group.label else "")
        elif telling:
            group.label += " (" + ", ".join(f"{key}={own[key]}" for key in telling) + ")"


def _set_turns(groups: list[Group], turns: Turns) -> None:
    for group in groups:
        if turns.fits(group.setting, group.runs[0].compared_options):
            group.turns = turns
    if not any(group.turns_ms is not None for group in groups):
        raise RunError(
            f"the steps measured in turns are of {turns.model} on {turns.data}, {turns.world_size} ranks and batches "
            f"of {turns.batch_size}, with {', '.join(turns.ms)}, and none of the runs is"
        )


def _set_baselines(groups: list[Group], wanted: str | None) -> list[Group]:
    """Gives each group the time that it is compared with, and returns those groups that are baselines."""

    def answers(group: Group) -> bool:
        if wanted is None:
            return group.spec == "none"
        return wanted in (group.spec, group.label, *(run.name for run in group.runs))

    if wanted is not None and not any(map(answers, groups)):
        names = ", ".join(run.name for group in groups for run in group.runs)
        raise RunError(f"no run or spec is called {wanted!r}, to be the baseline; the runs are: {names}")
    for group in groups:
        if group.runs[0].summary:
            same_work = (other for other in groups if answers(other) and other.work == group.work)
            group.baseline_ms = next((other.compared_ms for other in same_work), None)
    return list(filter(answers, groups))


def _row(kind: str, name: str, runs: list[Run], group: Group) -> dict[str, Any]:
    """The numbers of `runs`, of a group; `kind` is "run", or "mean" of several or "seed" for one of these."""
    first = runs[0]

    def agreed(get: Callable[[Run], Any]) -> Any:
        values = {get(run) for run in runs}
        return values.pop() if len(values) == 1 else None

    row: dict[str, Any] = {
        "kind": kind,
        "run": name,
        "runs": len(runs),
        "spec": first.spec,
        "policy": first.policy,
        "decisions": agreed(lambda run: None if run.decisions is None else run.decisions.made),
        "model": first.text("model"),
        "data": first.text("data"),
        "world_size": first.count("world_size"),
        "seed": agreed(lambda run: run.count("seed")),
        "status": ", ".join(dict.fromkeys(run.status for run in runs)),
        "metric": Group(runs).metric,
    }
    for key in _AVERAGED:
        values = [value for run in runs if (value := _value(run, key, group)) is not None]
        row[key] = float(np.mean(values)) if values else None
        row[f"{key}_min"], row[f"{key}_max"] = (min(values), max(values)) if values else (None, None)
    checks = [run.identical for run in runs]
    row["identical"] = False if False in checks else None if None in checks else True
    for phase in PHASES:
        row[f"{phase}_ms"] = Group(runs).phase(phase)
    row.update(group.columns() if kind != "seed" else dict.fromkeys(group.columns()))
    row["folder"] = agreed(lambda run: printable(run.folder))
    return row


def _value(run: Run, key: str, group: Group) -> float | None:
    if key == "speed_vs_baseline":
        ms = run.ms_per_step if group.turns_ms is None else group.turns_ms
        return group.baseline_ms / ms if group.baseline_ms and ms else None
    return getattr(run, key)


def cells(row: dict[str, Any], in_turns: bool = False, predicted: bool = False) -> list[str]:
    """The texts of one row in the order of `Section.headings`; a dash where nothing is known.

    Args:
        in_turns: of the section: times of single trainings are then marked.
        predicted: of the section: predictions have a place of their own.
    """

    def number(key: str, show: Callable[[float], str]) -> str:
        if row[key] is None:
            return "-"
        low, high = show(row[f"{key}_min"]), show(row[f"{key}_max"])
        return show(row[key]) + ("" if low == high else f" ({low}-{high})")

    def plain(value: Any, show: Callable[[Any], str] = str) -> str:
        return "-" if value is None else show(value)

    phases = [plain(row[f"{phase}_ms"], _short) for phase in PHASES]
    times = [number("ms_per_step", _short)]
    if in_turns:
        alone = f"{times[0]}*" if row["ms_per_step"] is not None else "-"
        times = [alone if row["turns_ms"] is None else _short(row["turns_ms"])]
    if predicted:
        there = [plain(row[f"predicted_ms_{rate}"], _short) for rate in RATES]
        times.append("-" if row["turns_ms"] is None else " / ".join(there))
    return [
        row["run"] + ("" if row["status"] == "finished" else f" ({row['status']})"),
        plain(row["spec"]),
        plain(row["world_size"]),
        number("quality", lambda v: f"{100 * v:.2f}" if row["metric"] == "accuracy" else f"{v:.2f}"),
        number("bytes_sent_per_step", lambda v: filesize.decimal(round(v))) + _within_nodes(row),
        number("compression_factor", lambda v: f"{_short(v)}x"),
        *times,
        plain(row["speed_vs_baseline"], lambda v: f"{v:.2f}x"),
        plain(row["identical"], lambda same: "yes" if same else "NO"),
        " / ".join(phases) if any(row[f"{phase}_ms"] is not None for phase in PHASES) else "-",
    ]


def _within_nodes(row: dict[str, Any]) -> str:
    """How much of what is sent stays within a node, where anything does for certain."""
    sent = row["bytes_in_node_per_step"]
    return f" ({filesize.decimal(round(sent))} in the node)" if sent else ""


def policy_line(row: dict[str, Any]) -> str | None:
    """A row's policy and the number of its decisions, to stand below the spec; None without a policy."""
    if row["policy"] is None or row["decisions"] is None:
        return row["policy"]
    return f"{row['policy']} ({row['decisions']} decision{'' if row['decisions'] == 1 else 's'})"


def _short(value: float) -> str:
    """Three significant digits but at most two decimals; without an exponent below a million."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - int(np.floor(np.log10(abs(value)))))
    return f"{value:.{min(decimals, 2)}f}" if abs(value) < 1e6 else f"{value:.3g}"
