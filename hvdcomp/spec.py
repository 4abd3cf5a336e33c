"""Spec strings: `name:field=value,field=value`, the way to name a method on a command line or in a manifest."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from hvdcomp.compressors import COMPRESSORS, Compressor
from hvdcomp.errors import SpecError
from hvdcomp.memory import MEMORIES, Memory

Described = TypeVar("Described")

_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_compressor(spec: str) -> Compressor:
    """The compressor that a spec string describes, such as `topk:ratio=0.01` or `powersgd:rank=4`.

    Raises:
        SpecError: for an unknown method or field, a missing field, or a value of the wrong kind; lists what exists.
    """
    return _parse(spec, COMPRESSORS, "compressor")


def parse_memory(spec: str) -> Memory:
    """The memory that a spec string describes: `error_feedback`, `error_feedback:decay=0.9` or `none`.

    Raises:
        SpecError: as `parse_compressor`.
    """
    return _parse(spec, MEMORIES, "memory")


def _parse(spec: str, kinds: Mapping[str, type[Described]], what: str) -> Described:
    name, _, rest = spec.strip().partition(":")
    if name not in kinds:
        raise SpecError(f"unknown {what} {name!r} in {spec!r}; there are: {', '.join(kinds)}")
    kind = kinds[name]
    types = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for setting in rest.split(",") if rest else []:
        key, equals, text = (part.strip() for part in setting.partition("="))
        if key not in fields or not equals:
            raise SpecError(f"{setting!r} in {spec!r} is not a setting of {name}; {_usage(name, fields)}")
        if key in values:
            raise SpecError(f"{key!r} is set twice in {spec!r}")
        values[key] = _convert(text, types[key], f"{key}={text} in {spec!r}")
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in values]
    if missing:
        raise SpecError(f"{spec!r} does not set {', '.join(missing)}; {_usage(name, fields)}")
    return kind(**values)


def _usage(name: str, fields: Mapping[str, dataclasses.Field]) -> str:
    if not fields:
        return f"{name} has no settings: write {name!r}"
    shown = [
        f"{key}=..." if field.default is dataclasses.MISSING else f"{key}={field.default}"
        for key, field in fields.items()
    ]
    return f"write {name + ':' + ','.join(shown)!r}"


def _convert(text: str, kind: Any, where: str) -> Any:
    if kind is bool:
        if text.lower() not in _TRUTH:
            raise SpecError(f"{where}: expected true or false")
        return _TRUTH[text.lower()]
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise SpecError(f"{where}: expected {expected}") from None
