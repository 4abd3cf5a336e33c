"""Times of steps that were measured in turns, beside what the performance model predicts for other networks.

The file is what `python -m hvdcomp.tools.bench.compare_worker` writes: a calibration of one model, and real steps of it
with several compressors. All of them took turns, a few steps at a time, so that a machine that is busy for a while is
busy for all of them. Trainings one after the other cannot be compared so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import SpecError
from hvdcomp.files import parse_json
from hvdcomp.perfmodel import (
    NOISY,
    STOCK_SPECS,
    Adviser,
    Calibration,
    CalibrationError,
    Network,
    Setting,
    from_json,
    uncertain_shares,
)
from hvdcomp.perfmodel.network import ALGORITHMS
from hvdcomp.tools.report.runs import RunError, printable

RATES = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s"}
"""Bandwidths that steps are predicted for, and how they are written."""
_SPEEDS = {"100mbit": 1.25e7, "1gbit": 1.25e8}  # bytes/s


@dataclass(frozen=True)
class Turns:
    """What such a file says of one model, data set, number of ranks and batch size.

    Attributes:
        model, data, world_size, batch_size: whose steps they are.
        ms: measured median of a step, by spec.
        predicted_ms: by spec, then by key of RATES, where it can be trusted: the median over all calibrations.
        calibrations: how many there are, one after the other.
        noise: relative difference of predictions below which no method is to be called faster than another.
        doubt: the same, of the prediction that can be trusted least.
        noisy: of the measurements that a calibration calls too noisy, how far the repetitions differ, the one that
            counts most in a step first.
        link: key of RATES, if the ranks were on emulated hosts with such links; None for what connects them here.
        measured_ms: by key of RATES, what `ms` is on such links.
    """

    model: str
    data: str
    world_size: int
    batch_size: int
    ms: Mapping[str, float]
    predicted_ms: Mapping[str, Mapping[str, float]]
    calibrations: int
    noise: float
    doubt: float
    noisy: Mapping[str, float]
    link: str | None = None
    measured_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def work(self) -> tuple[str, str, int, int]:
        """What two such files must share to be shown together."""
        return self.model, self.data, self.world_size, self.batch_size

    def fits(self, setting: tuple[str | None, ...], options: Mapping[str, str]) -> bool:
        """Whether steps of a run with this (model, data, ranks) and these options are such steps."""
        plain = options.get("framework", "torch") == "torch" and options.get("backward_passes_per_step", "1") == "1"
        real = options.get("simulate_ranks", "None") == "None"
        constant = options.get("policy", "None") == "None"
        same = setting == (self.model, self.data, str(self.world_size))
        return plain and real and constant and same and options.get("batch_size") == str(self.batch_size)


def load_all_turns(files: Sequence[Path]) -> Turns:
    """Reads such files: one of steps on this machine as it is, and others of the same steps on emulated links.

    Raises:
        RunError: as of `load_turns`; or they do not belong together.
    """
    every = [load_turns(file) for file in files]
    here = [point for point in every if point.link is None]
    there = {point.link: point.ms for point in every if point.link is not None}
    if len(here) != 1 or len(there) != len(every) - 1 or len({point.work for point in every}) != 1:
        raise RunError(
            f"{', '.join(map(str, files))}: steps measured in turns are shown of one model, data set, number of ranks "
            "and batch size, in one file without --rate and one for each --rate"
        )
    return replace(here[0], measured_ms=there)


def load_turns(file: Path) -> Turns:
    """Reads one such file.

    Raises:
        RunError: it is none, or of a model without its data, such as "cnn" instead of "cnn@digits".
    """
    try:
        content = parse_json(file.read_bytes())
        calibrations = [from_json(repeated) for repeated in content.get("repeated") or [content["calibration"]]]
        calibration = calibrations[-1]
        (name,) = calibration.models
        model, at, data = name.partition("@")
        if not at:
            raise RunError(f"{file} is of {name!r}, which does not say on which data: measure it as {name}@digits")
        left = (content["alone"], content["auto"])
        # Trainings send during the backward pass, as far as a method can.
        methods = [
            name for name, step in content["steps"].items() if name not in left and step.get("overlap_bytes") != 0
        ]
        specs = {str(parse_compressor(STOCK_SPECS.get(method, method))): method for method in methods}
        ms = {spec: float(content["steps"][method]["median_ms"]) for spec, method in specs.items()}
        ranks = int(calibration.machine["ranks"])
        batch_size = calibration.models[name].compute.batch_size
        link = content.get("rate")
        if link not in (None, *RATES):
            raise RunError(f"{file} is of links of {link!r}, and a report shows those of {' or '.join(RATES)}")
        noisy = _noisy(content.get("noisy", {}))  # files of earlier versions have none
        early = content.get("early_bytes") or 0  # files of earlier versions are of steps that send all at the end
        advisers = {
            rate: [Adviser(_with_links(calibration, speed), name, list(specs), early) for calibration in calibrations]
            for rate, speed in _SPEEDS.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SpecError, CalibrationError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(
            f"{file} holds no steps measured in turns ({type(error).__name__}: {error}); "
            "python -m hvdcomp.tools.bench.compare_worker writes such files"
        ) from None
    if batch_size is None or not all(math.isfinite(value) and value > 0 for value in ms.values()):
        raise RunError(f"{file}: it has no batch size, or a time that cannot be")
    predicted: dict[str, dict[str, float]] = {spec: {} for spec in ms}
    doubts = []
    for spec in ms:
        for rate, those in advisers.items():
            steps_s = [float(adviser.step_s(spec, Setting(ranks))) for adviser in those]
            doubts.append(_doubt(steps_s, calibration.noise, noisy))
            if doubts[-1] <= NOISY:
                predicted[spec][rate] = 1e3 * statistics.median(steps_s)
    return Turns(
        model,
        data,
        ranks,
        batch_size,
        ms,
        predicted,
        calibrations=len(calibrations),
        noise=max((doubt for doubt in doubts if doubt <= NOISY), default=0.0),
        doubt=max(doubts, default=0.0),
        noisy={what: noisy[what]["spread"] for what in uncertain_shares(noisy, 1.0)},
        link=link,
    )


def _doubt(steps_s: Sequence[float], noise: float, noisy: Mapping[str, Mapping[str, float]]) -> float:
    """How far a prediction can be wrong, as a share of it.

    Args:
        steps_s: the prediction of each calibration.
        noise, noisy: of the only calibration; several say more by how far their predictions differ.
    """
    if len(steps_s) > 1:
        return (max(steps_s) - min(steps_s)) / statistics.median(steps_s)
    return max([noise, *uncertain_shares(noisy, steps_s[0]).values()])


def _noisy(content: Any) -> dict[str, dict[str, float]]:
    """What the calibration calls too noisy, as `uncertain_shares` takes it."""
    keys = ("seconds", "spread")
    noisy = {printable(what): {key: float(number[key]) for key in keys} for what, number in content.items()}
    if not all(math.isfinite(value) and value >= 0 for number in noisy.values() for value in number.values()):
        raise ValueError("noisy: a time or a spread that cannot be")
    return noisy


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
