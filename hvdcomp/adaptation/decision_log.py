"""The decision log. The log contains each decision of a policy with its statistics, so that the decisions can be
replayed.

Each line is one JSON object. There is a start line when a run begins or is resumed, and a line for each decision. The
JSON is strict. Numbers that strict JSON cannot express are written as the texts "NaN", "Infinity" and "-Infinity", and
numeric keys are written as their repr. `hvdcomp.adaptation.log_lines` describes the short form of lines.

When a file reaches its size limit, it is renamed with a number, and a new file begins with its own start line. So each
file can be read without the others.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import numbers
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hvdcomp.adaptation.log_lines import Parts, Shorthand
from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.files import VERSION, RecordFile, parse_json, put_aside, put_aside_before
from hvdcomp.policies import Policy, refuse_removed
from hvdcomp.policies.request import Statistics
from hvdcomp.specs.described import is_whole
from hvdcomp.specs.typed import as_fields, typed

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The numbers that JSON cannot represent, by the text that the log contains instead."""

_WRITTEN = {"candidates": "survey"}
"""The fields of `Statistics` that have a different name in the log, because they were renamed later."""

_FORMAT = 2
"""The format number in start lines. Earlier versions wrote no format number, and no short lines."""

_FIRST_BYTES = (b'{"kind":"start",', b'{"kind": "start", ')  # the second form was written by earlier versions
_PARTS = ("statistics", "state", "decision")
_NOT_WRITTEN = ("file", "line", *_PARTS)  # fields that are not written, or are written in a different way

FILE_BYTES = 64 * 2**20
"""The default size, in bytes, at which the log continues in a new file."""

FILES = 16
"""The default limit on the number of files of a log."""


class DecisionLogError(ValueError):
    """A file is not a decision log, or is damaged."""


class RemovedPolicyError(DecisionLogError):
    """A decision log was written by a policy that was removed from hvdcomp.

    Attributes:
        start: the start line of the log.
        reason: the message that names the removed policy.
    """

    def __init__(self, start: Start, reason: str) -> None:
        super().__init__(f"{start.file}, line {start.line}: {reason}")
        self.start = start
        self.reason = reason


@dataclass(frozen=True)
class Start:
    """A start line of a decision log. It describes the run, and is the first line of each run in the log.

    Attributes:
        file, line: the file, and the line number, counted from 1.
        step, epoch: the numbers of steps and epochs that ended before this line. These numbers are 0 unless the run was
            resumed, or continues in a new file.
        policy, compressor: the spec strings of the policy and of the compressor.
        tensors: the shapes of the compressed tensors, by name.
        steps_per_epoch: the number of steps of an epoch; None if epochs are not counted.
        ranks: number of ranks.
        hvdcomp: the version of hvdcomp that wrote the line.
        state, decision: the current state of the policy, and the current decision, as JSON data.
        continues: whether this is the first line of a new file of the same run.
    """

    file: Path
    line: int
    step: int
    epoch: int | None
    policy: str
    compressor: str
    tensors: Mapping[str, tuple[int, ...]]
    steps_per_epoch: int | None
    ranks: int
    hvdcomp: str
    state: Mapping[str, Any]
    decision: Mapping[str, Any]
    continues: bool = False


@dataclass(frozen=True)
class Decided:
    """A line of a decision log that records one decision of the policy.

    Attributes:
        file, line: the file, and the line number, counted from 1.
        step, epoch: the numbers of steps and epochs that had ended when the statistics were measured.
        from_step: the first step, counted from 0, that uses the decision.
        statistics: the statistics from which the policy decided.
        state, decision: the new state of the policy, and the new decision, as JSON data.
    """

    file: Path
    line: int
    step: int
    epoch: int | None
    from_step: int
    statistics: Statistics
    state: Mapping[str, Any]
    decision: Mapping[str, Any]


