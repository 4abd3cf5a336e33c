"""The methods to try first, according to measured trainings (docs/best-rates.md, docs/convergence.md)."""

from __future__ import annotations

from hvdcomp.compressors.evidence import chosen_by_rule

_AT_ONE_RATE: dict[str, tuple[str, ...]] = {
    "SGD": ("terngrad", "powersgd:rank=4"),
    "Adam": ("int4", "int8"),
    "CompressedAdam": ("efsignsgd",),
}
"""Chosen by trainings at one learning rate, for optimizers that the rule does not decide yet."""

FIRST: dict[str, tuple[str, ...]] = {**_AT_ONE_RATE, **chosen_by_rule()}
"""Specs by optimizer, as in README's table. The first of each is the one to begin with."""

RECOMMENDED: tuple[str, ...] = tuple(dict.fromkeys(spec for specs in FIRST.values() for spec in specs))
"""All of these specs, which `hvdcomp calibrate` and `hvdcomp profile` measure, so that every advice knows them."""


def first_to_try() -> str:
    """The methods to try first, as a sentence."""
    phrases = [f"with {optimizer} {' or '.join(specs)}" for optimizer, specs in FIRST.items()]
    return f"Methods to try first: {', '.join(phrases[:-1])}, {phrases[-1]} (docs/adam.md)."
