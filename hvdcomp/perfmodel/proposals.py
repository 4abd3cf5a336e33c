"""Proposed compressors: of each kind, the compressor with the fastest predicted step that loses little enough
quality."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hvdcomp.compressors import Compressor
from hvdcomp.compressors.contraction import can_take_turns
from hvdcomp.compressors.evidence import lost_with, measured_specs
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.two_level import within
from hvdcomp.perfmodel.ways import in_two_levels

MOST = 3
"""Largest number of proposed compressors, as each is tried and mixed with others."""

REACH = 0.25
"""A compressor is worth a trial if its step is longer than the fastest step by at most this share."""


@dataclass(frozen=True)
class Criteria:
    """The criteria for proposals in one training.

    Attributes:
        loss: largest increase of the loss by a compressor, as a share.
        optimizer: as in `hvdcomp.compressors.evidence.Evidence`; None if unknown.
        beside: specs of other compressors that the training uses temporarily, such as a warm-up's.
    """

    loss: float
    optimizer: str | None
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proposals:
    """The compressors that can be proposed.

    Attributes:
        specs: specs of the proposed compressors, the fastest first.
        unpredicted: specs of compressors that evidence allows and whose encode time is unknown.
    """

    specs: tuple[str, ...] = ()
    unpredicted: tuple[str, ...] = ()

    def missing(self, criteria: Criteria, source: str) -> str | None:
        """A sentence of advice on how to get more proposals; None if none is missing."""
        if self.unpredicted:
            options = " ".join(f"--compressor '{spec}'" for spec in self.unpredicted)
            return (
                f"the policy auto leaves out compressors that loss={criteria.loss:g} allows, because the calibration "
                f"{source} has no encode times (times to compress and decompress) of these compressors for this model: "
                f"{', '.join(self.unpredicted)}. To include these compressors, run hvdcomp calibrate with {options}"
            )
        if self.specs or any(_allowed(criteria)):
            return None
        optimizer, way_out = criteria.optimizer, "Give a larger loss= or your own compressors="
        if optimizer is None:
            optimizer, way_out = (
                "SGD and with Adam",
                "Give a larger loss=, your own compressors=, or optimizer=, because the training's optimizer is not "
                "known",
            )
        return (
            f"the policy auto proposes no compressor: in hvdcomp's own trainings with {optimizer}, no compressor "
            f"raised the loss by {criteria.loss:.2%} or less. {way_out}"
        )


def propose(
    criteria: Criteria,
    fixed: Sequence[Compressor],
    seconds_of: Callable[[Compressor], float | None],
    least: float,
    two_levels: bool = False,
) -> Proposals:
    """Chooses a few compressors by the predicted time of a step.

    The compressor with the fastest step is always proposed, because a network may become slower. The others are of
    other kinds, and within `REACH` of the fastest method. They are only proposed if residuals stay bounded when all of
    them take turns.

    Args:
        criteria: the criteria.
        fixed: the training's own compressor, and those that the user named.
        seconds_of: function from a compressor to the predicted seconds of a step; None if its encode time is unknown.
        least: seconds of the fastest step without proposals.
        two_levels: whether nodes are known to have equal numbers of ranks, which two levels need.
    """
    times: dict[Compressor, float] = {}
    unpredicted = []
    for compressor in _allowed(criteria):
        if compressor in fixed:
            continue
        flat = seconds_of(compressor)
        if flat is None:
            unpredicted.append(str(compressor))
            continue
        times[compressor] = flat
        two_level = in_two_levels(compressor) if two_levels else None
        if two_level is not None and two_level not in fixed and (seconds := seconds_of(two_level)) is not None:
            times[two_level] = seconds
    limit = (1 + REACH) * min([least, *times.values()])
    chosen: list[Compressor] = []
    in_use = [*fixed, *map(parse_compressor, criteria.beside)]
    for compressor in sorted(times, key=lambda compressor: times[compressor]):
        if len(chosen) == MOST or (chosen and times[compressor] > limit):
            break
        is_new = within(compressor).name not in [within(proposal).name for proposal in chosen]
        if is_new and can_take_turns([*in_use, *chosen, compressor]):
            chosen.append(compressor)
    return Proposals(tuple(map(str, chosen)), tuple(unpredicted))


def _allowed(criteria: Criteria) -> Iterator[Compressor]:
    """The compressors that evidence allows."""
    for compressor in map(parse_compressor, measured_specs()):
        lost = lost_with(compressor, criteria.optimizer)
        if lost is not None and lost <= criteria.loss:
            yield compressor
