"""Levels: how hard a method compresses, in the method's own unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

Level = float | int
"""A ratio, a rank or a number of bits."""

Unit = Literal["bytes", "elements"]
"""What a compression factor counts, of what is dense and of what is sent: bytes, with those of indices, or elements,
without indices."""

DENSE: Final = "dense"
"""In place of a level: the step is sent uncompressed."""

LevelsBySize = tuple[tuple[int | None, Level], ...]
"""Levels by the number of a tensor's elements: each is of tensors with fewer than the number beside it that have none
of the levels before. The last has None in its place, and is of all others."""


def level_of_size(levels: Sequence[Sequence[int | Level | None]], size: int) -> Level:
    """The level of a tensor with `size` elements; `levels` are as `LevelsBySize`, or as JSON makes them."""
    return next(level for below, level in levels if level is not None and (below is None or size < below))
