"""Compressors that nobody named: those that evidence allows and a calibration can predict, the fastest of each kind."""

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
"""Compressors that are proposed: each is to be tried, and mixed with others."""

REACH = 0.25
"""Share by which a step may be longer than with the fastest of all: what is further off is not worth a trial."""


@dataclass(frozen=True)
class Asked:
    """The training that proposals are made for.

    Attributes:
        loss: by how much more, as a share, a compressor may raise the loss.
        optimizer: as in `hvdcomp.compressors.evidence.Evidence`; None if it is not known.
        beside: specs of other compressors that the training uses at times, such as a warm-up's.
    """

    loss: float
    optimizer: str | None
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proposals:
    """The compressors that can be proposed.

    Attributes:
        specs: of the compressors, the fastest first.
        unpredicted: specs of those that evidence allows, and whose encode time is not known.
    """

    specs: tuple[str, ...] = ()
    unpredicted: tuple[str, ...] = ()

    def missing(self, asked: Asked, source: str) -> str | None:
        """Advice how to get more proposals, in a sentence; None if nothing is missing."""
        if self.unpredicted:
            options = " ".join(f"--compressor '{spec}'" for spec in self.unpredicted)
            return (
                f"auto leaves out what loss={asked.loss:g} allows and {source} has no encode time of, for this model: "
                f"{', '.join(self.unpredicted)}. Calibrate with {options}"
            )
        if self.specs or any(_allowed(asked)):
            return None
        optimizer, way_out = asked.optimizer, "Give a larger loss=, or compressors= of your own"
        if optimizer is None:
            optimizer, way_out = "SGD and with Adam, and which it is, is not known", f"{way_out}, or optimizer="
        return (
            f"auto proposes no compressor: none was measured to raise the loss by {asked.loss:.2%} at most with "
            f"{optimizer}. {way_out}"
        )


def propose(
    asked: Asked,
    fixed: Sequence[Compressor],
    seconds_of: Callable[[Compressor], float | None],
    least: float,
    two_levels: bool = False,
) -> Proposals:
    """Chooses a handful of compressors by the predicted time of a step.

    The fastest is among them however slow it is: a network may become slower. Then come those of other kinds that are
    within `REACH` of the fastest of all, as long as residuals stay bounded where all of them take turns.

    Args:
        asked: by what compressors are proposed.
        fixed: the training's own compressor, and those that the user named.
        seconds_of: predicts a step with a compressor; None if its encode time is not known.
        least: seconds of a step with the fastest that is no proposal.
        two_levels: whether the ranks are known to form nodes, and so may exchange in two levels.
    """
    times: dict[Compressor, float] = {}
    unpredicted = []
    for compressor in _allowed(asked):
        if compressor in fixed:
            continue
        flat = seconds_of(compressor)
        if flat is None:
            unpredicted.append(str(compressor))
            continue
        times[compressor] = flat
        both = in_two_levels(compressor) if two_levels else None
        if both is not None and both not in fixed and (seconds := seconds_of(both)) is not None:
            times[both] = seconds
    limit = (1 + REACH) * min([least, *times.values()])
    chosen: list[Compressor] = []
    together = [*fixed, *map(parse_compressor, asked.beside)]
    for compressor in sorted(times, key=lambda compressor: times[compressor]):
        if len(chosen) == MOST or (chosen and times[compressor] > limit):
            break
        is_new = within(compressor).name not in [within(other).name for other in chosen]
        if is_new and can_take_turns([*together, *chosen, compressor]):
            chosen.append(compressor)
    return Proposals(tuple(map(str, chosen)), tuple(unpredicted))


def _allowed(asked: Asked) -> Iterator[Compressor]:
    """What evidence allows."""
    for compressor in map(parse_compressor, measured_specs()):
        lost = lost_with(compressor, asked.optimizer)
        if lost is not None and lost <= asked.loss:
            yield compressor
