"""Runs training on simulated ranks, predicts the times on a link, and compares the training runs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.reproduce import workloads
from benchmarks.reproduce.outcome import Curve, Outcome, Row
from benchmarks.reproduce.published import Artifact
from benchmarks.reproduce.workloads import LINK, Workload
from benchmarks.trainings import Run, train_missing
from hvdcomp.tools.terminal import make_console
from hvdcomp.tools.train.options import DECISIONS
from hvdcomp.tools.train.ranks import RunRefused
from hvdcomp.tools.train.spread import estimate

QUICK_SEEDS, SEEDS = 2, 5
MARGIN = 1.0
"""Largest loss of quality that does not count as a loss, in points of accuracy or percent of perplexity."""


@dataclass(frozen=True)
class Trained:
    """The result of a training run.

    Attributes:
        training: name of the training run, without the seed.
        quality: accuracy in percent, or perplexity, on the test data.
        floats: number of floats that a rank sent, counted as in the papers.
        seconds: predicted seconds of the training run on the link.
        epochs: the quality and the sent floats at the end of each epoch.
        sent: the number of floats sent up to the end of each step.
        decisions: the decisions of the policy, in order.
    """

    training: str
    quality: float
    floats: float
    seconds: float
    epochs: Sequence[tuple[float, float]] = ()
    sent: Sequence[float] = ()
    decisions: Sequence[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Training(Run):
    """A training run of a workload, with options that replace the workload's own."""

    of: Workload
    changes: Mapping[str, Any]

    @property
    def label(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.changes.items())

    @cached_property
    def options(self) -> dict[str, Any]:
        fixed = {"simulate_ranks": self.of.ranks, "link": LINK, "seed": self.seed}
        return {**self.of.options, **self.changes, **fixed}

    def trained(self) -> Trained:
        """The result of the complete training run in the folder."""
        assert self.summary is not None
        sent = list(itertools.accumulate(step["floats_sent"] for step in self.records("steps.jsonl")))
        chance = self.of.chance
        return Trained(
            f"{self.workload} {self.label}",
            _quality(self.summary, chance),
            self.summary["floats_sent"],
            self.summary["trained_seconds"],
            [(_quality(end, chance), sent[end["step"] - 1]) for end in self.records("epochs.jsonl")],
            sent,
            self.records(DECISIONS) if (self.folder / DECISIONS).exists() else [],
        )


class Trainings:
    """Runs training, or reads the results of earlier training runs with the same options.

    Args:
        folder: the folder that contains all trainings.
        quick: whether to train for fewer steps, with `QUICK_SEEDS` seeds instead of `SEEDS`.
        data: folder with the published data that Accordion is trained on; None for small training runs instead.
        epochs: number of epochs of the training runs on published data; None for the authors' number.

    Attributes:
        quick: whether training runs are short.
        seeds: the number of seeds.
        commits: the commits of the training runs that were used.
    """

    def __init__(self, folder: Path, quick: bool, data: Path | None = None, epochs: int | None = None) -> None:
        self._folder, self._data, self._epochs = folder, data, epochs
        self.quick = quick
        self.seeds = QUICK_SEEDS if quick else SEEDS
        self.commits: set[str] = set()

    def of(self, artifact: Artifact, kind: str = "images", **network: str) -> Workload:
        """The workload of a table or figure.

        Args:
            kind: "images" or "text".
            network: names of the network and of the data for images (`network` and `data`), if they differ from those
                of the table or figure.
        """
        if self._data is None or artifact.paper != "accordion":
            return workloads.small(kind, self.quick)
        chosen = {"network": "ResNet-18", "data": "cifar10"} | {
            key: artifact.settings[key] for key in ("network", "data") if key in artifact.settings
        }
        return workloads.of_accordion(kind, **{**chosen, **network}, folder=self._data, epochs=self._epochs)

    def train(
        self, workload: Workload, compression: str, policy: str | None = None, seeds: int | None = None, **changes: Any
    ) -> list[Trained]:
        """Runs training once for each seed.

        Raises:
            RunRefused: if a training run fails.
        """
        chosen = {"compression": compression, **({} if policy is None else {"policy": policy}), **changes}
        runs = [_Training(workload.name, seed, self._folder, workload, chosen) for seed in range(seeds or self.seeds)]
        if any(run.summary is None for run in runs):
            for run in train_missing(runs, make_console(stderr=True)):
                raise RunRefused(f"{run}: {run.about['error']} (full log: {run.folder / 'log.txt'})")
        self.commits |= {run.about.get("commit", "unknown") for run in runs}
        return [run.trained() for run in runs]


def _quality(record: Mapping[str, Any], chance: float) -> float:
    """The accuracy in percent, or the perplexity, in a summary or in the record of an epoch. If training has diverged,
    the result is the quality of guessing, although the summary may have the quality of an earlier epoch."""
    is_text = "perplexity" in record
    quality = record.get("perplexity" if is_text else "accuracy")
    if quality is None or record.get("status") == "diverged":
        return chance
    return float(quality) if is_text else 100 * float(quality)


def _estimated(what: str, values: Sequence[float], published: float | None, **more: Any) -> Row:
    """The row for the mean of some values, with its confidence interval."""
    estimated = estimate(values)
    assert estimated is not None
    return Row(what=what, published=published, ours=estimated.mean, half=estimated.half, **more)


