"""What every scheduler must be told of a job, and the TOML file that says it.

A settings file has a table `[job]` and one table per scheduler. Flags on the command line win over the file.
Everything is checked before anything is submitted, and a message names the setting and the way out.
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
from hvdcomp.specs.typed import type_hints, typed
from hvdcomp.tools.launch import torch_rank

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

NAME_LENGTH = 40
"""Schedulers append to a job's name (`-worker-12`), and a host's name ends at 63 characters."""

HOROVOD_ON_GPUS = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}
"""Without it, Horovod's one thread waits on the host for the GPU in each of its rounds. For ranks that have GPUs; a
job's own environment wins."""

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Job:
    """A program that runs on many ranks.

    Attributes:
        name: a DNS-1123 label of at most 40 characters.
        command: the program and its arguments, for each rank, as they are: no shell reads them.
        ranks: the number of processes; what `hvd.size()` or `torch.distributed.get_world_size()` must be.
        environment: variables for every rank.
        backend: what the ranks exchange through: Horovod, or PyTorch's torch.distributed.

    Raises:
        ConfigurationError: a field has a value that no scheduler can take.
    """

    name: str
    command: tuple[str, ...]
    ranks: int
    environment: Mapping[str, str] = field(default_factory=dict)
    backend: Literal["horovod", "torch"] = "horovod"

    def __post_init__(self) -> None:
        check_name(self.name)
        if not self.command or not self.command[0]:
            raise ConfigurationError("command: it is empty: give the program that each rank runs and its arguments")
        for argument in self.command:
            _check_text("command", argument)
        if self.ranks < 1:
            raise ConfigurationError(f"ranks: {self.ranks} is not a number of processes: take 1 or more")
        for name, value in self.environment.items():
            if not VARIABLE.fullmatch(name):
                raise ConfigurationError(
                    f"environment: {name!r} is not the name of a variable: take letters, digits and underscores, with "
                    "no digit first"
                )
            _check_text(f"environment: {name}", value)
            if self.backend == "torch" and name in torch_rank.OWN:
                raise ConfigurationError(f"environment: {name} is each rank's own, set when it starts: leave it out")

    @property
    def program(self) -> tuple[str, ...]:
        """What a scheduler starts on each rank: the command, or what becomes it."""
        return (*torch_rank.PROGRAM, *self.command) if self.backend == "torch" else self.command


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a job.

    Raises:
        ConfigurationError: it is not a DNS-1123 label of at most 40 characters.
    """
    if not DNS_LABEL.fullmatch(name) or len(name) > NAME_LENGTH:
        raise ConfigurationError(
            f"name: {name!r} is not a name for a job: take at most {NAME_LENGTH} small letters, digits and hyphens, "
            "with a letter or digit first and last"
        )


def _check_text(where: str, text: str) -> None:
    """Arguments and variables reach a process as bytes that end with NUL."""
    if "\0" in text:
        raise ConfigurationError(f"{where}: {text!r} has a NUL character, which no process can be given: take it out")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{where}: {text!r} is not valid Unicode, so it cannot be sent: mend it") from None


class MissingSettingsError(ConfigurationError):
    """Settings that must be given and are not.

    Attributes:
        names: of all of them.
        way_out: what to do about them.
    """

    def __init__(self, names: Sequence[str], way_out: str) -> None:
        super().__init__(f"{', '.join(names)}: not set: {way_out}")
        self.names = tuple(names)
        self.way_out = way_out


def read_settings(
    path: Path | None,
    section: str,
    kind: type[T],
    flags: Mapping[str, Any],
    ranks_of: Callable[[Mapping[str, Any]], int | None] = lambda _: None,
) -> T:
    """A scheduler's settings from a TOML file and the flags of a command line.

    `kind` is a dataclass with a field `job: Job`. The table `[job]` holds Job's fields, `[<section>]` the other fields
    of `kind`; a field without a default must be given. Tables for other schedulers are left alone.

    Arguments:
        path: the file, or None if the flags say everything.
        section: the scheduler's table.
        kind: what to make, of the types that `typed` knows.
        flags: values by the names of fields, of Job or of `kind`; None is "not given". They win over the file; of a
            mapping, entry by entry.
        ranks_of: the number of ranks that follows from the given fields of `kind`, where `ranks` is not given; None if
            none does.

    Raises:
        MissingSettingsError: settings without a default are not given; it names all of them.
        ConfigurationError: the file cannot be read, a key is unknown, or a value has another type.
    """
    file = {} if path is None else _read(path)
    tables: dict[str, type] = {"job": Job, section: kind}
    types_of = {name: _fields(owner) for name, owner in tables.items()}
    values: dict[str, dict[str, Any]] = {}
    for name, known in types_of.items():
        table = file.get(name, {})
        if not isinstance(table, dict):
            raise ConfigurationError(f"{path}: {name} must be a table: write [{name}] on a line of its own")
        _refuse_unknown(table, known, f"{path}, [{name}]")
        values[name] = {key: _typed(known[key], value, f"{path}, {name}.{key}") for key, value in table.items()}
    for key, value in flags.items():
        if value is None:
            continue
        _refuse_unknown([key], [known for fields in types_of.values() for known in fields], "flags")
        name = next(name for name, known in types_of.items() if key in known)
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
        raise ConfigurationError(f"{path} is not UTF-8 text, which TOML must be") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from None


def _fields(owner: type) -> dict[str, Any]:
    """The fields of a dataclass that a user sets, with their types."""
    hints = type_hints(owner)
    return {field.name: hints[field.name] for field in dataclasses.fields(owner) if hints[field.name] is not Job}


def _refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigurationError(f"{where}: there is no setting {unknown[0]!r}; there are: {', '.join(sorted(known))}")


def _missing(values: Mapping[str, Any], owner: type, known: Iterable[str]) -> list[str]:
    """The fields that have no default and are not given."""
    needed = (
        field.name
        for field in dataclasses.fields(owner)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
    return [name for name in needed if name in known and name not in values]


def _refuse_missing(missing: Mapping[str, Sequence[str]]) -> None:
    """Refuse what is missing, by table, in one message."""
    places = [f"{', '.join(names)} in the table [{table}]" for table, names in missing.items() if names]
    if places:
        names = [name for names in missing.values() for name in names]
        flags = "the flag" if len(names) == 1 else "the flags"
        raise MissingSettingsError(names, f"give {flags}, or write {' and '.join(places)} of a settings file")


def _typed(kind: Any, value: Any, where: str) -> Any:
    try:
        return typed(kind, value, where)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
