"""Draws the curves of one section of the report: accuracy or perplexity, training loss, and time per step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hvdcomp.perfmodel.figures import COLORS, INK, LINES
from hvdcomp.tools.report.bands import Curve, band_of
from hvdcomp.tools.report.groups import Group
from hvdcomp.tools.report.runs import PHASES, Run
from hvdcomp.tools.report.table import Section
from hvdcomp.tools.report.turns import RATES
from hvdcomp.tools.train.target import Target

LEGEND: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "labelcolor": INK}
_PHASE_COLORS = ("#0072b2", "#e69f00", "#009e73", "#b9b9b9")
HALF_WIDTH = 5.4  # width in inches of a figure that fills half of the page, or a phone
_LEGEND_WIDTH = 64  # number of characters that fit into a line of such a figure's legend
_PERCENT = "accuracy"  # the only metric that is a percentage and cannot diverge
_SEVERAL = " Line: mean over the seeds, at the steps that all finished runs have. Band: lowest to highest value."


@dataclass(frozen=True)
class Against:
    """The x axis of a curve: its name in file names, its label, and its name in captions."""

    name: str
    label: str
    words: str


_BYTES = Against("bytes", "megabytes sent by each rank", "the megabytes that each rank sent")
_SECONDS = Against("seconds", "seconds of training", "the seconds of training, without evaluations")
_STEPS = Against("steps", "step", "the number of steps")


def draw_section(section: Section) -> Iterator[tuple[str, str, Figure]]:
    """Yields (short name, caption, figure) for each kind of curve for which the section has data.

    The figures of quality over bytes and of quality over seconds come first. If step times were measured in alternating
    steps, only these times are shown, because times of separate training runs cannot be compared.
    """
    yield from _draw_quality(section, _BYTES)
    yield from _draw_quality(section, _SECONDS)
    yield from _draw_loss(section, _BYTES)
    if section.in_turns:
        caption = "Time of a step: measured here, with all methods in turn"
        for kind, rates in section.on_links.items():
            caption += f", and {kind} for links of {' and '.join(RATES[rate] for rate in rates)}"
        yield "time", caption, _draw_turns(section)
    elif _drawn(section):
        caption = (
            "Time of a step, after the first epoch: median, quartiles and the span of 90% of the steps; on the right, "
            "the medians of the measured phases of a step"
        )
        yield "time", f"{caption}.{_simulated(section)}", _draw_times(section)
    yield from _draw_loss(section, _STEPS)
    yield from _draw_quality(section, _STEPS)


def _drawn(section: Section) -> bool:
    return any(run.steps["step"].size for run in section.runs)


def _simulated(section: Section) -> str:
    """A sentence about simulated ranks for a caption; "" if no rank is simulated."""
    return "" if section.simulated is None else f" Simulated ranks: {section.simulated}."


def _draw_loss(section: Section, against: Against) -> Iterator[tuple[str, str, Figure]]:
    """Draws the training loss as a running mean. If a series has only one run, the loss of each step is drawn in the
    background."""
    if not _drawn(section):
        return
    figure, axes = _figure(section)
    for group, style in _styled(section):
        curves = [_loss_curve(run, against) for run in _with_data(group.finished or group.runs, "steps")]
        if len(curves) == 1:
            (raw,) = curves
            axes.plot(raw.x, raw.y, color=style["color"], linewidth=0.5, alpha=0.25, zorder=0.5, rasterized=True)
        _draw_band(axes, [Curve(curve.steps, curve.x, smooth(curve.y)) for curve in curves], style)
    _finish(axes, section, against, "training loss", limited=True)
    caption = f"Training loss against {against.words}: running mean over 2% of the run's steps"
    if any(len(group.runs) == 1 for group in section.groups):
        caption += ". Faint line: the loss of each step" + (" of a single run" if _has_bands(section) else "")
    yield f"loss-{against.name}", f"{caption}.{_of_several(section)}", figure


def _loss_curve(run: Run, against: Against) -> Curve:
    steps = run.steps["step"]
    x = np.nancumsum(run.steps["bytes_sent"]) / 1e6 if against is _BYTES else steps
    return Curve(steps, x, run.steps["loss"])


def _draw_quality(section: Section, against: Against) -> Iterator[tuple[str, str, Figure]]:
    """Draws the metric of the evaluations, and the targets. The loss is also drawn if it is a target."""
    targets = dict.fromkeys(group.target for group in section.groups if group.target is not None)
    metrics = dict.fromkeys((section.metric, *(target.metric for target in targets)))
    for metric in filter(None, metrics):
        curves = {
            group: [_quality_curve(run, against, metric) for run in _with_data(group.runs, "evaluations")]
            for group in section.groups
        }
        if not any(np.isfinite(curve.x + curve.y).any() for group_curves in curves.values() for curve in group_curves):
            continue
        figure, axes = _figure(section)
        for group, style in _styled(section):
            finished = [_quality_curve(run, against, metric) for run in _with_data(group.finished, "evaluations")]
            _draw_band(axes, finished or curves[group], style)
            for curve in curves[group]:
                axes.plot(curve.x[-1:], curve.y[-1:], marker="o", markersize=3, color=style["color"])
        shown = [target for target in targets if target.metric == metric]
        for target in shown:
            _draw_target(axes, target)
        label = " ".join((*_parts(section), metric)) + (" (%)" if metric == _PERCENT else "")
        _finish(axes, section, against, label, limited=metric != _PERCENT)
        caption = f"{label[0].upper()}{label[1:]} against {against.words}.{_of_several(section)} Dot: end of a run."
        if shown:
            caption += f" Horizontal line: the target, {' and '.join(map(str, shown))}."
        caption += _simulated(section) if against is _SECONDS else ""
        name = metric if metric == section.metric else f"evaluated-{metric}"
        yield f"{name}-{against.name}", caption, figure


def _quality_curve(run: Run, against: Against, metric: str) -> Curve:
    evaluations = run.evaluations
    steps = evaluations["step"]
    if against is _BYTES:
        x = evaluations["bytes_sent"] / 1e6
    else:
        x = evaluations["trained_seconds"] if against is _SECONDS else steps
    return Curve(steps, x, evaluations[metric] * (100 if metric == _PERCENT else 1))


def _parts(section: Section) -> list[str]:
    """The part of the data on which runs were evaluated; empty if the runs used different parts."""
    parts = {run.part for run in section.runs if run.part is not None}
    return sorted(parts) if len(parts) == 1 else []


def _with_data(runs: list[Run], of: str) -> list[Run]:
    """The runs that have data of the kind `of`, which is "steps" or "evaluations"."""
    return [run for run in runs if getattr(run, of)["step"].size]


def _draw_band(axes: Axes, curves: list[Curve], style: dict[str, Any]) -> None:
    """Draws the mean and the band. Policies may change the number of steps. If the runs therefore have no step in
    common, draws a line for each run."""
    if not curves:
        return
    band = band_of(curves)
    if not band.x.size:
        for curve in curves:
            axes.plot(curve.x, curve.y, **style)
    axes.plot(band.x, band.mean, **style)
    if len(curves) > 1:
        axes.fill_between(band.x, band.low, band.high, color=style["color"], alpha=0.18, linewidth=0)


def _draw_target(axes: Axes, target: Target) -> None:
    value = target.value * (100 if target.metric == _PERCENT else 1)
    axes.axhline(value, color=INK, linewidth=1, linestyle=(0, (6, 3)), zorder=0.8)
    place = axes.get_yaxis_transform()  # x is a share of the width, and y is a value
    axes.text(0.01, value, f"target {value:g}", transform=place, color=INK, fontsize=8, va="bottom")


def _has_bands(section: Section) -> bool:
    return any(len(group.runs) > 1 for group in section.groups)


def _of_several(section: Section) -> str:
    return _SEVERAL if _has_bands(section) else ""


def _styled(section: Section) -> Iterator[tuple[Group, dict[str, Any]]]:
    """Each series, with the style of its line."""
    for number, group in enumerate(section.groups):
        yield group, {"color": COLORS[number % 7], "linestyle": LINES[number // 7 % 4], "linewidth": 1.6}


def _figure(section: Section) -> tuple[Figure, Axes]:
    """Creates a figure with the legend of all series below it. The figure is no wider than a phone can show."""
    labels = [_legend_label(group) for group in section.groups]
    columns = max(1, min(3, _LEGEND_WIDTH // (max(map(len, labels)) + 8)))
    figure = Figure(figsize=(HALF_WIDTH, 3.8 + 0.22 * (len(labels) // columns)), layout="constrained")
    axes = figure.subplots()
    handles = [line for _, style in _styled(section) for line in axes.plot([], [], **style)]
    legend = figure.legend(handles, labels, ncols=columns, **LEGEND)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure, axes


def _finish(axes: Axes, section: Section, against: Against, y_label: str, limited: bool) -> None:
    """Sets the axes, their labels and their height, for all kinds of curves."""
    if against is _BYTES and any((run.steps["bytes_sent"] > 0).any() for run in section.runs):
        axes.set_xscale("log")
    axes.set_xlabel(against.label)
    tidy(axes)
    cut = limited and limit_height(axes)
    axes.set_ylabel(f"{y_label} (higher values cut off)" if cut else y_label)


def _draw_turns(section: Section) -> Figure:
    """Draws bars for each method that was measured in alternating steps: one for its measured time, and one for each
    prediction."""
    # reversed, because the first bar is at the bottom
    groups = [group for group in section.groups if group.turns_ms is not None][::-1]
    kinds = {"turns_ms": "measured here"}
    at = {rate: kind for kind, rates in section.on_links.items() for rate in rates}
    kinds |= {f"{at[rate]}_ms_{rate}": f"{at[rate]}, {RATES[rate]}" for rate in reversed(RATES) if rate in at}
    figure = Figure(figsize=(HALF_WIDTH, 1.6 + 0.25 * len(kinds) * len(groups)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(kinds)
    places = np.arange(len(groups))
    for number, (kind, words) in enumerate(kinds.items()):
        offset = ((len(kinds) - 1) / 2 - number) * height
        times = [group.columns()[kind] for group in groups]
        lengths = [np.nan if ms is None else ms for ms in times]
        bars = axes.barh(places + offset, lengths, height, label=words, color=COLORS[number])
        labels = ["" if ms is None else f"{ms:.3g}" for ms in times]
        axes.bar_label(bars, labels, padding=2, color=INK, fontsize=8)
    axes.set_yticks(places, [_legend_label(group, 24) for group in groups])
    for text in axes.get_yticklabels():
        text.set_parse_math(False)
    axes.margins(x=0.12)
    axes.set_xlabel("ms per step")
    tidy(axes)
    axes.grid(False, axis="y")
    figure.legend(ncols=len(kinds), **LEGEND)
    return figure


def _draw_times(section: Section) -> Figure:
    groups = section.groups[::-1]  # reversed, because the first bar is at the bottom
    figure = Figure(figsize=(11, 1.6 + 0.42 * len(groups)), layout="constrained")
    spread, bars = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(groups))
    times = [np.concatenate([run.times("ms") for run in group.runs]) for group in groups]
    p5, p25, medians, p75, p95 = np.array(
        [np.percentile(ms, (5, 25, 50, 75, 95)) if ms.size else np.zeros(5) for ms in times]
    ).T
    spread.hlines(places, p5, p95, color=INK)
    spread.barh(places, p75 - p25, left=p25, color=INK, height=0.4)
    spread.plot(medians, places, "|", color=COLORS[1], markersize=14, markeredgewidth=2.5)
    spread.set_xlabel("ms per step")
    spread.set_xlim(left=0)
    spread.set_ylim(-0.6, len(groups) - 0.4)
    left = np.zeros(len(groups))
    for phase, color in zip((*PHASES, "rest"), _PHASE_COLORS, strict=True):
        if phase == "rest":
            width = np.maximum(0, medians - left)
        else:
            width = np.array([group.phase(phase) or 0.0 for group in groups])
        label = "rest (or not measured)" if phase == "rest" else phase
        bars.barh(places, width, left=left, color=color, height=0.55, label=label)
        left += width
    bars.set_xlabel("ms per step (median)")
    spread.set_yticks(places, [_legend_label(group, 34) for group in groups])
    for text in spread.get_yticklabels():
        text.set_parse_math(False)
    for axes in (spread, bars):
        tidy(axes)
        axes.grid(False, axis="y")
    figure.legend(ncols=4, **LEGEND)
    return figure


def smooth(values: np.ndarray) -> np.ndarray:
    """The centered running mean over a fiftieth of the steps (over fewer steps at both ends). The mean is NaN at steps
    with a missing value."""
    is_finite = np.isfinite(values)
    sums = np.cumsum(np.concatenate([[0.0], np.where(is_finite, values, 0.0)]))
    counts = np.cumsum(np.concatenate([[0], is_finite]))
    centers = np.arange(values.size)
    reach = np.minimum(values.size // 100, np.minimum(centers, values.size - 1 - centers))
    low, high = centers - reach, centers + reach + 1
    return np.where(is_finite, (sums[high] - sums[low]) / np.maximum(1, counts[high] - counts[low]), np.nan)


def limit_height(axes: Axes) -> bool:
    """Limits the y axis to three times the highest value with which a curve begins. Otherwise a diverging run would
    make the other curves flat."""
    lines = [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines]
    firsts = [values[np.isfinite(values)][0] for values in lines if np.isfinite(values).any()]
    cut = bool(firsts) and axes.get_ylim()[1] > 3 * max(firsts) > 0
    if cut:
        axes.set_ylim(bottom=0, top=3 * max(firsts))
    return cut


def _legend_label(group: Group, width: int = 100) -> str:
    seeds = f" · {len(group.runs)} runs" if len(group.runs) > 1 else ""
    label = group.label if len(group.label) <= width else group.label[: width - 1] + "…"
    return label + seeds


def tidy(axes: Axes) -> None:
    """Gives the axes colors that are legible on light and dark pages, adds a faint grid, and removes the frame."""
    axes.grid(True, color=INK, alpha=0.25, linewidth=0.6)
    axes.set_facecolor("none")
    axes.tick_params(colors=INK, which="both")
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
