"""Checks values from parsed JSON or TOML against types, including dataclasses. hvdcomp checks all JSON and TOML files
in this way."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdcomp.specs.parsing import number, type_hints

_SCALARS: dict[Any, tuple[tuple[Any, ...], str]] = {
    str: ((str,), "text in quotes"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    Path: ((str, Path), "the name of a file or folder"),
}
_LONGEST = 60  # largest number of characters that a message shows of a value


def typed(kind: Any, value: Any, where: str, texts: Mapping[str, float] | None = None) -> Any:
    """Checks that a parsed value has a type, and converts it to this type. A list becomes a tuple, an object becomes a
    dataclass, and a text may become a path.

        typed(tuple[int, ...], [1, 2], "ranks")  # (1, 2)

    Args:
        kind: the expected type. The allowed types are Any, str, int, float (which also accepts whole numbers), bool,
            Path, a Literal, an optional of these, `int | float`, a tuple of one type, a Mapping whose keys are texts or
            numbers, or a dataclass of these.
        value: the value from parsed JSON or TOML.
        where: place of the value in the file, for error messages.
        texts: the numbers that JSON cannot express, such as not-a-number. The key of each number is the text that
            stands for it in the file, such as "NaN". Pass None if such texts are not allowed.

    Raises:
        ValueError: if the value does not have the type, or if the dataclass does not accept it.
    """
    origin, inner = _parts(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        inner = tuple(option for option in inner if option is not type(None))
        return typed(float if set(inner) == {int, float} else inner[0], value, where, texts)
    if origin is typing.Literal:
        if value not in inner:
            raise ValueError(f"{where}: {shortened(value)} is not one of {', '.join(map(str, inner))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f'{where}: {shortened(value)} must be a list, such as ["one", "two"]')
        return tuple(typed(inner[0], item, f"{where}[{place}]", texts) for place, item in enumerate(value))
    if origin is not None and issubclass(origin, collections.abc.Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: {shortened(value)} must be a table (in JSON an object) of names and values")
        return {
            key if inner[0] is str else number(key, f"{where}.{key}"): typed(inner[1], item, f"{where}.{key}", texts)
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where, texts)
    if kind is float and texts and isinstance(value, str) and value in texts:
        return texts[value]
    taken, words = _SCALARS[kind]
    if not isinstance(value, taken) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"{where}: {shortened(value)} must be {words}")
    return kind(value) if kind is Path else value


def as_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, in a form for files. `typed` restores the dataclass from these fields.

    The class attribute `later` lists fields that earlier versions of hvdcomp did not have. These fields are omitted if
    they have their defaults, so that the file is the same as with earlier versions.
    """
    later = getattr(value, "later", ())
    return {name: item for name, item in vars(value).items() if name not in later or item != getattr(type(value), name)}


def with_text_keys(value: Any) -> Any:
    """Converts dataclasses to mappings, and keys that are numbers to texts, at any depth. `typed` converts them
    back."""
    if dataclasses.is_dataclass(value):
        value = as_fields(value)
    if not isinstance(value, Mapping):
        return value
    return {key if isinstance(key, str) else repr(key): with_text_keys(inner) for key, inner in value.items()}


def shortened(value: Any) -> str:
    """The text of a value for a message. A long text is shortened."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _dataclass(kind: Any, value: Any, where: str, texts: Mapping[str, float] | None) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {shortened(value)} must be an object")
    hints = type_hints(kind)
    for word, names in (("lacks", _needed(kind) - value.keys()), ("has an unknown", value.keys() - hints.keys())):
        if names:
            raise ValueError(f"{where} {word} {', '.join(sorted(names))}")
    return kind(**{name: typed(hints[name], item, name, texts) for name, item in value.items()})


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


@functools.cache
def _needed(kind: Any) -> frozenset[str]:
    return frozenset(
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
