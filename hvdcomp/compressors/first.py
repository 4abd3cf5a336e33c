"""Which methods to try first, by what they did to trainings (docs/convergence.md and docs/adam.md)."""

from __future__ import annotations

FIRST: dict[str, tuple[str, ...]] = {
    "SGD": ("terngrad", "powersgd:rank=4"),
    "Adam": ("int4", "int8"),
    "CompressedAdam": ("efsignsgd",),
}
"""Specs, by optimizer: the first is the one to begin with, which did the loss no harm."""


def first_to_try() -> str:
    """The same as a sentence."""
    said = [f"with {optimizer} {' or '.join(specs)}" for optimizer, specs in FIRST.items()]
    return f"To try first: {', '.join(said[:-1])}, {said[-1]} (docs/adam.md)."
