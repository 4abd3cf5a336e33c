"""The set-ups in which compression makes a step faster, according to the advice: their number, or a row for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdcomp.perfmodel.advice import FREE, Adviser
from hvdcomp.perfmodel.calibration import Calibration
from hvdcomp.perfmodel.predict import Setting
from hvdcomp.perfmodel.rates import GBPS

WORLD_SIZES = (8, 16, 32, 64, 96, 128)
BATCHES = (0.25, 0.5, 1, 2)
"""Batch sizes of the set-ups, as factors of the calibration's; times of the passes are proportional."""
RATES = (1, 10, 25)
"""Gb/s of the link in `setups`, besides the calibration's rate. Source: Agarwal et al. 2022, On the Utility."""


def counts(calibration: Calibration, specs: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """A row for each model of a calibration, over `WORLD_SIZES` and, if the calibration has a batch size, `BATCHES`.

    Args:
        calibration: the calibration.
        specs: as in `Adviser`.

    Yields:
        calibration, model, setups: the names, and the number of set-ups.
        dense_fastest, fp16_fastest, compressor_fastest: numbers of set-ups in which each is the fastest by any lead.
        compressor_taken: number of set-ups in which a compressor leads over the free methods by more than the model's
            error.
        often: the compressor that is most often the fastest compressor; empty if there is none.
        largest_gain_percent: the largest lead of a compressor over the free methods.
    """
    for model in calibration.models:
        adviser = Adviser(calibration, model, specs)
        times = {spec: _times(adviser, spec, [adviser.bytes_per_s]) for spec in adviser.compressors}
        dense, fp16 = (times.pop(spec) for spec in FREE)
        free = np.minimum(dense, fp16)
        best = np.min([*times.values(), np.full_like(free, np.inf)], axis=0)
        gain = free / best - 1
        wins = {spec: int(np.sum(seconds == best)) for spec, seconds in times.items()}
        yield {
            "calibration": calibration.name,
            "model": model,
            "setups": free.size,
            "dense_fastest": int(np.sum((dense <= fp16) & (gain <= 0))),
            "fp16_fastest": int(np.sum((fp16 < dense) & (gain <= 0))),
            "compressor_fastest": int(np.sum(gain > 0)),
            "compressor_taken": int(np.sum(gain >= adviser.error)),
            "often": max(wins, key=lambda spec: wins[spec], default=""),
            "largest_gain_percent": round(100 * float(gain.max()), 1),
        }


def setups(calibration: Calibration, specs: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """A row for each set-up and compressor that can be used in it: set-ups as in `counts`, at the calibration's rate
    and at `RATES`.

    Args:
        calibration: the calibration.
        specs: as in `Adviser`.

    Yields:
        calibration, gpu, model, method: the names; the GPU is empty if the calibration has none.
        ranks, batch_size, gbps: of the set-up; the batch size is None if the calibration has none.
        step_ms, dense_ms, fp16_ms: predicted times of a step with the method, with dense gradients and with fp16.
        gain_percent: the lead over the faster of dense and fp16; negative if the method is slower.
        taken: whether `advise` recommends the method.
        estimated: whether the encode time is an estimate.
    """
    for model in calibration.models:
        adviser = Adviser(calibration, model, specs)
        rates = np.union1d(adviser.bytes_per_s, np.array(RATES) * GBPS)
        times = {spec: _times(adviser, spec, rates) for spec in adviser.compressors}
        dense, fp16 = (times.pop(spec) for spec in FREE)
        free = np.minimum(dense, fp16)
        fastest = np.argmin([free, *times.values()], axis=0)
        batches = _batches(adviser)
        for at in np.ndindex(free.shape):
            for place, (spec, seconds) in enumerate(times.items(), 1):
                gain, encode = free[at] / seconds[at] - 1, adviser.encode[spec]
                if np.isfinite(seconds[at]):
                    yield {
                        "calibration": calibration.name,
                        "gpu": calibration.machine.get("accelerator", ""),
                        "model": model,
                        "method": spec,
                        "ranks": WORLD_SIZES[at[0]],
                        "batch_size": None if batches is None else batches[at[1]],
                        "gbps": round(rates[at[2]] / GBPS, 3),
                        "step_ms": round(1e3 * seconds[at], 3),
                        "dense_ms": round(1e3 * dense[at], 3),
                        "fp16_ms": round(1e3 * fp16[at], 3),
                        "gain_percent": round(100 * gain, 1),
                        "taken": bool(fastest[at] == place and gain >= adviser.error),
                        "estimated": encode is not None and encode.estimated,
                    }


def _batches(adviser: Adviser) -> Any:
    """Batch sizes of a rank; None if the calibration has none."""
    batch = adviser.facts.compute.batch_size
    return None if batch is None else np.unique([max(1, round(batch * share)) for share in BATCHES])


def _times(adviser: Adviser, spec: str, rates: Any) -> Any:
    """Seconds of a step in each set-up, ranks by batches by rates; infinite if the method cannot be used."""
    ranks, batches = np.array(WORLD_SIZES)[:, None, None], _batches(adviser)
    setting = Setting(ranks, np.asarray(rates), None if batches is None else batches[:, None])
    possible = np.array([adviser.possible(spec, size) for size in WORLD_SIZES])[:, None, None]
    return np.where(possible, np.asarray(adviser.step_s(spec, setting), float), np.inf)
