"""Draws the pictures of docs/concepts.md: `python docs/concepts/draw.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from hvdcomp.perfmodel.figures import COLORS, INK, new_figure

FOLDER = Path(__file__).parent
BLUE, ORANGE, GREEN = COLORS[:3]
HIGH = 0.5  # of a box, in inches


def canvas(width: float, height: float) -> Axes:
    """Axes without lines, whose units are inches."""
    figure = new_figure(width, height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def box(axes: Axes, x: float, y: float, text: str, width: float = 1.2, high: float = HIGH, color: str = INK) -> None:
    """A box with a text, around the point (x, y)."""
    low = (x - width / 2, y - high / 2)
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch(low, width, high, boxstyle=style, edgecolor=color, facecolor="none", linewidth=1.4))
    axes.text(x, y, text, color=color, ha="center", va="center", fontsize=9)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "", bend: float = 0, color: str = INK
) -> None:
    """An arrow, with a text above its middle."""
    connection = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(start, end, connectionstyle=connection, arrowstyle="-|>", mutation_scale=11, color=color)
    )
    label(axes, (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.06, text, color)


def label(axes: Axes, x: float, y: float, text: str, color: str = INK, at: str = "center") -> None:
    axes.text(x, y, text, color=color, ha=at, va="bottom", fontsize=8)


def draw_step() -> Axes:
    """The way of a gradient, from the backward pass to the optimizer."""
    axes = canvas(8.4, 2.35)
    box(axes, 4.3, 1.08, "exchange\nover the\nnetwork", width=0.9, high=1.7, color=ORANGE)
    for rank, y in enumerate((1.58, 0.58)):
        label(axes, 0.05, y + 0.3, f"rank {rank}", at="left")
        box(axes, 0.5, y, "backward\npass", width=0.9)
        arrow(axes, (0.95, y), (2.05, y))
        label(axes, 1.35, y + 0.06, "gradient\n100 MB")
        box(axes, 2.5, y, "compress", width=0.9, color=BLUE)
        arrow(axes, (2.95, y), (3.85, y), "payload\n14 MB", color=BLUE)
        arrow(axes, (4.75, y), (5.4, y), "all\npayloads", color=BLUE)
        box(axes, 5.9, y, "decode\nand average", width=1.0, color=BLUE)
        arrow(axes, (6.4, y), (7.45, y))
        label(axes, 7.0, y + 0.06, "mean\ngradient")
        box(axes, 7.9, y, "optimizer", width=0.9)
    inside = FancyBboxPatch((1.75, 0.1), 4.85, 1.95, boxstyle="round,pad=0,rounding_size=0.1", linestyle="dashed")
    inside.set(edgecolor=BLUE, facecolor="none", linewidth=1)
    axes.add_patch(inside)
    label(axes, 4.17, 2.1, "hvdcomp", BLUE)
    return axes


def draw_feedback() -> Axes:
    """The loop of error feedback on one rank."""
    axes = canvas(7.8, 1.85)
    box(axes, 0.6, 1.55, "gradient", width=1.0)
    arrow(axes, (1.1, 1.55), (1.95, 1.55))
    box(axes, 2.2, 1.55, "+", width=0.5)
    arrow(axes, (2.45, 1.55), (3.4, 1.55), "x")
    box(axes, 4.0, 1.55, "compress", color=BLUE)
    arrow(axes, (4.6, 1.55), (6.1, 1.55), "sent part of x", color=BLUE)
    box(axes, 6.85, 1.55, "exchange", width=1.5, color=ORANGE)
    arrow(axes, (4.0, 1.3), (4.0, 0.6), color=GREEN)
    label(axes, 4.1, 0.88, "x minus the sent part", GREEN, at="left")
    box(axes, 4.0, 0.35, "residual", color=GREEN)
    arrow(axes, (3.4, 0.35), (2.2, 1.3), bend=-0.35, color=GREEN)
    label(axes, 2.15, 0.3, "added in the next step", GREEN, at="right")
    return axes


def draw_decision() -> Axes:
    """A decision of rank 0, and the step that obeys it."""
    axes = canvas(7.8, 2.95)
    rows = (1.7, 1.0, 0.3)
    box(axes, 3.3, 2.6, "policy: use level 0.05", width=1.9, color=GREEN)
    arrow(axes, (1.75, 1.95), (2.35, 2.5), bend=-0.2, color=GREEN)
    label(axes, 1.75, 2.3, "measurements", GREEN, at="right")
    for rank, y in enumerate(rows):
        label(axes, 0.05, y - 0.07, f"rank {rank}", at="left")
        box(axes, 1.4, y, "step 100\nlevel 0.01", width=1.3, color=BLUE)
        arrow(axes, (2.05, y), (6.35, y))
        label(axes, 3.3, y + 0.04, "optimizer, forward pass")
        box(axes, 7.0, y, "step 101\nlevel 0.05", width=1.3, color=BLUE)
        arrow(axes, (5.2, y + 0.17), (6.35, y + 0.17), color=GREEN)
    axes.plot([4.25, 5.2, 5.2], [2.6, 2.6, rows[-1] + 0.17], color=GREEN, linewidth=1.2)
    label(axes, 5.3, 2.5, "broadcast to all ranks", GREEN, at="left")
    return axes


def main() -> None:
    # Texts stay texts, and equal pictures have equal bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hvdcomp"}):
        for name, axes in (("step", draw_step()), ("feedback", draw_feedback()), ("decision", draw_decision())):
            axes.figure.savefig(FOLDER / f"{name}.svg", transparent=True, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
