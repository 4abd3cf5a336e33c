"""Descriptions that print as the spec string that makes them again."""

from __future__ import annotations

import dataclasses
from typing import ClassVar


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


def after_name(name: str) -> str:
    """What stands between a name and its settings."""
    return "," if ":" in name else ":"


def _text(value: object) -> str:
    return "|".join(map(str, value)) if isinstance(value, tuple) else str(value)
