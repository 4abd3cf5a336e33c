"""Plots a `RegimeRecord`: both measures over the epochs. The critical epochs by each measure are shaded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.diagnostics.regimes import EIGENVALUE, GRADIENT_NORM, RegimeRecord
from hvdcomp.perfmodel.figures import COLORS, INK, new_figure

_COLORS = {"loss": INK, EIGENVALUE: COLORS[0], GRADIENT_NORM: COLORS[2]}
_SHADE = COLORS[4]
_LABELS = {EIGENVALUE: "largest eigenvalue\nof the Hessian", GRADIENT_NORM: "norm of the\naccumulated gradient"}


def draw(record: RegimeRecord, losses: Sequence[float] | None = None, decays: Sequence[float] = ()) -> Figure:
    """Draws a record. Save the figure with `savefig`, or with `figures.as_png` to leave out the background.

    Args:
        record: the measurements of at least one epoch.
        losses: the training loss of each epoch. They are drawn above the two measures.
        decays: numbers of the epochs after which the learning rate fell. They are drawn as dashed lines.

    Raises:
        ValueError: if the record is empty, or if the numbers of losses and epochs differ.
    """
    if not record.epochs:
        raise ValueError("the record is empty; call record.note() for at least one epoch before you draw the record")
    if losses is not None and len(losses) != record.epochs:
        raise ValueError(f"{len(losses)} losses for {record.epochs} epochs; give a loss for each epoch")
    panels: list[tuple[str, str, Sequence[float | None]]] = []
    if losses is not None:
        panels.append(("loss", "training loss", losses))
    panels += [
        (EIGENVALUE, _LABELS[EIGENVALUE], record.eigenvalues),
        (GRADIENT_NORM, _LABELS[GRADIENT_NORM], record.gradient_norms),
    ]
    figure = new_figure(8, 2.3 * len(panels))
    for axes, (name, label, values) in zip(np.ravel(figure.subplots(len(panels), 1, sharex=True)), panels, strict=True):
        if name != "loss":
            _shade(axes, record.critical(name))
        _curve(axes, values, _COLORS[name])
        for decay in decays:
            axes.axvline(decay + 0.5, color=INK, linestyle="dashed", linewidth=0.8)
        axes.set_ylabel(label)
        axes.grid(True, alpha=0.25)
    axes.set_xlabel("epoch")
    axes.set_xlim(0.5, record.epochs + 0.5)
    figure.suptitle(
        f"Shaded: critical, by a relative change of at least {record.eta:g} over {record.interval} epochs", fontsize=10
    )
    return figure


def _curve(axes: Axes, values: Sequence[float | None], color: str) -> None:
    y = np.array([np.nan if value is None else value for value in values], dtype=float)
    is_finite = np.isfinite(y)
    axes.plot(np.arange(1, len(y) + 1)[is_finite], y[is_finite], color=color, marker="o", markersize=3)
    if is_finite.any() and (y[is_finite] > 0).all():
        axes.set_yscale("log")  # so equal relative changes look equally large


def _shade(axes: Axes, critical: Sequence[bool | None]) -> None:
    """Shades each run of successive critical epochs as a single area, because seams between areas would be visible."""
    edges = np.flatnonzero(np.diff([False, *[bool(regime) for regime in critical], False]))
    for first, last in edges.reshape(-1, 2):
        axes.axvspan(first + 0.5, last + 0.5, color=_SHADE, alpha=0.25, linewidth=0)
