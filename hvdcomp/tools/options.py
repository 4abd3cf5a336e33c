"""Declares the options of a command. Each option is declared only once, as a field of a dataclass.

    seed: int = option(0, "Seed of all random numbers.", between(0, 2**31 - 1))

The name of the field is the name of the option (`--seed`). The type of the field determines how a text is parsed. The
default of the field is the default of the option. None means "not given". These declarations are used for

- the command line with its help (`hvdcomp.tools.commands.declared`),
- the checks of single values (`check`), including values that a program passes,
- the list of options that a resumed run may change, and the values of options that older runs did not have
  (`may_change`, `of_older_runs`).

Conditions that involve several options are checked in the module that declares the options.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdcomp.specs.described import Rule

_KEY = "option"  # the key in the metadata of a field


@dataclass(frozen=True)
class Option:
    """The declaration of an option. The attributes are the arguments of `option`.

    Attributes:
        help: what the option does, for the help.
        rule: the values that are allowed in addition to None; None allows all values of the type.
        choices: the texts that are allowed; () allows any text.
        metavar: name of the option's value in the help.
        shown: the text for the default in the help. True shows the default itself, and False shows nothing. None shows
            the text that the command has for all options without a default.
        flags: names on the command line, if they differ from the field's name.
        items: for a list of numbers, a text that explains the meaning of the numbers, with an example.
        may_change: whether a resumed run may have a different value.
        before: the value with which a run behaves as in earlier versions, which did not have the option; `...` if this
            value is the default.
    """

    help: str
    rule: Rule | None = None
    choices: Sequence[str] = ()
    metavar: str | None = None
    shown: str | bool | None = None
    flags: tuple[str, ...] = ()
    items: str = ""
    may_change: bool = False
    before: Any = ...


def option(default: Any, help: str, rule: Rule | None = None, **attributes: Any) -> Any:
    """Declares a field of a dataclass that is an option. `attributes` are the attributes of `Option`."""
    return dataclasses.field(default=default, metadata={_KEY: Option(help, rule, **attributes)})


def required(help: str, **attributes: Any) -> Any:
    """Declares a field that is an option without a default."""
    return dataclasses.field(metadata={_KEY: Option(help, **attributes)})


def options_of(kind: Any) -> dict[str, Option]:
    """The options that a dataclass declares, by the name of the field."""
    return {field.name: field.metadata[_KEY] for field in dataclasses.fields(kind) if _KEY in field.metadata}


def flag_of(name: str) -> str:
    """The name of a field on the command line."""
    return f"--{name.replace('_', '-')}"


def check(settings: Any, refused: type[Exception], choices: Mapping[str, Sequence[str]]) -> None:
    """Raises an error of the type `refused` for the first value that its declaration does not allow.

    Args:
        settings: an instance of a dataclass with options.
        refused: the type of the error.
        choices: for some fields, the allowed texts, which replace the declared texts.
    """
    for name, declared in options_of(settings).items():
        value, allowed = getattr(settings, name), choices.get(name, declared.choices)
        if value is None:
            continue
        if allowed and value not in allowed:
            raise refused(f"{flag_of(name)} {value!r} is unknown; choose one of {', '.join(allowed)}")
        if declared.rule is not None and not declared.rule.allows(value):
            raise refused(f"{flag_of(name)} {text_of(value)} must be {declared.rule.allowed_text}")


def may_change(kind: Any) -> set[str]:
    """The options for which a resumed run may have a different value."""
    return {name for name, declared in options_of(kind).items() if declared.may_change}


def of_older_runs(kind: Any) -> dict[str, Any]:
    """For each option, the value with which a run behaves as in earlier versions, which did not have the option."""
    defaults = {name: getattr(kind, name) for name in options_of(kind)}
    return {name: defaults[name] if one.before is ... else one.before for name, one in options_of(kind).items()}


def text_of(value: Any) -> str:
    """A value as it is written on the command line."""
    return ",".join(f"{number:g}" for number in value) if isinstance(value, tuple) else str(value)


def at_least(least: float, words: str | None = None) -> Rule:
    """A rule that allows finite numbers of at least `least`. In the error message, `words` replaces the text "at least
    ..."."""
    return Rule(lambda value: math.isfinite(value) and value >= least, words or f"at least {least}")


def between(least: float, most: float, words: str | None = None) -> Rule:
    """A rule that allows numbers from `least` to `most`. In the error message, `words` replaces the text "from ... to
    ..."."""
    return Rule(lambda value: least <= value <= most, words or f"from {least} to {most}")


def below(least: float, limit: float) -> Rule:
    """A rule that allows numbers that are at least `least` and less than `limit`."""
    return Rule(lambda value: least <= value < limit, f"at least {least} and less than {limit}")
