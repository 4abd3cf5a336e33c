"""Draws two figures of the performance model: the step times of a sweep, and the map. This module needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from hvdcomp.files import replace_files
from hvdcomp.perfmodel.advice import UNCOMPRESSED
from hvdcomp.perfmodel.figures import COLORS, INK, LINES, as_png, new_figure
from hvdcomp.perfmodel.map import short
from hvdcomp.perfmodel.sweep import AXES, Sweep
from hvdcomp.perfmodel.verdict import times


def draw(swept: Sweep, title: str, marked: float | None, file: Path) -> None:
    """Writes a PNG of a sweep: the step times of all methods, and below them the compression factor that an ideal
    compressor would need.

    Args:
        swept: the predictions of the sweep.
        title: title of the figure.
        marked: the value on the sweep's axis that the figure marks with a line, such as the calibrated bandwidth; None
            for no line.
        file: path of the PNG.

    Raises:
        OSError: if the file cannot be written.
    """
    figure = new_figure(8, 6.2)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    compressed = [spec for spec in swept.step_s if spec != UNCOMPRESSED]
    for number, spec in enumerate(compressed):
        # The seventh color is gray, like the line of dense gradients.
        style = {"color": COLORS[number % 6], "linestyle": LINES[number // 6 % len(LINES)]}
        above.plot(swept.values, 1e3 * swept.step_s[spec], label=spec, linewidth=1.5, **style)
    above.plot(swept.values, 1e3 * swept.step_s[UNCOMPRESSED], label=UNCOMPRESSED, color=INK, linewidth=2.2)
    above.set_ylabel("time of a step (ms)")
    above.set_yscale("log")
    above.set_title(title, fontsize=10)
    below.plot(swept.values, swept.least_factor, color=INK)
    below.set_ylabel("least factor for\n95 % of linear scaling")
    below.set_yscale("log")
    below.set_xlabel(AXES[swept.axis].label)
    for axes in (above, below):
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
        _plain_ticks(axes)
        if marked is not None and swept.values[0] <= marked <= swept.values[-1]:
            axes.axvline(marked, color=INK, linestyle=":", linewidth=1)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    replace_files({file: as_png(figure, dots_per_inch=90)})


def _plain_ticks(axes: Axes) -> None:
    """Labels the ticks between the powers of ten on a short logarithmic axis, which may not contain any power of
    ten."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        digits = (2, 3, 5, 7) if high < 10 * low else (2, 5) if high < 1000 * low else ()
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(partial(_if_leading_digit, digits)))


def _if_leading_digit(digits: tuple[int, ...], value: float, _position: int | None) -> str:
    return f"{value:g}" if _leading_digit(value) in digits else ""


def _leading_digit(value: float) -> int:
    return round(value / 10 ** np.floor(np.log10(value))) if value > 0 else 0


_FULL_COLOR = 4.0
"""A cell of the map has its full color at this speedup or a higher one."""


def draw_map(rows: Sequence[dict[str, Any]], title: str, file: Path) -> None:
    """Writes a PNG of the map, with a panel for each number of ranks.

    A cell shows the fastest method and its speedup over the faster of dense and fp16. If the speedup is within the
    model's error, the cell is gray and empty.

    Args:
        rows: the cells of the map, as `map.cells` yields them.
        title: title of the figure.
        file: path of the PNG.

    Raises:
        OSError: if the file cannot be written.
    """
    ranks, models, rates = (list(dict.fromkeys(row[key] for row in rows)) for key in ("ranks", "model", "gbps"))
    figure = new_figure(1.6 + 1.25 * len(rates), 1.0 + len(ranks) * (0.5 + 0.42 * len(models)))
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(len(ranks), 1, squeeze=False)[:, 0]
    for axes, number in zip(panels, ranks, strict=True):
        for row in rows:
            if row["ranks"] == number:
                _draw_cell(axes, row, rates.index(row["gbps"]), models.index(row["model"]))
        axes.set(xlim=(0, len(rates)), ylim=(len(models), 0))
        axes.set_xticks([place + 0.5 for place in range(len(rates))], [f"{rate:g} Gb/s" for rate in rates], fontsize=8)
        axes.set_yticks([place + 0.5 for place in range(len(models))], models, fontsize=8)
        axes.tick_params(length=0)
        axes.set_title(f"{number} ranks", fontsize=9)
    replace_files({file: as_png(figure)})


def _draw_cell(axes: Axes, row: dict[str, Any], column: int, line: int) -> None:
    factor = 1.0 if row["gain_percent"] is None else 1 + row["gain_percent"] / 100
    strength = 0.25 + 0.75 * min(1.0, math.log(max(1.0, factor)) / math.log(_FULL_COLOR))
    # The colored cells are opaque, so that their text is legible on light and dark pages.
    color = 1 - strength * (1 - np.array(to_rgb(COLORS[0]))) if row["pays"] else (*to_rgb(COLORS[-1]), 0.2)
    axes.add_patch(Rectangle((column + 0.02, line + 0.04), 0.96, 0.92, facecolor=color, linewidth=0))
    if row["pays"]:
        ink = "white" if strength > 0.6 else "#202020"
        style: dict[str, Any] = {"ha": "center", "va": "center", "color": ink}
        axes.text(column + 0.5, line + 0.36, f"{times(factor)} x", fontsize=8, **style)
        axes.text(column + 0.5, line + 0.74, short(row["method"]), fontsize=5.5, **style)
