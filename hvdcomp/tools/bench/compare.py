"""Predicted beside measured times of steps: one row for each, and what the rows say together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdcomp.compressors import Compressor, needs_nodes
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel import STOCK_SPECS, UNCOMPRESSED, Adviser, Exchange, Setting, from_json
from hvdcomp.policies import median_with_error
from hvdcomp.tools.bench.places import Place, place_of

TWO_LEVELS, SCATTER = "two levels", "scatter"
_WAYS = {"alltoall": SCATTER, "allgather": "gather", "allreduce": "allreduce"}  # the first that a step has


@dataclass(frozen=True)
class Row(Place):
    """One method in one place. Times in ms, of one step.

    Attributes:
        method: the spec, or the name of one of the library's own, with ", at the end" where nothing is sent before the
            end of the backward pass although it could be.
        spec: of the compressor.
        way: "allreduce", "gather", "scatter" or "two levels".
        overlap: whether gradients are sent during the backward pass.
        measured_ms, low_ms, high_ms: median and quartiles of the steps.
        error: predicted / measured - 1.
        compute_error: the same of training without any communication, as calibrated and as measured beside: how far the
            machine itself was not equally fast.
        compute_ms, encode_ms, network_ms, latency_ms: the parts of the prediction.
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
    """The fastest compressor of one place, and how many times as fast it is as dense and as fp16, as measured.

    Attributes:
        best: the method.
        way, overlap: of the fastest, as in `Row`.
    """

    best: str
    way: str
    overlap: bool
    over_dense: float
    over_fp16: float
    predicted_best: str

    @property
    def over_stock(self) -> float:
        """How many times as fast as the faster one of dense and fp16."""
        return min(self.over_dense, self.over_fp16)


@dataclass(frozen=True)
class Choice(Place):
    """What `auto` did in one place. Ratios are medians over rounds in which it took turns with the others.

    Attributes:
        compressors: that it was given.
        chosen: in the end, of its candidates.
        predicted_ms: of that candidate.
        measured_ms: median of its steps.
        best: the static choice with the least median; dense, fp16 or any compressor.
        over_best, over_dense: time of a step / that of the best static choice, and of dense. Dense takes turns with it
            only if it is not far behind.
        over_best_error, over_dense_error: their standard errors; the latter 0 where dense took no turns.
        rounds: of these turns.
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
    """The rows of one model on one cluster, from what its ranks wrote."""
    calibration, model = from_json(run["calibration"]), run["model"]
    measured = _static(run)
    specs = {
        name: str(parse_compressor(STOCK_SPECS.get(name) or one.get("method", name))) for name, one in measured.items()
    }
    early_bytes = run.get("early_bytes") or 0  # of earlier versions, whose steps send all at the end
    adviser = Adviser(calibration, model, list(specs.values()), early_bytes)
    ranks = int(calibration.machine["ranks"])
    compute = calibration.models[model].compute
    alone = (compute.forward_s or 0.0) + compute.backward_s + compute.optimizer_s
    rows = []
    for method, one in measured.items():
        spec, early = specs[method], one.get("overlap_bytes") != 0
        exchange = adviser.exchange(spec, ranks)
        parts = adviser.parts(spec, Setting(ranks), early=early)
        low, high = one["quartiles_ms"]
        predicted = 1e3 * float(parts.total)
        rows.append(
            Row(
                **vars(place_of(run)),
                method=method,
                spec=spec,
                way=_way(adviser.compressors[spec], exchange),
                overlap=exchange.overlapped or (early and 0 < early_bytes < exchange.dense_bytes),
                measured_ms=one["median_ms"],
                low_ms=low,
                high_ms=high,
                predicted_ms=predicted,
                error=predicted / one["median_ms"] - 1,
                compute_error=1e3 * alone / run["steps"][run["alone"]]["median_ms"] - 1,
                compute_ms=1e3 * float(parts.compute),
                encode_ms=1e3 * float(parts.encode),
                network_ms=1e3 * float(parts.transfer),
                latency_ms=1e3 * float(parts.latency),
                noise=(high - low) / one["median_ms"],
                bytes_per_step=one["bytes_per_step"],
            )
        )
    return rows


def _way(compressor: Compressor, exchange: Exchange) -> str:
    """How most of it travels."""
    if needs_nodes(compressor):
        return TWO_LEVELS
    kinds = {collective.kind for collectives in exchange.rounds for collective in collectives}
    return next(way for kind, way in _WAYS.items() if kind in kinds)


def _static(run: dict[str, Any]) -> dict[str, Any]:
    """The measured steps of the methods that always send the same way."""
    return {method: one for method, one in run["steps"].items() if method not in (run["alone"], run["auto"])}


def choices(runs: Sequence[dict[str, Any]]) -> list[Choice]:
    """What `auto` did in each setting, from what the ranks wrote."""
    found = []
    for run in runs:
        auto = run["steps"].get(run["auto"])
        if auto is None:
            continue
        turns = auto["against"]
        over = {method: ratio(turns[run["auto"]], turns[method]) for method in turns}
        dense = over.get("none", (auto["median_ms"] / run["steps"]["none"]["median_ms"], 0.0))
        found.append(
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
    return found


def ratio(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The median over rounds of the ratio of the steps' medians, and its standard error."""
    pairs = zip(one, other, strict=True)
    return median_with_error([statistics.median(mine) / statistics.median(theirs) for mine, theirs in pairs])


def gains(rows: Sequence[Row]) -> list[Gain]:
    """For each place in which there is a compressor, the method that was fastest."""
    found = []
    for place in dict.fromkeys(row.place for row in rows):
        here = [row for row in rows if row.place == place]
        stock = {STOCK_SPECS[row.method]: row for row in here if row.method in STOCK_SPECS}
        others = [row for row in here if row.method not in STOCK_SPECS]
        if others and stock.keys() == set(STOCK_SPECS.values()):
            best = min(others, key=lambda row: row.measured_ms)
            found.append(
                Gain(
                    **vars(place),
                    best=best.method,
                    way=best.way,
                    overlap=best.overlap,
                    over_dense=stock[UNCOMPRESSED].measured_ms / best.measured_ms,
                    over_fp16=stock["fp16"].measured_ms / best.measured_ms,
                    predicted_best=min(others, key=lambda row: row.predicted_ms).method,
                )
            )
    return found


def errors(rows: Sequence[Row]) -> tuple[float, Row]:
    """The median of the absolute errors, and the row with the largest."""
    return statistics.median(abs(row.error) for row in rows), max(rows, key=lambda row: abs(row.error))
