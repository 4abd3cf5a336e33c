"""Descriptions that print as the spec string that makes them again."""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from hvdcomp.errors import SpecError


class Rule(NamedTuple):
    """What a setting may be, in its type: `rank: Annotated[int, Rule(allows, what)]`; errors say `what` is allowed.

    The type is read as text later, so a lambda that stands there can use its own argument alone.
    """

    allows: Callable[[Any], bool]
    what: str


class Described:
    """Base of the frozen dataclasses that a spec string can name.

    Class attributes:
        name: its name there.
        examples: spec strings of it in its forms, the commonest first, which errors and manuals show.
    """

    name: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]

    def __str__(self) -> str:
        """`name:field=value,field=value` with the fields that differ from their defaults."""
        settings = [
            f"{field.name}={_text(getattr(self, field.name))}"
            for field in fields_of(type(self))
            if field.default is dataclasses.MISSING or getattr(self, field.name) != field.default
        ]
        return f"{self.name}:{','.join(settings)}" if settings else self.name

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for setting, rule in _rules(kind).items():
            self.require(rule.allows(getattr(self, setting)), setting, rule.what)

    def require(self, allowed: bool, setting: str, what: str) -> None:
        """Raises SpecError, which says `what` is allowed, unless a setting is."""
        if not allowed:
            raise SpecError(f"{self.name}: {setting}={getattr(self, setting)!r} is not allowed; it must be {what}")


def fields_of(kind: type[Described]) -> list[dataclasses.Field[Any]]:
    """The settings of a description, those of its own before what it shares with others."""
    return sorted(dataclasses.fields(kind), key=lambda field: bool(field.kw_only))  # type: ignore[arg-type]


def is_number(value: object) -> bool:
    """Whether a setting is a finite number."""
    # Not math.isfinite, which fails on whole numbers beyond the largest float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_whole(value: object, least: float) -> bool:
    """Whether a setting is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def number(allows: Callable[[Any], bool], what: str) -> Rule:
    """Allows the finite numbers that `allows` does."""
    return Rule(lambda value: is_number(value) and allows(value), what)


def at_least(least: int) -> Rule:
    """Allows whole numbers from `least`."""
    return Rule(lambda value: is_whole(value, least), f"a whole number of at least {least}")


def between(least: int, most: int) -> Rule:
    """Allows whole numbers from `least` to `most`."""
    return Rule(lambda value: is_whole(value, least) and value <= most, f"a whole number from {least} to {most}")


def or_none(rule: Rule) -> Rule:
    """Allows None as well."""
    return Rule(lambda value: value is None or rule.allows(value), rule.what)


SHARE = number(lambda value: 0 < value <= 1, "above 0 and at most 1")
Share = Annotated[float, SHARE]
Truth = Annotated[bool, Rule(lambda value: isinstance(value, bool), "true or false")]


@functools.cache  # a level that is set makes a description anew
def _rules(kind: Any) -> Mapping[str, Rule]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: rule for name, hint in hints.items() for rule in getattr(hint, "__metadata__", ())}


def _text(value: object) -> str:
    """A list of texts stands in parentheses: they may hold commas, numbers cannot."""
    if not isinstance(value, tuple):
        return str(value)
    text = "|".join(map(str, value))
    return f"({text})" if any(isinstance(item, str) for item in value) else text
