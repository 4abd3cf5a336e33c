"""Compares predicted with measured step times: creates a row for each comparison, and statistics of the rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.steps.places import Place, place_of
from hvdcomp.compressors import Compressor, needs_nodes
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel import STOCK_SPECS, UNCOMPRESSED, Adviser, Exchange, Setting, from_json
from hvdcomp.tools.bench.trainings import ratio

TWO_LEVELS, SCATTER = "two levels", "scatter"
# The kind of exchange for each kind of collective. If a step uses several kinds of collectives, the first of them in
# this table decides.
_WAYS = {"alltoall": SCATTER, "allgather": "gather", "allreduce": "allreduce"}


@dataclass(frozen=True)
class Row(Place):
    """The measured and the predicted step time of a method in one setting. Times are in milliseconds per step.

    Attributes:
        method: the spec of a compressor, or the name of the library's own method. It ends with ", at the end" if
            overlap is switched off.
        spec: spec of the compressor.
        way: the kind of exchange: "allreduce", "gather", "scatter" or "two levels".
        overlap: whether gradients are sent during the backward pass.
        measured_ms, low_ms, high_ms: median and quartiles of the measured steps.
        error: relative error of the prediction: predicted / measured - 1.
        compute_error: the same error for training without communication. It shows how the speed of the machine has
            changed since the calibration.
        compute_ms, encode_ms, network_ms, latency_ms: the parts of the predicted time.
        noise: relative distance between the quartiles of the measured steps.
    """

    method: str
    spec: str
    way: str
    overlap: bool
    measured_ms: float
    low_ms: float
    high_ms: float
    predicted_ms: float
    error: float
    compute_error: float
    compute_ms: float
    encode_ms: float
    network_ms: float
    latency_ms: float
    noise: float
    bytes_per_step: float


@dataclass(frozen=True)
class Gain(Place):
    """The fastest compressor in a setting, with its measured speedup over dense and fp16.

    Attributes:
        best: name of the method, as in `Row.method`.
        way, overlap: attributes of the fastest compressor, as in `Row`.
    """

    best: str
    way: str
    overlap: bool
    over_dense: float
    over_fp16: float
    predicted_best: str

    @property
    def over_stock(self) -> float:
        """The speedup over the faster of dense and fp16."""
        return min(self.over_dense, self.over_fp16)


@dataclass(frozen=True)
class Choice(Place):
    """The choice of `auto` in a setting. The methods took turns in rounds; ratios are medians over these rounds.

    Attributes:
        compressors: the compressors that `auto` could choose.
        chosen: the candidate that `auto` chose at the end.
        predicted_ms: predicted step time of the chosen candidate, in ms.
        measured_ms: median of the measured step times of the chosen candidate, in ms.
        best: the method with the smallest median step time among the static methods: dense, fp16 and the compressors.
        over_best, over_dense: the step time of `auto` divided by that of the best static method, and divided by that of
            dense training. Dense training takes part in the rounds only if it is not much slower.
        over_best_error, over_dense_error: standard errors of these two ratios. The second is 0 if dense training did
            not take part in the rounds.
        rounds: number of rounds in which the methods took turns.
    """

    compressors: tuple[str, ...]
    chosen: str
    predicted_ms: float
    measured_ms: float
    best: str
    over_best: float
    over_best_error: float
    over_dense: float
    over_dense_error: float
    rounds: int


def compare(run: dict[str, Any]) -> list[Row]:
    """The rows of a model on a cluster, from the file that its ranks wrote."""
    calibration, model = from_json(run["calibration"]), run["model"]
    measured = _static(run)
    specs = {
        name: str(parse_compressor(STOCK_SPECS.get(name) or steps.get("method", name)))
        for name, steps in measured.items()
    }
    early_bytes = run.get("early_bytes") or 0  # files of earlier versions have no overlap
    adviser = Adviser(calibration, model, list(specs.values()), early_bytes)
    ranks = int(calibration.machine["ranks"])
    compute = calibration.models[model].compute
    alone = (compute.forward_s or 0.0) + compute.backward_s + compute.optimizer_s
    rows = []
    for method, step in measured.items():
        spec, early = specs[method], step.get("overlap_bytes") != 0
        exchange = adviser.exchange(spec, ranks)
        parts = adviser.parts(spec, Setting(ranks), early=early)
        low, high = step["quartiles_ms"]
        predicted = 1e3 * float(parts.total)
        rows.append(
            Row(
                **vars(place_of(run)),
                method=method,
                spec=spec,
                way=_way(adviser.compressors[spec], exchange),
                overlap=exchange.overlapped or (early and 0 < early_bytes < exchange.dense_bytes),
                measured_ms=step["median_ms"],
                low_ms=low,
                high_ms=high,
                predicted_ms=predicted,
                error=predicted / step["median_ms"] - 1,
                compute_error=1e3 * alone / run["steps"][run["alone"]]["median_ms"] - 1,
                compute_ms=1e3 * float(parts.compute),
                encode_ms=1e3 * float(parts.encode),
                network_ms=1e3 * float(parts.transfer),
                latency_ms=1e3 * float(parts.latency),
                noise=(high - low) / step["median_ms"],
                bytes_per_step=step["bytes_per_step"],
            )
        )
    return rows


def _way(compressor: Compressor, exchange: Exchange) -> str:
    """The kind of an exchange, as in `Row.way`."""
    if needs_nodes(compressor):
        return TWO_LEVELS
    kinds = {collective.kind for collectives in exchange.rounds for collective in collectives}
    return next(way for kind, way in _WAYS.items() if kind in kinds)


def _static(run: dict[str, Any]) -> dict[str, Any]:
    """The measured steps of the static methods."""
    return {method: step for method, step in run["steps"].items() if method not in (run["alone"], run["auto"])}


def choices(runs: Sequence[dict[str, Any]]) -> list[Choice]:
    """The choices of `auto`, from the result files of the ranks."""
    auto_choices = []
    for run in runs:
        auto = run["steps"].get(run["auto"])
        if auto is None:
            continue
        turns = auto["against"]
        over = {method: ratio(turns[run["auto"]], turns[method]) for method in turns}
        dense = over.get("none", (auto["median_ms"] / run["steps"]["none"]["median_ms"], 0.0))
        auto_choices.append(
            Choice(
                **vars(place_of(run)),
                compressors=tuple(auto.get("compressors") or [auto["compressor"]]),
                chosen=auto["chosen"],
                predicted_ms=auto["predicted_ms"],
                measured_ms=auto["median_ms"],
                best=auto["best"],
                over_best=over[auto["best"]][0],
                over_best_error=over[auto["best"]][1],
                over_dense=dense[0],
                over_dense_error=dense[1],
                rounds=len(turns[run["auto"]]),
            )
        )
    return auto_choices


def gains(rows: Sequence[Row]) -> list[Gain]:
    """The fastest compressor in each setting that has one."""
    all_gains = []
    for place in dict.fromkeys(row.place for row in rows):
        place_rows = [row for row in rows if row.place == place]
        stock = {STOCK_SPECS[row.method]: row for row in place_rows if row.method in STOCK_SPECS}
        compressed = [row for row in place_rows if row.method not in STOCK_SPECS]
        if compressed and stock.keys() == set(STOCK_SPECS.values()):
            best = min(compressed, key=lambda row: row.measured_ms)
            all_gains.append(
                Gain(
                    **vars(place),
                    best=best.method,
                    way=best.way,
                    overlap=best.overlap,
                    over_dense=stock[UNCOMPRESSED].measured_ms / best.measured_ms,
                    over_fp16=stock["fp16"].measured_ms / best.measured_ms,
                    predicted_best=min(compressed, key=lambda row: row.predicted_ms).method,
                )
            )
    return all_gains


def errors(rows: Sequence[Row]) -> tuple[float, Row]:
    """The median of the absolute errors, and the row with the largest error."""
    return statistics.median(abs(row.error) for row in rows), max(rows, key=lambda row: abs(row.error))
