"""Schedules give compression levels (ratios, ranks or bits) that depend only on the number of the step. So every rank
can compute the levels itself."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, Protocol, TypeVar

from hvdcomp.errors import SpecError
from hvdcomp.specs.described import Described, is_number, is_whole
from hvdcomp.specs.levels import DENSE, Level, LevelsBySize

Value = TypeVar("Value")

_FALLING = "give levels that decrease, such as levels=(0.25, 0.05) before topk:ratio=0.01"


class Levelled(Protocol):
    """The part of a compressor that schedules and policies use."""

    @property
    def level(self) -> Level | None: ...

    def at_level(self, level: Level | None) -> object: ...

    def leaves(self) -> Iterator[Levelled]: ...


@dataclass(frozen=True)
class LevelSchedule(Described):
    """Base of all schedules. Class attribute `name`: the schedule's name in a spec string."""

    name: ClassVar[str]

    def level_at(
        self, step: int, steps_per_epoch: int | None, own: Level | None
    ) -> Level | Literal["dense"] | LevelsBySize | None:
        """The level of a step.

        Args:
            step: number of the step, counted from 0.
            steps_per_epoch: the number of steps of an epoch; None if unknown.
            own: the compressor's own level; None if it has no level.

        Returns:
            A level, `DENSE`, levels by the size of tensors, or None for the compressor's own level.
        """
        raise NotImplementedError

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        """Raises SpecError if the schedule does not work with this compressor or these settings."""

    def require_epochs_to_count(self, steps_per_epoch: int | None) -> None:
        """Raises SpecError if the number of steps of an epoch is unknown."""
        if not steps_per_epoch:
            raise SpecError(
                f"{self.name}: the schedule counts epochs, so pass steps_per_epoch=len(loader) to "
                "hvdcomp.Compression, or give the schedule its parameter steps"
            )


@dataclass(frozen=True, kw_only=True)
class ListedLevels(LevelSchedule):
    """Base of schedules that have a list of levels and a list of the ends of these levels.

    Attributes:
        levels: the levels in the order in which they are used.
        epochs, steps: for each level, the end of its use, in epochs or in steps; in ascending order.
    """

    levels: tuple[Level, ...]
    epochs: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = isinstance(self.levels, tuple | list) and bool(self.levels) and all(map(is_number, self.levels))
        self.require(listed, "levels", "one number or more, such as 0.1|0.002")

    def require_ends(self, *settings: str, count: int) -> None:
        """Raises SpecError unless exactly one of the settings is given and has `count` ascending integers."""
        given = [setting for setting in settings if getattr(self, setting)]
        choice = f"{', '.join(f'{setting}=...' for setting in settings[:-1])} or {settings[-1]}=..."
        if len(given) != 1:
            listed = " and ".join(given) or "none"
            raise SpecError(
                f"{self.name}: give exactly one of {choice}, to define when each level ends; you gave {listed}"
            )
        ends = getattr(self, given[0])
        rising = isinstance(ends, tuple | list) and all(is_whole(end, 1) for end in ends) and _rises_always(ends)
        self.require(rising, given[0], "increasing whole numbers of at least 1, such as 3|8")
        if len(ends) != count:
            raise SpecError(
                f"{self.name}: {len(self.levels)} levels need {count} {given[0]}, but there are {len(ends)}: "
                f"levels={_listed(self.levels)},{given[0]}={_listed(ends)}"
            )

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        if self.epochs:
            self.require_epochs_to_count(steps_per_epoch)
        if compressor.level is None:
            raise SpecError(
                f"{self.name}: the compressor has no single level that can be set; use a compressor with a level, such "
                "as topk:ratio=0.01 or powersgd:rank=4"
            )
        for level in self.levels:
            compressor.at_level(level)

    def ends(self, steps_per_epoch: int | None) -> list[int]:
        """For each level, the number of the step at which its use ends."""
        return list(self.steps) or [end * (steps_per_epoch or 0) for end in self.epochs]


