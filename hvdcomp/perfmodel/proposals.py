"""Proposes compressors to the policy `auto`: compressors of different kinds whose predicted steps are fast and which
lost little quality in hvdcomp's own training runs."""

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
"""Largest number of proposed compressors. The number is small because the policy tries each proposed compressor, also
in combinations with other compressors."""

REACH = 0.25
"""The predicted step of a proposed compressor is longer than the fastest step by at most this share."""


@dataclass(frozen=True)
class Criteria:
    """The conditions that a compressor must meet to be proposed for a training run.

    Attributes:
        loss: the largest share by which a compressor may have increased the loss in hvdcomp's own training runs.
        optimizer: the kind of optimizer that the training uses, as in `hvdcomp.compressors.evidence.Evidence`; None if
            unknown.
        beside: specs of other compressors that the training uses for some time, such as the compressor of a warm-up.
    """

    loss: float
    optimizer: str | None
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proposals:
    """The proposed compressors, and the compressors that were not proposed only because they have no encode time.

    Attributes:
        specs: specs of the proposed compressors, the fastest first.
        unpredicted: specs of the compressors that lost little enough quality, but whose step time cannot be predicted
            because their encode time is unknown.
    """

    specs: tuple[str, ...] = ()
    unpredicted: tuple[str, ...] = ()

    def missing(self, criteria: Criteria, source: str) -> str | None:
        """Advice to the user on how to get more proposals, as a message; None if nothing is missing.

        Args:
            criteria: the criteria that led to these proposals.
            source: file or preset that the calibration comes from.
        """
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
                "Give a larger loss=, your own compressors=, or the training run's optimizer as optimizer=, because it "
                "is not known",
            )
        return (
            f"the policy auto proposes no compressor: in hvdcomp's own training runs with {optimizer}, no compressor "
            f"kept the loss within {criteria.loss:.2%} of uncompressed training. {way_out}"
        )


def propose(
    criteria: Criteria,
    fixed: Sequence[Compressor],
    seconds_of: Callable[[Compressor], float | None],
    least: float,
    two_levels: bool = False,
) -> Proposals:
    """Chooses a few compressors by the predicted time of a step.

    The compressor with the fastest step is always proposed, even if dense training is faster, because the network may
    become slower. The other proposals are of other kinds, and their steps are longer than the fastest step by at most
    `REACH`. They are proposed only if residuals stay bounded while training alternates between all compressors.

    Args:
        criteria: the conditions that a compressor must meet to be proposed.
        fixed: the compressor of the training, and the compressors that the user named. They are not proposed again.
        seconds_of: function that returns the predicted seconds of a step with a compressor, or None if the encode time
            of the compressor is unknown.
        least: predicted seconds of the fastest step with dense gradients or a compressor of `fixed`.
        two_levels: whether all nodes are known to have the same number of ranks, which two-level exchanges require.
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
    """The compressors that lost little enough quality in hvdcomp's own training runs (`Criteria.loss`)."""
    for compressor in map(parse_compressor, measured_specs()):
        lost = lost_with(compressor, criteria.optimizer)
        if lost is not None and lost <= criteria.loss:
            yield compressor
