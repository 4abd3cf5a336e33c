"""Estimates of encode times that were not measured for a model. An estimate is the time of another model, scaled by the
number of elements, or the time of hvdcomp's kernels on a GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel.calibration import Calibration, ModelFacts
from hvdcomp.perfmodel.cards import CARDS
from hvdcomp.perfmodel.compute import EncodeTime
from hvdcomp.perfmodel.kernel_times import KERNELS, encode_time

REFERENCE = "h100"
"""The name in `CARDS` of the GPU whose encode times are used if a calibration has neither encode times nor a GPU."""


def encode_times(calibration: Calibration, model: str) -> dict[str, EncodeTime]:
    """The encode times of a model, by spec: the calibration's times, and estimates for methods that the calibration has
    no time for.

    The encode time is assumed to be proportional to the number of elements. For each method, the estimate comes from a
    model of the calibration: among the models with an encode time for this method, it is the one closest in size. If
    the calibration has no encode time for any model, the estimates are the times of hvdcomp's own kernels on the
    calibration's GPU, or on `REFERENCE`.
    """
    facts, own = calibration.models[model], calibration.models[model].compute.encode
    models: Mapping[str, ModelFacts] = calibration.models
    if not any(_encoded(other) for other in models.values()):
        card = CARDS[calibration.card or REFERENCE]
        return {**{spec: encode_time(spec, card, _size(facts)) for spec in KERNELS}, **own}
    times = dict(own)
    for spec in dict.fromkeys(spec for other in models.values() for spec in _encoded(other)):
        if spec in own:
            continue
        known = [name for name, other in models.items() if spec in other.compute.encode]
        factor, nearest = min(((_size(facts) / _size(models[name]), name) for name in known), key=_distance)
        scaled = models[nearest].compute.encode[spec].part(factor)
        source = (
            f"estimated: the encode time of {nearest} times {factor:.3g}, the ratio of the two models' numbers of "
            "elements"
        )
        times[spec] = dataclasses.replace(scaled, source=source, estimated=True)
    return times


def _encoded(facts: ModelFacts) -> list[str]:
    """The specs with an encode time in the calibration, except casts."""
    return [spec for spec in facts.compute.encode if parse_compressor(spec).wire_dtype("float32") is None]


def _size(facts: ModelFacts) -> int:
    return sum(tensor.size for tensor in facts.tensors)


def _distance(entry: tuple[float, str]) -> float:
    return abs(math.log(entry[0]))
