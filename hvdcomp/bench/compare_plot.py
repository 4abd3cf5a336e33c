"""Pictures of predicted beside measured steps, and of what compression gains in them."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hvdcomp.bench.compare import Gain, Row

_FP16, _BEST = "#b9b9b9", "#0072b2"
_UNITS = {"mbit": "Mb/s", "gbit": "Gb/s"}


def draw_speed(gains: Sequence[Gain]) -> bytes:
    """How many times as fast as dense fp16 and the fastest compressor are, by rate and model, with the most hosts."""
    hosts = max(gain.hosts for gain in gains)
    shown = [gain for gain in gains if gain.hosts == hosts]
    rates = list(dict.fromkeys(gain.rate for gain in shown))
    models = list(dict.fromkeys(gain.model for gain in sorted(shown, key=lambda gain: -gain.over_dense)))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    for axes, rate in zip(panels, rates, strict=True):
        here = {gain.model: gain for gain in shown if gain.rate == rate}
        for place, model in enumerate(models):
            if model not in here:
                continue
            gain = here[model]
            for shift, value, colour in (
                (-0.2, gain.over_dense / gain.over_fp16, _FP16), (0.2, gain.over_dense, _BEST)
            ):
                axes.bar(place + shift, value, 0.38, color=colour)
                above = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
                axes.annotate(
                    f"{value:.1f}", (place + shift, value), (0, 4), textcoords="offset points", ha="center", fontsize=9,
                    bbox=above,
                )  # fmt: skip
        axes.axhline(1, color="0.3", linewidth=1, zorder=0.5)
        axes.set_xticks(range(len(models)), models)
        axes.set_title(f"{hosts} hosts, {_written(rate)}", fontsize=11)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("times as fast as dense")
    panels[0].margins(y=0.12)
    labels = {"Horovod's fp16": _FP16, "the fastest compressor of hvdcomp": _BEST}
    handles = [panels[0].bar(0, 0, color=colour, label=label) for label, colour in labels.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
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
    markers = dict(zip(dict.fromkeys((row.hosts, row.rate) for row in rows), "o^sDvP*X<>", strict=False))
    methods = list(dict.fromkeys(row.method for row in rows))
    for number, method in enumerate(methods):
        for place, marker in markers.items():
            here = [row for row in rows if row.method == method and (row.hosts, row.rate) == place]
            axes.plot(
                [row.measured_ms for row in here],
                [row.predicted_ms for row in here],
                marker,
                color=f"C{number}",
                markersize=5,
                label=method if place == next(iter(markers)) else None,
            )
    for (hosts, rate), marker in markers.items():
        axes.plot([], [], marker, color="0.5", label=f"{hosts} hosts, {rate}")
    ends = [min(row.measured_ms for row in rows) / 1.5, max(row.measured_ms for row in rows) * 1.5]
    axes.plot(ends, ends, color="0.3", linewidth=1)
    axes.fill_between(ends, [0.75 * end for end in ends], [1.25 * end for end in ends], color="0.9", label="25%")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured time of a step (ms)")
    axes.set_ylabel("predicted time of a step (ms)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()
