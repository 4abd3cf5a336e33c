"""Draws the decisions of a run's policy over the steps, together with the training loss. If a policy chooses a factor
for the whole model, also draws the gains and throughputs on which the choice was based."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import BoundaryNorm, Colormap, LinearSegmentedColormap, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from hvdcomp.errors import SpecError
from hvdcomp.perfmodel.figures import COLORS, INK
from hvdcomp.policies import parse_policy
from hvdcomp.tools.report.curves import LEGEND, limit_height, smooth, tidy
from hvdcomp.tools.report.decisions import Decisions
from hvdcomp.tools.report.runs import Run, printable

_WIDTH = 11.0  # the width of every figure in inches
_COLUMNS = 1500  # maximum number of ranges of steps; more cannot be distinguished at this width
_LABELS = 40  # largest number of tensor names next to a heat map
_MOST_COLORS = 12  # largest number of colors that can be distinguished
_MOST_FALLS = 20  # largest number of falls of the learning rate that are marked
_BINS = 60  # number of ranges of steps for which the shares of factors are drawn
_CRITICAL = "#d55e00"
_LOSS_HEIGHT = 2.4

Panel = tuple[Callable[[Figure, Axes], None], float]
"""The function that draws a panel, and the panel's height in inches."""


def draw_decisions(run: Run) -> Iterator[tuple[str, str, Figure]]:
    """Yields (short name, caption, figure) for each figure of the run's decisions."""
    decisions = run.decisions
    if decisions is None or decisions.left_out:
        return
    panels = _panels(run, decisions)
    end = _end(run, decisions)
    if not panels or not end:
        return
    heights = [height for _, height in panels]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.9), layout="constrained")
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (draw, _) in zip(every, panels, strict=True):
        draw(figure, axes)
    every[-1].set_xlim(0, end)
    every[-1].set_xlabel("step")
    _title(figure, run, decisions)
    yield "decisions", _caption(run, decisions), figure
    if _has_values(decisions.sent):
        caption = (
            "Left: the smoothed gain of each compression factor, and the lowest gain at which a factor may be used "
            "(epsilon). Middle: how often each factor was used, over the steps; the legend shows its share of all "
            "steps. Right: the compression throughput of each factor (samples of all ranks per second, times the "
            "gain), as median and range of 90%"
        )
        yield "gains", caption, _draw_gains(run, decisions, end)


def _caption(run: Run, decisions: Decisions) -> str:
    parts = []
    if run.steps["step"].size:
        shaded = _has_values(decisions.critical)
        parts.append("training loss" + (", shaded by the share of the tensors in a critical regime" if shaded else ""))
    if _has_values(*decisions.levels.values(), *decisions.factors.values()):
        parts.append("the level of each tensor; lighter colors keep more of the gradient")
    if _has_values(decisions.minimum):
        parts.append("the compression factors of the whole model")
    if _has_values(*decisions.chosen.values()):
        parts.append("the method in use, with the last measured time of its step")
    if _has_values(decisions.accumulation):
        parts.append("the number of batches accumulated for an update")
    text = "Decisions of the policy: " + "; ".join(parts)
    falls = _falls(run)
    if 0 < falls.size <= _MOST_FALLS:
        text += ". Dashed lines: the learning rate falls"
    elif falls.size:
        text += f". The learning rate falls {falls.size} times, which is not marked"
    return text


def _panels(run: Run, decisions: Decisions) -> list[Panel]:
    panels: list[Panel] = []
    end = _end(run, decisions)
    if run.steps["step"].size:
        panels.append((partial(_draw_loss, run=run, decisions=decisions, end=end), _LOSS_HEIGHT))
    for table, label in ((decisions.levels, "level"), (decisions.factors, "compression factor")):
        if _has_values(*table.values()):
            draw = partial(_draw_heat_map, decisions=decisions, table=table, label=label, end=end)
            panels.append((draw, _heat_map_height(table)))
    if _has_values(decisions.minimum):
        panels.append((partial(_draw_factors, decisions=decisions, end=end), 2.6))
    if _has_values(*decisions.chosen.values()):
        height = 0.35 * len(decisions.chosen) + 0.4
        panels.append((partial(_draw_chosen, decisions=decisions, end=end), height))
    if _has_values(decisions.accumulation):
        panels.append((partial(_draw_accumulation, decisions=decisions, end=end), 1.4))
    return panels


