"""What methods did to the loss of trainings, as measured: by this `auto` proposes methods, and `advise` speaks of one.

A figure is the mean over a training's seeds, with each method's own memory. `tests/test_evidence.py` holds the figures
to those of the pages. Left out are the methods that were not trained like all others: those with a momentum of their
own (`dgc`), and `signsgd`, which had another learning rate. Accuracies say nothing of a loss; of trainings that have
nothing else it counts which methods diverged. The page convergence.md is left out: the loss of its training differs by
20 % between machines and between roundings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.two_level import within

DIVERGED = math.inf
"""Excess of the loss where any seed diverged."""

OPTIMIZERS = ("SGD", "Adam")
"""An optimizer that is not known is taken for either, whichever speaks against a method."""


@dataclass(frozen=True)
class Evidence:
    """What one training says.

    Attributes:
        optimizer: "SGD", "Adam" or "CompressedAdam".
        training: its name on the page.
        page: where it is described, of the folder docs.
        excess: by spec, loss / loss with uncompressed gradients - 1; of CompressedAdam beside those of AdamW.
    """

    optimizer: str
    training: str
    page: str
    excess: Mapping[str, float]


def _from_percent(percent: Mapping[str, float]) -> dict[str, float]:
    return {spec: value / 100 for spec, value in percent.items()}


def _from_perplexity(dense: float, perplexity: Mapping[str, float]) -> dict[str, float]:
    """A perplexity is e to the loss."""
    return {spec: math.log(value) / math.log(dense) - 1 for spec, value in perplexity.items()}


EVIDENCE: tuple[Evidence, ...] = (
    Evidence(
        "SGD", "mnist1d", "adam-measured.md",
        _from_percent({
            "int4": 18.44, "powersgd:rank=4": 0.87, "efsignsgd": 273.76, "topk:ratio=0.01": 19.00,
            "qsgd:bits=4": DIVERGED,
        }),
    ),
    Evidence(
        "SGD", "stdlib-text", "convergence-earlier.md",
        _from_perplexity(4.86, {
            "topk:ratio=0.01": 6.36, "topk:ratio=0.001": 8.79, "randomk:ratio=0.1": 9.63, "randomk:ratio=0.01": 10.96,
            "mstopk:ratio=0.01": 6.36, "mstopk:ratio=0.001": 8.79, "redsync:ratio=0.01": 6.38,
            "redsync:ratio=0.001": 8.79, "sidco:ratio=0.01": 6.55, "sidco:ratio=0.001": 11.25, "onebit": 5.93,
            "onebit:per_row=True": 5.18, "efsignsgd": 5.97, "qsgd:bits=4": 5.22, "qsgd:bits=2": 7.17,
            "terngrad": 4.98, "natural": 4.86, "globalqsgd": 4.83, "globalqsgd:bits=4": 5.23,
            "powersgd:rank=2": 7.29, "powersgd:rank=1": 9.05, "powersgd:rank=2,alternating=True": 9.80,
            "powersgd:rank=1,alternating=True": 12.42, "atomo:rank=4": 6.60, "atomo:rank=2": 7.62,
        }),
    ),
    Evidence("SGD", "digits", "convergence-earlier.md", {"randomk:ratio=0.01": DIVERGED, "qsgd:bits=2": DIVERGED}),
    Evidence(
        "Adam", "gpt", "adam-measured.md",
        _from_percent({
            "int8": -0.05, "int4": 0.69, "powersgd:rank=4": 8.53, "efsignsgd": 51.53, "topk:ratio=0.01": 43.33,
        }),
    ),
    Evidence("CompressedAdam", "gpt-frozen", "adam-measured.md", _from_percent({"efsignsgd": -4.07})),
)  # fmt: skip


def excess_of(compressor: Compressor, optimizer: str | None) -> float | None:
    """By how much a method raised the loss where it did most harm, as a share; None if nothing was measured.

    In two levels the mean of a node is compressed like a rank's gradient without them, so what was measured of a method
    counts there. It does not count for the same method scattered, which rounds each element twice.

    Args:
        optimizer: as in `Evidence`; None if it is not known.
    """
    if optimizer is None:
        of_each = [excess_of(compressor, one) for one in OPTIMIZERS]
        known = [one for one in of_each if one is not None]
        return max(known) if len(known) == len(OPTIMIZERS) else None
    spec = str(within(compressor))
    found = [one.excess[spec] for one in EVIDENCE if one.optimizer == optimizer and spec in one.excess]
    return max(found, default=None)


def measured_specs() -> tuple[str, ...]:
    """The methods of which anything was measured."""
    return tuple(dict.fromkeys(spec for one in EVIDENCE for spec in one.excess))


def in_words(compressor: Compressor) -> str:
    """What was measured of a method, as a sentence."""
    optimizers = dict.fromkeys(one.optimizer for one in EVIDENCE)
    found = {one: excess for one in optimizers if (excess := excess_of(compressor, one)) is not None}
    if not found:
        return f"What {compressor} does to the loss was not measured in hvdcomp's own trainings."
    said = [
        f"{'it diverged' if excess == DIVERGED else f'{100 * excess:+.1f} %'} with {optimizer}"
        for optimizer, excess in found.items()
    ]
    return (
        f"In small trainings of hvdcomp's own, the loss with {compressor} beside that of uncompressed gradients, at "
        f"worst: {', '.join(said)} (docs/convergence-earlier.md, docs/adam-measured.md)."
    )
