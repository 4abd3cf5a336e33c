"""Makes options of click from the declarations of `hvdcomp.tools.options`."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hvdcomp.specs.parsing import type_hints
from hvdcomp.tools.options import Option, flag_of, options_of, text_of


def declared_options(kind: Any, unset: str) -> Callable[[Any], Any]:
    """A decorator that adds all options of a dataclass to a command, in the order of its fields.

    Args:
        kind: the dataclass that declares the options.
        unset: the text that the help shows if the default is None and the option has no text of its own.
    """
    return _decorator(kind, lambda option, hint, default: _attributes(option, hint, default, unset))


def declared_flags(kind: Any) -> Callable[[Any], Any]:
    """A decorator that adds all options of a dataclass to a command. The command also reads a file with the same
    settings.

    An option that is not given is None. The command then uses the value of the file, or the default if the file has no
    value.
    """
    return _decorator(kind, lambda option, hint, default: {"default": None, **_type_of_flag(hint)})


def _decorator(kind: Any, attributes_of: Callable[[Option, Any, Any], dict[str, Any]]) -> Callable[[Any], Any]:
    hints = type_hints(kind)

    def decorate(command: Any) -> Any:
        for name, option in reversed(options_of(kind).items()):
            flags = option.flags or (flag_of(name),)
            attributes = attributes_of(option, _without_none(hints[name]), getattr(kind, name, None))
            command = click.option(*flags, name, help=option.help, metavar=option.metavar, **attributes)(command)
        return command

    return decorate


def _type_of_flag(kind: Any) -> dict[str, Any]:
    if typing.get_origin(kind) is tuple:
        return {"multiple": True, "callback": lambda context, parameter, values: values or None}
    if typing.get_origin(kind) is typing.Literal:
        return {"type": click.Choice(typing.get_args(kind))}
    return {"type": kind}


def _attributes(option: Option, kind: Any, default: Any, unset: str) -> dict[str, Any]:
    if kind is bool:
        return {"is_flag": True, "default": default}
    if kind is Path:
        return {"type": click.Path(path_type=Path), "default": default}
    if typing.get_origin(kind) is tuple:
        return {"type": _Numbers(option.items), "default": text_of(default), "show_default": bool(default)}
    if option.choices:
        kind = click.Choice(tuple(option.choices))
    elif kind == int | str:
        kind = _NumberOrText()
    shown = (unset if default is None else True) if option.shown is None else option.shown
    return {"type": kind, "default": default, "show_default": shown}


def _without_none(kind: Any) -> Any:
    inner = [part for part in typing.get_args(kind) if part is not type(None)]
    return inner[0] if isinstance(kind, types.UnionType) and len(inner) == 1 else kind


class _Numbers(click.ParamType):
    """Numbers that are separated by commas. `items` explains the meaning of the numbers, with an example."""

    name = "numbers"

    def __init__(self, items: str) -> None:
        self._items = items

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in value.split(",") if part.strip())
        except ValueError:
            self.fail(f"{value!r} is not a list of {self._items}", param, ctx)


class _NumberOrText(click.ParamType):
    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        try:
            return int(value)
        except ValueError:
            return value
