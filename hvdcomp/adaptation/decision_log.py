"""The decision log: each decision of a policy with the statistics it was made from, so that it can be made again.

One JSON object a line: a start line when a run begins or is resumed, and a decision line for each moment of decision.
The JSON is strict; numbers that it cannot hold are the texts "NaN", "Infinity" and "-Infinity", and keys that are
numbers are their repr.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hvdcomp.errors import ConfigurationError
from hvdcomp.files import RecordFile
from hvdcomp.policies.request import Statistics
from hvdcomp.specs.typed import as_fields, typed

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON cannot hold, by the text that stands for them."""

_WRITTEN = {"candidates": "survey"}
"""Fields of `Statistics` that a log has under another name, that of the first versions."""

_FIRST_BYTES = b'{"kind": "start", '


class DecisionLogError(ValueError):
    """A file that is not a decision log, or is a damaged one."""


@dataclass(frozen=True)
class Start:
    """A start line.

    Attributes:
        line: number in the file, from 1.
        step, epoch: that ended before; 0 unless the run was resumed.
        policy, compressor: their spec strings.
        tensors: shapes of the compressed tensors, by name.
        steps_per_epoch: None if epochs are not counted.
        ranks: their number.
        hvdcomp: version that wrote the line.
        state, decision: those in force, as JSON.
    """

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


@dataclass(frozen=True)
class Decided:
    """A decision line.

    Attributes:
        line: number in the file, from 1.
        step, epoch: that ended when the statistics were taken.
        from_step: the first step, counted from 0, that obeys the decision.
        statistics: from which it was made.
        state, decision: the new ones, as JSON.
    """

    line: int
    step: int
    epoch: int | None
    from_step: int
    statistics: Statistics
    state: Mapping[str, Any]
    decision: Mapping[str, Any]


class DecisionLog:
    """Writes a decision log, on rank 0. A log that is there already is continued, after a last line cut short.

    The file is opened with the first line, and each line is written at once, so that a run that is killed leaves all it
    did. On a full disk the file ends with the last whole line.
    """

    def __init__(self, path: Path) -> None:
        """Checks that the file can be written, and leaves no trace of that.

        Raises:
            ConfigurationError: if it cannot, or if it is another kind of file.
        """
        self.path = Path(path)
        self._file: RecordFile | None = None
        try:
            _check_writable(self.path)
        except OSError as error:
            raise self._cannot(error) from None

    def start(self, **fields: Any) -> None:
        """Adds a start line with the fields of `Start`; the line and the version are filled in.

        Raises:
            ConfigurationError: if the file cannot be written any more.
        """
        self._write({"kind": "start", **_fields(Start(line=0, hvdcomp=version("hvdcomp"), **fields))})

    def decision(self, **fields: Any) -> None:
        """Adds a decision line with the fields of `Decided`; the line is filled in.

        Raises:
            ConfigurationError: if the file cannot be written any more.
        """
        made = Decided(line=0, **fields)
        statistics = _renamed(made.statistics.known(), _WRITTEN)
        self._write({"kind": "decision", **_fields(made), "statistics": statistics})

    def close(self) -> None:
        """Closes the file. A line that follows opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(to_json(record), allow_nan=False).encode() + b"\n"
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if self.path.is_file():
                    _mend(self.path)
                self._file = RecordFile(self.path)
            self._file.write(line)
        except OSError as error:
            raise self._cannot(error) from None

    def _cannot(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"the decision log {self.path} cannot be written: {error.strerror or error}; name another file"
        )


def read_decisions(path: Path) -> Iterator[Start | Decided]:
    """The lines of a decision log, one by one. A last line that was cut short is left out.

    Raises:
        DecisionLogError: at a line that is not as this module writes them; names the file and the line.
        OSError: if the file cannot be read.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and not _is_whole(line):
                return
            try:
                yield _record(number, line)
            except ValueError as error:
                raise DecisionLogError(f"{path}, line {number}: {error}") from None


def to_json(value: Any) -> Any:
    """A value as strict JSON can hold it, dataclasses as objects.

    Raises:
        TypeError: for anything but numbers, texts, None, and mappings, sequences and dataclasses of these.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        if math.isfinite(number):
            return number
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_json(item) for name, item in as_fields(value).items()}
    if isinstance(value, Mapping):
        return {_key_text(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [to_json(item) for item in value]
    raise TypeError(f"a decision log cannot hold {value!r}, a {type(value).__name__}")


def with_numbers(value: Any) -> Any:
    """A logged state, in which texts stand for numbers that are not finite, with these numbers.

    Only the values of objects are looked at: a text in a list is a tensor's name.
    """
    if isinstance(value, Mapping):
        return {
            key: NON_FINITE.get(item, item) if isinstance(item, str) else with_numbers(item)
            for key, item in value.items()
        }
    return [with_numbers(item) for item in value] if isinstance(value, list) else value


def _key_text(key: Any) -> str:
    if isinstance(key, str):
        return key
    return repr(int(key)) if isinstance(key, numbers.Integral) else repr(float(key))


def _check_writable(path: Path) -> None:
    """Raises OSError if a decision log cannot be written there, ConfigurationError if another file is there."""
    if not path.exists():
        folder = next(place for place in path.absolute().parents if place.exists())
        tempfile.TemporaryFile(dir=folder).close()
        return
    if not path.is_file():
        raise OSError("it is not a file")
    with path.open("r+b") as file:
        first = file.read(len(_FIRST_BYTES))
    if not _FIRST_BYTES.startswith(first):
        raise ConfigurationError(f"{path} is there already and is not a decision log; name another file")


def _mend(path: Path) -> None:
    """Makes a file end with a whole line: completes its end, or drops a last line that was cut short."""
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
    """Whether a line without its end is all there."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _record(number: int, line: bytes) -> Start | Decided:
    """Raises ValueError if the line is not one of a decision log."""
    data = json.loads(line, parse_constant=_no_constant)
    kinds: dict[Any, type[Start | Decided]] = {"start": Start, "decision": Decided}
    kind = data.pop("kind", None) if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError('this is not a line of a decision log, whose "kind" is "start" or "decision"')
    if isinstance(data.get("statistics"), dict):
        data["statistics"] = _renamed(data["statistics"], {written: name for name, written in _WRITTEN.items()})
    return typed(kinds[kind], {**data, "line": number}, kind, texts=NON_FINITE)


def _fields(record: Start | Decided) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name != "line"}


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in values.items()}


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
