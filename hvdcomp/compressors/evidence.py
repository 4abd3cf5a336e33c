"""How much quality each method lost in hvdcomp's own training runs, and which methods to try first. `auto` uses these
results to propose methods, and `advise` reports them.

`evidence.json` has the complete rows of docs/best-rates.md: each method at its own best learning rate, compared with
uncompressed training at the best learning rate for uncompressed training. `python -m
benchmarks.best_rates.which_method` writes this file, including the methods to try first.

`evidence_one_rate.json` has the older training runs of docs/convergence.md, all of them at one learning rate. `python
-m benchmarks.quality.convergence --evidence hvdcomp/compressors/evidence_one_rate.json` writes this file. The file does
not contain methods that were trained with different settings: `dgc`, which has its own momentum, and `signsgd`, which
was trained at a different learning rate. If `evidence.json` has the same method with the same optimizer on the same
task, the value in `evidence_one_rate.json` is ignored.

The values in both files are means over seeds. Every method was used with its default memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.gathering import WAYS, Gathering
from hvdcomp.compressors.two_level import within

DIVERGED = math.inf
"""The loss of quality that is recorded for a method if its training run diverged with at least one seed."""

OPTIMIZERS = ("SGD", "Adam")
"""The optimizers by which a method is judged if the user's optimizer is unknown. The worse of the two results
counts."""


MUON = "Muon"


@dataclass(frozen=True)
class Evidence:
    """The result of one of hvdcomp's own training runs: how much quality each method lost.

    Attributes:
        optimizer: kind of the optimizer. This is "SGD", "Adam", "CompressedAdam", "Muon", or an optimizer of
            docs/optimizers.md.
        training: the name of the training run in docs/best-rates.md, docs/optimizers.md or docs/convergence.md.
        metric: the quality that was compared, either "loss" or "accuracy".
        lost: for each spec, the loss of quality compared with uncompressed gradients (for CompressedAdam, compared with
            AdamW). The loss of quality is the relative increase of the loss, or the decrease of the accuracy in points.
            0.01 is 1 % or one point.
        at_best_rates: whether each method was trained at its own best learning rate. If False, all methods were trained
            at the same rate.
        every: number of steps between two exchanges of compressed steps (`hvdcomp.torch.LocalSteps.compressed`); None
            if gradients were compressed.
    """

    optimizer: str
    training: str
    metric: str
    lost: Mapping[str, float]
    at_best_rates: bool = False
    every: int | None = None


_WITH_MUON = Evidence(
    optimizer=MUON,
    training="gpt, 100 steps, one seed (docs/muon.md)",
    metric="loss",
    lost={"int4": 0.004, "terngrad": 0.029, "powersgd:rank=4": 0.037, "efsignsgd": 0.119, "topk:ratio=0.01": 0.185},
)
"""A training run at one learning rate. The run is too short to propose methods from its results, but long enough to
warn about the methods that lost most."""


@cache
def evidence() -> tuple[Evidence, ...]:
    """The results of all training runs. If a method was not trained on a task at its best learning rate, its results at
    one learning rate are used."""
    at_best = _at_best_rates("trainings")
    return (*at_best, *without_replaced([*map(_parse, _read("evidence_one_rate.json")), _WITH_MUON], at_best))


@cache
def evidence_of_steps() -> tuple[Evidence, ...]:
    """The results of all training runs with compressed steps, each at its own best learning rate."""
    return tuple(_at_best_rates("steps"))


def without_replaced(at_one_rate: Sequence[Evidence], at_best_rates: Sequence[Evidence]) -> list[Evidence]:
    """Returns the results at one learning rate, without the results that are replaced by results at best learning
    rates.

    A result at best learning rates replaces only the results of the same method with the same optimizer on the same
    task, because a method is judged by its worst result.
    """
    replaced = {(_task_of(training), spec) for training in at_best_rates for spec in training.lost}
    left = [
        {spec: lost for spec, lost in training.lost.items() if (_task_of(training), spec) not in replaced}
        for training in at_one_rate
    ]
    return [replace(training, lost=lost) for training, lost in zip(at_one_rate, left, strict=True) if lost]


def _task_of(training: Evidence) -> tuple[str, str]:
    """The optimizer and the task of a training run. The task of gpt-frozen (CompressedAdam) and of gpt-muon is gpt."""
    return training.optimizer, re.split("[-,]", training.training)[0]


def is_at_best_rates(optimizer: str) -> bool:
    """Whether hvdcomp's own training runs with an optimizer used the best learning rate of each method."""
    return any(training.at_best_rates for training in evidence() if training.optimizer == optimizer)


