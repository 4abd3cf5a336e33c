"""Base class of objects that are parsed from a spec string, and print as this spec string."""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from hvdcomp.errors import SpecError


class Rule(NamedTuple):
    """A rule for the values of a setting. The rule is part of the setting's type:

        rank: Annotated[int, Rule(allows, allowed_text)]

    Python evaluates this type later, from its source text. Therefore a lambda in the type can use no local variables
    except its own argument.

    Attributes:
        allows: function that returns whether a value is allowed.
        allowed_text: words that describe the allowed values, for error messages.
    """

    allows: Callable[[Any], bool]
    allowed_text: str


class Described:
    """The base class of the frozen dataclasses that a spec string can describe. The fields of a class are the settings
    in the spec string.

    Class attributes:
        name: name of the class in a spec string, such as "topk".
        examples: examples of spec strings, the most common first, for error messages and the manual.
    """

    name: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]

    def __str__(self) -> str:
        """The spec string of this object: `name:field=value,field=value`, with the fields that differ from their
        defaults."""
        settings = [
            f"{field.name}={_text(getattr(self, field.name))}"
            for field in fields_of(type(self))
            if field.default is dataclasses.MISSING or getattr(self, field.name) != field.default
        ]
        return f"{self.name}:{','.join(settings)}" if settings else self.name

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for setting, rule in _rules(kind).items():
            self.require(rule.allows(getattr(self, setting)), setting, rule.allowed_text)

    def require(self, allowed: bool, setting: str, allowed_text: str) -> None:
        """Raises SpecError if `allowed` is False.

        Args:
            allowed: whether the value of the setting is allowed.
            setting: name of the setting.
            allowed_text: words that describe the allowed values, for the error message.
        """
        if not allowed:
            value = getattr(self, setting)
            raise SpecError(f"{self.name}: {setting}={value!r} is not allowed; it must be {allowed_text}")


def fields_of(kind: type[Described]) -> list[dataclasses.Field[Any]]:
    """The settings of a class, as dataclass fields. Positional fields precede keyword-only fields."""
    return sorted(dataclasses.fields(kind), key=lambda field: bool(field.kw_only))  # type: ignore[arg-type]


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    # For an integer beyond the largest float, this comparison is False, but math.isfinite raises an error.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_whole(value: object, least: float) -> bool:
    """Whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def number(allows: Callable[[Any], bool], allowed_text: str) -> Rule:
    """A rule that allows finite numbers for which `allows` returns True."""
    return Rule(lambda value: is_number(value) and allows(value), allowed_text)


def at_least(least: int) -> Rule:
    """A rule that allows whole numbers of at least `least`."""
    return Rule(lambda value: is_whole(value, least), f"a whole number of at least {least}")


def between(least: int, most: int) -> Rule:
    """A rule that allows whole numbers from `least` to `most`."""
    return Rule(lambda value: is_whole(value, least) and value <= most, f"a whole number from {least} to {most}")


def or_none(rule: Rule) -> Rule:
    """A rule that allows None, and all values that the given rule allows."""
    return Rule(lambda value: value is None or rule.allows(value), rule.allowed_text)


SHARE = number(lambda value: 0 < value <= 1, "above 0 and at most 1")
Share = Annotated[float, SHARE]
Truth = Annotated[bool, Rule(lambda value: isinstance(value, bool), "true or false")]


@functools.cache  # every change of a level creates an object, and each new object is checked
def _rules(kind: Any) -> Mapping[str, Rule]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: rule for name, hint in hints.items() for rule in getattr(hint, "__metadata__", ())}


def _text(value: object) -> str:
    """The text of a value in a spec string. A list of texts is in parentheses, because texts may contain commas."""
    if not isinstance(value, tuple):
        return str(value)
    text = "|".join(map(str, value))
    return f"({text})" if any(isinstance(item, str) for item in value) else text
