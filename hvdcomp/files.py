"""Writes files so that they stay complete even if the disk is full. Files are either replaced by renaming, or extended
by whole records. The module also parses JSON.

If several errors occur, the first error is raised.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import secrets
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PART = ".part"

DEEPEST_JSON = 100
"""Largest allowed depth of nested lists and objects in a JSON file. The files of hvdcomp are far less deep, and
recursive functions can process this depth."""

_ROOT = Path(__file__).parents[1]

try:
    VERSION = version("hvdcomp")
except PackageNotFoundError:  # hvdcomp runs from a checkout and is not installed
    VERSION = "0+checkout"
"""The version of hvdcomp. hvdcomp also writes it into files."""


def commit() -> str:
    """The commit of the sources, with a plus sign if files differ from this commit. If hvdcomp does not run from a
    checkout, the result is "hvdcomp" and its version."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()

    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        if (_ROOT / ".git").exists():  # otherwise git would find another checkout around this folder
            changed = git("status", "--porcelain", "--", "hvdcomp", "benchmarks", ":!benchmarks/measured")
            return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    return f"hvdcomp {VERSION}"


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Writes files. Afterwards, each file is either complete or unchanged.

    All files are first written under temporary names, and then renamed. If the disk is full, no file is replaced. The
    temporary names are unpredictable and must not exist yet. If a name could be guessed, another user who can write to
    the folder could create a link with this name, and the content would be written to the target of the link.

    Args:
        contents: the content of each file, by path. If a path is a link, the file that it points to is replaced. A pipe
            or device, such as /dev/stdout, is written to directly.

    Raises:
        OSError: the first error. No incomplete file is left.
    """
    places = {Path(os.path.realpath(path)): content for path, content in contents.items()}
    parts: dict[Path, Path] = {}
    try:
        for place, content in places.items():
            if place.exists() and not place.is_file():
                write_file(place, content)
            else:
                part = place.with_name(f"{place.name}.{secrets.token_hex(8)}{_PART}")
                with part.open("xb", buffering=0) as file:  # this mode fails if there is a link with this name
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
    """Writes a text file in UTF-8 with the function `replace_files`. Characters that UTF-8 cannot encode become
    question marks."""
    replace_files({path: text.encode("utf-8", errors="replace")})


def commits_in_words(commits: Iterable[str]) -> str:
    """Lists the commits of some measurements, each commit once, for a page of the manual."""
    return ", ".join(f"`{commit}`" for commit in sorted(set(commits)))


def provenance_last(page: str) -> str:
    """Moves the sentence that begins with "Made by" to the end of a page. Readers want the results first, and need the
    command and the commits only if they repeat the measurement.

    Example:
        >>> provenance_last("# Times\\n\\nMade by `make times`, at commit `abc`.\\n\\nAll are short.\\n")
        '# Times\\n\\nAll are short.\\n\\n## How this page was made\\n\\nMade by `make times`, at commit `abc`.\\n'
    """
    made = re.search(r"^Made by `.*?\.\n+", page, re.MULTILINE | re.DOTALL)
    if made is None:
        return page
    rest = page[: made.start()] + page[made.end() :]
    return f"{rest.rstrip()}\n\n## How this page was made\n\n{made[0].rstrip()}\n"


def with_block(text: str, begin: str, end: str, block: str) -> str | None:
    """Replaces the lines between two marks in a text with `block`. The result is None if the text does not contain both
    marks."""
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    return f"{before}{begin}\n{block}\n{end}{after}" if first and last else None


def csv_of(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The content of a CSV file with a heading and one or more rows.

    Numbers are written as numbers. A text that a spreadsheet would interpret as a formula gets a leading apostrophe.
    This is needed because names of runs and models may be any text.
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
    """Parses a JSON text. hvdcomp parses every JSON file with this function, because a file may come from someone who
    is not trusted.

    Args:
        text: the JSON text.
        options: options of `json.loads`.

    Raises:
        ValueError: if the text is not JSON, or is nested deeper than `DEEPEST_JSON`.
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
    """Writes a file directly, without a temporary name. Use this function in a folder that has a temporary name and is
    renamed when all its files are complete."""
    with path.open("wb", buffering=0) as file:
        _write_all(file, content)


def aside(path: Path, number: int) -> Path:
    """The path that a file gets when it is put aside under a number, such as "log.2.jsonl" for "log.jsonl"."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def put_aside_before(path: Path) -> dict[int, Path]:
    """The files that `put_aside` has renamed, by their numbers, the oldest first. The result is empty if the folder
    does not exist.

    Args:
        path: the path that the files had before they were renamed.
    """
    form = re.compile(re.escape(path.stem) + r"\.([1-9][0-9]*)" + re.escape(path.suffix))
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    numbers = [int(match[1]) for match in map(form.fullmatch, names) if match]
    return {number: aside(path, number) for number in sorted(numbers)}


def put_aside(path: Path, most: int) -> None:
    """Renames a file so that a new file can begin under its name. The new name contains the next number (see `aside`).

    Args:
        path: path of the file.
        most: number of renamed files to keep. Older renamed files are removed.

    Raises:
        OSError: if renaming fails.
    """
    path.rename(aside(path, max(put_aside_before(path), default=0) + 1))
    for old in list(put_aside_before(path).values())[:-most]:
        old.unlink()


def bring_back(path: Path, number: int) -> None:
    """Undoes `put_aside` for the files with numbers above `number`. The file with the number `number + 1` gets its old
    name back, and everything that was written later is lost.

    If this function was interrupted, call it again.

    Raises:
        OSError: if renaming fails.
    """
    for later, file in reversed(put_aside_before(path).items()):
        if later > number:
            file.replace(path)


class RecordFile:
    """A file to which records, such as lines, are appended without buffering. Each record is written completely or not
    at all."""

    def __init__(self, path: Path) -> None:
        """Opens the file, and creates it if it is missing.

        Raises:
            OSError: if the file cannot be opened.
        """
        self._file = path.open("ab", buffering=0)

    @property
    def size(self) -> int:
        """The size of the file, in bytes.

        Raises:
            OSError: if the size is not available.
        """
        return os.fstat(self._file.fileno()).st_size

    def write(self, record: bytes) -> None:
        """Adds a record at the end of the file.

        Raises:
            OSError: if the record cannot be written. A partial record is removed.
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
