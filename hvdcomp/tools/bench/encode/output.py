"""Shows a comparison as a table on the screen, as a table in Markdown, as a plot, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdcomp.tools.bench.encode.comparison import Row

HEADINGS: tuple[str, ...] = (
    "method", "threads", "x copy", "x hook", "step ms", "quartiles", "CPU ms", "copy ms", "encode ms", "decode ms",
    "operations", "launches", "peak MiB", "kept B/param", "bytes", "factor",
)  # fmt: skip
DEVICE = ("device ms", "x device copy")
BEFORE = ("before, ms", "times as fast")


def title(options: Mapping[str, Any]) -> str:
    """The line that is printed above a table."""
    memory = "" if options["memory"] is None else f"memory {options['memory']}, "
    return (
        f"Time of one training step without a network ({options['model']}, {options['framework']}, "
        f"{options['device']}, {options['dtype']}, {memory}payloads of {options['ranks']} rank(s)). "
        f"The numbers are medians of at least {options['repeats']} repetitions"
    )


def table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headings, and the cells of each row. The columns for times on a device, or for times of an earlier
    comparison, are included only if a row has such a time."""
    headings, cells = HEADINGS, [_cells(row) for row in rows]
    optional: list[tuple[bool, tuple[str, ...], Callable[[Row], tuple[str, ...]]]] = [
        (any(row.measurement.device_ms is not None for row in rows), DEVICE, _device),
        (any(row.before_ms is not None for row in rows), BEFORE, _before),
    ]
    for has_values, names, cells_of in optional:
        if has_values:
            headings += names
            cells = [(*row_cells, *cells_of(row)) for row_cells, row in zip(cells, rows, strict=True)]
    return headings, cells


def _device(row: Row) -> tuple[str, str]:
    spent, copy = row.measurement.device_ms, row.measurement.device_copy_ms
    if spent is None or copy is None:
        return "-", "-"
    return number(spent.median), number(spent.median / copy.median)


def _before(row: Row) -> tuple[str, str]:
    times = None if row.before_ms is None else row.before_ms / row.measurement.step_ms.median
    return number(row.before_ms), number(times)


def _cells(row: Row) -> tuple[str, ...]:
    measurement = row.measurement
    return (
        measurement.request.method if row.steady else f"{measurement.request.method} (unsteady)",
        str(measurement.request.threads),
        number(measurement.ratio_to_copy.median),
        number(row.ratio_to_peer),
        number(measurement.step_ms.median),
        f"{number(measurement.step_ms.low)} to {number(measurement.step_ms.high)}",
        number(measurement.cpu_ms.median),
        number(measurement.copy_ms.median),
        number(measurement.encode_ms),
        number(measurement.decode_ms),
        "-" if measurement.operations is None else f"{measurement.operations:,}",
        "-" if measurement.kernel_launches is None else f"{measurement.kernel_launches:,}",
        f"{measurement.peak_mb:.0f}",
        "-" if measurement.kept_bytes is None else f"{measurement.kept_bytes:.1f}",
        "-" if measurement.bytes_sent is None else f"{measurement.bytes_sent:,}",
        "-" if measurement.compression_factor is None else f"{measurement.compression_factor:.1f}",
    )


def number(value: float | None) -> str:
    """A number with two significant digits. Digits before the decimal point are never rounded."""
    if value is None:
        return "-"
    places = next((places for places, least in enumerate((10, 1, 0.1, 0.01)) if value >= least), 4)
    return f"{value:.{places}f}"


def markdown(rows: Sequence[Row], options: Mapping[str, Any]) -> str:
    """The table in Markdown."""
    headings, cells = table(rows)
    lines = [headings, ("---",) + ("--:",) * (len(headings) - 1), *cells]
    return "\n".join([f"{title(options)}.", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def as_json(rows: Sequence[Row], options: Mapping[str, Any], facts: Mapping[str, Any], refused: str | None) -> str:
    """All rows as JSON, with the options and the machine's facts.

    Args:
        refused: the reason why the rows may not be compared with each other; None if they may be compared.
    """
    data = {
        "options": dict(options),
        "facts": dict(facts),
        "refused": refused,
        "measurements": [row.as_json() for row in rows],
    }
    return json.dumps(data, indent=1) + "\n"


def plot(rows: Sequence[Row], options: Mapping[str, Any]) -> bytes:
    """A bar chart of the rows, as PNG.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from hvdcomp.perfmodel.figures import COLORS, INK, as_png, new_figure

    measurements = (row.measurement for row in rows)
    ordered = sorted(measurements, key=lambda measurement: measurement.ratio_to_copy.median, reverse=True)
    several = len({measurement.request.threads for measurement in ordered}) > 1
    labels = [
        f"{request.method}, {request.threads} thread(s)" if several else request.method
        for request in (measurement.request for measurement in ordered)
    ]
    figure = new_figure(8, 0.32 * len(ordered) + 1.2)
    axes = figure.add_subplot()
    colors = [INK if measurement.request.is_peer else COLORS[0] for measurement in ordered]
    axes.barh(labels, [measurement.ratio_to_copy.median for measurement in ordered], color=colors)
    axes.set_xlabel(f"time of a step / time of a copy of the gradients of {options['model']}")
    axes.grid(axis="x", alpha=0.3)
    return as_png(figure, dots_per_inch=120)
