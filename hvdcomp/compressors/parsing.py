"""Reads the spec strings of compressors (including routers) and of memories."""

from __future__ import annotations

import json
from typing import Any

from hvdcomp.compressors import COMPRESSORS, MEMORIES, Compressor
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.routing import ANY, CONDITION, ByDimensions, ByName, BySize, nested_too_deep
from hvdcomp.compressors.two_level import TwoLevel
from hvdcomp.errors import SpecError
from hvdcomp.specs.parsing import convert, parse, text_of
from hvdcomp.specs.plugins import Plugins

COMPRESSOR_PLUGINS = Plugins("compressor", "hvdcomp.compressors", (Compressor,), COMPRESSORS)
"""Finds compressors in other packages and in the user's modules."""

_STARTS_OF_JSON = ("{", "[", '"')
_RULES = """write a compressor for each pattern of names, such as {"embed.*": "topk:ratio=0.001", "*": "none"}"""


def parse_compressor(spec: str) -> Compressor:
    """The compressor that a spec string describes, such as `topk:ratio=0.01` or `powersgd:rank=4`.

    A spec may also be a JSON object of rules for tensors. The first rule that matches a tensor determines its
    compressor. The key of a rule is a pattern of names, or `numel<N` or `ndim<N` for tensors with fewer than N elements
    or dimensions. The value of a rule is a spec string or another JSON object. Example: `{"embed.*":
    "topk:ratio=0.001", "numel<10000": "none", "*": "powersgd:rank=4"}`.

    `two_level(...)` around a spec compresses only between nodes.

    Raises:
        SpecError: for an unknown method or field, a missing field, or a value of the wrong kind. The message lists the
            methods or fields that exist.
    """
    text = text_of(spec, "compressor", "topk:ratio=0.01")
    if text.startswith(TwoLevel.name):
        return TwoLevel(parse_compressor(_within(text)))
    if not text.startswith(_STARTS_OF_JSON):
        return parse(spec, COMPRESSORS, "compressor", COMPRESSOR_PLUGINS)
    try:
        rules = json.loads(spec, object_pairs_hook=tuple)
    except json.JSONDecodeError as error:
        raise SpecError(f"{spec!r} is not a JSON object: {error}; {_RULES}") from None
    except RecursionError:  # routers are nested too deeply
        raise nested_too_deep() from None
    if not text.startswith("{"):
        raise SpecError(f"{spec!r} is not a JSON object; {_RULES}, or write one compressor without brackets and quotes")
    try:
        return _router(rules)
    except RecursionError:  # routers are nested too deeply
        raise nested_too_deep() from None


def parse_memory(spec: str) -> Memory:
    """The memory that a spec string describes: `error_feedback`, `error_feedback:decay=0.9` or `none`.

    Raises:
        SpecError: for an unknown name or setting, or a value of the wrong kind. The message lists the names or settings
            that exist.
    """
    return parse(spec, MEMORIES, "memory")


def _within(text: str) -> str:
    """The spec inside `two_level(...)`."""
    inside = text.removeprefix(TwoLevel.name)
    if not (inside.startswith("(") and inside.endswith(")")):
        raise SpecError(
            f"{text!r} is not a valid spec; write two-level compression like this: 'two_level(topk:ratio=0.01)'"
        )
    # A nested two_level is refused here, before the inner spec is parsed, because specs could otherwise be nested
    # without limit.
    if inside[1:].lstrip().startswith(TwoLevel.name):
        raise SpecError(
            "two_level inside two_level is not allowed, because there are only two levels; write two_level once"
        )
    return inside[1:-1]


def _router(rules: tuple[tuple[str, Any], ...]) -> Compressor:
    """The router for these rules. If a rule's key is a condition, such as `numel<1000`, this rule and all later rules
    become a nested router. The rules before it are patterns of the outer router."""
    patterns = []
    for place, (key, value) in enumerate(rules):
        condition = CONDITION.fullmatch(key.strip())
        if condition is None:
            patterns.append((key, _routed(value)))
            continue
        later = rules[place + 1 :]
        if not later:
            raise SpecError(f'no rule follows {key!r}; end with a rule for all other tensors, such as "*": "none"')
        otherwise = _routed(later[0][1]) if len(later) == 1 and later[0][0] == ANY else _router(later)
        kind = {"numel": BySize, "ndim": ByDimensions}[condition[1]]
        router = kind(convert(condition[2], int, key), _routed(value), otherwise)
        return ByName([*patterns, (ANY, router)]) if patterns else router
    return ByName(patterns)


def _routed(value: Any) -> Compressor:
    """The compressor of a rule's value."""
    if isinstance(value, str):
        return parse_compressor(value)
    if isinstance(value, tuple):
        return _router(value)
    raise SpecError(
        f"{value!r} is neither a spec string, such as 'topk:ratio=0.01', nor a JSON object with spec strings"
    )
