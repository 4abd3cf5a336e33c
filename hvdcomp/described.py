"""Descriptions that print as the spec string that makes them again."""

from __future__ import annotations

import dataclasses
from typing import ClassVar


class Described:
    """Base of the frozen dataclasses that a spec string can name. Class attribute `name`: its name there."""

    name: ClassVar[str]

    def __str__(self) -> str:
        """`name:field=value,field=value` with the fields that differ from their defaults."""
        settings = [
            f"{field.name}={_text(getattr(self, field.name))}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if field.default is dataclasses.MISSING or getattr(self, field.name) != field.default
        ]
        return ":".join([self.name, ",".join(settings)]) if settings else self.name


def _text(value: object) -> str:
    return "|".join(map(str, value)) if isinstance(value, tuple) else str(value)
