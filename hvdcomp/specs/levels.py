"""Levels: how hard a method compresses, in the method's own unit."""

from __future__ import annotations

from typing import Final

Level = float | int
"""A ratio, a rank or a number of bits."""

DENSE: Final = "dense"
"""In place of a level: the step is sent uncompressed."""
