"""Counts and lists the set-ups in which compression makes a step faster, according to the advice.

A set-up consists of a number of ranks and a batch size; in lists, it also has the rate of a link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel.advice import FREE, Adviser
from hvdcomp.perfmodel.by_size import encode_times
from hvdcomp.perfmodel.calibration import Calibration, ModelFacts, load
from hvdcomp.perfmodel.cards import CARDS
from hvdcomp.perfmodel.compute import EncodeTime
from hvdcomp.perfmodel.kernel_times import KERNELS, encode_time, host_s
from hvdcomp.perfmodel.predict import Setting
from hvdcomp.perfmodel.rates import GBPS
from hvdcomp.perfmodel.ways import encode_time_of, reduces_shards

WORLD_SIZES = (8, 16, 32, 64, 96, 128)
BATCHES = (0.25, 0.5, 1, 2)
"""The batch sizes of the set-ups, as factors of the calibration's batch size. The times of the forward and backward
pass are assumed to be proportional to the batch size."""
RATES = (1, 10, 25)
"""The rates of a link in `setups`, in Gb/s, in addition to the calibration's rate. Source: Agarwal et al. 2022, On the
Utility of Gradient Compression."""
OF_2021 = "v100-p3.8xlarge-2021"
"""The preset with the encode times of Agarwal et al. 2022, measured with their code of 2021 on a V100."""


def counts(
    calibration: Calibration, specs: Sequence[str] | None = None, optimizer: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yields one row for each model of a calibration. A row counts set-ups: every number of ranks in `WORLD_SIZES`,
    combined with every batch size in `BATCHES` if the calibration has a batch size.

    If the calibration names a GPU, each row also has counts for the code that Agarwal et al. measured in 2021. The
    encode times of this code are scaled from a V100 by memory bandwidth. If the calibration is the preset `OF_2021`,
    the columns without "2021" use the encode times of hvdcomp's own kernels on a V100.

    Args:
        calibration: the measured times of the network and of the models.
        specs: specs of the compressors to compare, as in `Adviser`. If it is None and the calibration names a GPU, only
            methods that have both current encode times and encode times of 2021 are counted.
        optimizer: kind of the training's optimizer, as in `Adviser`.

    Yields:
        calibration, model: the names of the calibration and of the model.
        setups: number of set-ups.
        dense_fastest, fp16_fastest, compressor_fastest: numbers of set-ups in which dense gradients, fp16 or a
            compressor is fastest, even if the lead is small.
        compressor_taken: number of set-ups in which a compressor is faster than the free methods, dense and fp16, by
            more than the model's error.
        often: spec of the compressor that is most often the fastest compressor; empty if there is none.
        largest_gain_percent: the largest lead of a compressor over the faster of dense and fp16, in percent.
        compressor_taken_2021, often_2021, largest_gain_percent_2021: the same three numbers with the encode times of
            2021; None if the calibration names no GPU.
    """
    published = load(OF_2021)
    known_then = published.models["resnet50"].compute.encode
    for model, facts in calibration.models.items():
        if calibration.name == OF_2021:
            facts = with_own_kernels(facts, calibration.card)
        if calibration.card and specs is None:
            encode = {spec: time for spec, time in facts.compute.encode.items() if spec in known_then}
            facts = replace(facts, compute=replace(facts.compute, encode=encode))
        adviser = adviser_of(replace(calibration, models={model: facts}), model, specs, optimizer)
        now = _count(adviser)
        then: dict[str, Any] = dict.fromkeys(now)
        if calibration.card:
            then = _count(_with_encode_times(adviser, _encode_times_of_2021(published, facts, calibration.card)))
        yield {
            "calibration": calibration.name,
            "model": model,
            **now,
            **{f"{key}_2021": then[key] for key in ("compressor_taken", "often", "largest_gain_percent")},
        }


def _count(adviser: Adviser) -> dict[str, Any]:
    times = {spec: _times(adviser, spec, [adviser.bytes_per_s]) for spec in adviser.recommended}
    dense, fp16 = (times.pop(spec) for spec in FREE)
    free = np.minimum(dense, fp16)
    best = np.min([*times.values(), np.full_like(free, np.inf)], axis=0)
    gain = free / best - 1
    wins = {spec: int(np.sum(seconds == best)) for spec, seconds in times.items()}
    return {
        "setups": free.size,
        "dense_fastest": int(np.sum((dense <= fp16) & (gain <= 0))),
        "fp16_fastest": int(np.sum((fp16 < dense) & (gain <= 0))),
        "compressor_fastest": int(np.sum(gain > 0)),
        "compressor_taken": int(np.sum(gain >= adviser.error)),
        "often": max(wins, key=lambda spec: wins[spec], default=""),
        "largest_gain_percent": round(100 * float(gain.max()), 1),
    }


