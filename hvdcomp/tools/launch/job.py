"""The settings of a job that all schedulers share, and the TOML file that contains settings.

A settings file has a table `[job]` and a table for each scheduler. Flags of the command line override the file. All
settings are checked before anything is submitted. An error message names the setting, and explains how to fix it.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from hvdcomp.errors import ConfigurationError
from hvdcomp.specs.parsing import type_hints
from hvdcomp.specs.typed import typed
from hvdcomp.tools.launch import torch_rank

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

NAME_LENGTH = 40
"""Largest number of characters in a job's name. Schedulers append to this name (`-worker-12`), and a host name may have
at most 63 characters."""

HOROVOD_ON_GPUS = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}
"""Variables for Horovod's ranks with GPUs. A job's environment overrides them. Without this variable, Horovod's
background thread waits in each of its cycles until the GPU has finished."""

_NAME = re.compile(r"[A-Za-z0-9_]([-.A-Za-z0-9_]*[A-Za-z0-9_])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Job:
    """A program that runs on many ranks.

    Attributes:
        name: a name that `check_name` allows. A scheduler may have stricter rules for names.
        command: the program of each rank, and its arguments. No shell interprets the program and its arguments.
        ranks: number of ranks, as in `hvd.size()` or `torch.distributed.get_world_size()`.
        environment: the environment variables of every rank.
        backend: the library that averages gradients: Horovod, or PyTorch's torch.distributed.

    Raises:
        ConfigurationError: if a field has a value that no scheduler accepts.
    """

    name: str
    command: tuple[str, ...]
    ranks: int
    environment: Mapping[str, str] = field(default_factory=dict)
    backend: Literal["horovod", "torch"] = "horovod"

    def __post_init__(self) -> None:
        check_name(self.name)
        if not self.command or not self.command[0]:
            raise ConfigurationError(
                "command: the command is empty: give the program that each rank runs, and its arguments"
            )
        for argument in self.command:
            _check_text("command", argument)
        if self.ranks < 1:
            raise ConfigurationError(f"ranks: {self.ranks} is not a number of processes: use 1 or more")
        for name, value in self.environment.items():
            if not VARIABLE.fullmatch(name):
                raise ConfigurationError(
                    f"environment: {name!r} is not the name of a variable: use letters, digits and underscores, with "
                    "no digit first"
                )
            _check_text(f"environment: {name}", value)
            if self.backend == "torch" and name in torch_rank.OWN:
                raise ConfigurationError(
                    f"environment: hvdcomp sets {name} for each rank when the rank starts: leave it out"
                )

    @property
    def program(self) -> tuple[str, ...]:
        """The command that a scheduler starts on each rank. For torch.distributed, a wrapper comes before `command`."""
        return (*torch_rank.PROGRAM, *self.command) if self.backend == "torch" else self.command


def check_name(name: str) -> None:
    """Checks the name of a job, which is also the beginning of file names.

    Raises:
        ConfigurationError: if the name is too long, or has characters that a file name or a scheduler does not allow.
    """
    if not _NAME.fullmatch(name) or len(name) > NAME_LENGTH:
        raise ConfigurationError(
            f"name: {name!r} is not a valid name for a job: use at most {NAME_LENGTH} letters, digits, underscores, "
            "hyphens and dots; the first and the last character must not be a hyphen or a dot"
        )


def _check_text(setting: str, text: str) -> None:
    """Checks text that is passed to a process. The text must not contain NUL, because arguments and variables end with
    NUL."""
    if "\0" in text:
        raise ConfigurationError(f"{setting}: {text!r} has a NUL character, which no process can receive: remove it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{setting}: {text!r} is not valid Unicode and cannot be sent: correct it") from None


class MissingSettingsError(ConfigurationError):
    """Required settings are missing.

    Attributes:
        names: names of the settings that are missing.
        way_out: a text that explains how to give these settings.
    """

    def __init__(self, names: Sequence[str], way_out: str) -> None:
        super().__init__(f"{', '.join(names)} must be set: {way_out}")
        self.names = tuple(names)
        self.way_out = way_out


def read_settings(
    path: Path | None,
    section: str,
    kind: type[T],
    flags: Mapping[str, Any],
    ranks_of: Callable[[Mapping[str, Any]], int | None] = lambda _: None,
) -> T:
    """Reads the settings of a scheduler from a TOML file and from the flags of a command line.

    `kind` is a dataclass with a field `job: Job`. The table `[job]` contains the fields of Job, and `[<section>]`
    contains the other fields of `kind`. A field without a default is required. Tables of other schedulers are ignored.

    Args:
        path: path of the settings file; None if the flags give all settings.
        section: name of the scheduler's table in the file.
        kind: the class of the settings. The fields of this class must have types that `typed` supports.
        flags: the values of command-line flags by field name, for fields of Job or of `kind`. None means "not given".
            Flags override the file. For a mapping, flags override single entries.
        ranks_of: a function that computes the number of ranks from the given fields of `kind`, if `ranks` is not given.
            It returns None if these fields do not determine the number.

    Raises:
        MissingSettingsError: if required settings are not given. The message names all missing settings.
        ConfigurationError: if the file cannot be read, a key is unknown, or a value has the wrong type.
    """
    file = {} if path is None else _read(path)
    tables: dict[str, type] = {"job": Job, section: kind}
    types_of = {name: _fields(owner) for name, owner in tables.items()}
    values: dict[str, dict[str, Any]] = {}
    for name, types in types_of.items():
        table = file.get(name, {})
        if not isinstance(table, dict):
            raise ConfigurationError(f"{path}: {name} must be a table: write [{name}] on a line of its own")
        _refuse_unknown(table, types, f"{path}, [{name}]")
        values[name] = {key: _typed(types[key], value, f"{path}, {name}.{key}") for key, value in table.items()}
    for key, value in flags.items():
        if value is None:
            continue
        _refuse_unknown([key], [name for types in types_of.values() for name in types], "flags")
        name = next(name for name, types in types_of.items() if key in types)
        flag = _typed(types_of[name][key], value, key)
        values[name][key] = {**values[name].get(key, {}), **flag} if isinstance(flag, dict) else flag
    if "ranks" not in values["job"] and (ranks := ranks_of(values[section])) is not None:
        values["job"]["ranks"] = ranks
    _refuse_missing({name: _missing(values[name], owner, types_of[name]) for name, owner in tables.items()})
    values[section]["job"] = Job(**values["job"])
    return kind(**values[section])


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not UTF-8 text, as TOML must be: save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from None


def _fields(owner: type) -> dict[str, Any]:
    """The fields of a dataclass that a user sets, with their types."""
    hints = type_hints(owner)
    return {field.name: hints[field.name] for field in dataclasses.fields(owner) if hints[field.name] is not Job}


def _refuse_unknown(keys: Iterable[str], fields: Iterable[str], place: str) -> None:
    unknown = sorted(set(keys) - set(fields))
    if unknown:
        raise ConfigurationError(
            f"{place}: there is no setting {unknown[0]!r}; the settings are: {', '.join(sorted(fields))}"
        )


def _missing(values: Mapping[str, Any], owner: type, settable: Iterable[str]) -> list[str]:
    """The settable fields that have no default and are not given."""
    required = (
        field.name
        for field in dataclasses.fields(owner)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
    return [name for name in required if name in settable and name not in values]


def _refuse_missing(missing: Mapping[str, Sequence[str]]) -> None:
    """Raises a single error for all missing settings. `missing` has the names of the settings, by table."""
    places = [f"{', '.join(names)} in the table [{table}]" for table, names in missing.items() if names]
    if places:
        names = [name for names in missing.values() for name in names]
        flags = "the flag" if len(names) == 1 else "the flags"
        raise MissingSettingsError(names, f"give {flags}, or set {' and '.join(places)} in a settings file")


def _typed(kind: Any, value: Any, place: str) -> Any:
    try:
        return typed(kind, value, place)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
