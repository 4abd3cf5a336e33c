"""Schedules: levels that depend on nothing but the step, so that every rank finds the same one by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, Protocol

from hvdcomp.errors import SpecError
from hvdcomp.specs.described import Described, is_number, is_whole
from hvdcomp.specs.levels import DENSE, Level

_FALLING = "let levels fall, such as levels=(0.25, 0.05) before topk:ratio=0.01"


class Levelled(Protocol):
    """Of a compressor, what a schedule or a policy must know."""

    @property
    def level(self) -> Level | None: ...

    def at_level(self, level: Level | None) -> object: ...

    def leaves(self) -> Iterator[Levelled]: ...


@dataclass(frozen=True)
class LevelSchedule(Described):
    """Base of all schedules. Class attribute `name`: the schedule's name in a spec string."""

    name: ClassVar[str]

    def level_at(self, step: int, steps_per_epoch: int | None, own: Level | None) -> Level | Literal["dense"] | None:
        """The level of a step.

        Args:
            step: from 0.
            steps_per_epoch: None if the user did not say.
            own: the compressor's own level, None if it has none.

        Returns:
            A level, `DENSE`, or None for the compressor's own.
        """
        raise NotImplementedError

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        """Raises SpecError if the schedule cannot work with this compressor or run."""


@dataclass(frozen=True)
class WarmUp(LevelSchedule):
    """Compresses little at first and more later, until the compressor's own level is reached.

    Deep Gradient Compression's warm-up is `WarmUp(levels=(0.25, 0.0625, 0.015625, 0.004), epochs=1)` before a ratio
    of 0.001 (Lin et al. 2018, arXiv:1712.01887, section 3.3).

    Attributes:
        dense_steps: number of steps that are sent uncompressed before anything else.
        levels: the levels of the periods that follow, one each.
        start: instead of `levels`: the first level of a geometric sequence that would reach the compressor's own
            level after `periods` periods. Levels that are whole numbers (ranks, bits) are rounded.
        periods: length of that sequence.
        epochs, steps: the length of a period; one of the two.
    """

    dense_steps: int = 0
    levels: tuple[Level, ...] = ()
    start: Level | None = None
    periods: int = 4
    epochs: int = 0
    steps: int = 0

    name: ClassVar[str] = "warmup"
    examples: ClassVar[tuple[str, ...]] = ("warmup:levels=0.25|0.05,epochs=1",)

    def __post_init__(self) -> None:
        for field in ("dense_steps", "epochs", "steps"):
            self.require(is_whole(getattr(self, field), 0), field, "a whole number of at least 0")
        listed = isinstance(self.levels, tuple | list) and all(map(is_number, self.levels))
        self.require(listed, "levels", "numbers, such as (0.25, 0.05)")
        self.require(self.start is None or is_number(self.start), "start", "a number")
        if self.levels and self.start is not None:
            raise SpecError("warmup: give levels (a list) or start (a geometric sequence), not both")
        self.require(is_whole(self.periods, 1), "periods", "a whole number of at least 1")
        if _rises(self.levels):
            raise SpecError(f"warmup: levels={self.levels} goes from much to little compression; {_FALLING}")
        if self._set and (self.epochs > 0) == (self.steps > 0):
            raise SpecError("warmup: say how long each level lasts, with epochs=... or steps=..., one of the two")
        if not self._set and not self.dense_steps:
            raise SpecError("warmup: nothing to do; give levels, start, or dense_steps")

    @property
    def _set(self) -> tuple[Level, ...]:
        """The levels that the settings name."""
        return self.levels if self.start is None else (self.start,)

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        if self.epochs and not steps_per_epoch:
            raise SpecError("warmup: epochs can only be counted with steps_per_epoch=len(loader); or give steps")
        if compressor.level is None and self._set:
            raise SpecError(
                "warmup: the compressor has no single level to warm up to; use one with a level, such as "
                "topk:ratio=0.01, or give only dense_steps"
            )
        for level in self._set:
            compressor.at_level(level)
        if compressor.level is not None and _rises([*self._set[-1:], compressor.level]):
            raise SpecError(
                f"warmup: the level {self._set[-1]} compresses harder than the compressor's own, {compressor.level}, "
                f"which follows; {_FALLING}"
            )

    def level_at(self, step: int, steps_per_epoch: int | None, own: Level | None) -> Level | Literal["dense"] | None:
        if step < self.dense_steps:
            return DENSE
        if not self._set:
            return None
        length = self.steps or self.epochs * (steps_per_epoch or 0)
        period = (step - self.dense_steps) // length
        if self.levels:
            return self.levels[period] if period < len(self.levels) else None
        if period >= self.periods or own is None or self.start is None:
            return None
        level = self.start * (own / self.start) ** (period / self.periods)
        return max(1, round(level)) if isinstance(own, int) else level


def _rises(levels: Sequence[Level]) -> bool:
    """Whether less is compressed at a later level than at an earlier one."""
    return any(later > earlier for earlier, later in pairwise(levels))