def adviser_of(
    calibration: Calibration, model: str, specs: Sequence[str] | None = None, optimizer: str | None = None
) -> Adviser:
    """An adviser for a model. If the model is sharded, compressors that cannot compress shards are left out."""
    if specs is not None and calibration.models[model].sharded:
        specs = [spec for spec in specs if reduces_shards(parse_compressor(spec))]
    return Adviser(calibration, model, specs, optimizer=optimizer)


def with_own_kernels(facts: ModelFacts, card: str) -> ModelFacts:
    """Replaces all encode times of a model with those of hvdcomp's own kernels on a GPU."""
    elements = sum(tensor.size for tensor in facts.tensors)
    encode = {spec: encode_time(spec, CARDS[card], elements, facts.shapes) for spec in KERNELS}
    return replace(facts, compute=replace(facts.compute, encode=encode))


def _encode_times_of_2021(published: Calibration, facts: ModelFacts, card: str) -> dict[str, EncodeTime]:
    """The encode times of Agarwal et al.'s code of 2021 on a GPU, by spec. Each time is scaled from the published time
    on a V100: for the same model, or else for the model that is closest in size."""
    same = [name for name, known in published.models.items() if known.tensors == facts.tensors]
    without = replace(facts, compute=replace(facts.compute, encode={}))
    models = published.models if same else {**published.models, "": without}
    known = encode_times(replace(published, models=models), same[0] if same else "")
    slower = CARDS["v100"].bytes_per_s / CARDS[card].bytes_per_s
    # We assume that no code launches fewer kernels than hvdcomp, so the host needs at least hvdcomp's time.
    return {
        spec: replace(time.part(slower), host_s=host_s(KERNELS[spec]) if spec in KERNELS else 0.0)
        for spec, time in known.items()
    }


def _with_encode_times(adviser: Adviser, known: dict[str, EncodeTime]) -> Adviser:
    """A copy of the adviser with the encode times `known`. Methods that have no time in `known` are left out."""
    of_nodes = (adviser.facts.tensors, adviser.ranks_per_node)
    times = {spec: encode_time_of(method, known, *of_nodes) for spec, method in adviser.compressors.items()}
    other = copy(adviser)
    other.compressors = {
        spec: method for spec, method in adviser.compressors.items() if spec in FREE or times[spec] is not None
    }
    other.encode = times
    return other


def setups(
    calibration: Calibration, specs: Sequence[str] | None = None, optimizer: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yields one row for each set-up and each compressor that can be used in the set-up and may be recommended.

    The set-ups are those of `counts`, each at the calibration's link rate and at the rates in `RATES`.

    Args:
        calibration: the measured times of the network and of the models.
        specs: specs of the compressors to compare, as in `Adviser`.
        optimizer: kind of the training's optimizer, as in `Adviser`.

    Yields:
        calibration, gpu, model, method: names of the calibration, the GPU and the model, and spec of the compressor.
            The name of the GPU is empty if the calibration has none.
        ranks, batch_size, gbps: number of ranks, batch size of one rank and rate of a link in Gb/s. The batch size is
            None if the calibration has none.
        step_ms, dense_ms, fp16_ms: predicted milliseconds of a step with the compressor, with dense gradients and with
            fp16.
        gain_percent: the compressor's lead over the faster of dense and fp16, in percent; negative if the compressor
            is slower.
        taken: whether `advise` recommends the compressor.
        estimated: whether the compressor's encode time is an estimate.
    """
    for model in calibration.models:
        adviser = adviser_of(calibration, model, specs, optimizer)
        rates = np.union1d(adviser.bytes_per_s, np.array(RATES) * GBPS)
        times = {spec: _times(adviser, spec, rates) for spec in adviser.recommended}
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
    """The batch sizes of one rank in the set-ups; None if the calibration has no batch size."""
    batch = adviser.facts.compute.batch_size
    return None if batch is None else np.unique([max(1, round(batch * share)) for share in BATCHES])


def _times(adviser: Adviser, spec: str, rates: Any) -> Any:
    """Predicted seconds of a step in each set-up, (numbers of ranks, batch sizes, rates); infinite if the method cannot
    be used in the set-up."""
    ranks, batches = np.array(WORLD_SIZES)[:, None, None], _batches(adviser)
    setting = Setting(ranks, np.asarray(rates), None if batches is None else batches[:, None])
    possible = np.array([adviser.possible(spec, size) for size in WORLD_SIZES])[:, None, None]
    return np.where(possible, np.asarray(adviser.step_s(spec, setting), float), np.inf)
