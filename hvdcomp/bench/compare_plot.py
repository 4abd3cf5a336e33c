"""Pictures of predicted beside measured steps, and of what compression gains in them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import cycle

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, StrMethodFormatter

from hvdcomp.bench.compare import TWO_LEVELS, Gain, Row
from hvdcomp.perfmodel.rates import parse_rate

_UNITS = {"mbit": "Mb/s", "gbit": "Gb/s"}
_MARKERS = "o^sDvP*X<>"
_WAYS = {"allreduce": "o", "gather": "s", "scatter": "^", TWO_LEVELS: "D"}
_COLUMNS = 2  # of panels


def draw_speed(gains: Sequence[Gain]) -> bytes:
    """How many times as fast as the better one of dense and fp16 the fastest compressor is, by bandwidth.

    Each model has a panel, each cluster a line; markers say how the fastest compressor sends.
    """
    models = list(dict.fromkeys(gain.model for gain in gains))
    rates = sorted({gain.rate for gain in gains}, key=parse_rate)
    colours = {hosts: f"C{number}" for number, hosts in enumerate(dict.fromkeys(gain.cluster for gain in gains))}
    columns = min(_COLUMNS, len(models))
    lines = -(-len(models) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.1 * lines + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes, model in zip(panels, models, strict=False):
        axes.axhline(1, color="0.3", linewidth=1, zorder=0.5)
        for hosts, colour in colours.items():
            here = sorted(
                (gain for gain in gains if (gain.model, gain.cluster) == (model, hosts)),
                key=lambda gain: parse_rate(gain.rate),
            )
            axes.plot([parse_rate(gain.rate) for gain in here], [gain.over_stock for gain in here], color=colour)
            for gain in here:
                filling = colour if gain.overlap else "white"
                axes.plot(
                    parse_rate(gain.rate), gain.over_stock, _WAYS[gain.way], color=colour, markerfacecolor=filling
                )
        axes.set_title(model, fontsize=11)
        axes.grid(alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for axes in panels[len(models) :]:
        axes.set_visible(False)
    first = panels[0]  # whose scales are those of all
    first.margins(x=0.12)
    first.set_xscale("log")
    first.set_xticks([parse_rate(rate) for rate in rates], [_written(rate) for rate in rates])
    first.set_yscale("log")
    first.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    first.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    first.minorticks_off()
    handles = [Line2D([], [], color=colour, label=hosts.in_words()) for hosts, colour in colours.items()]
    handles += [
        Line2D([], [], color="0.4", linestyle="", marker=marker, label=way)
        for way, marker in _WAYS.items()
        if any(gain.way == way for gain in gains)
    ]
    if not all(gain.overlap for gain in gains):
        handles.append(
            Line2D([], [], color="0.4", linestyle="", marker="o", markerfacecolor="white", label="without overlap")
        )
    figure.supylabel("times as fast as the better one of dense and fp16", fontsize=10)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return _png(figure)


def _written(rate: str) -> str:
    """A rate as people write it: 1 Gb/s for 1gbit."""
    for unit, written in _UNITS.items():
        if rate.endswith(unit):
            return f"{rate.removesuffix(unit)} {written}"
    return rate


def draw_errors(rows: Sequence[Row]) -> bytes:
    """Measured against predicted: on the diagonal they are equal."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    markers = dict(zip(dict.fromkeys(row.cluster for row in rows), cycle(_MARKERS)))
    specs = list(dict.fromkeys(row.spec for row in rows))
    colours = {spec: colormaps["tab20"](number % 20) for number, spec in enumerate(specs)}
    for row in rows:
        axes.plot(
            row.measured_ms,
            row.predicted_ms,
            markers[row.cluster],
            color=colours[row.spec],
            markerfacecolor=colours[row.spec] if row.overlap else "white",
            markersize=5,
        )
    handles: list[Artist] = [
        Line2D([], [], linestyle="", marker="s", color=colour, label=spec) for spec, colour in colours.items()
    ]
    handles += [
        Line2D([], [], linestyle="", marker=marker, color="0.4", label=hosts.in_words())
        for hosts, marker in markers.items()
    ]
    if not all(row.overlap for row in rows):
        handles.append(
            Line2D([], [], color="0.4", linestyle="", marker="o", markerfacecolor="white", label="without overlap")
        )
    ends = [min(row.measured_ms for row in rows) / 1.5, max(row.measured_ms for row in rows) * 1.5]
    axes.plot(ends, ends, color="0.3", linewidth=1)
    handles.append(
        axes.fill_between(ends, [0.75 * end for end in ends], [1.25 * end for end in ends], color="0.9", label="25%")
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured time of a step (ms)")
    axes.set_ylabel("predicted time of a step (ms)")
    axes.grid(alpha=0.3)
    axes.legend(handles=handles, fontsize=7)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()
