"""Enables `tf.train.Checkpoint` to save and restore a `Compression`.

    checkpoint = tf.train.Checkpoint(
        model=model, optimizer=optimizer, compression=hvdcomp.tensorflow.CompressionState(compression)
    )

Residuals differ between ranks. To keep the residuals, every rank must save to its own path. `saved_state` reads the
state from such a checkpoint, for `hvdcomp.state_for`.
"""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import numpy as np
import tensorflow as tf

from hvdcomp.bindings.setup import UsedCompression
from hvdcomp.errors import ConfigurationError

_ARRAY = "array of hvdcomp"  # the key of an object that represents an array in another file of the archive
_PAIRS = "pairs of hvdcomp"  # the key of an object that represents a mapping whose keys are not all strings
_STATE = "state.json"


class CompressionState(tf.train.experimental.PythonState):
    """The state of a `Compression`, as in `Compression.state_dict`, for `tf.train.Checkpoint`.

    Restore the state before the first step. `Compression.load_state_dict` documents the errors.

    Args:
        compression: the `Compression` whose state is saved.
    """

    def __init__(self, compression: UsedCompression) -> None:
        self._compression = compression

    def serialize(self) -> bytes:
        """Returns a zip archive as bytes. The archive contains the state in JSON, and each array in TensorFlow's own
        serialization."""
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(_STATE, json.dumps(_without_arrays(self._compression.state_dict(), archive)))
        return file.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Restores the result of `serialize`."""
        self._compression.load_state_dict(_state_in(string_value))


def saved_state(path: str, name: str = "compression") -> dict[str, Any]:
    """The state that a `CompressionState` has saved, in the form of `Compression.state_dict`.

    Args:
        path: the path of a checkpoint, as returned by `tf.train.Checkpoint.save` or `write`.
        name: the name of the `CompressionState` in `tf.train.Checkpoint`.

    Raises:
        ConfigurationError: if the checkpoint has no such state.
    """
    try:
        return _state_in(tf.train.load_checkpoint(path).get_tensor(f"{name}/.ATTRIBUTES/py_state"))
    except tf.errors.NotFoundError as error:
        raise ConfigurationError(
            f"{path} contains no state of hvdcomp.Compression with the name {name!r}: {error.message}. Give the path "
            "of a checkpoint, and the name under which you gave hvdcomp.tensorflow.CompressionState to "
            "tf.train.Checkpoint"
        ) from None


def _state_in(serialized: bytes) -> dict[str, Any]:
    """Restores the state from the bytes that `CompressionState.serialize` wrote."""
    with zipfile.ZipFile(io.BytesIO(serialized)) as archive:
        return dict(json.loads(archive.read(_STATE), object_hook=lambda entry: _with_array(entry, archive)))


def _without_arrays(value: Any, archive: zipfile.ZipFile) -> Any:
    """Writes each array of a value to a separate file of the archive. Returns a copy of the value in which each array
    is replaced by the name of its file."""
    if isinstance(value, np.ndarray):
        name = f"array{len(archive.namelist())}"
        archive.writestr(name, tf.io.serialize_tensor(value).numpy())
        return {_ARRAY: name, "dtype": value.dtype.name}
    if isinstance(value, dict):
        entries = {key: _without_arrays(entry, archive) for key, entry in value.items()}
        return entries if all(isinstance(key, str) for key in entries) else {_PAIRS: list(entries.items())}
    if isinstance(value, list | tuple):
        return [_without_arrays(entry, archive) for entry in value]
    return value


def _with_array(entry: dict[str, Any], archive: zipfile.ZipFile) -> Any:
    if _PAIRS in entry:
        return dict(entry[_PAIRS])
    if _ARRAY not in entry:
        return entry
    return np.array(tf.io.parse_tensor(archive.read(entry[_ARRAY]), entry["dtype"]))
