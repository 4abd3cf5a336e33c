"""Files that are there whole or are what they were before: on real full disks, as far as one process can have one."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdcomp.files import DEEPEST_JSON, RecordFile, csv_of, parse_json, provenance_last, replace_files, replace_text


def test_files_are_replaced_together(tmp_path: Path) -> None:
    replace_text(tmp_path / "a", "old")
    replace_files({tmp_path / "a": b"new", tmp_path / "b": b"other"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"new", "b": b"other"}


def test_a_link_is_followed_and_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    replace_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    with pytest.raises(OSError, match="No space left"):
        replace_text(Path("/dev/full"), "text")
    assert not Path("/dev/full").is_file()


def test_what_others_have_put_beside_a_file_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what a link leads to that stands where the file is written first, if its name was guessed."""
    (tmp_path / "theirs").write_text("precious")
    for name in ("summary.json.part", "summary.json.guessed.part"):
        (tmp_path / name).symlink_to("theirs")
    replace_text(tmp_path / "summary.json", "new")
    assert (tmp_path / "summary.json").read_text() == "new"
    monkeypatch.setattr("hvdcomp.files.secrets.token_hex", lambda _: "guessed")
    with pytest.raises(FileExistsError, match=r"summary\.json\.guessed\.part"):
        replace_text(tmp_path / "summary.json", "newer")
    assert (tmp_path / "theirs").read_text() == "precious"
    names = ["summary.json", "summary.json.guessed.part", "summary.json.part", "theirs"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "summary.json").stat().st_mode == (tmp_path / "theirs").stat().st_mode


_FULL = """
import os, resource, sys
from pathlib import Path
from hvdcomp.files import RecordFile, replace_files
folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    replace_files({folder / "small": b"new", folder / "large": bytes(5000)})
except OSError as error:
    print(error.strerror)
lines = RecordFile(folder / "lines")
try:
    for _ in range(100):
        lines.write(b"fifteen letters\\n")
except OSError as error:
    print(error.strerror)
"""


def test_a_full_disk_replaces_nothing_and_cuts_no_line(tmp_path: Path) -> None:
    replace_files({tmp_path / "small": b"old", tmp_path / "large": b"old"})
    done = subprocess.run([sys.executable, "-c", _FULL, tmp_path], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("File too large\nFile too large\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "lines", "small"]
    assert {(tmp_path / name).read_bytes() for name in ("small", "large")} == {b"old"}
    assert (tmp_path / "lines").read_bytes() == b"fifteen letters\n" * 62


def test_records_are_added_at_once(tmp_path: Path) -> None:
    for text in (b"one\n", b"two\n"):
        file = RecordFile(tmp_path / "file")
        file.write(text)
        assert (tmp_path / "file").read_bytes().endswith(text)
        file.close()
    assert os.path.getsize(tmp_path / "file") == 8


def test_a_text_that_looks_like_a_formula_stays_text_in_a_table() -> None:
    texts = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "a=1", "topk:ratio=0.01"]
    rows = [{"name": text, "number": -1.5} for text in texts]
    made = list(csv.DictReader(io.StringIO(csv_of(rows).decode(), newline="")))
    assert [row["name"] for row in made] == [*(f"'{text}" for text in texts[:6]), *texts[6:]]
    assert {row["number"] for row in made} == {"-1.5"}


def test_a_page_ends_with_the_command_that_made_it() -> None:
    made = "Made by `make times --x 0.5`,\nat commit `abc`.\n"
    page = provenance_last(f"# Times\n\n{made}\nAll are short.\n\n| a |\n|---|\n")
    assert page == f"# Times\n\nAll are short.\n\n| a |\n|---|\n\n## How this page was made\n\n{made}"
    assert provenance_last("# Nothing was measured.\n") == "# Nothing was measured.\n"


@pytest.mark.parametrize("depth", [DEEPEST_JSON + 1, 300, 900, 100_000])
@pytest.mark.parametrize("brackets", ["[]", '{"a": }'])
def test_json_nested_too_deep_is_refused_as_what_is_no_json(depth: int, brackets: str) -> None:
    """However deep: what a parser still takes, those that look through it afterwards do not."""
    opened, closed = brackets[:-1], brackets[-1]
    with pytest.raises(ValueError, match=f"lists and objects are nested more than {DEEPEST_JSON} deep"):
        parse_json(opened * (depth - 1) + "[]" + closed * (depth - 1))
    with pytest.raises(ValueError, match=r"nested more than|Expecting"):
        parse_json(b"[" * depth)


def test_json_nested_as_deep_as_allowed_is_read() -> None:
    found, depth = parse_json("[" * DEEPEST_JSON + "]" * DEEPEST_JSON), 1
    while found:
        (found,), depth = found, depth + 1
    assert depth == DEEPEST_JSON
    assert parse_json('{"a": ' * DEEPEST_JSON + "1" + "}" * DEEPEST_JSON)
    assert parse_json("1") == 1
