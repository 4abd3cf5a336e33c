"""Draws a sweep: step times by method, and the compression factor needed below. Needs matplotlib."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from hvdcomp.files import replace_files
from hvdcomp.perfmodel.advice import UNCOMPRESSED
from hvdcomp.perfmodel.figures import COLOURS, INK, LINES, as_png, new_figure
from hvdcomp.perfmodel.sweep import AXES, Sweep


def draw(swept: Sweep, title: str, marked: float | None, file: Path) -> None:
    """Writes a PNG. Raises OSError if it cannot be written.

    Args:
        swept: the sweep.
        title: title of the figure.
        marked: place of the setting itself on the axis; None for none.
        file: file to write.
    """
    figure = new_figure(8, 6.2)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    compressed = [spec for spec in swept.step_s if spec != UNCOMPRESSED]
    for number, spec in enumerate(compressed):
        style = {"color": COLOURS[number % 6], "linestyle": LINES[number // 6 % len(LINES)]}  # its grey is for dense
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
    """Labels more than powers of ten on a short axis, which may have no power of ten."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        digits = (2, 3, 5, 7) if high < 10 * low else (2, 5) if high < 1000 * low else ()
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(partial(_if_leading_digit, digits)))


def _if_leading_digit(digits: tuple[int, ...], value: float, _position: int | None) -> str:
    return f"{value:g}" if _leading_digit(value) in digits else ""


def _leading_digit(value: float) -> int:
    return round(value / 10 ** np.floor(np.log10(value))) if value > 0 else 0
