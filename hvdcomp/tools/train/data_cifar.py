"""Reads CIFAR-10 and CIFAR-100 from a folder, in the published Python or binary form.

The Python form is a set of pickles. They are read with an unpickler that accepts only NumPy arrays and bytes, so a
malicious file cannot run code.

References: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdcomp.tools.train.dataset import DataSet, labeled_data
from hvdcomp.tools.train.options import SetupError

_PIXELS = 3 * 32 * 32  # the values of an image: first all red values, row by row, then green, then blue

try:
    from numpy._core.multiarray import _reconstruct  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # NumPy 1
    from numpy.core.multiarray import _reconstruct  # type: ignore[no-redef, unused-ignore]


@dataclass(frozen=True)
class _Archive:
    """The files of an archive. In the binary form, `label_bytes` bytes precede each image. The last of these bytes is
    the label."""

    title: str
    classes: int
    python_folder: str
    python_files: tuple[tuple[str, ...], tuple[str, ...]]  # training, test
    label_key: bytes
    binary_folder: str
    binary_files: tuple[tuple[str, ...], tuple[str, ...]]
    label_bytes: int


_ARCHIVES = {
    "cifar10": _Archive(
        title="CIFAR-10",
        classes=10,
        python_folder="cifar-10-batches-py",
        python_files=(tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",)),
        label_key=b"labels",
        binary_folder="cifar-10-batches-bin",
        binary_files=(tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",)),
        label_bytes=1,
    ),
    "cifar100": _Archive(
        title="CIFAR-100",
        classes=100,
        python_folder="cifar-100-python",
        python_files=(("train",), ("test",)),
        label_key=b"fine_labels",
        binary_folder="cifar-100-binary",
        binary_files=(("train.bin",), ("test.bin",)),
        label_bytes=2,
    ),
}


def load(folder: Path | None, name: str) -> DataSet:
    """Reads CIFAR from its unpacked archive, or from the folder that contains the archive.

    Args:
        folder: the folder with the data, from the option --data-dir.
        name: name of the data set: "cifar10" or "cifar100" (its 100 fine labels).

    Raises:
        SetupError: if a file is missing or damaged.
    """
    assert folder is not None
    archive = _ARCHIVES[name]
    forms = (
        (archive.python_folder, archive.python_files, _read_python),
        (archive.binary_folder, archive.binary_files, _read_binary),
    )
    for subfolder, (train_files, test_files), read in forms:
        for place in (folder / subfolder, folder):
            names = (*train_files, *test_files)
            present = [file for file in names if (place / file).is_file()]
            # The second folder may contain unrelated files named "train" or "test".
            if not present:
                continue
            missing = [file for file in names if file not in present]
            if missing:
                raise SetupError(f"{place / missing[0]} is missing; {archive.title} consists of {', '.join(names)}")
            train = _join([read(place / file, archive) for file in train_files])
            test = _join([read(place / file, archive) for file in test_files])
            return labeled_data(*train, *test, classes=archive.classes, augment=True)
    raise SetupError(
        f"--data-dir {folder} contains no {archive.title}; it must contain the folder {archive.python_folder} (or "
        f"{archive.binary_folder}) of the unpacked archive, with the files "
        f"{', '.join((*archive.python_files[0], *archive.python_files[1]))}"
    )


def _join(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    images = np.concatenate([images for images, _ in parts])
    return images.reshape(-1, 3, 32, 32), np.concatenate([labels for _, labels in parts])


def _read_python(path: Path, archive: _Archive) -> tuple[np.ndarray, np.ndarray]:
    """Reads a pickled batch: images (n, 3072) as uint8, and labels (n,)."""
    expected = f"a pickled dictionary with b'data', uint8 (n, {_PIXELS}), and {archive.label_key!r}, n labels"
    try:
        batch = _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        images, labels = batch[b"data"], np.asarray(batch[archive.label_key], dtype=np.int64)
    except Exception as error:  # a damaged pickle can raise anything
        raise _damaged(path, archive, f"{type(error).__name__}: {error}", expected) from None
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (_PIXELS,):
        raise _damaged(path, archive, f"b'data' is {_describe(images)}", expected)
    if labels.shape != images.shape[:1]:
        raise _damaged(path, archive, f"{labels.size} labels for {len(images)} images", expected)
    return images, _checked(labels, path, archive, expected)


def _read_binary(path: Path, archive: _Archive) -> tuple[np.ndarray, np.ndarray]:
    """Reads a binary batch. Each of its rows consists of label bytes and pixels. Returns the images, an array of shape
    (n, 3072) of uint8, and the labels, an array of shape (n,)."""
    row = archive.label_bytes + _PIXELS
    expected = f"rows of {row} bytes: {archive.label_bytes} of labels, {_PIXELS} of pixels"
    content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if content.size == 0 or content.size % row:
        raise _damaged(path, archive, f"{content.size} bytes", expected)
    rows = content.reshape(-1, row)
    labels = rows[:, archive.label_bytes - 1].astype(np.int64)
    return rows[:, archive.label_bytes :], _checked(labels, path, archive, expected)


def _checked(labels: np.ndarray, path: Path, archive: _Archive, expected: str) -> np.ndarray:
    if labels.size == 0:
        raise _damaged(path, archive, "no images", expected)
    if labels.min() < 0 or labels.max() >= archive.classes:
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise _damaged(path, archive, f"label {wrong}", f"labels from 0 to {archive.classes - 1}")
    return labels


def _damaged(path: Path, archive: _Archive, problem: str, expected: str) -> SetupError:
    return SetupError(
        f"{path} is not a file of {archive.title}, or is damaged: {problem}; expected {expected}. "
        "Unpack the archive again"
    )


def _describe(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


def _encode(text: str, encoding: str) -> bytes:
    """Decodes bytes in pickles of protocol 2. Python 3 writes these bytes as latin1 text. Other encodings are
    refused."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"the file has text encoded as {encoding!r}, which is not allowed")
    return text.encode(encoding)


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler that reads only plain Python values, bytes and NumPy arrays. It refuses all other functions and
    classes."""

    _ALLOWED = {  # noqa: RUF012 - a constant
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"the file would load {module}.{name}, which arrays do not need, so hvdcomp refuses to read the file"
            ) from None
