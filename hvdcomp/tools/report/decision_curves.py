"""Draws what the policy of one run decided: over the steps, beside the training loss, and for policies that choose
factors for the whole model the gains and throughputs that they chose by."""

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
from hvdcomp.perfmodel.figures import COLOURS, INK
from hvdcomp.policies import parse_policy
from hvdcomp.tools.report.curves import LEGEND, limit_height, smooth, tidy
from hvdcomp.tools.report.decisions import Decisions
from hvdcomp.tools.report.runs import Run, printable

_WIDTH = 11.0  # inches, of every figure
_COLUMNS = 1500  # more points in time than this cannot be told apart at that width
_LABELS = 40  # tensors that are named beside a heat map
_MOST_COLOURS = 12  # that can be told apart
_MOST_FALLS = 20  # of the learning rate; a schedule that falls in every step is not marked
_BINS = 60  # in which shares of steps are counted
_CRITICAL = "#d55e00"
_LOSS_HEIGHT = 2.4

Panel = tuple[Callable[[Figure, Axes], None], float]
"""What draws a panel, and its height in inches."""


def draw_decisions(run: Run) -> Iterator[tuple[str, str, Figure]]:
    """Yield (short name, caption, figure) for each figure that the run's decisions give."""
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
    if _known(decisions.sent):
        caption = (
            "Left: the smoothed gain of each compression factor, and the gain from which on it may be sent (epsilon). "
            "Middle: which factors were sent, as shares of the steps; below, of all steps. Right: compression "
            "throughput, samples of all ranks per second times gain, whenever that factor was sent: median, and the "
            "span of 90%"
        )
        yield "gains", caption, _draw_gains(run, decisions, end)


def _caption(run: Run, decisions: Decisions) -> str:
    parts = []
    if run.steps["step"].size:
        shaded = _known(decisions.critical)
        parts.append("training loss" + (", shaded by the share of the tensors in a critical regime" if shaded else ""))
    if _known(*decisions.levels.values(), *decisions.factors.values()):
        parts.append("what each tensor was compressed to, light colours keeping more")
    if _known(decisions.minimum):
        parts.append("the compression factors of the whole model")
    if _known(*decisions.chosen.values()):
        parts.append("which way to send the gradients was in force, with the time of a step as last measured")
    if _known(decisions.accumulation):
        parts.append("how many batches were accumulated for one update")
    text = "What the policy decided: " + "; ".join(parts)
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
        if _known(*table.values()):
            draw = partial(_draw_heat_map, decisions=decisions, table=table, label=label, end=end)
            panels.append((draw, _heat_map_height(table)))
    if _known(decisions.minimum):
        panels.append((partial(_draw_factors, decisions=decisions, end=end), 2.6))
    if _known(*decisions.chosen.values()):
        height = 0.35 * len(decisions.chosen) + 0.4
        panels.append((partial(_draw_chosen, decisions=decisions, end=end), height))
    if _known(decisions.accumulation):
        panels.append((partial(_draw_accumulation, decisions=decisions, end=end), 1.4))
    return panels


