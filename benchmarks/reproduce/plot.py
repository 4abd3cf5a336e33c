"""Draws the curves of an outcome. This module needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.reproduce.outcome import Curve, Outcome
from hvdcomp.files import replace_files
from hvdcomp.perfmodel.figures import COLORS, LINES, as_png, new_figure


def draw(outcome: Outcome, title: str, file: Path) -> None:
    """Writes a PNG with a plot for each group of curves. Raises OSError if the file cannot be written."""
    figure = new_figure(5.2 * len(outcome.curves) + 2, 4)
    (all_axes,) = figure.subplots(1, len(outcome.curves), squeeze=False)
    for axes, (label, curves) in zip(all_axes, outcome.curves.items(), strict=True):
        if curves and isinstance(curves[0].x[0], str):
            _bars(axes, list(curves))
        else:
            _lines(axes, list(curves))
            axes.set_xlabel(outcome.x)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=9)
    replace_files({file: as_png(figure, dots_per_inch=90)})


def _bars(axes: Axes, curves: list[Curve]) -> None:
    width = 0.8 / len(curves)
    for number, curve in enumerate(curves):
        places = [place + (number - (len(curves) - 1) / 2) * width for place in range(len(curve.x))]
        heights = [float("nan") if value is None else value for value in curve.y]
        axes.bar(places, heights, width, label=curve.label, color=COLORS[number % len(COLORS)])
    axes.set_xticks(range(len(curves[0].x)), [str(label) for label in curves[0].x], fontsize=7)


def _lines(axes: Axes, curves: list[Curve]) -> None:
    for number, curve in enumerate(curves):
        values = [float("nan") if value is None else value for value in curve.y]
        line = LINES[number // len(COLORS) % len(LINES)]
        style: Any = {"color": COLORS[number % len(COLORS)], "linestyle": line}
        axes.plot(curve.x, values, label=curve.label, linewidth=1.4, marker="." if len(values) < 8 else "", **style)
    shown = [value for curve in curves for value in curve.y if value is not None]
    if shown and min(shown) > 0 and max(shown) > 20 * min(shown):
        axes.set_yscale("log")
