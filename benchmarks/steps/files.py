"""Writes the comparison of predicted and measured step times as files, tables and sentences."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.pages import formerly
from benchmarks.steps.compare import SCATTER, TWO_LEVELS, Choice, Gain, Row, choices, errors, gains
from benchmarks.steps.places import place_of
from hvdcomp.files import commits_in_words, csv_of, provenance_last, replace_files
from hvdcomp.perfmodel import NOISY, STOCK_SPECS
from hvdcomp.perfmodel.rates import parse_rate


def write(folder: Path, stem: str, rows: Sequence[Row], details: dict[str, Any]) -> list[Path]:
    """Writes STEM.json, .csv, .md and .png, STEM-gains.csv and STEM-speed.png. Returns their paths.

    Args:
        folder, stem: folder of the files, and the beginning of their names.
        rows: the rows to write.
        details: further values for the JSON file: options, calibrations and all step times.

    Raises:
        OSError: if a file cannot be written. The earlier files still exist after an interruption, or if the disk is
            full.
    """
    from benchmarks.steps.plot import draw_errors, draw_speed

    files = [folder / f"{stem}.{ending}" for ending in ("json", "csv", "md", "png")]
    all_gains = gains(rows)
    tables: dict[str, Sequence[Any]] = {"rows": rows, "gains": all_gains, "auto": choices(details.get("runs", ()))}
    data = {name: [asdict(row) for row in table] for name, table in tables.items()} | details
    contents = [
        json.dumps(data).encode() + b"\n",  # the JSON is one line, because no person reads it
        csv_of([asdict(row) for row in rows]),
        markdown(stem, rows, details).encode(),
        draw_errors(rows),
    ]
    if all_gains:
        files += [folder / f"{stem}-gains.csv", folder / f"{stem}-speed.png"]
        contents += [
            csv_of([{**asdict(gain), "over_stock": gain.over_stock} for gain in all_gains]),
            draw_speed(rows),
        ]
    replace_files(dict(zip(files, contents, strict=True)))
    return files


def summary(rows: Sequence[Row]) -> list[str]:
    """Paragraphs about the errors of all predictions, and about how often the predictions name the fastest
    compressor."""
    middle, worst = errors(rows)
    paragraphs = [
        f"The median error of {len(rows)} predictions is {middle:.1%}. The largest error is {worst.error:+.1%}, for "
        f"{worst.method} ({worst.in_words()}): predicted {worst.predicted_ms:.1f} ms, measured "
        f"{worst.measured_ms:.1f} ms (quartiles {worst.low_ms:.1f} to {worst.high_ms:.1f})."
    ]
    if all_gains := gains(rows):
        predicted = sum(gain.best == gain.predicted_best for gain in all_gains)
        paragraphs.append(f"The predictions name the fastest compressor in {predicted} of {len(all_gains)} settings.")
    return paragraphs


def _by_kind(rows: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    """For each kind of exchange, the number of predictions for compressors, and their median error."""
    compressed = [row for row in rows if row.spec not in STOCK_SPECS.values()]
    kinds = {
        "an all-gather or allreduce": [row for row in compressed if row.way not in (SCATTER, TWO_LEVELS)],
        "scattered payloads": [row for row in compressed if row.way == SCATTER],
        "two levels": [row for row in compressed if row.way == TWO_LEVELS],
        "overlap": [row for row in compressed if row.overlap],
        "no overlap": [row for row in compressed if not row.overlap],
    }
    for kind, some in kinds.items():
        if some:
            yield kind, str(len(some)), f"{errors(some)[0]:.1%}"


def _speedups(all_gains: Sequence[Gain]) -> list[str]:
    """A table with the speedups of the fastest compressors, by model and rate. It shows the range over all clusters."""
    if not all_gains:
        return []
    rates = sorted({gain.rate for gain in all_gains}, key=parse_rate)
    lines = []
    for model in dict.fromkeys(gain.model for gain in all_gains):
        cells = []
        for rate in rates:
            speedups = sorted(gain.over_stock for gain in all_gains if (gain.model, gain.rate) == (model, rate))
            cells.append(" to ".join(dict.fromkeys(f"{value:.2f}" for value in [*speedups[:1], *speedups[-1:]])))
        lines.append((model, *cells))
    ranges = ", as a range over the numbers of hosts and ranks" if len({gain.cluster for gain in all_gains}) > 1 else ""
    return [
        f"The table shows the speedup of the fastest compressor in each setting{ranges}. The baseline is the faster of "
        "dense gradients and fp16:",
        "",
        *_markdown_table(("model", *rates), lines),
        "",
    ]


NOT_FAR = 0.05
"""The page has a row for each setting in which a step with `auto` takes longer than with the best static choice by more
than this share."""

HEADINGS = ("hosts", "rate", "model", "method", "measured ms", "quartiles", "predicted ms", "error", "compute", "of it")


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a row."""
    parts = {"compute": row.compute_ms, "encode": row.encode_ms, "network": row.network_ms, "latency": row.latency_ms}
    largest = max(parts, key=lambda part: parts[part])
    return (
        str(row.cluster),
        row.rate,
        row.model,
        row.method,
        f"{row.measured_ms:.1f}",
        f"{row.low_ms:.1f} to {row.high_ms:.1f}",
        f"{row.predicted_ms:.1f}",
        f"{row.error:+.0%}",
        f"{row.compute_error:+.0%}",
        f"{largest} {parts[largest]:.1f}",
    )


