"""What methods cost in trainings, as measured: by this `auto` proposes methods, and `advise` speaks of one.

`evidence.json` has the figures, means over the seeds of a training, each method with its own memory. It is written by
`python benchmarks/convergence.py --evidence hvdcomp/compressors/evidence.json` from the trainings of the page. Left out
are the methods that were not trained like all others: those with a momentum of their own (`dgc`), and `signsgd`, which
had another learning rate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.two_level import within

DIVERGED = math.inf
"""What a method lost of which any seed diverged."""

OPTIMIZERS = ("SGD", "Adam")
"""An optimizer that is not known is taken for either, whichever speaks against a method."""


@dataclass(frozen=True)
class Evidence:
    """What one training says.

    Attributes:
        optimizer: "SGD", "Adam" or "CompressedAdam".
        training: its name on the page docs/convergence.md.
        metric: "loss" or "accuracy".
        lost: by spec, beside uncompressed gradients (of CompressedAdam beside those of AdamW), as a share: what the
            loss is higher by, or the points of accuracy that are missing; 0.01 is 1 % or a point.
    """

    optimizer: str
    training: str
    metric: str
    lost: Mapping[str, float]


@cache
def evidence() -> tuple[Evidence, ...]:
    """What all trainings say."""
    records = json.loads(Path(__file__).with_name("evidence.json").read_text())
    return tuple(
        Evidence(
            **{**record, "lost": {spec: DIVERGED if lost is None else lost for spec, lost in record["lost"].items()}}
        )
        for record in records
    )


def lost_with(compressor: Compressor, optimizer: str | None) -> float | None:
    """What a method lost where it did most harm, as in `Evidence`; None if nothing was measured.

    In two levels the mean of a node is compressed like a rank's gradient without them, so what was measured of a method
    counts there. It does not count for the same method scattered, which rounds each element twice.

    Args:
        optimizer: as in `Evidence`; None if it is not known.
    """
    if optimizer is None:
        of_each = [lost_with(compressor, each) for each in OPTIMIZERS]
        known = [lost for lost in of_each if lost is not None]
        return max(known) if len(known) == len(OPTIMIZERS) else None
    spec = str(within(compressor))
    trainings = [training.lost for training in evidence() if training.optimizer == optimizer]
    return max((lost[spec] for lost in trainings if spec in lost), default=None)


def measured_specs() -> tuple[str, ...]:
    """The methods of which anything was measured."""
    return tuple(dict.fromkeys(spec for training in evidence() for spec in training.lost))


def in_words(compressor: Compressor) -> str:
    """The measured losses of a method, as a sentence."""
    optimizers = dict.fromkeys(training.optimizer for training in evidence())
    losses = {name: lost for name in optimizers if (lost := lost_with(compressor, name)) is not None}
    if not losses:
        return f"What {compressor} costs in accuracy was not measured in hvdcomp's own trainings."
    said = [
        f"with {optimizer} {'it diverged' if lost == DIVERGED else f'{100 * lost:.1f}'}"
        for optimizer, lost in losses.items()
    ]
    return (
        f"In small trainings of hvdcomp's own, {compressor} lost beside uncompressed gradients, in percent of the loss "
        f"or points of accuracy, at worst: {', '.join(said)} (docs/convergence.md)."
    )
