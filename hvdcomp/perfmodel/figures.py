"""The style of all figures. The colors suit color-blind readers, and figures have no background, so that they are
legible on light and dark pages. This module needs matplotlib."""

from __future__ import annotations

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

# Okabe and Ito's palette without yellow and black, which vanish on a light or a dark page.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888")
LINES = ("solid", "dashed", "dotted", "dashdot")
INK = "#7d7d7d"  # axes, texts and lines of dense gradients: legible on white and on near black


def new_figure(width: float, height: float) -> Figure:
    """An empty figure with this width and height, in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def as_png(figure: Figure, dots_per_inch: int = 110) -> bytes:
    """The bytes of a PNG of the figure, without a background. Axes and black texts get the color `INK`."""
    for axes in figure.axes:
        axes.tick_params(which="both", colors=INK)
        axes.spines[:].set_color(INK)
        axes.spines[["top", "right"]].set_visible(False)
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text.get_color() == "black":
            text.set_color(INK)
    for legend in [*figure.legends, *(axes.legend_ for axes in figure.axes if axes.legend_)]:
        legend.set_frame_on(False)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=dots_per_inch, transparent=True)
    return image.getvalue()
