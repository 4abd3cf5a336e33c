"""Counts of the set-ups in which compression pays, by the advice for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdcomp.perfmodel.advice import FREE, Adviser
from hvdcomp.perfmodel.calibration import Calibration
from hvdcomp.perfmodel.predict import Setting

WORLD_SIZES = (8, 16, 32, 64, 96, 128)
BATCHES = (0.25, 0.5, 1, 2)
"""Batch sizes of the set-ups, as factors of the calibration's; times of the passes are proportional."""


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
        times = {spec: _times(adviser, spec) for spec in adviser.compressors}
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


def _times(adviser: Adviser, spec: str) -> Any:
    """Seconds of a step in each set-up, ranks by batches; infinite if the method cannot be used."""
    batch = adviser.facts.compute.batch_size
    batches = None if batch is None else np.unique([max(1, round(batch * share)) for share in BATCHES])
    ranks = np.array(WORLD_SIZES)[:, None]
    seconds = np.asarray(adviser.step_s(spec, Setting(ranks, batch_size=batches)), float)
    possible = np.array([adviser.possible(spec, size) for size in WORLD_SIZES])[:, None]
    return np.where(possible, seconds, np.inf)
