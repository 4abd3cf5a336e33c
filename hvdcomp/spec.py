"""Spec strings: `name:field=value,field=value`, the way to name a method on a command line or in a manifest."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from hvdcomp.compressors import COMPRESSORS, Compressor
from hvdcomp.compressors.routing import ANY, CONDITION, ByDimensions, ByName, BySize, require_nested
from hvdcomp.described import Described, after_name
from hvdcomp.errors import SpecError
from hvdcomp.memory import MEMORIES, Memory
from hvdcomp.policies import POLICIES, LevelSchedule, Policy
from hvdcomp.suggestions import did_you_mean

Kind = TypeVar("Kind", bound=Described)

_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_compressor(spec: str) -> Compressor:
    """The compressor that a spec string describes, such as `topk:ratio=0.01` or `powersgd:rank=4`.

    A JSON object gives different tensors different compressors, by the first rule that holds: a pattern of names, or
    `numel<N` or `ndim<N` for tensors of less than N elements or dimensions. A rule's value is a spec string or again
    such an object: `{"embed.*": "topk:ratio=0.001", "numel<10000": "none", "*": "powersgd:rank=4"}`.

    Raises:
        SpecError: for an unknown method or field, a missing field, or a value of the wrong kind; lists what exists.
    """
    if not spec.lstrip().startswith("{"):
        return _parse(spec, COMPRESSORS, "compressor")
    try:
        return _router(json.loads(spec, object_pairs_hook=tuple))
    except json.JSONDecodeError as error:
        raise SpecError(f"{spec!r} is not a JSON object: {error}") from None
    except RecursionError:  # in the JSON decoder, which is deeper than any router may be
        require_nested(sys.getrecursionlimit())
        raise


def parse_memory(spec: str) -> Memory:
    """The memory that a spec string describes: `error_feedback`, `error_feedback:decay=0.9` or `none`.

    Raises:
        SpecError: as `parse_compressor`.
    """
    return _parse(spec, MEMORIES, "memory")


def parse_policy(spec: str) -> LevelSchedule | Policy[Any]:
    """The policy or schedule that a spec string describes.

    Such as `warmup:levels=0.25|0.0625,epochs=1`, `accordion:low=4,high=1`, `accordion:auto,eta=0.4` or `gravac`.

    Raises:
        SpecError: as `parse_compressor`.
    """
    return _parse(spec, POLICIES, "policy")


def _router(rules: tuple[tuple[str, Any], ...], depth: int = 1) -> Compressor:
    """The router of some rules: names before the first condition, and all that follows it in the router below it."""
    require_nested(depth)
    patterns = []
    for place, (key, value) in enumerate(rules):
        condition = CONDITION.fullmatch(key.strip())
        if condition is None:
            patterns.append((key, _routed(value, depth)))
            continue
        rest = rules[place + 1 :]
        if not rest:
            raise SpecError(f'no rule follows {key!r}; end with one for all other tensors, such as "*": "none"')
        inner = depth + bool(patterns)
        otherwise = _routed(rest[0][1], inner) if len(rest) == 1 and rest[0][0] == ANY else _router(rest, inner + 1)
        kind = {"numel": BySize, "ndim": ByDimensions}[condition[1]]
        threshold = _convert(condition[2], int, key)
        router = kind(threshold, _routed(value, inner), otherwise)
        return ByName([*patterns, (ANY, router)]) if patterns else router
    return ByName(patterns)


def _routed(value: Any, depth: int) -> Compressor:
    """The compressor of a rule of a router that is the `depth`-th from the outermost."""
    if isinstance(value, str):
        return parse_compressor(value)
    if isinstance(value, tuple):
        return _router(value, depth + 1)
    raise SpecError(f"{value!r} is neither a spec string, such as 'topk:ratio=0.01', nor a JSON object of such")


def _parse(spec: str, kinds: Mapping[str, type[Kind]], what: str) -> Kind:
    name, rest = _split(spec.strip(), kinds)
    if name not in kinds:
        guess = did_you_mean(name, kinds)
        raise SpecError(f"unknown {what} {name!r} in {spec!r}{guess}; there are: {', '.join(kinds)}")
    kind = kinds[name]
    types = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for setting in rest.split(",") if rest else []:
        key, equals, text = (part.strip() for part in setting.partition("="))
        if key not in fields or not equals:
            guess = did_you_mean(key, fields)
            raise SpecError(f"{setting!r} in {spec!r} is not a setting of {name}{guess}; {_usage(kind, fields)}")
        if key in values:
            raise SpecError(f"{key!r} is set twice in {spec!r}")
        values[key] = _convert(text, types[key], f"{key}={text} in {spec!r}")
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in values]
    if missing:
        others = [f", or {other!r}" for other in kinds if other.startswith(f"{name}:")]
        raise SpecError(f"{spec!r} does not set {', '.join(missing)}; {_usage(kind, fields)}{''.join(others)}")
    return kind(**values)


def _split(spec: str, names: Iterable[str]) -> tuple[str, str]:
    """A spec's name and its settings. Some names have a colon themselves."""
    for name in names:
        if ":" in name and (spec == name or spec.startswith(name + after_name(name))):
            return name, spec[len(name) + 1 :]
    name, _, rest = spec.partition(":")
    return name, rest


def _usage(kind: type[Described], fields: Mapping[str, dataclasses.Field]) -> str:
    if not fields:
        return f"{kind.name} has no settings: write {kind.name!r}"
    others = [f"{key}={field.default}" for key, field in fields.items() if field.default is not dataclasses.MISSING]
    words = f"write {kind.examples[0]!r}"
    return f"{words}, for example; by default {', '.join(others)}" if others else f"{words}, for example"


def _convert(text: str, kind: Any, where: str) -> Any:
    if kind is bool:
        if text.lower() not in _TRUTH:
            raise SpecError(f"{where}: expected true or false")
        return _TRUTH[text.lower()]
    if kind is str:
        return text
    if typing.get_origin(kind) is tuple:
        return tuple(_number(part, where) for part in text.split("|"))
    if kind not in (int, float):
        return _number(text, where)
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise SpecError(f"{where}: expected {expected}") from None


def _number(text: str, where: str) -> float | int:
    """A whole number where the text is one, else a float."""
    try:
        return int(text)
    except ValueError:
        return _convert(text, float, where)