@dataclass(frozen=True, kw_only=True)
class Schedule(ListedLevels):
    """Uses each level of a list until the end of this level, and then the compressor's own level. Levels may rise and
    fall.

    Attributes:
        levels: the levels of all tensors, in the order in which they are used.
        epochs, steps: the end of each level, in epochs or in steps. Pass only one of the two.

    Example:
        >>> str(Schedule(levels=(0.1, 0.002), epochs=(3, 8)))
        'schedule:levels=0.1|0.002,epochs=3|8'
    """

    name: ClassVar[str] = "schedule"
    examples: ClassVar[tuple[str, ...]] = ("schedule:levels=0.1|0.002,epochs=3|8",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_ends("epochs", "steps", count=len(self.levels))

    def level_at(self, step: int, steps_per_epoch: int | None, own: Level | None) -> Level | None:
        return _until(self.ends(steps_per_epoch), (*self.levels, None), step)


@dataclass(frozen=True, kw_only=True)
class Legacy(ListedLevels):
    """LEGACY (ICLR 2026): compresses less at the start of training, or compresses small tensors less. This policy does
    not measure anything.

    The compressor's own level is not used. The last level of the list is used for the last steps, or for the largest
    tensors.

    Attributes:
        levels: the levels, in descending order.
        epochs, steps: the end of each level except the last, in epochs or in steps.
        sizes: used instead of `epochs` or `steps`. For each level except the last, the number of elements below which a
            tensor gets this level.

    Example:
        >>> str(Legacy(levels=(0.1, 0.01, 0.001), sizes=(10000, 1000000)))
        'legacy:levels=0.1|0.01|0.001,sizes=10000|1000000'
    """

    sizes: tuple[int, ...] = ()

    name: ClassVar[str] = "legacy"
    examples: ClassVar[tuple[str, ...]] = (
        "legacy:levels=0.1|0.01|0.001,sizes=10000|1000000",
        "legacy:levels=0.1|0.01,steps=1000",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        falls = len(self.levels) > 1 and _rises_always(self.levels[::-1])
        self.require(falls, "levels", "two or more decreasing numbers, such as 0.1|0.01|0.001")
        self.require_ends("epochs", "steps", "sizes", count=len(self.levels) - 1)

    def level_at(self, step: int, steps_per_epoch: int | None, own: Level | None) -> Level | LevelsBySize | None:
        if self.sizes:
            return tuple(zip((*self.sizes, None), self.levels, strict=True))
        return _until(self.ends(steps_per_epoch), self.levels, step)


@dataclass(frozen=True)
class WarmUp(LevelSchedule):
    """Compresses weakly at first, and then more and more, until the compressor's own level is reached.

    The warm-up of Deep Gradient Compression is `WarmUp(levels=(0.25, 0.0625, 0.015625, 0.004), epochs=1)`, followed by
    a ratio of 0.001 (Lin et al. 2018, arXiv:1712.01887, section 3.3).

    Attributes:
        dense_steps: number of steps at the start that send uncompressed gradients.
        levels: the level of each period after the dense steps.
        start: used instead of `levels`. The first level of a geometric sequence that reaches the compressor's own level
            after `periods` periods. Integer levels (ranks, bits) are rounded.
        periods: the number of periods of the geometric sequence.
        epochs, steps: the length of a period, in epochs or in steps. Pass only one of the two.

    Example:
        >>> str(WarmUp(levels=(0.25, 0.05), epochs=1))
        'warmup:levels=0.25|0.05,epochs=1'
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
            raise SpecError(f"warmup: levels={self.levels} goes from strong to weak compression; {_FALLING}")
        if self._set and (self.epochs > 0) == (self.steps > 0):
            raise SpecError("warmup: give exactly one of epochs=... and steps=..., to define how long each level lasts")
        if not self._set and not self.dense_steps:
            raise SpecError("warmup: without settings, warmup changes nothing; give levels, start, or dense_steps")

    @property
    def _set(self) -> tuple[Level, ...]:
        """The levels that the user has listed in the settings."""
        return self.levels if self.start is None else (self.start,)

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        if self.epochs:
            self.require_epochs_to_count(steps_per_epoch)
        if compressor.level is None and self._set:
            raise SpecError(
                "warmup: the compressor has no single level to warm up to; use a compressor with a level, such as "
                "topk:ratio=0.01, or give only dense_steps"
            )
        for level in self._set:
            compressor.at_level(level)
        if compressor.level is not None and _rises([*self._set[-1:], compressor.level]):
            raise SpecError(
                f"warmup: the last level, {self._set[-1]}, compresses more than the compressor's own level, "
                f"{compressor.level}, which follows; {_FALLING}"
            )

    def level_at(self, step: int, steps_per_epoch: int | None, own: Level | None) -> Level | Literal["dense"] | None:
        length = self.steps or self.epochs * (steps_per_epoch or 0)
        levels = self.levels or self._sequence(own)
        ends = [self.dense_steps + length * periods for periods in range(len(levels) + 1)]
        return _until(ends, (DENSE, *levels, None), step)

    def _sequence(self, own: Level | None) -> tuple[Level, ...]:
        """The geometric sequence from `start`. The sequence is empty if there is no `start`, or no level to reach."""
        if own is None or self.start is None:
            return ()
        levels = [self.start * (own / self.start) ** (period / self.periods) for period in range(self.periods)]
        return tuple(max(1, round(level)) if isinstance(own, int) else level for level in levels)


def _until(ends: Sequence[int], values: Sequence[Value], step: int) -> Value:
    """The value for a step. Value i is for the steps before end i, and the last value is for all later steps."""
    return values[bisect_right(ends, step)]


def _rises_always(numbers: Sequence[Level]) -> bool:
    return all(earlier < later for earlier, later in pairwise(numbers))


def _listed(numbers: Sequence[Level]) -> str:
    return "|".join(map(str, numbers))


def _rises(levels: Sequence[Level]) -> bool:
    """Whether any level is larger than the previous level, which means less compression."""
    return any(later > earlier for earlier, later in pairwise(levels))
