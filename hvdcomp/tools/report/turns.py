"""Step times that were measured in alternating steps, and the predictions of the performance model for other networks.

The program `python -m hvdcomp.tools.bench.compare_worker` writes such times to a file. The file contains a calibration
of a model, and measured steps of this model with several compressors. The compressors alternate every few steps, so
other programs on the machine disturb all of them equally. Step times of training runs that ran one after the other
cannot be compared.
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
"""Bandwidths for which steps are predicted, with their names."""
_SPEEDS = {"100mbit": 1.25e7, "1gbit": 1.25e8}  # bytes/s


@dataclass(frozen=True)
class Turns:
    """Steps that were measured alternately, for one model, data set, number of ranks and batch size.

    Attributes:
        model, data, world_size, batch_size: the training run to which the steps belong.
        ms: the measured median step time of each method, in milliseconds, by spec.
        predicted_ms: the reliable predictions of step times, in milliseconds, by spec and then by key of RATES. The
            predictions are medians over all calibrations.
        calibrations: number of calibrations that were made one after the other.
        noise: the relative error of the reliable predictions. Smaller differences have no meaning.
        doubt: relative error of the least reliable prediction.
        noisy: the relative difference between the repetitions of each noisy measurement. The most important measurement
            is first.
        link: the key in RATES of the links between the ranks, if the ranks were on emulated hosts; None if the ranks
            used the connections of this machine.
        measured_ms: the step times that were measured on emulated links: for each key of RATES, a mapping like `ms`.
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
        """The values that must be the same in two files if they are shown together."""
        return self.model, self.data, self.world_size, self.batch_size

    def fits(self, setting: tuple[str | None, ...], options: Mapping[str, str]) -> bool:
        """Whether these steps match a run with this setting (model, data, ranks) and these options."""
        plain = options.get("framework", "torch") == "torch" and options.get("backward_passes_per_step", "1") == "1"
        real = options.get("simulate_ranks", "None") == "None"
        constant = options.get("policy", "None") == "None"
        same = setting == (self.model, self.data, str(self.world_size))
        return plain and real and constant and same and options.get("batch_size") == str(self.batch_size)


def load_all_turns(files: Sequence[Path]) -> Turns:
    """Reads files of steps that were measured alternately: one file with steps on this machine, and other files with
    the same steps on emulated links.

    Raises:
        RunError: if the files do not belong together, or if `load_turns` raises this error.
    """
    all_turns = [load_turns(file) for file in files]
    local = [point for point in all_turns if point.link is None]
    on_links = {point.link: point.ms for point in all_turns if point.link is not None}
    if len(local) != 1 or len(on_links) != len(all_turns) - 1 or len({point.work for point in all_turns}) != 1:
        raise RunError(
            f"{', '.join(map(str, files))} cannot be shown together: steps measured in turn must have the same model, "
            "data set, number of ranks and batch size. Give one file without --rate, and at most one file for each "
            "--rate"
        )
    return replace(local[0], measured_ms=on_links)


def load_turns(file: Path) -> Turns:
    """Reads a file of steps that were measured alternately.

    Raises:
        RunError: if the file has a different format, or names a model without its data, such as "cnn" instead of
            "cnn@digits".
    """
    try:
        content = parse_json(file.read_bytes())
        calibrations = [from_json(repeated) for repeated in content.get("repeated") or [content["calibration"]]]
        calibration = calibrations[-1]
        (name,) = calibration.models
        model, at, data = name.partition("@")
        if not at:
            raise RunError(f"{file} has the model {name!r} without its data: measure it as {name}@digits")
        left_out = (content["alone"], content["auto"])
        # In training, the exchange overlaps with the backward pass if the method supports this.
        methods = [
            name for name, step in content["steps"].items() if name not in left_out and step.get("overlap_bytes") != 0
        ]
        specs = {str(parse_compressor(STOCK_SPECS.get(method, method))): method for method in methods}
        ms = {spec: float(content["steps"][method]["median_ms"]) for spec, method in specs.items()}
        ranks = int(calibration.machine["ranks"])
        batch_size = calibration.models[name].compute.batch_size
        link = content.get("rate")
        if link not in (None, *RATES):
            raise RunError(f"{file} has links of {link!r}; a report can only show {' or '.join(RATES)}")
        noisy = _noisy(content.get("noisy", {}))  # files of earlier versions do not have this entry
        early = content.get("early_bytes") or 0  # in earlier versions, all gradients were sent after the backward pass
        advisers = {
            rate: [Adviser(_with_links(calibration, speed), name, list(specs), early) for calibration in calibrations]
            for rate, speed in _SPEEDS.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SpecError, CalibrationError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(
            f"{file} does not contain steps measured in turn ({type(error).__name__}: {error}); python -m "
            "hvdcomp.tools.bench.compare_worker writes such files"
        ) from None
    if batch_size is None or not all(math.isfinite(value) and value > 0 for value in ms.values()):
        raise RunError(f"{file}: the batch size is missing, or a time is not a positive number")
    predicted: dict[str, dict[str, float]] = {spec: {} for spec in ms}
    doubts = []
    for spec in ms:
        for rate, rate_advisers in advisers.items():
            steps_s = [float(adviser.step_s(spec, Setting(ranks))) for adviser in rate_advisers]
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
        noisy={measurement: noisy[measurement]["spread"] for measurement in uncertain_shares(noisy, 1.0)},
        link=link,
    )


def _doubt(steps_s: Sequence[float], noise: float, noisy: Mapping[str, Mapping[str, float]]) -> float:
    """The relative error of a prediction: the spread over several calibrations, or the noise of a single calibration.

    Args:
        steps_s: the step time that each calibration predicts, in seconds.
        noise, noisy: the noise and the noisy measurements of a single calibration.
    """
    if len(steps_s) > 1:
        return (max(steps_s) - min(steps_s)) / statistics.median(steps_s)
    return max([noise, *uncertain_shares(noisy, steps_s[0]).values()])


def _noisy(content: Any) -> dict[str, dict[str, float]]:
    """The noisy measurements of a calibration, in the format that the function `uncertain_shares` needs."""
    keys = ("seconds", "spread")
    noisy = {printable(name): {key: float(number[key]) for key in keys} for name, number in content.items()}
    if not all(math.isfinite(value) and value >= 0 for number in noisy.values() for value in number.values()):
        raise ValueError("noisy: a time or a spread is negative or not finite")
    return noisy


def _with_links(calibration: Calibration, bytes_per_s: float) -> Calibration:
    """The calibration, with links of this bandwidth between all ranks instead of the measured links.

    The measured table of transfer times is dropped. Between ranks on one machine, these times include copying and
    waiting for a core, which do not take longer on a slower link.
    """
    network = calibration.network
    costs: dict[str, Any] = {
        kind: replace(network.cost(kind), bytes_per_s=bytes_per_s, transfer=()) for kind in ALGORITHMS
    }
    return replace(calibration, network=Network(**costs))
