"""Files that stay whole on a disk that fills up: replaced by renaming, or added to by whole lines; and what a file of
JSON holds.

What goes wrong is raised as it first was: closing a file raises nothing after that.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PART = ".part"

DEEPEST_JSON = 100
"""How deep lists and objects may be nested in a file of JSON: far deeper than hvdcomp nests them, and not so deep that
what looks through them would run out of stack."""

try:
    VERSION = version("hvdcomp")
except PackageNotFoundError:  # a checkout on the path that nobody has installed
    VERSION = "0+checkout"
"""Of hvdcomp, as the files say that it writes."""


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Writes files, each of which is afterwards there whole, or is what it was before.

    All are written under other names before the first is renamed, so that on a full disk none is replaced. Nobody can
    know these names before, and none is written to that is there already: in a folder that others may write to, a link
    of theirs would lead elsewhere.

    Args:
        contents: by place. A link is followed; what is no file, such as a pipe or /dev/stdout, is written to.

    Raises:
        OSError: what went wrong first. Nothing that was half written is left.
    """
    places = {Path(os.path.realpath(path)): content for path, content in contents.items()}
    parts: dict[Path, Path] = {}
    try:
        for place, content in places.items():
            if place.exists() and not place.is_file():
                write_file(place, content)
            else:
                part = place.with_name(f"{place.name}.{secrets.token_hex(8)}{_PART}")
                with part.open("xb", buffering=0) as file:  # which follows no link
                    parts[place] = part
                    _write_all(file, content)
        for place, part in parts.items():
            part.replace(place)
    except BaseException:
        for part in parts.values():
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """The same for one file of text, in UTF-8; what UTF-8 cannot hold becomes a question mark."""
    replace_files({path: text.encode("utf-8", errors="replace")})


def csv_of(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A CSV file of some rows, at least one, with a heading.

    Numbers stay numbers. A text that a spreadsheet would compute, as it begins like a formula, gets an apostrophe: the
    names of runs and models are whatever somebody called them.
    """
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"'{cell}" if _is_formula(cell) else cell for key, cell in row.items()})
    return stream.getvalue().encode("utf-8", errors="replace")


def _is_formula(cell: Any) -> bool:
    return isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r"))


def parse_json(text: str | bytes, **options: Any) -> Any:
    """The content of a text of JSON. Every file of JSON is read through this: it may come from anywhere.

    Args:
        options: of `json.loads`.

    Raises:
        ValueError: if it is no JSON, or lists and objects are nested more than `DEEPEST_JSON` deep.
    """
    with contextlib.suppress(RecursionError):
        content = json.loads(text, **options)
        inside = [content]
        for _ in range(DEEPEST_JSON + 1):
            inside = [item for item in inside if isinstance(item, list | dict)]
            if not inside:
                return content
            inside = [item for outer in inside for item in (outer.values() if isinstance(outer, dict) else outer)]
    raise ValueError(f"lists and objects are nested more than {DEEPEST_JSON} deep")


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Writes a file where it is to stay; for folders that are renamed as a whole."""
    with path.open("wb", buffering=0) as file:
        _write_all(file, content)


def aside(path: Path, number: int) -> Path:
    """Where a file is put aside under a number: "log.2.jsonl" of "log.jsonl"."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def put_aside_before(path: Path) -> dict[int, Path]:
    """The files that `put_aside` left of one, by number, the oldest first; none if its folder is not there."""
    form = re.compile(re.escape(path.stem) + r"\.([1-9][0-9]*)" + re.escape(path.suffix))
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    numbers = [int(match[1]) for match in map(form.fullmatch, names) if match]
    return {number: aside(path, number) for number in sorted(numbers)}


def put_aside(path: Path, most: int) -> None:
    """Renames a file, to make way for a new one, to the number after those that are there.

    Args:
        most: files to keep under a number. Of more, the oldest are removed.

    Raises:
        OSError: if that cannot be done.
    """
    path.rename(aside(path, max(put_aside_before(path), default=0) + 1))
    for old in list(put_aside_before(path).values())[:-most]:
        old.unlink()


def bring_back(path: Path, number: int) -> None:
    """Undoes what `put_aside` did after the file of a number was put aside; what was written since is lost.

    It may be killed, and called again.

    Raises:
        OSError: if that cannot be done.
    """
    for later, file in reversed(put_aside_before(path).items()):
        if later > number:
            file.replace(path)


class RecordFile:
    """A file to which records, such as lines, are added: at once, and each of them whole or not at all."""

    def __init__(self, path: Path) -> None:
        """Opens the file, and makes it if it is not there.

        Raises:
            OSError: if that cannot be done.
        """
        self._file = path.open("ab", buffering=0)

    @property
    def size(self) -> int:
        """Bytes of the file.

        Raises:
            OSError: if that cannot be told.
        """
        return os.fstat(self._file.fileno()).st_size

    def write(self, record: bytes) -> None:
        """Adds a record.

        Raises:
            OSError: if it cannot be written. What was written of it is taken back.
        """
        before = self.size
        try:
            _write_all(self._file, record)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), before)
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _write_all(file: io.FileIO, content: bytes | memoryview) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]