class DecisionLog:
    """Writes a decision log, on rank 0. If the log already exists, it is continued, and an incomplete last line is
    dropped.

    The file is opened when the first line is written. Each line is written immediately, so that the log is complete
    even if the run is killed. If the disk is full, the file ends with the last complete line.

    Args:
        path: the path of the newest file. New lines are written to this file.
        file_bytes: when a file reaches this size, it is renamed with the next number (such as "decisions.1.jsonl" for
            "decisions.jsonl"), and a new file begins.
        files: the largest number of files. If there are more, the oldest file is removed.
    """

    def __init__(self, path: Path, file_bytes: int = FILE_BYTES, files: int = FILES) -> None:
        """Checks that the file can be written. The check leaves no file behind.

        Raises:
            ConfigurationError: if the file cannot be written, or is not a decision log.
        """
        self.path = Path(path)
        self._file_bytes = file_bytes
        self._files = files
        self._file: RecordFile | None = None
        self._header: Start | None = None  # the start line that a new file would get now
        self._shorthand = Shorthand(())  # the shorthand of the lines after the latest start line
        self._before: Parts = {}  # the parts of the previous line, not shortened
        try:
            _check_writable(self.path)
        except OSError as error:
            raise self._cannot(error) from None

    def start(self, **fields: Any) -> None:
        """Adds a start line with the fields of `Start`. File, line number and version are filled in.

        Raises:
            ConfigurationError: if the file can no longer be written.
        """
        self._begin(Start(file=self.path, line=0, hvdcomp=VERSION, **fields))

    def decision(self, **fields: Any) -> None:
        """Adds a decision line with the fields of `Decided`. File and line number are filled in. Call `start` first.

        Raises:
            ConfigurationError: if the file can no longer be written.
        """
        decided = Decided(file=self.path, line=0, **fields)
        assert self._header is not None
        if self._header.continues and self._is_full():
            self._begin(self._header)
        parts = to_json({**_parts(decided), "statistics": _renamed(decided.statistics.known(), _WRITTEN)})
        self._write("decision", decided, parts)
        self._header = dataclasses.replace(
            self._header,
            step=decided.from_step,
            epoch=decided.epoch,
            state=decided.state,
            decision=decided.decision,
            continues=True,
        )

    def close(self) -> None:
        """Closes the file. The next line opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self, start: Start) -> None:
        """Adds a start line. If the current file is full, the line goes to a new file."""
        if self._is_full():
            self.close()
            try:
                put_aside(self.path, self._files - 1)
            except OSError as error:
                raise self._cannot(error) from None
        self._shorthand, self._before = Shorthand(start.tensors), {}
        self._write("start", start, to_json(_parts(start)), format=_FORMAT)
        self._header = start

    def _write(self, kind: str, record: Start | Decided, parts: Parts, **more: Any) -> None:
        fields = to_json({name: value for name, value in vars(record).items() if name not in _NOT_WRITTEN})
        line = {"kind": kind, **more, **fields, **self._shorthand.short(parts, self._before)}
        text = json.dumps(line, allow_nan=False, separators=(",", ":"))
        try:
            self._opened().write(text.encode() + b"\n")
        except OSError as error:
            raise self._cannot(error) from None
        self._before = parts

    def _is_full(self) -> bool:
        try:
            return self._opened().size >= self._file_bytes
        except OSError as error:
            raise self._cannot(error) from None

    def _opened(self) -> RecordFile:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_file():
                _mend(self.path)
            self._file = RecordFile(self.path)
        return self._file

    def _cannot(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"the decision log {self.path} cannot be written: {error.strerror or error}; choose a different file for "
            "decision_log"
        )


class LogFiles(NamedTuple):
    """The settings of a decision log, which are the arguments of `DecisionLog`."""

    path: Path
    file_bytes: int
    files: int


def log_files(path: str | Path | None, file_bytes: int, files: int, policy: object) -> LogFiles | None:
    """The files of the decision log that a user requested; None for no log.

    Args:
        path, file_bytes, files: the arguments of `DecisionLog`. If `path` is None, there is no log.
        policy: the policy whose decisions are logged.

    Raises:
        SpecError: if a limit is invalid, or if there is no policy. The message names the parameters of
            `hvdcomp.Compression`.
    """
    for name, value, least in (("decision_log_bytes", file_bytes, 1), ("decision_log_files", files, 2)):
        if not is_whole(value, least):
            raise SpecError(f"{name}={value!r} is not allowed; give a whole number of at least {least}")
    if path is not None and not isinstance(policy, Policy):
        schedule = "" if policy is None else f" ({policy} is a schedule, which makes no decisions)"
        raise SpecError(
            f"decision_log={str(path)!r} records the decisions of a policy, but this training run has no "
            f"policy{schedule}. Give a policy, such as hvdcomp.Accordion(low=0.1, high=0.01), or leave decision_log out"
        )
    return None if path is None else LogFiles(Path(path), file_bytes, files)


def read_decisions(path: Path) -> Iterator[Start | Decided]:
    """Yields the lines of a decision log. An incomplete last line is omitted.

    Args:
        path: either the path of the newest file, or the path of a numbered file. With the path of the newest file, all
            numbered files are read before it. With the path of a numbered file, only this file is read.

    Raises:
        DecisionLogError: if a line is invalid (the message names the file and the line), or if a file between two
            others is missing.
        RemovedPolicyError: if a start line names a removed policy.
        OSError: if a file cannot be read.
    """
    aside = put_aside_before(path)
    for number, following in itertools.pairwise(aside):
        if following != number + 1:
            raise DecisionLogError(
                f"{path}: this decision log consists of several files, and a file between {aside[number].name} and "
                f"{aside[following].name} is missing. Restore the missing file, or remove {aside[number].name} and all "
                "older files"
            )
    for file in (*aside.values(), path):
        yield from _read_file(file)


def _read_file(path: Path) -> Iterator[Start | Decided]:
    shorthand: Shorthand | None = None
    before: Parts = {}
    begun = False
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and not _is_whole(line):
                return
            try:
                data = _fields_of(line)
                if data["kind"] == "start":
                    shorthand, before, begun = _shorthand_of(data), {}, True
                elif not begun:
                    raise ValueError(
                        'the first line of a decision log must be a start line, which has "kind": "start", but this '
                        "file begins with a different line"
                    )
                if shorthand is not None:
                    before = shorthand.whole({name: data[name] for name in _PARTS if name in data}, before)
                    data |= before
                record = _record(path, number, data)
            except ValueError as error:
                raise DecisionLogError(f"{path}, line {number}: {error}") from None
            if isinstance(record, Start):
                _require_known(record)
            yield record


def _require_known(start: Start) -> None:
    """Raises RemovedPolicyError if a start line names a removed policy."""
    try:
        refuse_removed(start.policy)
    except SpecError as error:
        raise RemovedPolicyError(start, str(error)) from None


def to_json(value: Any) -> Any:
    """Converts a value to strict JSON data. Dataclasses become objects.

    Raises:
        TypeError: if the value contains anything but numbers, texts, None, mappings, sequences and dataclasses.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, float) and math.isfinite(value):  # the common case is first, because the tests below are slow
        return float(value)
    if isinstance(value, int | numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        if math.isfinite(number):
            return number
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_json(item) for name, item in as_fields(value).items()}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _key_text(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [to_json(item) for item in value]
    raise TypeError(f"a decision log cannot store {value!r}, which is of type {type(value).__name__}")


def with_numbers(value: Any) -> Any:
    """Replaces texts such as "NaN" in a logged state by the numbers that these texts represent.

    Only texts that are values of JSON objects are replaced, because a text in a list is the name of a tensor.
    """
    if isinstance(value, Mapping):
        return {
            key: NON_FINITE.get(item, item) if isinstance(item, str) else with_numbers(item)
            for key, item in value.items()
        }
    return [with_numbers(item) for item in value] if isinstance(value, list) else value


def _key_text(key: Any) -> str:
    return repr(int(key)) if isinstance(key, numbers.Integral) else repr(float(key))


def _check_writable(path: Path) -> None:
    """Raises OSError if the path cannot be written, and ConfigurationError if the file is not a decision log."""
    if not path.exists():
        folder = next(place for place in path.absolute().parents if place.exists())
        tempfile.TemporaryFile(dir=folder).close()
        return
    if not path.is_file():
        raise OSError("this path is not a file")
    with path.open("r+b") as file:
        first = file.read(max(map(len, _FIRST_BYTES)))
    if not any(prefix.startswith(first) or first.startswith(prefix) for prefix in _FIRST_BYTES):
        raise ConfigurationError(
            f"{path} exists already and is not a decision log, so hvdcomp does not overwrite it; choose a different "
            "file for decision_log"
        )


def _mend(path: Path) -> None:
    """Makes a file end with a complete line. Adds a missing newline, or drops an incomplete last line."""
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                if _is_whole(line):
                    file.seek(0, os.SEEK_END)
                    file.write(b"\n")
                else:
                    file.truncate(file.seek(-len(line), os.SEEK_END))
                return


def _is_whole(line: bytes) -> bool:
    """Whether a line without a newline is complete."""
    try:
        parse_json(line)
    except ValueError:
        return False
    return True


def _fields_of(line: bytes) -> dict[str, Any]:
    """The fields of a line. Raises ValueError if the line is not a line of a decision log."""
    data = parse_json(line, parse_constant=_no_constant)
    if not isinstance(data, dict) or data.get("kind") not in ("start", "decision"):
        raise ValueError('this is not a line of a decision log: its "kind" is neither "start" nor "decision"')
    return data


def _shorthand_of(start: dict[str, Any]) -> Shorthand | None:
    """The shorthand of the lines after a start line; None if an earlier version wrote these lines without a shorthand.
    Removes the format number from the start line.

    Raises:
        ValueError: if the format number belongs to a later version of hvdcomp.
    """
    form = start.pop("format", None)
    if form not in (None, _FORMAT):
        raise ValueError(
            f"this version of hvdcomp cannot read decision logs of format {form!r}; install hvdcomp "
            f"{start.get('hvdcomp')} or later"
        )
    return None if form is None else Shorthand(typed(Mapping[str, Any], start.get("tensors"), "tensors"))


def _record(file: Path, number: int, data: dict[str, Any]) -> Start | Decided:
    """The record of a line. Raises ValueError if its fields do not fit its kind."""
    kind = data.pop("kind")
    if isinstance(data.get("statistics"), dict):
        data["statistics"] = _renamed(data["statistics"], {written: name for name, written in _WRITTEN.items()})
    make: type[Start | Decided] = Start if kind == "start" else Decided
    return typed(make, {**data, "file": file, "line": number}, kind, texts=NON_FINITE)


def _parts(record: Start | Decided) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name in _PARTS}


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in values.items()}


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number that JSON allows")
