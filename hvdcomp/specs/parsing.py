"""Parses spec strings, `name:field=value,field=value`, which describe methods on command lines and in manifests."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from hvdcomp.errors import SpecError
from hvdcomp.specs.described import Described
from hvdcomp.specs.plugins import Plugins
from hvdcomp.specs.suggestions import did_you_mean

Kind = TypeVar("Kind", bound=Described)

_QUOTED_OR_ONE = re.compile(r'"(?:[^"\\]|\\.)*"|.', re.DOTALL)
_NAME_AND_SIGN = re.compile(r"(?:hvdcomp\.)?(\w*)\s*(.?)", re.DOTALL)
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


_type_hints = functools.cache(typing.get_type_hints)


def type_hints(kind: Any) -> Mapping[str, Any]:
    """The types of a class's fields, by name. They are cached, because `advise` reads thousands of specs, and each
    decision reads the state of a policy."""
    return _type_hints(kind)


def parse(spec: str, kinds: Mapping[str, type[Kind]], noun: str, plugins: Plugins | None = None) -> Kind:
    """Creates the object that a spec string describes.

    Args:
        spec: the spec string, which is a name, or a name followed by a colon and settings.
        kinds: the classes that the spec string may name, by name.
        noun: word for an object of these classes in error messages, such as "compressor".
        plugins: classes of other packages that the spec string may also name; None if there are none.

    Raises:
        SpecError: if the name or a setting is unknown, if a setting is missing, or if a value has the wrong type. The
            message lists the known names, or shows a valid spec string.
    """
    name, _, settings = text_of(spec, noun, next(iter(kinds.values())).examples[0]).partition(":")
    kind: type[Kind] | None = kinds.get(name) if plugins is None else plugins.find(name)
    if kind is None:
        _refuse_other_notations(name, spec, kinds, noun)
        guess, own = did_you_mean(name, kinds), "" if plugins is None else f"; {plugins.ways()}"
        raise SpecError(f"unknown {noun} {name!r} in {spec!r}{guess}; choose one of: {', '.join(kinds)}{own}")
    types = type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for setting in split_outside(settings, ",") if settings else []:
        key, equals, text = (part.strip() for part in setting.partition("="))
        if key not in fields or not equals:
            guess = did_you_mean(key, fields)
            raise SpecError(f"{setting!r} in {spec!r} is not a setting of {name}{guess}; {_usage(kind, fields)}")
        if key in values:
            raise SpecError(f"{key!r} is set twice in {spec!r}")
        values[key] = convert(text, types[key], f"{key}={text} in {spec!r}")
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in values]
    if missing:
        raise SpecError(f"{spec!r} does not set {', '.join(missing)}; {_usage(kind, fields)}")
    return kind(**values)


def _refuse_other_notations(name: str, spec: str, kinds: Mapping[str, type[Kind]], noun: str) -> None:
    """Raises SpecError if a known name is not followed by a colon, as in `powersgd=4` or `TopK(ratio=0.01)`."""
    word, sign = _NAME_AND_SIGN.match(name).groups()  # type: ignore[union-attr]  # it matches any text
    classes = {kind.__name__: known for known, kind in kinds.items()}
    known = word if word in kinds else classes.get(word) if sign == "(" else None
    if sign and known is not None:
        raise SpecError(
            f"{spec!r} is not a valid {noun}: write settings after a colon, as in {kinds[known].examples[0]!r}"
        )


def text_of(spec: object, noun: str, example: str) -> str:
    """Checks that a spec is a text, and removes the spaces around it.

    Args:
        spec: the user's spec.
        noun: word for what the spec describes in error messages, such as "compressor".
        example: an example of a spec, for the error message.

    Raises:
        SpecError: if the spec is not a text.
    """
    if isinstance(spec, str):
        return spec.strip()
    instead = ", or give the object itself without from_spec" if isinstance(spec, Described) else ""
    raise SpecError(f"{spec!r} is not a spec string of a {noun}; give a string, such as {example!r}{instead}")


def split_outside(text: str, separator: str) -> list[str]:
    """Splits a text at the separators that are outside parentheses and outside double quotes.

    Example:
        >>> split_outside("calibration=c.json,compressors=(qsgd:bits=4,exchange=scatter|natural)", ",")
        ['calibration=c.json', 'compressors=(qsgd:bits=4,exchange=scatter|natural)']

    Raises:
        SpecError: if a parenthesis is never closed.
    """
    parts, depth = [""], 0
    for piece in _QUOTED_OR_ONE.findall(text):
        depth = max(0, depth + (piece == "(") - (piece == ")"))
        if piece == separator and not depth:
            parts.append("")
        else:
            parts[-1] += piece
    if depth:
        raise SpecError(f"a parenthesis in {text!r} is never closed; add the missing ')'")
    return parts


def _usage(kind: type[Described], fields: Mapping[str, dataclasses.Field]) -> str:
    if not fields:
        return f"{kind.name} has no settings: write {kind.name!r}"
    defaults = [f"{key}={field.default}" for key, field in fields.items() if field.default is not dataclasses.MISSING]
    words = f"write {next(iter(getattr(kind, 'examples', ())), f'{kind.name}:...')!r}"
    return f"{words}, for example (defaults: {', '.join(defaults)})" if defaults else f"{words}, for example"


def convert(text: str, kind: Any, where: str) -> Any:
    """Converts the text of a setting to a value.

    Args:
        text: the text of the value in a spec string.
        kind: type of the value. This is bool, str, int, float, a Literal, or a tuple of texts or of numbers. Any other
            type means an int or a float.
        where: words that name the setting in error messages.

    Raises:
        SpecError: if the text does not describe a value of the type.
    """
    if kind is bool:
        if text.lower() not in _TRUTH:
            raise SpecError(f"{where}: expected true or false")
        return _TRUTH[text.lower()]
    if kind is str or typing.get_origin(kind) is typing.Literal:
        return text
    if typing.get_origin(kind) is tuple:
        if str in typing.get_args(kind):
            return _texts(text, where)
        return tuple(number(part, where) for part in text.split("|"))
    if kind not in (int, float):
        return number(text, where)
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else f"a number{_of_percent(text)}"
        raise SpecError(f"{where}: expected {expected}") from None


def _of_percent(text: str) -> str:
    """Words for an error message, which show the number to write instead of a percentage; empty if the text is not a
    percentage.

    >>> _of_percent("1 %")
    ', such as 0.01 for 1 %'
    """
    share, percent, _ = text.rpartition("%")
    try:
        return f", such as {float(share) / 100:g} for {float(share):g} %" if percent else ""
    except ValueError:
        return ""


def _texts(text: str, where: str) -> tuple[str, ...]:
    """The texts of a list such as `(one|two)`. Texts may contain commas."""
    if not (text.startswith("(") and text.endswith(")")):
        raise SpecError(f"{where}: expected a list in parentheses with | between its parts, such as (one|two)")
    return tuple(part.strip() for part in split_outside(text[1:-1], "|")) if text[1:-1].strip() else ()


def number(text: str, where: str) -> float | int:
    """Converts a text to an int if it is a whole number, and otherwise to a float. `where` names the number in error
    messages."""
    try:
        return int(text)
    except ValueError:
        return convert(text, float, where)
