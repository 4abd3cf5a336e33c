"""Measured losses of methods in trainings; `auto` proposes methods by them, and `advise` reports them.

`evidence.json` holds means over the seeds of each training, every method with its default memory. It is written by
`python benchmarks/convergence.py --evidence hvdcomp/compressors/evidence.json` from the trainings of
docs/convergence.md. It leaves out methods that were trained with other settings: `dgc`, which has a momentum of its
own, and `signsgd`, which had another learning rate.
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
"""The loss of a method of which any seed diverged."""

OPTIMIZERS = ("SGD", "Adam")
"""The optimizers by which a method is judged if the user's is unknown: the worse result counts."""


MUON = "Muon"


@dataclass(frozen=True)
class Evidence:
    """The results of one training.

    Attributes:
        optimizer: "SGD", "Adam", "CompressedAdam" or "Muon".
        training: its name in docs/convergence.md.
        metric: "loss" or "accuracy".
        lost: by spec, the relative increase of the loss, or the decrease of accuracy in points, against uncompressed
            gradients (CompressedAdam against AdamW); 0.01 is 1 % or one point.
    """

    optimizer: str
    training: str
    metric: str
    lost: Mapping[str, float]


_WITH_MUON = Evidence(
    optimizer=MUON,
    training="100 steps of gpt, one seed (docs/muon.md)",
    metric="loss",
    lost={"int4": 0.004, "terngrad": 0.029, "powersgd:rank=4": 0.037, "efsignsgd": 0.119, "topk:ratio=0.01": 0.185},
)
"""Too short to propose methods by; enough to warn of those that lost most."""


@cache
def evidence() -> tuple[Evidence, ...]:
    """The results of all trainings."""
    records = json.loads(Path(__file__).with_name("evidence.json").read_text())
    return tuple(
        Evidence(
            **{**record, "lost": {spec: DIVERGED if lost is None else lost for spec, lost in record["lost"].items()}}
        )
        for record in records
    )


def lost_with(compressor: Compressor, optimizer: str | None) -> float | None:
    """The worst measured loss of a method, as in `Evidence`; None if nothing was measured.

    With two levels a node's mean is compressed as a rank's gradient is without them, so the method's figures hold. They
    do not hold for the same method scattered, which rounds each element twice.

    Args:
        compressor: the method.
        optimizer: as in `Evidence`; None if unknown.
    """
    if optimizer is None:
        losses = [lost_with(compressor, name) for name in OPTIMIZERS]
        known = [lost for lost in losses if lost is not None]
        return max(known) if len(known) == len(OPTIMIZERS) else None
    spec = str(within(compressor))
    trainings = [training.lost for training in (*evidence(), _WITH_MUON) if training.optimizer == optimizer]
    return max((lost[spec] for lost in trainings if spec in lost), default=None)


def measured_specs() -> tuple[str, ...]:
    """Specs of the measured methods."""
    return tuple(dict.fromkeys(spec for training in evidence() for spec in training.lost))


def in_words(compressor: Compressor) -> str:
    """The measured losses of a method, as a sentence."""
    optimizers = dict.fromkeys(training.optimizer for training in evidence())
    losses = {name: lost for name in optimizers if (lost := lost_with(compressor, name)) is not None}
    if not losses:
        return f"hvdcomp's own trainings did not measure what {compressor} costs in accuracy."
    phrases = [
        f"with {optimizer} {'it diverged' if lost == DIVERGED else f'{100 * lost:.1f}'}"
        for optimizer, lost in losses.items()
    ]
    return (
        f"The worst loss of quality with {compressor} in hvdcomp's own small trainings, compared with uncompressed "
        f"gradients, in percent of the loss or points of accuracy: {', '.join(phrases)} (docs/convergence.md)."
    )