@dataclass(frozen=True)
class Compared:
    """The training runs of a workload that are compared, by label."""

    workload: Workload
    runs: Mapping[str, Sequence[Trained]]

    def also(self, label: str, runs: Sequence[Trained]) -> Compared:
        return Compared(self.workload, {**self.runs, label: runs})

    def floats(self, label: str) -> float:
        """The mean number of floats that a rank sends, over the seeds."""
        return self.mean(label, lambda run: run.floats)

    def mean(self, label: str, value: Callable[[Trained], float]) -> float:
        return statistics.fmean(value(run) for run in self.runs[label])

    def named(self, *labels: str) -> tuple[str, ...]:
        """The names of the training runs with these labels."""
        return tuple(self.runs[label][0].training for label in labels)

    def is_guessing(self, label: str) -> bool:
        """Whether the final quality of the training runs is at most `MARGIN` better than guessing."""
        quality, chance = self.mean(label, lambda run: run.quality), self.workload.chance
        return quality * (1 + MARGIN / 100) >= chance if self.workload.is_text else quality <= chance + MARGIN

    def gains(self, label: str, base: str) -> list[float]:
        """The advantage of `label` over `base` for each seed, in points of accuracy or percent of perplexity."""
        pairs = zip(self.runs[label], self.runs[base], strict=False)
        return [100 * (b.quality / a.quality - 1) if self.workload.is_text else a.quality - b.quality for a, b in pairs]

    def gain(
        self,
        label: str,
        base: str,
        claim: str,
        published: float | None = None,
        note: str = "",
        margin: float = MARGIN,
        main: bool = False,
    ) -> Row:
        """The row for the advantage of `label` over `base` at the end of training.

        Args:
            label, base: labels of the two groups of training runs that are compared.
            claim: the paper's claim about `label`: "worse", "better" or "no loss" (a loss up to `margin` is allowed);
                empty if the paper has no claim.
            published: the paper's number.
            note, main: as in `Row`.
            margin: the largest loss that the claim "no loss" allows.
        """
        bounds = {"worse": {"less_than": 0.0}, "better": {"more_than": 0.0}, "no loss": {"more_than": -margin}, "": {}}
        unit = "%, perplexity" if self.workload.is_text else "points"
        meant = {"no loss": f"no more than {margin:g} lost"}.get(claim, claim)
        what = f"{label} - {base} ({unit}{': ' + meant if meant else ''})"
        found = self.gains(label, base)
        named = self.named(label, base)
        guessing = " and ".join(name for name in (label, base) if self.is_guessing(name))
        note = "; ".join(filter(None, (note, guessing and f"{guessing}: no better than guessing at the end")))
        return _estimated(what, found, published, note=note, main=main, trainings=named, **bounds[claim])

    def quality(self, label: str, published: float | None = None) -> Row:
        """The row for the final quality of `label`. It makes no claim, because the data differ from the paper's
        data."""
        what = f"{label}: {'perplexity' if self.workload.is_text else 'accuracy (%)'}"
        found = [run.quality for run in self.runs[label]]
        return _estimated(what, found, published, trainings=self.named(label))

    def recovered(self, label: str, published: float | None = None) -> Row:
        """The row for the share of the gap between "high" and "low" that `label` closes. It makes no claim."""
        gap = statistics.fmean(self.gains("low", "high"))
        closed = statistics.fmean(self.gains(label, "high"))
        what = f"{label}: recovers of the gap between high and low (%)"
        recovered = 100 * closed / gap if gap > 0 else None
        return Row(what=what, published=published, ours=recovered, trainings=self.named(label, "high", "low"))

    def times_fewer_floats(self, label: str, base: str, published: float | None = None, claimed: bool = True) -> Row:
        """The row for the floats of `base` divided by the floats of `label`. `claimed` is False if the paper has no
        such training run."""
        ours = self.floats(base) / self.floats(label)
        what = f"{label}: times fewer floats than {base}"
        holds = (ours > 1 if published is None else ours > max(1, published / 2)) if claimed else None
        note = "of the whole training" + ("" if published is None else "; holds above half of the published value")
        named = self.named(label, base)
        return Row(what=what, published=published, ours=ours, holds=holds, note=note, trainings=named)

    def times_as_fast(self, label: str, base: str, published: float | None = None) -> Row:
        times = [a.seconds / b.seconds for a, b in zip(self.runs[base], self.runs[label], strict=False)]
        wanted = 1 if published is None or published <= 1 else max(1, published / 2)
        from_where = "; holds above half of the published value" if wanted > 1 else ""
        note = f"predicted for {self.workload.ranks} ranks on {LINK} links{from_where}"
        what, named = f"{label}: times as fast as {base}", self.named(label, base)
        return _estimated(what, times, published, note=note, trainings=named, more_than=wanted)

    def curves(self) -> dict[str, list[Curve]]:
        """Curves of quality over epochs and over floats, averaged over the seeds."""
        name = "perplexity" if self.workload.is_text else "accuracy (%)"
        over_epochs, over_floats = [], []
        for label, runs in self.runs.items():
            ends = list(zip(*(run.epochs for run in runs), strict=False))
            quality = [statistics.fmean(point[0] for point in end) for end in ends]
            floats = [statistics.fmean(point[1] for point in end) / 1e6 for end in ends]
            over_epochs.append(Curve(label=label, x=list(range(1, len(ends) + 1)), y=quality))
            over_floats.append(Curve(label=label, x=floats, y=quality))
        return {f"{name} over epochs": over_epochs, f"{name} over millions of floats": over_floats}

    def outcome(self, artifact: Artifact, rows: Sequence[Row], note: str = "", **more: Any) -> Outcome:
        seeds = len(next(iter(self.runs.values())))
        trained = f"Trained: {self.workload.shown}, {self.workload.ranks} simulated ranks, {seeds} seeds."
        ours = f"{trained} {note}".strip()
        more.setdefault("curves", self.curves())
        more.setdefault("x", "epochs; millions of floats")
        return Outcome(name=artifact.name, rows=rows, ours=ours, about={"seeds": seeds}, **more)
