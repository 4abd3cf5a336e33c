"""Levels: how hard a method compresses, in the method's own unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

Level = float | int
"""A ratio, a rank or a number of bits."""

Unit = Literal["bytes", "elements"]
"""The unit of a compression factor: bytes, indices included, or elements, without indices."""

DENSE: Final = "dense"
"""In place of a level: no compression."""

LevelsBySize = tuple[tuple[int | None, Level], ...]
"""Pairs (size, level), in ascending order of sizes: a tensor has the level of the first size that is larger than its
number of elements. The last size is None, for all other tensors."""


def level_of_size(levels: Sequence[Sequence[int | Level | None]], size: int) -> Level:
    """The level of a tensor with `size` elements; `levels` is a `LevelsBySize`, or its JSON data."""
    return next(level for below, level in levels if level is not None and (below is None or size < below))
