"""Times of steps that were measured in turns, beside what the performance model predicts for other networks.

The file is what `python -m hvdcomp.bench.compare_worker` writes: a calibration of one model, and real steps of it with
several compressors. All of them took turns, a few steps at a time, so that a machine that is busy for a while is busy
for all of them. Trainings one after the other cannot be compared so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import SpecError
from hvdcomp.files import parse_json
from hvdcomp.perfmodel import STOCK_SPECS, Adviser, Calibration, CalibrationError, Network, Setting, from_json
from hvdcomp.perfmodel.network import ALGORITHMS
from hvdcomp.report.runs import RunError

RATES = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s"}
"""Bandwidths that steps are predicted for, and how they are written."""
_SPEEDS = {"100mbit": 1.25e7, "1gbit": 1.25e8}  # bytes/s


@dataclass(frozen=True)
class Turns:
    """What such a file says of one model, data set, number of ranks and batch size.

    Attributes:
        model, data, world_size, batch_size: whose steps they are.
        ms: measured median of a step, by spec.
        predicted_ms: by spec, then by key of RATES.
        noise: median relative difference between repeated measurements of the calibration.
    """

    model: str
    data: str
    world_size: int
    batch_size: int
    ms: Mapping[str, float]
    predicted_ms: Mapping[str, Mapping[str, float]]
    noise: float

    def fits(self, setting: tuple[str | None, ...], options: Mapping[str, str]) -> bool:
        """Whether steps of a run with this (model, data, ranks) and these options are such steps."""
        plain = options.get("framework", "torch") == "torch" and options.get("backward_passes_per_step", "1") == "1"
        constant = options.get("policy", "None") == "None"
        same = setting == (self.model, self.data, str(self.world_size))
        return plain and constant and same and options.get("batch_size") == str(self.batch_size)


def load_turns(file: Path) -> Turns:
    """Reads such a file.

    Raises:
        RunError: it is none, or of a model without its data, such as "cnn" instead of "cnn@digits".
    """
    try:
        content = parse_json(file.read_bytes())
        calibration = from_json(content["calibration"])
        (name,) = calibration.models
        model, at, data = name.partition("@")
        if not at:
            raise RunError(f"{file} is of {name!r}, which does not say on which data: measure it as {name}@digits")
        left = (content["alone"], content["auto"])
        # Trainings send during the backward pass, as far as a method can.
        methods = [
            name for name, one in content["steps"].items() if name not in left and one.get("overlap_bytes") != 0
        ]
        specs = {str(parse_compressor(STOCK_SPECS.get(method, method))): method for method in methods}
        ms = {spec: float(content["steps"][method]["median_ms"]) for spec, method in specs.items()}
        ranks = int(calibration.machine["ranks"])
        batch_size = calibration.models[name].compute.batch_size
        early = content.get("early_bytes") or 0  # files of earlier versions are of steps that send all at the end
        networks = {rate: _with_links(calibration, speed) for rate, speed in _SPEEDS.items()}
        advisers = {rate: Adviser(there, name, list(specs), early) for rate, there in networks.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SpecError, CalibrationError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(
            f"{file} holds no steps measured in turns ({type(error).__name__}: {error}); "
            "python -m hvdcomp.bench.compare_worker writes such files"
        ) from None
    if batch_size is None or not all(math.isfinite(one) and one > 0 for one in ms.values()):
        raise RunError(f"{file}: it has no batch size, or a time that cannot be")
    predicted = {
        spec: {rate: 1e3 * float(adviser.step_s(spec, Setting(ranks))) for rate, adviser in advisers.items()}
        for spec in ms
    }
    return Turns(model, data, ranks, batch_size, ms, predicted, calibration.noise)


def _with_links(calibration: Calibration, bytes_per_s: float) -> Calibration:
    """The same computers with links of this bandwidth between all ranks.

    The measured table of transfers goes: between ranks of one machine it tells how fast that copies, and how long a
    rank waits for a core, which does not grow where a link is slower.
    """
    network = calibration.network
    costs: dict[str, Any] = {
        kind: replace(network.cost(kind), bytes_per_s=bytes_per_s, transfer=()) for kind in ALGORITHMS
    }
    return replace(calibration, network=Network(**costs))
