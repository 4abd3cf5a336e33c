"""Groups of runs that differ only in their seed. The report calls such a group a series."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdcomp.tools.report.runs import Run
from hvdcomp.tools.report.turns import RATES, Turns
from hvdcomp.tools.train.target import Target

_WORK_OPTIONS = (
    *("framework", "batch_size", "backward_passes_per_step", "sequence_length", "image_size"),
    *("simulate_ranks", "link"),
)


@dataclass(eq=False)
class Group:
    """The runs of an experiment, one for each seed. `label` is the name of the group in legends."""

    runs: list[Run]
    label: str = ""
    baseline_ms: float | None = None
    turns: Turns | None = None

    @property
    def turns_ms(self) -> float | None:
        """The median step time, if the steps of this method were measured alternately with the steps of other methods;
        otherwise None."""
        return None if self.turns is None or self.spec is None else self.turns.ms.get(self.spec)

    @property
    def compared_ms(self) -> float | None:
        """The step time that is used to compare groups."""
        return self.ms_per_step if self.turns_ms is None else self.turns_ms

    def columns(self) -> dict[str, float | None]:
        """Step times that were measured in alternating steps, and step times that were predicted or measured for other
        networks."""
        columns = {"turns_ms": self.turns_ms}
        for rate in RATES:
            predicted = measured = None
            if self.turns is not None and self.spec is not None:
                predicted = self.turns.predicted_ms.get(self.spec, {}).get(rate)
                measured = self.turns.measured_ms.get(rate, {}).get(self.spec)
            columns |= {f"predicted_ms_{rate}": predicted, f"measured_ms_{rate}": measured}
        return columns

    @property
    def setting(self) -> tuple[str | None, ...]:
        """Model, data and number of ranks."""
        return tuple(self.runs[0].text(key) for key in ("model", "data", "world_size"))

    @property
    def work(self) -> tuple[str | None, ...]:
        """The values that must be the same in two groups if their step times are compared."""
        options = self.runs[0].compared_options
        # Runs of earlier versions lack newer options.
        return (*self.setting, *(options.get(key, "None") for key in _WORK_OPTIONS))

    @property
    def is_plain(self) -> bool:
        """Whether the spec alone determines the compression: there is no policy, and the optimizer does not
        compress."""
        return self.runs[0].policy is None and self.runs[0].options.get("optimizer") != "compressed-adam"

    @property
    def spec(self) -> str | None:
        return self.runs[0].spec

    @property
    def finished(self) -> list[Run]:
        """The runs that have trained until their end, or until their target."""
        return [run for run in self.runs if run.status == "finished"]

    @property
    def target(self) -> Target | None:
        """The quality at which each run ends; None without a target."""
        return self.runs[0].target

    @property
    def always_reached(self) -> bool:
        """Whether every run reached its target."""
        return all(run.reached is not None for run in self.runs)

    @property
    def metric(self) -> str | None:
        return next((run.metric for run in self.runs if run.metric), None)

    @property
    def ms_per_step(self) -> float | None:
        times = [run.ms_per_step for run in self.runs if run.ms_per_step is not None]
        return float(np.mean(times)) if times else None

    @property
    def quality(self) -> float | None:
        """The mean of the runs' last accuracies (0 to 1) or perplexities."""
        qualities = [run.quality for run in self.runs if run.quality is not None]
        return float(np.mean(qualities)) if qualities else None

    @property
    def factor(self) -> float | None:
        """The mean of the runs' compression factors."""
        factors = [run.compression_factor for run in self.runs if run.compression_factor is not None]
        return float(np.mean(factors)) if factors else None

    def phase(self, phase: str) -> float | None:
        """The milliseconds of a phase of a step, one of PHASES. The result is the mean over the runs of the median in
        each run; None if the phase was not measured."""
        times = [ms for run in self.runs if (ms := run.median(f"{phase}_ms")) is not None]
        return float(np.mean(times)) if times else None
