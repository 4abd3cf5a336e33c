"""The types of levels. A level determines how strongly a method compresses, in the method's own unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

Level = float | int
"""A level: a ratio, a rank or a number of bits."""

Unit = Literal["bytes", "elements"]
"""The unit in which a compression factor is computed: either bytes (including the bytes of indices), or elements
(without indices)."""

DENSE: Final = "dense"
"""The value that is used instead of a level if gradients are sent uncompressed."""

LevelsBySize = tuple[tuple[int | None, Level], ...]
"""The levels of tensors by their number of elements: pairs (size, level) in ascending order of sizes. A tensor has the
level of the first pair whose size is larger than the tensor's number of elements. The size in the last pair is None,
and the level of this pair applies to all larger tensors."""


def level_of_size(levels: Sequence[Sequence[int | Level | None]], size: int) -> Level:
    """The level of a tensor with `size` elements. `levels` is a `LevelsBySize`, or the nested lists that it becomes in
    JSON."""
    return next(level for below, level in levels if level is not None and (below is None or size < below))