@cache
def chosen_by_rule() -> Mapping[str, tuple[str, ...]]:
    """The methods to try first, for each optimizer in the README's table. The rule in benchmarks/best_rates/rule.py
    chooses them from the training runs."""
    return {optimizer: tuple(specs) for optimizer, specs in _read("evidence.json")["first"].items()}


def _read(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text())


def _parse(record: Mapping[str, Any]) -> Evidence:
    lost = {spec: DIVERGED if lost is None else lost for spec, lost in record["lost"].items()}
    return Evidence(record["optimizer"], record["training"], record["metric"], lost, every=record.get("every"))


def _at_best_rates(part: str) -> list[Evidence]:
    return [replace(one, at_best_rates=True) for one in map(_parse, _read("evidence.json")[part])]


def lost_with(compressor: Compressor, optimizer: str | None) -> float | None:
    """The largest loss of quality that was measured for a method, as in `Evidence`; None if nothing was measured.

    For a two-level method, the results of its inner method are used, because the inner method compresses the mean of a
    node in the same way as the gradient of a rank. Results that were measured with another exchange are not used for a
    method with exchange "scatter", because "scatter" rounds each element twice. With exchange "auto", the number of
    ranks decides between "gather" and "scatter", so the worse of the two results is used.

    Args:
        compressor: the method.
        optimizer: kind of the optimizer, as in `Evidence`; None if unknown.
    """
    if optimizer is None:
        losses = [lost_with(compressor, name) for name in OPTIMIZERS]
        known = [lost for lost in losses if lost is not None]
        return max(known) if len(known) == len(OPTIMIZERS) else None
    worst = worst_with(compressor, optimizer)
    return None if worst is None else worst.lost


class Measured(NamedTuple):
    """How much quality a method lost with one setting, in the training run in which this setting lost most quality. The
    attributes have the same meaning as in `Evidence`."""

    spec: str
    lost: float
    optimizer: str
    training: str
    metric: str
    at_best_rates: bool

    def in_words(self) -> str:
        """A text that states how much quality the setting lost, compared with uncompressed gradients."""
        place = f"with {self.spec} in {self.training}"
        if self.lost == DIVERGED:
            return f"training diverged {place}"
        amount = f"{abs(100 * self.lost):.0f}"
        is_better = self.lost < 0 and amount != "0"
        if self.metric == "accuracy":
            return f"the accuracy was {amount} points {'higher' if is_better else 'lower'} {place}"
        return f"the loss was {amount} % {'lower' if is_better else 'higher'} {place}"


def worst_with(compressor: Compressor, optimizer: str, every: int | None = None) -> Measured | None:
    """The result of a method in the training run in which it lost most quality with an optimizer; None if nothing was
    measured, or if only one of the two exchanges of a method with exchange "auto" was measured.

    Args:
        compressor: the method.
        optimizer, every: as in `Evidence`.
    """
    every_training = evidence() if every is None else evidence_of_steps()
    trainings = [one for one in every_training if (one.optimizer, one.every) == (optimizer, every)]
    found = []
    for spec in _specs_in_trainings(within(compressor)):
        of_spec = [
            Measured(spec, one.lost[spec], one.optimizer, one.training, one.metric, one.at_best_rates)
            for one in trainings
            if spec in one.lost
        ]
        if not of_spec:
            return None
        found += of_spec
    return max(found, key=lambda measured: measured.lost)


