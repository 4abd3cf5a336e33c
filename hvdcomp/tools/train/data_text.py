"""Text for language models: WikiText-2 or the Penn Treebank from a folder, or the source of Python's standard library.

The vocabulary comes from the training part. It turns a text into token ids; unknown tokens become `<unk>`. The ids are
cut into sequences of equal length. The targets of a sequence are the ids shifted by one position. Every sequence is a
sample, so sequences are shuffled and distributed to the ranks like images.

References: Merity et al., Pointer Sentinel Mixture Models, 2017 (WikiText-2); Mikolov et al., Recurrent
neural network based language model, 2010 (the Penn Treebank as prepared there).
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from hvdcomp.tools.train.dataset import DataSet, Part
from hvdcomp.tools.train.options import SetupError

_UNKNOWN = "<unk>"
_END_OF_LINE = "<eos>"
_MOST_WORDS = 10_000  # the limit for the standard library; the published texts already have a limited vocabulary

# For each data set: title, the archive's folder, and the files for training, testing and validation.
_TEXTS = {
    "wikitext2": ("WikiText-2", "wikitext-2", "wiki.train.tokens", "wiki.test.tokens", "wiki.valid.tokens"),
    "ptb": ("the Penn Treebank", "simple-examples/data", "ptb.train.txt", "ptb.test.txt", "ptb.valid.txt"),
}
# The files of the standard library are divided into groups of this number of files. In each group, one file is for
# validation, and one file is for testing.
_FILES_PER_PART = 16
_HELD_OUT_BYTES = 65_536  # the largest size of each part, so that evaluations are short
_HELD_OUT_BYTES_OF_A_FILE = 8_192
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def load(folder: Path | None, name: str, length: int | None) -> DataSet:
    """Reads WikiText-2 or the Penn Treebank. Words are separated by spaces, and each line is a sentence or a paragraph.

    If the file for validation is missing, there is no validation part.

    Args:
        folder: the value of --data-dir: the folder of the files, or the folder of their unpacked archive.
        name: name of the data set: "wikitext2" or "ptb".
        length: the number of tokens of a sequence.

    Raises:
        SetupError: if a file is missing, empty or not UTF-8 text, or if a text is shorter than a sequence.
    """
    assert folder is not None
    title, subfolder, *files, validation = _TEXTS[name]
    places = [place for place in (folder / subfolder, folder) if any((place / file).is_file() for file in files)]
    if not places:
        raise SetupError(
            f"--data-dir {folder} contains no {title}; it must contain the files {' and '.join(files)}, or have them "
            f"in its folder {subfolder}"
        )
    paths = [places[0] / file for file in files]
    if (places[0] / validation).is_file():
        paths.append(places[0] / validation)
    parts = [_read_words(path, title, files) for path in paths]
    return _text_data(parts, length, limit=None, sources=[str(path) for path in paths])


def _read_words(path: Path, title: str, files: list[str]) -> list[str]:
    if not path.is_file():
        raise SetupError(f"{path} is missing; {title} is read from {' and '.join(files)}")
    try:
        with path.open(encoding="utf-8") as file:
            words = [word for line in file for word in (*line.split(), _END_OF_LINE)]
    except UnicodeDecodeError as error:
        raise SetupError(f"{path} is damaged: expected UTF-8 text, words separated by spaces ({error})") from None
    if all(word == _END_OF_LINE for word in words):
        raise SetupError(f"{path} is empty: expected text, words separated by spaces")
    return words


def standard_library(size: int | None, unit: str, length: int | None) -> DataSet:
    """The source code of the running Python's standard library, which is real text that does not need a download.

    Files are read in the order of their names, up to `size` characters in total. The last tenth of each file is for
    testing. The text, and therefore every result, depends on the version of Python.

    Args:
        size: the number of characters to read, for training and test together.
        unit: whether a token is a "char" or a "word". A word is a name, a number, any other character, or the end of a
            line.
        length: the number of tokens of a sequence.

    Raises:
        SetupError: if the source of this Python's standard library is shorter.
    """
    assert size is not None
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[str], list[str]] = ([], [])
    total = 0
    for path in _source_files(root):
        text = path.read_text(encoding="utf-8", errors="replace")[: size - total]
        cut = len(text) * 9 // 10
        parts[0].append(text[:cut])
        parts[1].append(text[cut:])
        total += len(text)
        if total == size:
            break
    if total < size:
        raise SetupError(
            f"--text-size {size} is too large: the standard library in {root} has {total} characters; give {total} or "
            "fewer"
        )
    split = list if unit == "char" else re.compile(r"\w+|\n|[^\w\s]").findall
    return _text_data([split("".join(part)) for part in parts], length, _MOST_WORDS, [f"--text-size {size}"] * 2)


def bytes_of_standard_library(size: int | None, length: int | None) -> DataSet:
    """The bytes of the source code of the running Python's standard library, with validation and test parts.

    Files are used in the order of their names. In each group of 16 files, one file is for validation, and one file is
    for testing. Each of these two parts has 64 KiB. At most 8 KiB are used from each file in these parts, from the
    middle of the file, so that no file dominates. No file is in two parts. The text, and therefore every result,
    depends on the version of Python.

    Args:
        size: the number of bytes to train on.
        length: the number of bytes of a sequence.

    Raises:
        SetupError: if the source of this Python's standard library is shorter.
    """
    assert size is not None
    assert length is not None
    root = Path(sysconfig.get_path("stdlib"))
    train, validation, test = bytearray(), bytearray(), bytearray()
    for number, path in enumerate(_source_files(root)):
        content = path.read_bytes()
        held_out = {0: validation, 1: test}.get(number % _FILES_PER_PART)
        if held_out is None:
            train += content
        else:
            start = max(0, len(content) - _HELD_OUT_BYTES_OF_A_FILE) // 2
            held_out += content[start : start + _HELD_OUT_BYTES_OF_A_FILE]
        if len(train) >= size and min(len(validation), len(test)) >= _HELD_OUT_BYTES:
            break
    if len(train) < size:
        raise SetupError(
            f"--text-size {size} is too large: the standard library in {root} has {len(train)} bytes; give "
            f"{len(train)} or fewer"
        )
    source = f"--text-size {size}"
    ends = (size, _HELD_OUT_BYTES, _HELD_OUT_BYTES)
    (x, y), (test_x, test_y), validation_part = (
        _cut(np.frombuffer(part[:end], np.uint8).astype(np.int64), length, source)
        for part, end in zip((train, test, validation), ends, strict=True)
    )
    return DataSet(x, y, test_x, test_y, classes=256, validation=validation_part)


def _source_files(root: Path) -> list[Path]:
    files = (path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _text_data(parts: list[list[str]], length: int | None, limit: int | None, sources: list[str]) -> DataSet:
    """Makes a data set from the tokens for training, for testing and, if there is a third part, for validation."""
    assert length is not None
    ids = {token: number for number, token in enumerate(_vocabulary(parts[0], limit))}
    train, test, *validation = (
        _cut(np.array([ids.get(token, 0) for token in part], dtype=np.int64), length, source)
        for part, source in zip(parts, sources, strict=True)
    )
    return DataSet(*train, *test, classes=len(ids), validation=validation[0] if validation else None)


def _vocabulary(tokens: Iterable[str], limit: int | None) -> list[str]:
    """The vocabulary: `<unk>`, followed by the tokens in order of decreasing frequency. Tokens with equal frequency are
    sorted alphabetically."""
    counts = Counter(tokens)
    del counts[_UNKNOWN]
    ordered = sorted(counts, key=lambda token: (-counts[token], token))
    return [_UNKNOWN, *ordered[: None if limit is None else limit - 1]]


def _cut(tokens: np.ndarray, length: int, source: str) -> Part:
    """Cuts tokens into inputs and targets, (N, length) each. An incomplete last sequence is left out."""
    count = (len(tokens) - 1) // length
    if count < 1:
        raise SetupError(
            f"{source}: a text of {len(tokens)} tokens is too short for --sequence-length {length}; give a shorter "
            "--sequence-length"
        )
    flat = tokens[: count * length + 1]
    return Part(flat[:-1].reshape(count, length), flat[1:].reshape(count, length))
