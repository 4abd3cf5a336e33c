"""Encode times that nobody measured: those of another model, by the models' sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel.calibration import Calibration, ModelFacts, load
from hvdcomp.perfmodel.compute import EncodeTime

REFERENCE = "v100-p3.8xlarge"
"""The preset whose encode times stand in where a calibration has none at all."""


def encode_times(calibration: Calibration, model: str) -> dict[str, EncodeTime]:
    """By spec the encode times of a model: its own, and estimates of other methods.

    Encoding is taken to need time in proportion to the elements. Of the models that have a time of a method, the one
    counts whose size is nearest. They are the calibration's; if none of them has an encode time, those of `REFERENCE`.
    """
    asked, own = calibration.models[model], calibration.models[model].compute.encode
    others: Mapping[str, ModelFacts] = calibration.models
    where = ""
    if not any(_encoded(facts) for facts in others.values()):
        reference = load(REFERENCE)
        others, where = reference.models, f" in {REFERENCE} ({reference.machine['accelerator']})"
    times = dict(own)
    for spec in dict.fromkeys(spec for facts in others.values() for spec in _encoded(facts)):
        if spec in own:
            continue
        known = [name for name, facts in others.items() if spec in facts.compute.encode]
        factor, nearest = min(((_size(asked) / _size(others[name]), name) for name in known), key=_distance)
        scaled = others[nearest].compute.encode[spec].part(factor)
        source = f"estimated: that of {nearest}{where} times {factor:.3g}, by the models' elements"
        times[spec] = dataclasses.replace(scaled, source=source, estimated=True)
    return times


def _encoded(facts: ModelFacts) -> list[str]:
    """The methods with a time; without what a library sends by itself."""
    return [spec for spec in facts.compute.encode if parse_compressor(spec).wire_dtype("float32") is None]


def _size(facts: ModelFacts) -> int:
    return sum(tensor.size for tensor in facts.tensors)


def _distance(entry: tuple[float, str]) -> float:
    return abs(math.log(entry[0]))
