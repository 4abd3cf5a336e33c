"""The map shows where compression makes training faster on one type of GPU. It has a row for each model, a column for
each rate of a node's link, and a panel for each number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdcomp.perfmodel.advice import FREE
from hvdcomp.perfmodel.calibration import Calibration
from hvdcomp.perfmodel.count import adviser_of
from hvdcomp.perfmodel.predict import Setting
from hvdcomp.perfmodel.rates import GBPS

MAP_RATES = (1, 10, 25, 50, 100, 400)
"""The rates of a node's link on the map, in Gb/s."""
MAP_RANKS = (16, 64, 256)


def cells(
    calibration: Calibration,
    ranks: Sequence[int] = MAP_RANKS,
    specs: Sequence[str] | None = None,
    optimizer: str | None = None,
    **setting: Any,
) -> Iterator[dict[str, Any]]:
    """Yields the cells of the map: one row for each number of ranks, each model and each rate of `MAP_RATES`.

    Args:
        calibration: the measured times of the network and of the models.
        ranks: the numbers of ranks on the map.
        specs: specs of the compressors to compare, as in `Adviser`.
        optimizer: kind of the training's optimizer, as in `Adviser`.
        setting: other attributes of `Setting`, such as `micro_batches`.

    Yields:
        calibration, model: names of the calibration and of the model.
        ranks, batch_size, gbps: number of ranks, batch size of one rank and rate of a node's link in Gb/s. The batch
            size is None if the calibration has none.
        method: spec of the fastest compressor that may be recommended; empty if there is none.
        step_ms, dense_ms, fp16_ms: predicted milliseconds of a step with this compressor, with dense gradients and with
            fp16. `step_ms` is None if there is no compressor.
        gain_percent: the compressor's lead over the faster of dense and fp16, in percent; negative if the compressor is
            slower, and None if there is no compressor.
        pays: whether the lead is larger than the model's error.
        estimated: whether the compressor's encode time is an estimate.
    """
    for model in calibration.models:
        adviser = adviser_of(calibration, model, specs, optimizer)
        for number in ranks:
            at = Setting(number, np.array(MAP_RATES) * GBPS, **setting)
            usable = [spec for spec in adviser.recommended if adviser.possible(spec, number)]
            times = {spec: np.broadcast_to(adviser.step_s(spec, at), len(MAP_RATES)) for spec in usable}
            dense, fp16 = (times.pop(spec) for spec in FREE)
            for place, rate in enumerate(MAP_RATES):
                method = min(times, key=lambda spec: times[spec][place], default="")
                seconds = float(times[method][place]) if method else float("inf")
                gain = float(min(dense[place], fp16[place])) / seconds - 1
                encode = adviser.encode.get(method)
                yield {
                    "calibration": calibration.name,
                    "ranks": number,
                    "model": model,
                    "batch_size": adviser.facts.compute.batch_size,
                    "gbps": rate,
                    "method": method,
                    "step_ms": round(1e3 * seconds, 3) if method else None,
                    "dense_ms": round(1e3 * float(dense[place]), 3),
                    "fp16_ms": round(1e3 * float(fp16[place]), 3),
                    "gain_percent": round(100 * gain, 1) if method else None,
                    "pays": bool(method) and gain >= adviser.error,
                    "estimated": encode is not None and encode.estimated,
                }


def short(method: str) -> str:
    """The name of a method in a cell of the map: its spec without `exchange=scatter`.

    Example:
        >>> short("two_level(int4:exchange=scatter)"), short("topk:ratio=0.01")
        ('int4, 2 levels', 'topk:ratio=0.01')
    """
    inner = method.removeprefix("two_level(").removesuffix(")") if method.startswith("two_level(") else method
    inner = inner.replace(",exchange=scatter", "").replace(":exchange=scatter", "")
    return f"{inner}, 2 levels" if method.startswith("two_level(") else inner
