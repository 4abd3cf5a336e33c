"""Computes the results of each series: the means over the seeds with their 95% confidence intervals, and the costs of
reaching a target."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import filesize

from hvdcomp.tools.report.groups import Group
from hvdcomp.tools.report.runs import HEADINGS, Run, finite, printable, shown_quality, three_digits
from hvdcomp.tools.train.spread import Estimate, estimate

REFERENCES = ("none", "fp16")
"""The specs of reference series. The report compares the time that another series needs to reach a target with the
times of these series."""

_FINAL: dict[str, Callable[[Run], float | None]] = {
    "loss": lambda run: run.number("loss"),
    "quality": lambda run: run.quality,
    "bytes_sent": lambda run: run.number("bytes_sent"),
    "compression_factor": lambda run: run.compression_factor,
    "trained_seconds": lambda run: run.number("trained_seconds"),
}
_TARGET, _SPEED = "Target reached", "Speed to target vs "  # headings of columns
_TO_TARGET = {"steps_to_target": "step", "bytes_to_target": "bytes_sent", "seconds_to_target": "trained_seconds"}


def series_rows(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """Creates a table row of numbers for each series of runs. Means are taken over the finished runs."""
    groups = list(groups)
    return [_row(group, groups) for group in groups]


def _row(group: Group, groups: list[Group]) -> dict[str, Any]:
    first = group.runs[0]
    target = None if group.target is None else str(group.target)
    reached = [run for run in group.runs if run.reached is not None]
    row: dict[str, Any] = {
        "series": group.label,
        "spec": first.spec,
        "policy": first.policy,
        "model": first.text("model"),
        "data": first.text("data"),
        "world_size": first.count("world_size"),
        "simulated_link": first.simulated_link,
        "seeds": len(_by_seed(group.runs, lambda run: 0.0)),
        "runs": len(group.runs),
        "unfinished": ", ".join(_unfinished(group)),
        "metric": group.metric,
        "target": target,
        "reached": None if target is None else len(reached),
    }
    for key, get in _FINAL.items():
        row |= _columns(key, estimate(_by_seed(group.finished, get)))
    for key, name in _TO_TARGET.items():
        row |= _columns(key, _to_target(group, name))
    for spec in REFERENCES:
        row |= _speed(group, spec, groups)
    return row


def _columns(key: str, estimated: Estimate | None) -> dict[str, float | None]:
    mean, half = (None, None) if estimated is None else (estimated.mean, estimated.half)
    return {key: mean, f"{key}_ci95": half}


def _by_seed(runs: Iterable[Run], get: Callable[[Run], float | None]) -> list[float]:
    """One value for each seed. If a seed has several runs, the value is their mean, because they are not independent
    samples."""
    values: dict[Any, list[float]] = {}
    for run in runs:
        value, seed = get(run), run.count("seed")
        if value is not None:
            values.setdefault(run.folder if seed is None else seed, []).append(value)
    return [statistics.fmean(seed_values) for seed_values in values.values()]


def _unfinished(group: Group) -> list[str]:
    """Texts that give the number of runs for each status other than finished."""
    counts: dict[str, int] = {}
    for run in group.runs:
        if run.status != "finished":
            counts[run.status] = counts.get(run.status, 0) + 1
    return [f"{count} {printable(status)}" for status, count in counts.items()]


def mean_to_target(group: Group, name: str) -> float | None:
    """The mean cost of reaching the target, over the runs that reached the target; None if no run did. `name` is the
    kind of cost: "step", "bytes_sent" or "trained_seconds"."""
    estimated = _to_target(group, name)
    return None if estimated is None else estimated.mean


def _to_target(group: Group, name: str) -> Estimate | None:
    """The cost of reaching the target, over the runs that reached it."""
    return estimate(_by_seed(group.runs, lambda run: None if run.reached is None else finite(run.reached[name])))


def _speed(group: Group, spec: str, groups: Iterable[Group]) -> dict[str, Any]:
    """Computes how many times faster this series reaches the target than the series of `spec` with the same work. The
    second entry of the result says from which runs this speedup is computed.

    If there are several such series, the series whose runs all reached the target are preferred. If several such series
    remain, the fastest series is used.
    """
    own_seconds = mean_to_target(group, "trained_seconds")
    rivals = [other for other in groups if other.spec == spec and other.is_plain and other.work == group.work]
    times = {
        rival: seconds
        for rival in rivals
        if rival.target == group.target and (seconds := mean_to_target(rival, "trained_seconds")) is not None
    }
    column = f"speed_to_target_vs_{spec}"
    if not own_seconds or not times:
        return {column: None, f"{column}_over": None}
    rival = min(times, key=lambda rival: (not rival.always_reached, times[rival]))
    always = group.always_reached and rival.always_reached
    return {column: times[rival] / own_seconds, f"{column}_over": "all runs" if always else "runs that reached it"}


def series_headings(groups: Iterable[Group]) -> list[str]:
    """The headings of `series_cells`. Headings for a target are included only if a series has a target."""
    groups = list(groups)
    metric = next((group.metric for group in groups if group.metric), None)
    headings = ["Series", "Seeds", "Loss", HEADINGS[metric], "Sent in total", "CF", "Seconds"]
    if any(group.target is not None for group in groups):
        headings += [_TARGET, "Steps to target", "Sent to target", "Seconds to target"]
        with_target = {group.spec for group in groups if group.target is not None and group.is_plain}
        headings += [_SPEED + spec for spec in REFERENCES if spec in with_target]
    return headings


def series_notes(groups: Iterable[Group]) -> list[str]:
    """Notes that explain the numbers of series."""
    groups = list(groups)
    notes = []
    if any(len(group.runs) > 1 for group in groups):
        notes.append(
            "A series consists of runs that differ only in their seed. The numbers are means over the seeds of the "
            "finished runs; ± is half the width of the 95% confidence interval, by Student's t. Loss and quality are "
            "the values at the end of a run. Seconds are the time of training without evaluations."
        )
    if any(group.target is not None for group in groups):
        notes.append(
            "Steps, bytes and seconds to the target are means over the runs that reached the target. Speed to target "
            "compares these seconds with the fastest series of the named spec that has the same target, ranks, batch "
            "size and link. * marks comparisons in which some runs did not reach the target."
        )
    return notes


def series_cells(row: dict[str, Any], headings: Sequence[str]) -> list[str]:
    """The texts of a row, one for each of `series_headings`. A missing value is a dash."""

    def number(key: str, show: Callable[[float], str]) -> str:
        if row[key] is None:
            return "-"
        half = row[f"{key}_ci95"]
        return show(row[key]) + ("" if half is None or show(half) == show(0.0) else f" (±{show(half)})")

    remarks = [f"{row['runs']} runs"] if row["runs"] != row["seeds"] else []
    remarks += [row["unfinished"]] if row["unfinished"] else []
    texts = [
        row["series"],
        str(row["seeds"]) + (f" ({', '.join(remarks)})" if remarks else ""),
        number("loss", lambda v: f"{v:.3f}"),
        number("quality", lambda v: shown_quality(row["metric"], v)),
        number("bytes_sent", lambda v: filesize.decimal(round(v))),
        number("compression_factor", lambda v: f"{three_digits(v)}x"),
        number("trained_seconds", three_digits),
    ]
    if _TARGET in headings:
        texts += [
            "-" if row["target"] is None else f"{row['reached']} of {row['runs']} ({row['target']})",
            number("steps_to_target", three_digits),
            number("bytes_to_target", lambda v: filesize.decimal(round(v))),
            number("seconds_to_target", three_digits),
            *(_speed_cell(row, f"speed_to_target_vs_{spec}") for spec in REFERENCES if _SPEED + spec in headings),
        ]
    return texts


def _speed_cell(row: dict[str, Any], column: str) -> str:
    if row[column] is None:
        return "-"
    return f"{row[column]:.2f}x" + ("" if row[f"{column}_over"] == "all runs" else "*")