def _draw_loss(figure: Figure, axes: Axes, *, run: Run, decisions: Decisions, end: int) -> None:
    steps, loss = run.steps["step"], run.steps["loss"]
    axes.plot(steps, loss, color=COLORS[0], linewidth=0.5, alpha=0.3, zorder=1.5, rasterized=True)
    axes.plot(steps, smooth(loss), color=COLORS[0], linewidth=1.6)
    cut = limit_height(axes)
    axes.set_ylabel("training loss\n(higher values cut off)" if cut else "training loss")
    tidy(axes)
    axes.autoscale(False)
    if _has_values(decisions.critical):
        edges, place = _grid(decisions, end)
        shades = LinearSegmentedColormap.from_list("critical", [(_CRITICAL, 0.0), (_CRITICAL, 0.4)])
        # The shading is drawn as an image, which has no visible lines between steps and fills the height of the panel.
        image = axes.imshow(
            decisions.critical[place][np.newaxis],
            cmap=shades,
            vmin=0,
            vmax=1,
            aspect="auto",
            interpolation="nearest",
            extent=(edges[0], edges[-1], 0, 1),
            transform=axes.get_xaxis_transform(),
            zorder=0.5,
        )
        _draw_bar(figure, axes, image, "critical tensors", _LOSS_HEIGHT, format=PercentFormatter(1.0, decimals=0))
    falls = _falls(run)
    if falls.size <= _MOST_FALLS:
        for step in falls:
            axes.axvline(step, color=INK, linestyle="dashed", linewidth=1)


