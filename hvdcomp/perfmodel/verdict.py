"""Writes the advice in words: whether compression is faster than dense gradients and than fp16, and three lines about
each method."""

from __future__ import annotations

from typing import Any

from hvdcomp.perfmodel.advice import FREE
from hvdcomp.perfmodel.predict import UNCOMPRESSED

_RIVALS = {UNCOMPRESSED: "dense gradients", "fp16": "fp16 gradients"}


def verdict(report: dict[str, Any]) -> list[str]:
    """One sentence about whether compression makes training faster, and one sentence for each rival of compression:
    uncompressed gradients and fp16.

    Args:
        report: the report of `hvdcomp advise --json`, parsed.
    """
    winner, methods = report["winner"], report["methods"]
    compressors = {spec: row for spec, row in methods.items() if spec not in FREE and row["why_not"] is None}
    if winner is None or not compressors:
        return []
    best = min(compressors, key=lambda spec: compressors[spec]["step_ms"])
    error = report["error_percent"] / 100
    factors = {rival: methods[rival]["step_ms"] / methods[best]["step_ms"] for rival in FREE}
    beaten = [rival for rival in FREE if factors[rival] - 1 >= error]
    if len(beaten) == len(FREE):
        answer = "Compression makes training faster here."
    elif beaten:
        answer = (
            f"Compression makes training faster here only in comparison with {_named(beaten)}. Measure the speedup "
            "before you rely on this prediction."
        )
    else:
        answer = "Compression does not make training faster here."
    lines = (_over(best, rival, factors[rival], error) for rival in FREE)
    return [f"{answer} The fastest compressor is {best}:", *lines]


def _named(rivals: list[str]) -> str:
    return " and ".join(_RIVALS[rival] for rival in rivals)


def _over(spec: str, rival: str, factor: float, error: float) -> str:
    """Compares the compressor `spec` with a rival whose step takes `factor` times the time of the compressor's step."""
    is_clear = max(factor, 1 / factor) - 1 >= error
    within = "" if is_clear else f", which is within the model's error of {100 * error:.1f}%"
    return f"- {spec} is {compared(factor, _RIVALS[rival])}{within}."


def compared(ratio: float, rival: str) -> str:
    """Describes in words how a method compares with a rival, if the method is `ratio` times faster than the rival.

    Example:
        >>> compared(1.28, "fp16"), compared(0.5, "dense"), compared(1.001, "fp16")
        ('1.28 times faster than fp16', '2.0 times slower than dense', 'as fast as fp16')
    """
    factor, word = times(max(ratio, 1 / ratio)), "faster" if ratio > 1 else "slower"
    return f"as fast as {rival}" if factor == "1.00" else f"{factor} times {word} than {rival}"


def times(ratio: float) -> str:
    """Formats a ratio with two decimals below 2, one decimal below 100, and no decimals above."""
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def lines_of(spec: str, row: dict[str, Any], ranges: str) -> list[str]:
    """Three lines for a method: the time of a step, its parts, and the bandwidths at which it is faster than dense.

    Args:
        spec: spec of the method.
        row: the entry of the method in the report of `hvdcomp advise --json`.
        ranges: words for the bandwidths at which the method is faster than dense; empty for dense gradients.
    """
    beside = "" if spec == UNCOMPRESSED else f", {compared(row['speedup_over_dense'], 'dense')}"
    parts = [f"{part} {row[f'{part}_ms']:.1f}" for part in ("compute", "encode", "network", "latency")]
    if row["estimated"]:
        parts[1] = parts[1].replace("encode ", "encode ~")
    unit = "" if ranges in ("always", "never") else " Gb/s"
    third = "" if spec == UNCOMPRESSED else f"faster than dense {ranges}{unit}; "
    third += f"sends {(row['bytes_sent'] - row['bytes_in_node']) / 1e6:,.1f} MB of gradients"
    if row["bytes_in_node"]:
        third += " between nodes"
    if row["kept_bytes_per_parameter"]:
        third += f"; needs {row['kept_bytes_per_parameter']:.1f} bytes of memory per parameter"
    return [
        f"{spec}: {row['step_ms']:.1f} ms{beside}",
        f"    in ms: {', '.join(parts)}; limited by {row['limited_by']}",
        f"    {third}",
    ]