_OF_KINDS = "The table shows the errors of the predictions for compressors, for each kind of exchange:"


def markdown(stem: str, rows: Sequence[Row], details: dict[str, Any]) -> str:
    """The page: the summary, tables of errors and speedups, the settings in which `auto` made a bad choice, and the
    noise."""
    commits = commits_in_words(run["commit"] for run in details["runs"])  # several if the command was resumed
    all_gains = gains(rows)
    file = f"{stem}-gains.csv"
    gains_file = f" The file [{file}]({file}) contains the fastest compressor of each setting, and its speedups."
    kinds = list(_by_kind(rows))
    lines = [
        "# Predicted and measured times of steps",
        "",
        f"Made by `{details['command']}`, at commit {commits}. {formerly('hvdcomp bench steps')}",
        "",
        "This page compares the measured times of training steps with the times that the performance model predicts. "
        f"The file [{stem}.csv]({stem}.csv) contains all {len(rows)} predictions, with the quartiles of the measured "
        f"times, and the parts of each prediction.{gains_file if all_gains else ''}",
        "",
        *([details["left_out"], ""] if details.get("left_out") else []),
        *(line for paragraph in summary(rows) for line in (paragraph, "")),
        *_speedups(all_gains),
        "The table shows the errors of the predictions for each method, over all settings:",
        "",
        *_markdown_table(
            ("method", "settings", "fastest compressor in", "median error", "largest error"),
            list(_by_method(rows, all_gains)),
        ),
        "",
        *([_OF_KINDS, ""] if kinds else []),
        *(_markdown_table(("exchange with", "predictions", "median error"), kinds) if kinds else []),
        *([""] if kinds else []),
        *_auto(choices(details.get("runs", ()))),
        *_noise(details.get("runs", ())),
    ]
    return provenance_last("\n".join(lines))


def _by_method(rows: Sequence[Row], all_gains: Sequence[Gain]) -> Iterator[tuple[str, ...]]:
    """For each method, the number of settings in which it is the fastest compressor, and the errors of its
    predictions."""
    for method in dict.fromkeys(row.method for row in rows):
        errors = [row.error for row in rows if row.method == method]
        fastest = "" if method in STOCK_SPECS else str(sum(gain.best == method for gain in all_gains))
        median = statistics.median(abs(error) for error in errors)
        yield method, str(len(errors)), fastest, f"{median:.1%}", f"{max(errors, key=abs):+.0%}"


def auto_summary(chosen: Sequence[Choice]) -> str:
    """A paragraph about the step times with `auto`."""
    slowest, slower = (max(chosen, key=lambda choice: getattr(choice, name)) for name in ("over_best", "over_dense"))
    median = statistics.median(choice.over_best for choice in chosen)
    return (
        f"In the median setting, a step with the policy auto takes {median:.3f} times as long as with the best static "
        f"choice. In the worst setting ({slowest.in_words()}), it takes {slowest.over_best:.3f} times as long. "
        f"Compared with dense gradients, a step with auto takes {slower.over_dense:.3f} times as long in the worst "
        f"setting ({slower.in_words()}). The standard errors of the ratios to the best static choice are at most "
        f"{max(choice.over_best_error for choice in chosen):.3f}."
    )


def _auto(chosen: Sequence[Choice]) -> list[str]:
    if not chosen:
        return []
    headings = ("cluster", "rate", "model", "candidates", "chosen", "predicted ms", "measured ms", "best static choice",
                "measured / best", "measured / dense")  # fmt: skip
    table = [
        (
            choice.cluster.in_words(), choice.rate, choice.model, _candidates(choice), choice.chosen,
            f"{choice.predicted_ms:.1f}", f"{choice.measured_ms:.1f}", choice.best,
            f"{choice.over_best:.3f} ± {choice.over_best_error:.3f}",
            f"{choice.over_dense:.3f}" + (f" ± {choice.over_dense_error:.3f}" if choice.over_dense_error else ""),
        )
        for choice in chosen
        if choice.over_best > 1 + NOT_FAR
    ]  # fmt: skip
    if not table:
        return [auto_summary(chosen), ""]
    sentence = (
        f"{auto_summary(chosen)} In these settings, a step with auto takes more than {NOT_FAR:.0%} longer than with "
        "the best static choice:"
    )
    return [sentence, "", *_markdown_table(headings, table), ""]


def _candidates(choice: Choice) -> str:
    """The compressors that `auto` could choose, in addition to dense and fp16."""
    return choice.compressors[0] if len(choice.compressors) == 1 else f"{len(choice.compressors)} compressors"


def _noise(runs: Sequence[dict[str, Any]]) -> list[str]:
    """A paragraph about the noisy measurements in the calibrations."""
    noisy = [(number["spread"], number_name, run) for run in runs for number_name, number in run["noisy"].items()]
    if not noisy:
        return []
    spread, number_name, run = max(noisy, key=lambda entry: entry[0])
    return [
        f"In the calibrations, {len(noisy)} {'numbers are' if len(noisy) > 1 else 'number is'} noisy: the medians of "
        f"repeated measurements differ by more than {NOISY:.0%}. The largest difference is {spread:.0%} "
        f"({number_name}; {place_of(run).in_words()}). The JSON file lists all noisy numbers.",
        "",
    ]


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    every = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(row)} |" for row in every]
