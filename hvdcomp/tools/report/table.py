"""Turns runs into the rows of the report. Runs that differ only in their seed form a group, for which the mean and the
spread are shown. Groups with the same model and data set form a section, which has its own table and curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import filesize

from hvdcomp.perfmodel import NOISY
from hvdcomp.tools.report.groups import Group
from hvdcomp.tools.report.runs import HEADINGS, PHASES, Run, RunError, printable, shown_quality, three_digits
from hvdcomp.tools.report.series import series_headings, series_notes, series_rows
from hvdcomp.tools.report.turns import RATES, Turns

_NO_BREAK = "\u00a0"  # a space at which lines do not break
_AVERAGED = (
    *("quality", "ms_per_step", "bytes_sent_per_step", "bytes_in_node_per_step"),
    *("compression_factor", "speed_vs_baseline"),
)


@dataclass(eq=False)
class Section:
    """The groups with the same model and data, which share a table and curves. The speed of each group is compared with
    the group `reference`, by default dense training."""

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
        return [row for group in self.groups for row in _rows(group)]

    @property
    def headings(self) -> list[str]:
        on_links = [
            f"{kind.capitalize()} ms{_NO_BREAK}at {', '.join(RATES[rate].replace(' ', _NO_BREAK) for rate in rates)}"
            for kind, rates in self.on_links.items()
        ]
        return ["Run", "Spec", "Ranks", HEADINGS[self.metric], "Sent per step", "CF", "ms per step", *on_links,
                f"Speed vs {self.baseline}", "Ranks agree", "Encode / send / decode ms"]  # fmt: skip

    @property
    def has_series(self) -> bool:
        """Whether any series has several runs or a target. If so, the section has an additional table with a row for
        each series."""
        return self.has_targets or any(len(group.runs) > 1 for group in self.groups)

    @property
    def has_targets(self) -> bool:
        return any(group.target is not None for group in self.groups)

    @property
    def series(self) -> list[dict[str, Any]]:
        """A row for each series, with its means."""
        return series_rows(self.groups)

    @property
    def series_headings(self) -> list[str]:
        return series_headings(self.groups)

    @property
    def simulated(self) -> str | None:
        """A text that explains where the times of simulated ranks come from; None if there are no simulated ranks."""
        links = [run.simulated_link for run in self.runs if run.simulated_link is not None]
        if not links:
            return None
        return (
            "the time of computation is measured, and the time of exchanges is predicted for "
            f"{' and '.join(sorted(set(links)))}"
        )

    @property
    def turns(self) -> Turns | None:
        """The steps that were measured alternately, with and without compression; None if there are none."""
        return next((group.turns for group in self.groups if group.turns_ms is not None), None)

    @property
    def in_turns(self) -> bool:
        """Whether there are steps that were measured alternately."""
        return self.turns is not None

    @property
    def on_links(self) -> dict[str, list[str]]:
        """The keys of RATES for the columns of the table: under "measured", the keys of links on which steps were
        measured, and under "predicted", all other keys, if there are reliable predictions."""
        if self.turns is None:
            return {}
        measured = [rate for rate in RATES if rate in self.turns.measured_ms]
        predicted = [rate for rate in RATES if rate not in measured and any(self.turns.predicted_ms.values())]
        return {kind: rates for kind, rates in (("measured", measured), ("predicted", predicted)) if rates}

    def notes(self) -> list[str]:
        """Notes that explain the times in the table, and list the data that could not be shown."""
        notes = []
        real = [run for run in self.runs if run.summary and run.simulated_link is None]
        if real and all(run.shares_one_machine for run in real):
            sizes = sorted({run.count("world_size") or 0 for run in real})
            ranks = " or ".join(map(str, sizes)) + (" real" if self.simulated else "")
            notes.append(
                f"The {ranks} ranks of a run share one machine. They compete for its cores, and exchange data through "
                "its memory, so compression saves little time here, and may even make steps slower."
            )
        if self.simulated:
            notes.append(
                f"Simulated ranks: {self.simulated}. The processor time of packets and sockets is not counted."
            )
        notes += series_notes(self.groups)
        notes += [
            f"The decisions of {run.name} are not plotted: {printable(run.decisions.left_out)}."
            for run in self.runs
            if run.decisions is not None and run.decisions.left_out
        ]
        if self.turns is not None:
            notes.append(
                "ms per step is a median. The methods took turns, a few steps at a time, so that other programs on "
                "the machine disturbed all of them equally. none and fp16 are the library's own methods. * measured "
                "in this method's own run, so do not compare it with the other rows."
            )
            if measured := self.on_links.get("measured"):
                notes.append(
                    f"Measured at {' and '.join(RATES[rate] for rate in measured)}: the same steps of the same ranks, "
                    "each rank on an emulated host with such a link (docs/emulated-cluster.md)."
                )
            notes.append(_predicted_note(self.turns))
        return notes


def _predicted_note(turns: Turns) -> str:
    """A note that explains how the predictions were made, or why there are no predictions."""
    links = " or ".join(words for rate, words in RATES.items() if rate not in turns.measured_ms)
    worst = next(iter(turns.noisy), None)
    cause = ""
    if worst is not None:
        cause = (
            f"When the calibration was repeated, {len(turns.noisy)} of its measurements differed by more than "
            f"{NOISY:.0%}. The most important is {worst}, which differed by {turns.noisy[worst]:.0%}. "
        )
    if turns.calibrations > 1:
        cause += f"So the model was calibrated {turns.calibrations} times, and the predictions were compared. "
    if not any(turns.predicted_ms.values()):
        return (
            f"There are no predictions for links of {links}, because the performance model could not be calibrated "
            f"here. {cause}A prediction could be wrong by {turns.doubt:.0%}. Repeat the measurements while nothing "
            "else is running."
        )
    note = (
        f"The step times of {turns.world_size} ranks with a link of {links} between them are predicted, not measured. "
        "The performance model that predicts these times was calibrated while the steps were measured. "
        f"{cause}Predictions may be wrong by {turns.noise:.0%}; ignore smaller differences."
    )
    if turns.doubt > NOISY:
        note += f" Predictions that may be wrong by more than {NOISY:.0%} are left out."
    return note


def make_sections(runs: Iterable[Run], baseline: str | None = None, turns: Turns | None = None) -> list[Section]:
    """Groups the runs, finds the baseline of each group, and sorts the groups into sections.

    Args:
        runs: the runs to compare, of any models and data.
        baseline: the name or the spec of the run with which the speed of other runs is compared; None for the spec
            "none".
        turns: steps that were measured alternately. The times of these steps replace the step times of matching runs.

    Raises:
        RunError: if no run is called `baseline`, or `turns` matches no run.
    """
    grouped: dict[Any, Group] = {}
    for run in runs:
        group = Group([run])
        same = (*group.setting, group.spec, frozenset(run.compared_options.items()))
        # Without a summary, the options of a run are unknown, so the run is its own group.
        grouped.setdefault(same if run.summary else run.folder, Group([])).runs.append(run)
    groups = list(grouped.values())
    _set_labels(groups)
    if turns is not None:
        _set_turns(groups, turns)
    references = _set_baselines(groups, baseline)
    sections: dict[Any, Section] = {}
    for group in groups:
        model, data, _ = group.setting
        # For a model and its data, there is only one metric, but a run may have ended before its first evaluation.
        key = (model, data) if model else (None, group.metric)
        section = sections.setdefault(key, Section(model, data, [], "dense" if baseline is None else "baseline"))
        section.groups.append(group)
        if section.reference is None and group in references:
            section.reference = group
    return list(sections.values())


def _set_labels(groups: list[Group]) -> None:
    """Labels each group with its spec, its policy, and the options that distinguish it from other groups with this
    spec."""
    for group in groups:
        rivals = [g for g in groups if g.spec == group.spec and g.setting[:2] == group.setting[:2]]
        described = {id(g): _described(g) for g in rivals}
        options = described[id(group)]
        differing = [
            key
            for key in options
            if key != "policy" and any(other.get(key) != options[key] for other in described.values())
        ]
        run = group.runs[0]
        group.label = ", ".join(part for part in (run.spec, run.policy) if part)
        if not run.summary or not run.spec:
            group.label = f"{run.name} ({run.status})" + (f": {group.label}" if group.label else "")
        elif differing:
            group.label += " (" + ", ".join(f"{key}={options[key]}" for key in differing) + ")"


def _described(group: Group) -> dict[str, str | None]:
    """The values of a group that a label may contain: its options, and its number of ranks. The number of ranks is
    among the options only for simulated ranks."""
    options = {key: value for key, value in group.runs[0].compared_options.items() if key != "simulate_ranks"}
    ranks = group.setting[2]
    return {**options, "ranks": ranks if group.runs[0].simulated_link is None else f"{ranks} simulated"}


def _set_turns(groups: list[Group], turns: Turns) -> None:
    for group in groups:
        if turns.fits(group.setting, group.runs[0].compared_options):
            group.turns = turns
    if not any(group.turns_ms is not None for group in groups):
        raise RunError(
            f"no run matches the steps that were measured in turn: {turns.model} on {turns.data}, {turns.world_size} "
            f"ranks, batches of {turns.batch_size}, with {', '.join(turns.ms)}"
        )


def _set_baselines(groups: list[Group], name: str | None) -> list[Group]:
    """Sets the baseline time of each group, and returns the groups that are baselines."""

    def is_baseline(group: Group) -> bool:
        if name is None:
            return group.spec == "none"
        return name in (group.spec, group.label, *(run.name for run in group.runs))

    if name is not None and not any(map(is_baseline, groups)):
        names = ", ".join(run.name for group in groups for run in group.runs)
        raise RunError(f"no run and no spec is called {name!r}, the name of the baseline; the runs are: {names}")
    for group in groups:
        if group.runs[0].summary:
            same_work = (baseline for baseline in groups if is_baseline(baseline) and baseline.work == group.work)
            group.baseline_ms = next((baseline.compared_ms for baseline in same_work), None)
    return list(filter(is_baseline, groups))


def _rows(group: Group) -> list[dict[str, Any]]:
    """A row of numbers for the group. If the group has several runs, there is also a row for each run."""
    if len(group.runs) == 1:
        return [_row("run", group.runs[0].name, group.runs, group)]
    average = _row("mean", f"mean of {len(group.runs)} runs", group.runs, group)
    return [average, *(_row("seed", run.name, [run], group) for run in group.runs)]


def _row(kind: str, name: str, runs: list[Run], group: Group) -> dict[str, Any]:
    """The numbers for `runs` of a group. `kind` is "run" for a single run, "mean" for several runs, and "seed" for one
    seed."""
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
        "decisions": agreed(lambda run: None if run.decisions is None else run.decisions.count),
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


def cells(row: dict[str, Any], in_turns: bool = False, on_links: Mapping[str, list[str]] | None = None) -> list[str]:
    """The texts of a row, in the order of `Section.headings`. A missing value is a dash.

    Args:
        row: a row of the section, an element of `Section.rows`.
        in_turns: whether the section has steps that were measured alternately. If True, the times of separate training
            runs are marked.
        on_links: the kinds of times on links in the section, as in `Section.on_links`. Each kind has a cell.
    """

    def number(key: str, show: Callable[[float], str]) -> str:
        if row[key] is None:
            return "-"
        low, high = show(row[f"{key}_min"]), show(row[f"{key}_max"])
        return show(row[key]) + ("" if low == high else f" ({low}-{high})")

    def plain(value: Any, show: Callable[[Any], str] = str) -> str:
        return "-" if value is None else show(value)

    phases = [plain(row[f"{phase}_ms"], three_digits) for phase in PHASES]
    times = [number("ms_per_step", three_digits)]
    if in_turns:
        own_time = f"{times[0]}*" if row["ms_per_step"] is not None else "-"
        times = [own_time if row["turns_ms"] is None else three_digits(row["turns_ms"])]
    for kind, rates in (on_links or {}).items():
        link_times = [plain(row[f"{kind}_ms_{rate}"], three_digits) for rate in rates]
        times.append("-" if row["turns_ms"] is None else " / ".join(link_times))
    return [
        row["run"] + ("" if row["status"] == "finished" else f" ({row['status']})"),
        plain(row["spec"]),
        plain(row["world_size"]),
        number("quality", lambda v: shown_quality(row["metric"], v)),
        number("bytes_sent_per_step", lambda v: filesize.decimal(round(v))) + _within_nodes(row),
        number("compression_factor", lambda v: f"{three_digits(v)}x"),
        *times,
        plain(row["speed_vs_baseline"], lambda v: f"{v:.2f}x"),
        plain(row["identical"], lambda same: "yes" if same else "NO"),
        " / ".join(phases) if any(row[f"{phase}_ms"] is not None for phase in PHASES) else "-",
    ]


def _within_nodes(row: dict[str, Any]) -> str:
    """The sent bytes that stay within a node; "" if no bytes stay within a node, or if their number is unknown."""
    sent = row["bytes_in_node_per_step"]
    return f" ({filesize.decimal(round(sent))} in the node)" if sent else ""


def policy_line(row: dict[str, Any]) -> str | None:
    """The policy of a row, and the number of its decisions; None if it has no policy."""
    if row["policy"] is None or row["decisions"] is None:
        return row["policy"]
    return f"{row['policy']} ({row['decisions']} decision{'' if row['decisions'] == 1 else 's'})"
