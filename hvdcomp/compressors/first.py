"""The methods to try first, by their measured effect on trainings (docs/convergence.md and docs/adam.md)."""

from __future__ import annotations

FIRST: dict[str, tuple[str, ...]] = {
    "SGD": ("terngrad", "powersgd:rank=4"),
    "Adam": ("int4", "int8"),
    "CompressedAdam": ("efsignsgd",),
}
"""Specs by optimizer. The first of each is the one to begin with: it did not raise the loss."""

RECOMMENDED: tuple[str, ...] = tuple(dict.fromkeys(spec for specs in FIRST.values() for spec in specs))
"""All of these specs, which `hvdcomp calibrate` and `hvdcomp profile` measure, so that every advice knows them."""


def first_to_try() -> str:
    """The methods to try first, as a sentence."""
    phrases = [f"with {optimizer} {' or '.join(specs)}" for optimizer, specs in FIRST.items()]
    return f"Methods to try first: {', '.join(phrases[:-1])}, {phrases[-1]} (docs/adam.md)."