def _specs_in_trainings(compressor: Compressor) -> tuple[str, ...]:
    """The specs with which a method was trained. The training runs name the exchange, so there are two if the method
    has exchange "auto"."""
    if isinstance(compressor, Gathering) and compressor.exchange == "auto":
        return tuple(str(compressor.with_exchange(way)) for way in WAYS)
    return (str(compressor),)


def measured_specs() -> tuple[str, ...]:
    """The specs of all measured methods."""
    return tuple(dict.fromkeys(spec for training in evidence() for spec in training.lost))


def in_words(compressor: Compressor) -> str:
    """A sentence that states how much quality a method lost in measurements."""
    losses = _worst_in_words(compressor)
    if not losses:
        return f"hvdcomp's own training runs did not measure how much accuracy is lost with {compressor}."
    return (
        f"The most quality that {compressor} lost in hvdcomp's own small training runs, compared with uncompressed "
        f"gradients (in percent of the loss, or in points of accuracy): {losses}."
    )


def steps_in_words(compressor: Compressor, every: int) -> str:
    """A sentence that states how much quality compressed steps lost in measurements.

    Args:
        compressor: the compressor of the changes of weights.
        every: number of steps between two exchanges.
    """
    spec, losses = within(compressor), _worst_in_words(compressor, every)
    if not losses:
        return (
            f"hvdcomp's own training runs did not measure how much quality compressed steps with {spec} and "
            f"every={every} lose."
        )
    return (
        f"The most quality that compressed steps with {spec} lost in hvdcomp's own small training runs, with "
        f"every={every}, compared with uncompressed gradients and the same optimizer (in percent of the loss, or in "
        f"points of accuracy): {losses}."
    )


def _worst_in_words(compressor: Compressor, every: int | None = None) -> str:
    """The largest loss of quality with each optimizer, and the page that contains it; "" if nothing was measured."""
    optimizers = (*OPTIMIZERS, "CompressedAdam", MUON)  # the results for all other optimizers are in docs/optimizers.md
    worst = [found for name in optimizers if (found := worst_with(compressor, name, every)) is not None]
    phrases = []
    for at_best_rates, source in _SOURCES.items():
        losses = [
            f"with {found.optimizer} {_in_percent(found.lost)}"
            for found in worst
            if found.at_best_rates == at_best_rates
        ]
        phrases += [f"{', '.join(losses)} ({source})"] if losses else []
    return "; ".join(phrases)


_SOURCES = {
    True: "each at its own best learning rate, docs/best-rates.md",
    False: "all at one learning rate, docs/convergence.md",
}


def _in_percent(lost: float) -> str:
    return "training diverged" if lost == DIVERGED else f"{100 * lost:.1f}"


_AT_ONE_RATE: dict[str, tuple[str, ...]] = {
    "SGD": ("terngrad", "powersgd:rank=4"),
    "Adam": ("int4", "int8"),
    "CompressedAdam": ("efsignsgd",),
}
"""The specs to try first, chosen from training runs at one learning rate. They are used for optimizers for which
`chosen_by_rule` has no methods yet."""

FIRST: dict[str, tuple[str, ...]] = {**_AT_ONE_RATE, **chosen_by_rule()}
"""Specs by optimizer, as in the README's table. For each optimizer, try the first spec first. A tuple is empty if
no method is good enough with this optimizer on all tasks."""

RECOMMENDED: tuple[str, ...] = tuple(dict.fromkeys(spec for specs in FIRST.values() for spec in specs))
"""All specs in `FIRST`. `hvdcomp calibrate` and `hvdcomp profile` measure these specs, so that any advice can use their
times."""


def first_to_try() -> str:
    """A sentence that names the methods to try first."""
    phrases = [f"with {optimizer} {' or '.join(specs)}" for optimizer, specs in FIRST.items() if specs]
    return f"Methods to try first: {', '.join(phrases)} (docs/adam.md)."
