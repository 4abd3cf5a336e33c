"""Draws the curves of one section of the report: loss, accuracy or perplexity, and time per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hvdcomp.report.runs import PHASES, Run
from hvdcomp.report.table import Group, Section
from hvdcomp.report.turns import RATES

# Okabe and Ito's palette less its yellow and black, which vanish on a light or a dark page.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888")
_LINES = ("solid", "dashed", "dotted", "dashdot")
INK = "#7d7d7d"  # axes and texts: legible on white and on near black
LEGEND: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "labelcolor": INK}
_PHASE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#b9b9b9")
HALF_WIDTH = 5.4  # inches, of a figure that has another beside it, or the whole of a phone
_LEGEND_WIDTH = 64  # characters that fit into it
_AXIS_LABELS = {"accuracy": "test accuracy (%)", "perplexity": "test perplexity"}


def draw_section(section: Section) -> Iterator[tuple[str, str, Figure]]:
    """Yield (short name, caption, figure) for each kind of curve that the section has data for.

    What each byte bought comes first. Times are those of steps in turns where there are such: those of single trainings
    cannot be compared.
    """
    yield from _draw_curves(section, against_bytes=True)
    if section.in_turns:
        caption = "Time of one step: measured here, all methods in turns"
        if section.predicted:
            caption += f", and predicted for links of {' and '.join(RATES.values())}"
        yield "time", caption, _draw_turns(section)
    elif _drawn(section):
        caption = (
            "Time of one step, after the first epoch: median, quartiles and the span of 90% of the steps; on "
            "the right, the medians of its phases where they were measured"
        )
        yield "time", caption, _draw_times(section)
    yield from _draw_curves(section, against_bytes=False)


def _draw_curves(section: Section, against_bytes: bool) -> Iterator[tuple[str, str, Figure]]:
    place = "bytes" if against_bytes else "steps"
    against = "the megabytes that each rank sent" if against_bytes else "the number of steps"
    if _drawn(section):
        shown = "running mean over 2% of the run's steps; faintly, the loss of each step"
        caption = f"Training loss against {against}: {shown}"
        yield f"loss-{place}", caption, _curves(section, against_bytes, "training loss", _draw_loss)
    if section.metric is not None:
        label = _AXIS_LABELS[section.metric]
        caption = f"{label[0].upper()}{label[1:]} after each epoch, against {against}"
        yield f"{section.metric}-{place}", caption, _curves(section, against_bytes, label, _draw_quality)


def _drawn(section: Section) -> bool:
    return any(run.steps["step"].size for run in section.runs)


def _curves(
    section: Section, against_bytes: bool, y_label: str, draw: Callable[[Axes, Run, bool, dict], None]
) -> Figure:
    """The curves of all runs, against bytes sent or against steps; no wider than a phone can show."""
    labels = [_legend_label(group) for group in section.groups]
    columns = max(1, min(3, _LEGEND_WIDTH // (max(map(len, labels)) + 8)))
    figure = Figure(figsize=(HALF_WIDTH, 3.8 + 0.22 * (len(labels) // columns)), layout="constrained")
    axes = figure.subplots()
    handles = []
    for number, group in enumerate(section.groups):
        style: dict[str, Any] = {"color": COLOURS[number % 7], "linestyle": _LINES[number // 7 % 4], "linewidth": 1.6}
        for run in group.runs:
            draw(axes, run, against_bytes, style)
        handles += axes.plot([], [], **style)
    if against_bytes and any((run.steps["bytes_sent"] > 0).any() for run in section.runs):
        axes.set_xscale("log")
    axes.set_xlabel("megabytes sent by each rank" if against_bytes else "step")
    tidy(axes)
    cut = y_label != _AXIS_LABELS["accuracy"] and limit_height(axes)
    axes.set_ylabel(f"{y_label} (higher values cut off)" if cut else y_label)
    legend = figure.legend(handles, labels, ncols=columns, **LEGEND)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _draw_loss(axes: Axes, run: Run, against_bytes: bool, style: dict) -> None:
    loss, steps = run.steps["loss"], run.steps["step"]
    x = np.nancumsum(run.steps["bytes_sent"]) / 1e6 if against_bytes else steps
    axes.plot(x, loss, color=style["color"], linewidth=0.5, alpha=0.25, zorder=0.5, rasterized=True)
    axes.plot(x, smooth(loss), **style)


def _draw_quality(axes: Axes, run: Run, against_bytes: bool, style: dict) -> None:
    values = run.epochs["accuracy"] * 100 if run.metric == "accuracy" else run.epochs["perplexity"]
    x = run.epochs["bytes_sent"] / 1e6 if against_bytes else run.epochs["step"]
    axes.plot(x, values, marker="o" if values.size <= 30 else None, markersize=3, **style)


def _draw_turns(section: Section) -> Figure:
    """Bars for each method that was measured in turns: what was measured, and each prediction."""
    groups = [group for group in section.groups if group.turns_ms is not None][::-1]  # bars are counted from below
    kinds = {"turns_ms": "measured here"}
    if section.predicted:
        kinds |= {f"predicted_ms_{rate}": f"predicted, {words}" for rate, words in reversed(RATES.items())}
    figure = Figure(figsize=(HALF_WIDTH, 1.6 + 0.25 * len(kinds) * len(groups)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(kinds)
    places = np.arange(len(groups))
    for number, (kind, words) in enumerate(kinds.items()):
        offset = ((len(kinds) - 1) / 2 - number) * height
        known = [group.columns()[kind] for group in groups]
        lengths = [np.nan if ms is None else ms for ms in known]
        bars = axes.barh(places + offset, lengths, height, label=words, color=COLOURS[number])
        written = ["" if ms is None else f"{ms:.3g}" for ms in known]
        axes.bar_label(bars, written, padding=2, color=INK, fontsize=8)
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
    groups = section.groups[::-1]  # bars are counted from below
    figure = Figure(figsize=(11, 1.6 + 0.42 * len(groups)), layout="constrained")
    spread, bars = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(groups))
    times = [np.concatenate([run.times("ms") for run in group.runs]) for group in groups]
    p5, p25, medians, p75, p95 = np.array(
        [np.percentile(ms, (5, 25, 50, 75, 95)) if ms.size else np.zeros(5) for ms in times]
    ).T
    spread.hlines(places, p5, p95, color=INK)
    spread.barh(places, p75 - p25, left=p25, color=INK, height=0.4)
    spread.plot(medians, places, "|", color=COLOURS[1], markersize=14, markeredgewidth=2.5)
    spread.set_xlabel("ms per step")
    spread.set_xlim(left=0)
    spread.set_ylim(-0.6, len(groups) - 0.4)
    left = np.zeros(len(groups))
    for phase, colour in zip((*PHASES, "rest"), _PHASE_COLOURS, strict=True):
        if phase == "rest":
            width = np.maximum(0, medians - left)
        else:
            width = np.array([group.phase(phase) or 0.0 for group in groups])
        label = "rest (or not measured)" if phase == "rest" else phase
        bars.barh(places, width, left=left, color=colour, height=0.55, label=label)
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
    """Centred running mean over a fiftieth of the steps, fewer at both ends; NaN where there is no value."""
    known = np.isfinite(values)
    sums = np.cumsum(np.concatenate([[0.0], np.where(known, values, 0.0)]))
    counts = np.cumsum(np.concatenate([[0], known]))
    centres = np.arange(values.size)
    reach = np.minimum(values.size // 100, np.minimum(centres, values.size - 1 - centres))
    low, high = centres - reach, centres + reach + 1
    return np.where(known, (sums[high] - sums[low]) / np.maximum(1, counts[high] - counts[low]), np.nan)


def limit_height(axes: Axes) -> bool:
    """Keep a diverging run from flattening all other curves: cut at three times the highest first value."""
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
    """Colour the axes to be legible on any page, with a faint grid and without a frame."""
    axes.grid(True, color=INK, alpha=0.25, linewidth=0.6)
    axes.set_facecolor("none")
    axes.tick_params(colors=INK, which="both")
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
