"""Plots predicted and measured step times, and the speedup from compression."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, StrMethodFormatter

from benchmarks.steps.compare import TWO_LEVELS, Row, gains
from hvdcomp.perfmodel import STOCK_SPECS
from hvdcomp.perfmodel.figures import COLORS, INK, as_png, new_figure
from hvdcomp.perfmodel.rates import parse_rate

_UNITS = {"mbit": "Mb/s", "gbit": "Gb/s"}
_MARKERS = "o^sDvP*X<>"
_WAYS = {"allreduce": "o", "gather": "s", "scatter": "^", TWO_LEVELS: "D"}
_IN_A_ROW, _COLUMNS = 3, 2  # most panels in a single row; number of columns for more panels


def draw_speed(rows: Sequence[Row]) -> bytes:
    """Draws the speedup of the fastest compressor over the faster of dense and fp16, by bandwidth.

    Each model has a panel, and each cluster has a color. Markers are measurements, and show the exchange of the fastest
    compressor. Lines are predictions.
    """
    measured = gains(rows)
    models = list(dict.fromkeys(gain.model for gain in measured))
    rates = sorted({gain.rate for gain in measured}, key=parse_rate)
    colors = dict(zip(dict.fromkeys(gain.cluster for gain in measured), cycle(COLORS)))
    columns = len(models) if len(models) <= _IN_A_ROW else _COLUMNS
    lines = -(-len(models) // columns)
    figure = new_figure(max(9, 3 * columns), 3.1 * lines + 0.9)
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes, model in zip(panels, models, strict=False):
        axes.axhline(1, color=INK, linewidth=1, zorder=0.5)
        for hosts, color in colors.items():
            cluster_gains = sorted(
                (gain for gain in measured if (gain.model, gain.cluster) == (model, hosts)),
                key=lambda gain: parse_rate(gain.rate),
            )
            predicted = [_predicted([row for row in rows if row.place == gain.place]) for gain in cluster_gains]
            axes.plot([parse_rate(gain.rate) for gain in cluster_gains], predicted, color=color, linewidth=1.2)
            for gain in cluster_gains:
                filling = color if gain.overlap else "none"
                axes.plot(parse_rate(gain.rate), gain.over_stock, _WAYS[gain.way], color=color, markerfacecolor=filling)
        axes.set_title(model, fontsize=11)
        axes.grid(alpha=0.3)
    for axes in panels[len(models) :]:
        axes.set_visible(False)
    first = panels[0]  # all panels share the axes of the first panel
    first.margins(x=0.12)
    first.set_xscale("log")
    first.set_xticks([parse_rate(rate) for rate in rates], [_as_text(rate) for rate in rates])
    first.set_yscale("log")
    first.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    first.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    first.minorticks_off()
    handles = [Line2D([], [], color=color, label=hosts.in_words()) for hosts, color in colors.items()]
    handles.append(Line2D([], [], color=INK, linewidth=1.2, label="predicted"))
    handles += [
        Line2D([], [], color=INK, linestyle="", marker=marker, label=f"measured, {way}")
        for way, marker in _WAYS.items()
        if any(gain.way == way for gain in measured)
    ]
    if not all(gain.overlap for gain in measured):
        handles.append(
            Line2D([], [], color=INK, linestyle="", marker="o", markerfacecolor="none", label="without overlap")
        )
    figure.supylabel("speedup over the faster of dense and fp16", fontsize=10)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return as_png(figure)


def _predicted(rows: Sequence[Row]) -> float:
    """The predicted speedup in a setting: the time of the faster of dense and fp16, divided by the time of the fastest
    compressor."""
    stock, compressed = (
        [row.predicted_ms for row in rows if (row.method in STOCK_SPECS) is is_stock] for is_stock in (True, False)
    )
    return min(stock) / min(compressed)


def _as_text(rate: str) -> str:
    """A rate as text, such as "1 Gb/s" for 1gbit."""
    for unit, symbol in _UNITS.items():
        if rate.endswith(unit):
            return f"{rate.removesuffix(unit)} {symbol}"
    return rate


def draw_errors(rows: Sequence[Row]) -> bytes:
    """Plots predicted against measured times. On the diagonal, the two times are equal."""
    figure = new_figure(7, 6)
    axes = figure.add_subplot()
    markers = dict(zip(dict.fromkeys(row.cluster for row in rows), cycle(_MARKERS)))
    specs = list(dict.fromkeys(row.spec for row in rows))
    tab20: Any = colormaps["tab20"]
    colors = dict(zip(specs, cycle(COLORS if len(specs) <= len(COLORS) else tab20.colors)))
    for row in rows:
        axes.plot(
            row.measured_ms,
            row.predicted_ms,
            markers[row.cluster],
            color=colors[row.spec],
            markerfacecolor=colors[row.spec] if row.overlap else "none",
            markersize=5,
        )
    handles: list[Artist] = [
        Line2D([], [], linestyle="", marker="s", color=color, label=spec) for spec, color in colors.items()
    ]
    handles += [
        Line2D([], [], linestyle="", marker=marker, color=INK, label=hosts.in_words())
        for hosts, marker in markers.items()
    ]
    if not all(row.overlap for row in rows):
        handles.append(
            Line2D([], [], color=INK, linestyle="", marker="o", markerfacecolor="none", label="without overlap")
        )
    ends = [min(row.measured_ms for row in rows) / 1.5, max(row.measured_ms for row in rows) * 1.5]
    axes.plot(ends, ends, color=INK, linewidth=1)
    low, high = ([share * end for end in ends] for share in (0.75, 1.25))
    handles.append(axes.fill_between(ends, low, high, color=INK, alpha=0.15, label="25%"))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured time of a step (ms)")
    axes.set_ylabel("predicted time of a step (ms)")
    axes.grid(alpha=0.3)
    axes.legend(handles=handles, fontsize=7)
    return as_png(figure)
