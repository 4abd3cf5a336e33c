"""Reads JSON objects field by field, and raises errors that name the file, the field and the allowed values."""

from __future__ import annotations

import math
from typing import Any

from hvdcomp.specs.typed import shortened, typed

_REQUIRED: Any = object()


class CalibrationError(ValueError):
    """The calibration does not exist, cannot be read, or has an invalid field."""


class Fields:
    """Reads one JSON object of a calibration file. Every method raises CalibrationError if a value is missing or wrong.

    Args:
        data: the parsed JSON object.
        file: name of the file, for error messages.
        path: path of the object in the file, such as models.resnet50; empty for the whole file.
    """

    def __init__(self, data: Any, file: str, path: str) -> None:
        self._file = file
        self._path = path
        self._read: set[str] = set()
        if not isinstance(data, dict):
            raise self.error(f"must be a JSON object, not {shortened(data)}")
        self._data: dict[str, Any] = data

    def error(self, problem: str, name: str | None = None) -> CalibrationError:
        """Creates an error about this object, or about its field `name`. The message consists of the file, the path of
        the field, and `problem`."""
        place = self._place(name)
        return CalibrationError(f"{self._file}: {place} {problem}" if place else f"{self._file} {problem}")

    def _place(self, name: str | None) -> str:
        return ".".join(part for part in (self._path, name) if part)

    def names(self) -> list[str]:
        """The names of all fields."""
        return list(self._data)

    def has(self, name: str) -> bool:
        """Whether the field `name` exists and is not null."""
        self._read.add(name)
        return self._data.get(name) is not None

    def finish(self) -> None:
        """Raises CalibrationError if a field was never read. Its name is then probably misspelled."""
        unknown = [name for name in self._data if name not in self._read]
        if unknown:
            known = ", ".join(sorted(self._read))
            raise self.error(f"is not a known field; the known fields are: {known}", unknown[0])

    def text(self, name: str, default: str = _REQUIRED) -> str:
        """Reads a text."""
        return self._typed(str, name, default)

    def truth(self, name: str, default: bool) -> bool:
        """Reads true or false."""
        return self._typed(bool, name, default)

    def number(
        self, name: str, default: float = _REQUIRED, *, lowest: float | None = None, above: float | None = None
    ) -> float:
        """Reads a finite number, at least `lowest` or more than `above`."""
        return self._number(self._get(name, default), name, lowest, above)

    def share(self, name: str, default: float) -> float:
        """Reads a number from 0 to 1."""
        value = self.number(name, default, lowest=0)
        if value > 1:
            raise self.error(f"is {value}, and must be at most 1", name)
        return value

    def whole(self, name: str, *, lowest: int) -> int:
        """Reads a whole number, at least `lowest`."""
        value = self.number(name, lowest=lowest)
        if value != int(value):
            raise self.error(f"must be a whole number, not {shortened(value)}", name)
        return int(value)

    def pairs(
        self, name: str, noun: str, *, second_rises: bool = False, lowest_second: float = 0
    ) -> tuple[tuple[float, float], ...]:
        """Reads a list of pairs of numbers. The first numbers must be positive and in ascending order. The result is
        empty if the field is missing.

        Args:
            name: name of the field.
            noun: words for the two numbers of a pair, such as "bytes, seconds", for error messages.
            second_rises: whether each second number must be at least the second number of the previous pair.
            lowest_second: smallest allowed second number.
        """
        rows = self._list(name)
        pairs: list[tuple[float, float]] = []
        for row in rows:
            if not isinstance(row, list) or len(row) != 2:
                raise self.error(f"must contain pairs ({noun}), and {shortened(row)} is not a pair", name)
            first, second = self._number(row[0], name, None, 0), self._number(row[1], name, lowest_second, None)
            if pairs and (first <= pairs[-1][0] or (second_rises and second < pairs[-1][1])):
                raise self.error(
                    f"must contain pairs ({noun}) in ascending order, but {row} follows {list(pairs[-1])}", name
                )
            pairs.append((first, second))
        return tuple(pairs)

    def shape(self, name: str) -> tuple[int, ...]:
        """Reads the shape of a tensor: a list of whole numbers, each 0 or more."""
        sizes = self._typed(tuple[int, ...], name)
        if any(size < 0 for size in sizes):
            raise self.error(f"must be a list of whole numbers, each 0 or more, not {shortened(sizes)}", name)
        return sizes

    def texts(self) -> dict[str, str]:
        """The values of all fields, by name. All values must be texts."""
        return {name: self.text(name) for name in self._data}

    def list_of_texts(self, name: str) -> list[str]:
        """Reads a list of texts. The result is empty if the field is missing."""
        return list(self._typed(tuple[str, ...], name, []))

    def section(self, name: str, optional: bool = False) -> Fields:
        """Reads an object inside this object. If the object is missing and `optional` is True, the result has no
        fields."""
        return Fields(self._get(name, {} if optional else _REQUIRED), self._file, self._place(name))

    def sections(self, name: str) -> list[Fields]:
        """Reads a list of objects inside this object."""
        path = self._place(name)
        return [Fields(value, self._file, f"{path}[{place}]") for place, value in enumerate(self._list(name))]

    def _get(self, name: str, default: Any) -> Any:
        self._read.add(name)
        if self._data.get(name) is None:
            if default is _REQUIRED:
                raise self.error("is missing", name)
            return default
        return self._data[name]

    def _list(self, name: str) -> tuple[Any, ...]:
        return self._typed(tuple[Any, ...], name, [])

    def _typed(self, kind: Any, name: str, default: Any = _REQUIRED) -> Any:
        value = self._get(name, default)
        try:
            return typed(kind, value, self._place(name))
        except ValueError as error:
            raise CalibrationError(f"{self._file}: {error}") from None

    def _number(self, value: Any, name: str, lowest: float | None, above: float | None) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"must be a finite number, not {shortened(value)}", name)
        if lowest is not None and value < lowest:
            raise self.error(f"is {value}, and must be at least {lowest:g}", name)
        if above is not None and value <= above:
            raise self.error(f"is {value}, and must be more than {above:g}", name)
        return value