def _draw_heat_map(
    figure: Figure, axes: Axes, *, decisions: Decisions, table: dict[str, np.ndarray], label: str, end: int
) -> None:
    """Draws a row for each tensor over the steps, in the order of the log. Colors show levels or factors."""
    edges, place = _grid(decisions, end)
    values = np.array([column[place] for column in table.values()])
    colors, norm, shown = _colors(values, label == "compression factor")
    image = axes.imshow(
        values,
        cmap=colors,
        norm=norm,
        aspect="auto",
        interpolation="nearest",
        extent=(edges[0], edges[-1], len(table) - 0.5, -0.5),
    )
    tidy(axes)
    axes.grid(False)
    if len(table) <= _LABELS:  # draws lines between the tensors
        axes.hlines(np.arange(1, len(table)) - 0.5, edges[0], edges[-1], color=INK, linewidth=0.4)
    every = -(-len(table) // _LABELS)
    names = [_short_name(name) for name in table][::every]
    axes.set_yticks(range(0, len(table), every), names, fontsize=7)
    for text in axes.get_yticklabels():
        text.set_parse_math(False)
    if every > 1:
        axes.set_ylabel(f"{len(table)} tensors (every {every}th is named)")
    ticks = range(len(shown)) if shown else None
    bar = _draw_bar(figure, axes, image, label, _heat_map_height(table), ticks=ticks)
    if shown:
        bar.ax.set_yticklabels(shown)
        bar.ax.yaxis.set_minor_locator(NullLocator())


def _heat_map_height(table: dict[str, np.ndarray]) -> float:
    return min(max(0.19 * len(table), 1.2), 7.0)


def _colors(values: np.ndarray, reverse: bool) -> tuple[Colormap, Normalize, list[str]]:
    """A color map, its scale, and the labels of its colors. There are no labels if there are more values than colors.

    If there are labels, each value in `values` is replaced with its rank among the different values.
    """
    viridis = colormaps["viridis_r" if reverse else "viridis"]
    known = np.isfinite(values)
    present = np.unique(values[known])
    if len(present) > _MOST_COLORS:
        positive = present[0] > 0
        limits = {"vmin": present[0], "vmax": present[-1]}
        return viridis, LogNorm(**limits) if positive else Normalize(**limits), []
    values[known] = np.searchsorted(present, values[known])
    # If there is only one value, its color is the middle of the color map. The darkest and the lightest colors are not
    # used, because they would be invisible on a dark or a light page.
    places = np.linspace(0.12, 0.92, len(present)) if len(present) > 1 else [0.5]
    norm = BoundaryNorm(np.arange(len(present) + 1) - 0.5, len(present))
    return ListedColormap(viridis(places)), norm, [f"{value:g}" for value in present]


def _draw_chosen(figure: Figure, axes: Axes, *, decisions: Decisions, end: int) -> None:
    """Draws when each candidate was used. Candidates are labeled with their step times."""
    starts = decisions.steps
    widths = np.diff(np.append(starts, max(end, starts[-1])))
    labels = []
    for row, (name, chosen) in enumerate(decisions.chosen.items()):
        spans = [(start, width) for start, width, in_force in zip(starts, widths, chosen, strict=True) if in_force == 1]
        axes.broken_barh(spans, (row - 0.35, 0.7), color=COLORS[row % len(COLORS)])
        measured = decisions.measured.get(name, np.array([]))
        measured = measured[np.isfinite(measured)]
        predicted = decisions.predicted[name][np.isfinite(decisions.predicted[name])][-1]
        time = f"{1000 * measured[-1]:.4g} ms" if measured.size else "not tried"
        labels.append(f"{name}: {time} (predicted {1000 * predicted:.4g})")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    tidy(axes)
    axes.grid(False, axis="y")


def _draw_factors(figure: Figure, axes: Axes, *, decisions: Decisions, end: int) -> None:
    """Draws the factors that the policy considered, and the factor that was sent, over the steps."""
    edges, place = _grid(decisions, end)
    sent = decisions.sent[place]
    marks: dict[str, Any] = {"color": COLORS[5], "markersize": 11, "markeredgewidth": 1.5}
    axes.plot(edges[:-1], sent, "|", label="sent", rasterized=True, **marks)
    for number, name in enumerate(("candidate", "minimum"), start=1):
        values = getattr(decisions, name)[place]
        axes.stairs(values, edges, baseline=None, color=COLORS[number], linewidth=1.6, label=name, zorder=3)
    axes.set_yscale("log")
    factors = _factors(decisions)
    axes.set_yticks(factors, list(map(_factor_name, factors)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(factors[0] / 1.5, factors[-1] * 1.5)
    axes.set_ylabel("compression factor")
    tidy(axes)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=INK)


def _draw_accumulation(figure: Figure, axes: Axes, *, decisions: Decisions, end: int) -> None:
    edges, place = _grid(decisions, end)
    values = decisions.accumulation[place]
    axes.stairs(values, edges, baseline=None, color=COLORS[2], linewidth=1.8)
    axes.set_ylim(0, 1.15 * np.nanmax(values))
    present = np.unique(values[np.isfinite(values)])
    axes.yaxis.set_major_locator(FixedLocator(present.tolist()) if len(present) <= 5 else MaxNLocator(4, integer=True))
    axes.set_ylabel("batches\nper update")
    tidy(axes)


def _draw_gains(run: Run, decisions: Decisions, end: int) -> Figure:
    figure = Figure(figsize=(_WIDTH, 4.4), layout="constrained")
    gain, share, throughput = figure.subplots(1, 3)
    factors = _factors(decisions)
    above_dense = [factor for factor in factors if factor != 1]
    many = colormaps["turbo"](np.linspace(0.08, 0.92, len(above_dense)))
    colors = dict(zip(above_dense, COLORS if len(above_dense) <= 6 else many, strict=False))
    colors[1.0] = COLORS[6]
    edges, place = _grid(decisions, end)
    for factor in factors:
        if factor in decisions.gains:
            gain.plot(edges[:-1], decisions.gains[factor][place], linewidth=1.8, color=colors[factor])
    highest = [gains[np.isfinite(gains)].max(initial=0) for gains in decisions.gains.values()]
    gain.set_ylim(0, 1.05 * max(1, *highest) if highest else 1.05)  # gains are above 1 only if they are not normalized
    gain.set_ylabel("smoothed gain")
    shares = _draw_shares(share, decisions, end, factors, colors)
    for axes in (gain, share):
        axes.set_xlabel("step")
        axes.set_xlim(0, end)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _draw_throughput(throughput, decisions, colors)
    for axes in (gain, share, throughput):
        tidy(axes)
    throughput.grid(False, axis="y")
    handles = [gain.plot([], [], linewidth=4, color=colors[factor])[0] for factor in factors]
    labels = [f"{_factor_name(factor)}: {_percent(part)}" for factor, part in shares.items()]
    epsilon = _epsilon(decisions)
    if epsilon is not None:
        handles.append(gain.axhline(epsilon, color=INK, linestyle="dashed", linewidth=1))
        labels.append(f"epsilon = {epsilon:g}")
    figure.legend(handles, labels, ncols=7, **LEGEND)
    _title(figure, run, decisions)
    return figure


def _draw_shares(
    axes: Axes, decisions: Decisions, end: int, factors: list[float], colors: Mapping[float, Any]
) -> dict[float, float]:
    """Draws the stacked shares of the sent factors over the steps. Returns the share of each factor in all steps."""
    edges = np.unique(np.linspace(0, end, min(_BINS, end) + 1).astype(int))
    cuts = np.union1d(edges, decisions.steps[(decisions.steps > 0) & (decisions.steps < end)])
    # the sent factor does not change between two cuts
    sent, lengths = decisions.sent[decisions.in_force(cuts[:-1])], np.diff(cuts)
    firsts = np.searchsorted(cuts, edges[:-1])
    counted = np.add.reduceat(lengths * np.isfinite(sent), firsts)
    bottom = np.zeros(len(edges) - 1)
    shares = {}
    for factor in factors:
        of_factor = np.add.reduceat(lengths * (sent == factor), firsts)
        top = bottom + of_factor / np.maximum(1, counted)
        axes.stairs(top, edges, baseline=bottom, fill=True, color=colors[factor], alpha=0.85)
        bottom = top
        shares[factor] = float(of_factor.sum() / max(1, counted.sum()))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("share of the steps, by factor sent")
    return shares


def _draw_throughput(axes: Axes, decisions: Decisions, colors: Mapping[float, Any]) -> None:
    factors = sorted(decisions.throughput)
    for place, factor in enumerate(factors):
        values = decisions.throughput[factor]
        # The log repeats the entry of a factor until this factor is sent again, so repeated entries are left out.
        entered = np.flatnonzero(np.isfinite(values) & (np.diff(values, prepend=np.nan) != 0))
        p5, median, p95 = np.percentile(values[entered], (5, 50, 95))
        axes.barh(place, median, color=colors[factor], height=0.6, alpha=0.85)
        axes.hlines(place, p5, p95, color=INK, linewidth=2.5)
    axes.set_yticks(range(len(factors)), list(map(_factor_name, factors)))
    axes.set_ylim(-0.6, max(len(factors), 1) - 0.4)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("samples/s times gain")


def _end(run: Run, decisions: Decisions) -> int:
    """The number of completed steps, as far as known."""
    steps = run.steps["step"]
    return max(decisions.end, int(np.nanmax(steps)) if np.isfinite(steps).any() else 0)


def _grid(decisions: Decisions, end: int) -> tuple[np.ndarray, np.ndarray]:
    """The edges of at most _COLUMNS equal ranges of steps, and the index of the decision at the start of each range."""
    edges = np.linspace(0, end, min(end, _COLUMNS) + 1)
    return edges, decisions.in_force(np.floor(edges[:-1]))


def _falls(run: Run) -> np.ndarray:
    """The number of completed steps at each fall of the learning rate."""
    rates = run.steps["learning_rate"]
    return run.steps["step"][1:][rates[1:] < rates[:-1]] - 1


def _factors(decisions: Decisions) -> list[float]:
    """All compression factors of the whole model in the log, ascending."""
    used = np.concatenate([decisions.minimum, decisions.candidate, decisions.sent])
    return sorted({*used[np.isfinite(used)].tolist(), *decisions.gains, *decisions.throughput})


def _factor_name(factor: float) -> str:
    return "dense" if factor == 1 else f"{factor:g}x"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share == 0 or share >= 0.01 else "<1%"


def _epsilon(decisions: Decisions) -> float | None:
    """The smallest gain with which a factor may be sent; None if the policy has no such setting."""
    try:
        return getattr(parse_policy(decisions.policy), "epsilon", None)
    except SpecError:  # this version of hvdcomp does not know the policy
        return None


def _has_values(*columns: np.ndarray) -> bool:
    return any(np.isfinite(column).any() for column in columns)


def _short_name(name: str, width: int = 34) -> str:
    """The name of a tensor. Only the end of a long name is kept, because the end distinguishes the tensor from
    others."""
    name = printable(name)
    return name if len(name) <= width else "…" + name[1 - width :]


def _title(figure: Figure, run: Run, decisions: Decisions) -> None:
    text = f"{run.name}: {printable(decisions.policy)}, {printable(decisions.compressor)}"
    text = text if len(text) <= 110 else text[:109] + "…"
    figure.suptitle(text, color=INK, fontsize=10, parse_math=False)


def _draw_bar(figure: Figure, axes: Axes, image: AxesImage, label: str, height: float, **options: Any) -> Colorbar:
    """Draws a color bar next to a panel of `height` inches. All color bars have the same width."""
    bar = figure.colorbar(image, ax=axes, aspect=8 * height, **options)
    bar.set_label(label, color=INK, fontsize=9)
    bar.ax.tick_params(colors=INK, which="both", labelsize=8)
    bar.outline.set_visible(False)
    return bar
