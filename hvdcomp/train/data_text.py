"""Text for the language model: WikiText-2 or the Penn Treebank from a folder, or Python's standard library.

A text becomes token ids by a vocabulary taken from its training part; what that part lacks is the token
`<unk>`. The ids are cut into sequences of equal length, each predicting its ids one further. Every sequence
is a sample of its own, so that an epoch can be shuffled and dealt to the ranks as images are.

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

from hvdcomp.train.dataset import DataSet
from hvdcomp.train.options import SetupError

_UNKNOWN = "<unk>"
_END_OF_LINE = "<eos>"
_MOST_WORDS = 10_000  # of the standard library; the published texts come with a limited vocabulary

# Per data set: its title, where its archive puts the files, the training file and the test file.
_TEXTS = {
    "wikitext2": ("WikiText-2", "wikitext-2", "wiki.train.tokens", "wiki.test.tokens"),
    "ptb": ("the Penn Treebank", "simple-examples/data", "ptb.train.txt", "ptb.test.txt"),
}
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def load(folder: Path | None, name: str, length: int | None) -> DataSet:
    """Read WikiText-2 or the Penn Treebank: words separated by spaces, one sentence or paragraph a line.

    Args:
        folder: the value of --data-dir: the folder of the files, or that in which their archive was unpacked.
        name: "wikitext2" or "ptb".
        length: tokens of a sequence.

    Raises:
        SetupError: a file is missing, empty or not UTF-8 text, or a text is shorter than one sequence.
    """
    assert folder is not None
    title, subfolder, *files = _TEXTS[name]
    places = [place for place in (folder / subfolder, folder) if any((place / file).is_file() for file in files)]
    if not places:
        raise SetupError(
            f"--data-dir {folder} holds no {title}: expected the files {' and '.join(files)} in it, "
            f"or in its folder {subfolder}"
        )
    paths = [places[0] / file for file in files]
    train, test = (_read_words(path, title, files) for path in paths)
    return _text_data(train, test, length, limit=None, sources=(str(paths[0]), str(paths[1])))


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


def standard_library(size: int, unit: str, length: int | None) -> DataSet:
    """The source of the running Python's standard library: real text that is there without a download.

    Files come in the order of their names until `size` characters are read; the last tenth of each file is for
    testing. The text, and so any result, belongs to the version of Python.

    Args:
        size: characters to read, training and test together.
        unit: "char" or "word": what a token is. A word is a name, a number, another character, or a line's end.
        length: tokens of a sequence.

    Raises:
        SetupError: this Python comes without that much source.
    """
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
        raise SetupError(f"--text-size {size}: the standard library in {root} has {total} characters; take no more")
    split = list if unit == "char" else re.compile(r"\w+|\n|[^\w\s]").findall
    train, test = (split("".join(part)) for part in parts)
    return _text_data(train, test, length, _MOST_WORDS, (f"--text-size {size}",) * 2)


def _source_files(root: Path) -> list[Path]:
    files = (path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _text_data(
    train: list[str], test: list[str], length: int | None, limit: int | None, sources: tuple[str, str]
) -> DataSet:
    assert length is not None
    ids = {token: number for number, token in enumerate(_vocabulary(train, limit))}
    train_x, train_y = _sequences(train, ids, length, sources[0])
    test_x, test_y = _sequences(test, ids, length, sources[1])
    return DataSet(train_x, train_y, test_x, test_y, classes=len(ids))


def _vocabulary(tokens: Iterable[str], limit: int | None) -> list[str]:
    """`<unk>`, then the tokens from the most to the least frequent, and else by their characters."""
    counts = Counter(tokens)
    del counts[_UNKNOWN]
    ordered = sorted(counts, key=lambda token: (-counts[token], token))
    return [_UNKNOWN, *ordered[: None if limit is None else limit - 1]]


def _sequences(tokens: list[str], ids: dict[str, int], length: int, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, (N, length) each; a last piece that is shorter is left out."""
    count = (len(tokens) - 1) // length
    if count < 1:
        raise SetupError(
            f"{source}: a text of {len(tokens)} tokens has no sequence of --sequence-length {length}; shorten it"
        )
    flat = np.array([ids.get(token, 0) for token in tokens[: count * length + 1]], dtype=np.int64)
    return flat[:-1].reshape(count, length), flat[1:].reshape(count, length)