def _draw_loss(figure: Figure, axes: Axes, *, run: Run, decisions: Decisions, end: int) -> None:
    steps, loss = run.steps["step"], run.steps["loss"]
    axes.plot(steps, loss, color=COLOURS[0], linewidth=0.5, alpha=0.3, zorder=1.5, rasterized=True)
    axes.plot(steps, smooth(loss), color=COLOURS[0], linewidth=1.6)
    cut = limit_height(axes)
    axes.set_ylabel("training loss\n(higher values cut off)" if cut else "training loss")
    tidy(axes)
    axes.autoscale(False)
    if _known(decisions.critical):
        edges, place = _grid(decisions, end)
        shades = LinearSegmentedColormap.from_list("critical", [(_CRITICAL, 0.0), (_CRITICAL, 0.4)])
        # As an image it has no seams between neighbouring steps. It fills the panel's height, whatever the loss.
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
    """Tensors below each other in the order of the log, over the steps; a colour is a level or a factor."""
    edges, place = _grid(decisions, end)
    values = np.array([column[place] for column in table.values()])
    colours, norm, shown = _colours(values, label == "compression factor")
    image = axes.imshow(
        values,
        cmap=colours,
        norm=norm,
        aspect="auto",
        interpolation="nearest",
        extent=(edges[0], edges[-1], len(table) - 0.5, -0.5),
    )
    tidy(axes)
    axes.grid(False)
    if len(table) <= _LABELS:  # lines between the tensors
        axes.hlines(np.arange(1, len(table)) - 0.5, edges[0], edges[-1], color=INK, linewidth=0.4)
    every = -(-len(table) // _LABELS)
    names = [_short_name(name) for name in table][::every]
    axes.set_yticks(range(0, len(table), every), names, fontsize=7)
    for text in axes.get_yticklabels():
        text.set_parse_math(False)
    if every > 1:
        axes.set_ylabel(f"{len(table)} tensors, one name in {every}")
    ticks = range(len(shown)) if shown else None
    bar = _draw_bar(figure, axes, image, label, _heat_map_height(table), ticks=ticks)
    if shown:
        bar.ax.set_yticklabels(shown)
        bar.ax.yaxis.set_minor_locator(NullLocator())


def _heat_map_height(table: dict[str, np.ndarray]) -> float:
    return min(max(0.19 * len(table), 1.2), 7.0)


def _colours(values: np.ndarray, reverse: bool) -> tuple[Colormap, Normalize, list[str]]:
    """A colour map and its scale, and the labels of its colours if it has one for each of the values.

    `values` are replaced by their places among those that occur then.
    """
    viridis = colormaps["viridis_r" if reverse else "viridis"]
    known = np.isfinite(values)
    found = np.unique(values[known])
    if len(found) > _MOST_COLOURS:
        positive = found[0] > 0
        limits = {"vmin": found[0], "vmax": found[-1]}
        return viridis, LogNorm(**limits) if positive else Normalize(**limits), []
    values[known] = np.searchsorted(found, values[known])
    # One colour alone is the middle one. The darkest and the lightest would vanish on a dark or a light page.
    places = np.linspace(0.12, 0.92, len(found)) if len(found) > 1 else [0.5]
    norm = BoundaryNorm(np.arange(len(found) + 1) - 0.5, len(found))
    return ListedColormap(viridis(places)), norm, [f"{value:g}" for value in found]


def _draw_chosen(figure: Figure, axes: Axes, *, decisions: Decisions, end: int) -> None:
    """When each candidate was in force, and what its steps take."""
    starts = decisions.steps
    widths = np.diff(np.append(starts, max(end, starts[-1])))
    labels = []
    for row, (name, chosen) in enumerate(decisions.chosen.items()):
        spans = [(start, width) for start, width, one in zip(starts, widths, chosen, strict=True) if one == 1]
        axes.broken_barh(spans, (row - 0.35, 0.7), color=COLOURS[row % len(COLOURS)])
        measured = decisions.measured.get(name, np.array([]))
        measured = measured[np.isfinite(measured)]
        predicted = decisions.predicted[name][np.isfinite(decisions.predicted[name])][-1]
        taken = f"{1000 * measured[-1]:.4g} ms" if measured.size else "not tried"
        labels.append(f"{name}: {taken} (predicted {1000 * predicted:.4g})")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    tidy(axes)
    axes.grid(False, axis="y")


def _draw_factors(figure: Figure, axes: Axes, *, decisions: Decisions, end: int) -> None:
    """The factors that were compressed to, and what was sent, over the steps."""
    edges, place = _grid(decisions, end)
    sent = decisions.sent[place]
    marks: dict[str, Any] = {"color": COLOURS[5], "markersize": 11, "markeredgewidth": 1.5}
    axes.plot(edges[:-1], sent, "|", label="sent", rasterized=True, **marks)
    for number, name in enumerate(("candidate", "minimum"), start=1):
        values = getattr(decisions, name)[place]
        axes.stairs(values, edges, baseline=None, color=COLOURS[number], linewidth=1.6, label=name, zorder=3)
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
    axes.stairs(values, edges, baseline=None, color=COLOURS[2], linewidth=1.8)
    axes.set_ylim(0, 1.15 * np.nanmax(values))
    found = np.unique(values[np.isfinite(values)])
    axes.yaxis.set_major_locator(FixedLocator(found.tolist()) if len(found) <= 5 else MaxNLocator(4, integer=True))
    axes.set_ylabel("batches\nper update")
    tidy(axes)


def _draw_gains(run: Run, decisions: Decisions, end: int) -> Figure:
    figure = Figure(figsize=(_WIDTH, 4.4), layout="constrained")
    gain, share, throughput = figure.subplots(1, 3)
    factors = _factors(decisions)
    above_dense = [factor for factor in factors if factor != 1]
    many = colormaps["turbo"](np.linspace(0.08, 0.92, len(above_dense)))
    colours = dict(zip(above_dense, COLOURS if len(above_dense) <= 6 else many, strict=False))
    colours[1.0] = COLOURS[6]
    edges, place = _grid(decisions, end)
    for factor in factors:
        if factor in decisions.gains:
            gain.plot(edges[:-1], decisions.gains[factor][place], linewidth=1.8, color=colours[factor])
    known = [one[np.isfinite(one)].max(initial=0) for one in decisions.gains.values()]
    gain.set_ylim(0, 1.05 * max(1, *known) if known else 1.05)  # a share, but of raw gains
    gain.set_ylabel("smoothed gain")
    shares = _draw_shares(share, decisions, end, factors, colours)
    for axes in (gain, share):
        axes.set_xlabel("step")
        axes.set_xlim(0, end)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _draw_throughput(throughput, decisions, colours)
    for axes in (gain, share, throughput):
        tidy(axes)
    throughput.grid(False, axis="y")
    handles = [gain.plot([], [], linewidth=4, color=colours[factor])[0] for factor in factors]
    labels = [f"{_factor_name(factor)}: {_percent(part)}" for factor, part in shares.items()]
    epsilon = _epsilon(decisions)
    if epsilon is not None:
        handles.append(gain.axhline(epsilon, color=INK, linestyle="dashed", linewidth=1))
        labels.append(f"epsilon = {epsilon:g}")
    figure.legend(handles, labels, ncols=7, **LEGEND)
    _title(figure, run, decisions)
    return figure


def _draw_shares(
    axes: Axes, decisions: Decisions, end: int, factors: list[float], colours: Mapping[float, Any]
) -> dict[float, float]:
    """Stack the shares of the factors that were sent, over the steps; return each factor's share of all steps."""
    sent = decisions.sent[decisions.in_force(np.arange(end))]
    edges = np.unique(np.linspace(0, end, min(_BINS, end) + 1).astype(int))
    counted = np.maximum(1, np.add.reduceat(np.isfinite(sent).astype(float), edges[:-1]))
    bottom = np.zeros(len(edges) - 1)
    shares = {}
    for factor in factors:
        those = sent == factor
        top = bottom + np.add.reduceat(those.astype(float), edges[:-1]) / counted
        axes.stairs(top, edges, baseline=bottom, fill=True, color=colours[factor], alpha=0.85)
        bottom = top
        shares[factor] = float(those.sum() / max(1, np.isfinite(sent).sum()))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("share of the steps, by factor sent")
    return shares


def _draw_throughput(axes: Axes, decisions: Decisions, colours: Mapping[float, Any]) -> None:
    factors = sorted(decisions.throughput)
    for place, factor in enumerate(factors):
        values = decisions.throughput[factor]
        # The table keeps an entry until its factor is sent again.
        entered = np.flatnonzero(np.isfinite(values) & (np.diff(values, prepend=np.nan) != 0))
        p5, median, p95 = np.percentile(values[entered], (5, 50, 95))
        axes.barh(place, median, color=colours[factor], height=0.6, alpha=0.85)
        axes.hlines(place, p5, p95, color=INK, linewidth=2.5)
    axes.set_yticks(range(len(factors)), list(map(_factor_name, factors)))
    axes.set_ylim(-0.6, max(len(factors), 1) - 0.4)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("samples/s times gain")


def _end(run: Run, decisions: Decisions) -> int:
    """The number of steps that are known to have ended."""
    steps = run.steps["step"]
    return max(decisions.end, int(np.nanmax(steps)) if np.isfinite(steps).any() else 0)


def _grid(decisions: Decisions, end: int) -> tuple[np.ndarray, np.ndarray]:
    """The edges of at most _COLUMNS equal spans of steps, and the place of the decision that each span begins with."""
    edges = np.linspace(0, end, min(end, _COLUMNS) + 1)
    return edges, decisions.in_force(np.floor(edges[:-1]))


def _falls(run: Run) -> np.ndarray:
    """Steps that had ended when the learning rate fell."""
    rates = run.steps["learning_rate"]
    return run.steps["step"][1:][rates[1:] < rates[:-1]] - 1


def _factors(decisions: Decisions) -> list[float]:
    """All the compression factors of the whole model that occur, ascending."""
    used = np.concatenate([decisions.minimum, decisions.candidate, decisions.sent])
    return sorted({*used[np.isfinite(used)].tolist(), *decisions.gains, *decisions.throughput})


def _factor_name(factor: float) -> str:
    return "dense" if factor == 1 else f"{factor:g}x"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share == 0 or share >= 0.01 else "<1%"


def _epsilon(decisions: Decisions) -> float | None:
    """The gain from which on a factor may be sent, if the policy has such a setting."""
    try:
        return getattr(parse_policy(decisions.policy), "epsilon", None)
    except SpecError:  # of another version
        return None


def _known(*columns: np.ndarray) -> bool:
    return any(np.isfinite(column).any() for column in columns)


def _short_name(name: str, width: int = 34) -> str:
    """A tensor's name; of a long one the end, which tells it from others."""
    name = printable(name)
    return name if len(name) <= width else "…" + name[1 - width :]


def _title(figure: Figure, run: Run, decisions: Decisions) -> None:
    text = f"{run.name}: {printable(decisions.policy)}, {printable(decisions.compressor)}"
    text = text if len(text) <= 110 else text[:109] + "…"
    figure.suptitle(text, color=INK, fontsize=10, parse_math=False)


def _draw_bar(figure: Figure, axes: Axes, image: AxesImage, label: str, height: float, **options: Any) -> Colorbar:
    """A colour bar beside a panel of some inches' height, as wide as those of other panels."""
    bar = figure.colorbar(image, ax=axes, aspect=8 * height, **options)
    bar.set_label(label, color=INK, fontsize=9)
    bar.ax.tick_params(colors=INK, which="both", labelsize=8)
    bar.outline.set_visible(False)
    return bar
