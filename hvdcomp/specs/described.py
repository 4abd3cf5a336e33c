"""Descriptions that print as the spec string that makes them again."""

from __future__ import annotations

import dataclasses
import sys
from typing import ClassVar

from hvdcomp.errors import SpecError


class Described:
    """Base of the frozen dataclasses that a spec string can name.

    Class attributes:
        name: its name there.
        examples: spec strings of it in its forms, the commonest first, which errors and manuals show.
    """

    name: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]

    def __str__(self) -> str:
        """`name:field=value,field=value` with the fields that differ from their defaults.

        A name that has a colon itself, such as `accordion:auto`, is followed by a comma instead.
        """
        settings = [
            f"{field.name}={_text(getattr(self, field.name))}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if field.default is dataclasses.MISSING or getattr(self, field.name) != field.default
        ]
        return self.name + after_name(self.name) + ",".join(settings) if settings else self.name

    def require(self, allowed: bool, setting: str, what: str) -> None:
        """Raises SpecError, which says `what` is allowed, unless a setting is."""
        if not allowed:
            raise SpecError(f"{self.name}: {setting}={getattr(self, setting)} is not allowed; it must be {what}")

    def require_truth(self, setting: str) -> None:
        """Raises SpecError unless a setting is True or False."""
        self.require(isinstance(getattr(self, setting), bool), setting, "true or false")


def after_name(name: str) -> str:
    """What stands between a name and its settings."""
    return "," if ":" in name else ":"


def is_number(value: object) -> bool:
    """Whether a setting is a finite number."""
    # Not math.isfinite, which fails on whole numbers beyond the largest float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_whole(value: object, least: int) -> bool:
    """Whether a setting is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _text(value: object) -> str:
    return "|".join(map(str, value)) if isinstance(value, tuple) else str(value)
