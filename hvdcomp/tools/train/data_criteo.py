"""Reads Criteo's click data from a folder with the file `train.txt`, in the format of Kaggle's Display Advertising
Challenge.

A line has 40 fields, which are separated by tabs: the label (0 or 1), 13 integers, and 26 categories as hexadecimal
numbers of 32 bits. All fields except the label may be missing. An integer n becomes log(1 + n), or 0 if it is negative
or missing. A category becomes the row 1 + category mod (rows - 1) of its table. A missing category becomes row 0.

References: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019,
section 5.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hvdcomp.tools.train.dataset import DataSet, Part
from hvdcomp.tools.train.options import SetupError

_FILE = "train.txt"
_FIELDS = [rb"[01]", *[rb"(?:-?[0-9]{1,18})?"] * 13, *[rb"(?:[0-9a-f]{1,8})?"] * 26]
_LINE = re.compile(rb"\t".join(_FIELDS))
_EXPECTED = "a label of 0 or 1, then 13 integers and 26 hexadecimal numbers, each after a tab; a number may be missing"
_CHUNK = 2**14  # number of lines that are parsed at a time
_HELD_BACK = 7  # One seventh of the lines is held out, because the file covers seven days.


def load(folder: Path | None, rows: int, samples: int | None) -> DataSet:
    """Reads the file, whose lines are in chronological order. The last seventh is held out, and its lines are used
    alternately for validation and for testing.

    Args:
        folder: the folder with the data, from the option --data-dir.
        rows: number of rows of each embedding table.
        samples: the number of lines to train on; None for all. Besides these lines, the function reads only the
            held-out lines, one for every six lines to train on.

    Returns:
        Samples (N, 13 + 26), float32, with the integers before the rows; and labels 0 or 1.

    Raises:
        SetupError: if the file is missing, damaged or has too few lines.
    """
    assert folder is not None
    path = folder / _FILE
    if not path.is_file():
        raise SetupError(
            f"--data-dir {folder} does not contain the Criteo data; it must contain the file {_FILE} of Kaggle's "
            "Display Advertising Challenge"
        )
    most = None if samples is None else samples + max(2, samples // (_HELD_BACK - 1))
    chunks, labels, lines = [np.empty((0, len(_FIELDS) - 1), np.float32)], [np.empty(0, np.int64)], 0
    with path.open("rb") as file:
        content = itertools.islice(file, most)
        while chunk := list(itertools.islice(content, _CHUNK)):
            x, y = _read(chunk, rows, path, lines + 1)
            chunks.append(x)
            labels.append(y)
            lines += len(chunk)
    train = lines - max(2, lines // _HELD_BACK)
    if train < 1:
        raise SetupError(f"{path} has {lines} lines, and --data criteo needs at least three, to train and to evaluate")
    x, y = np.concatenate(chunks), np.concatenate(labels)
    return DataSet(
        x[:train],
        y[:train],
        x[train + 1 :: 2],
        y[train + 1 :: 2],
        classes=2,
        mean=np.zeros(x.shape[1], np.float32),
        std=np.ones(x.shape[1], np.float32),
        validation=Part(x[train::2], y[train::2]),
        table_rows=rows,
    )


def _read(lines: Sequence[bytes], rows: int, path: Path, first: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples and labels of some lines. `first` is the number of the first line, for error messages."""
    values = []
    for number, line in enumerate(lines, first):
        line = line.rstrip(b"\r\n")
        if not _LINE.fullmatch(line):
            raise SetupError(f"{path}, line {number}: {_problem(line)}; expected {_EXPECTED}")
        label, *fields = line.split(b"\t")
        numbers = [int(field or b"0") for field in fields[:13]]
        ids = [1 + int(field, 16) % (rows - 1) if field else 0 for field in fields[13:]]
        values.append([int(label), *numbers, *ids])
    read = np.array(values, np.int64)
    x = read[:, 1:].astype(np.float32)
    x[:, :13] = np.log1p(np.maximum(x[:, :13], 0))
    return x, read[:, 0]


def _problem(line: bytes) -> str:
    fields = line.split(b"\t")
    if len(fields) != len(_FIELDS):
        return f"{len(fields)} fields instead of {len(_FIELDS)}"
    wrong = next(at for at, form in enumerate(_FIELDS) if not re.fullmatch(form, fields[at]))
    return f"field {wrong + 1} is {fields[wrong][:20].decode('latin1')!r}"
