"""Converts states to bytes for other ranks, as JSON and raw NumPy arrays. Unlike unpickling, reading these bytes cannot
execute code."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

_ARRAY = "array of hvdcomp"  # the key of a JSON object that represents an array in another file of the archive
_PAIRS = "pairs of hvdcomp"  # the key of a JSON object that represents a mapping whose keys are not all strings
_STATE = "state.json"


def pack(state: Mapping[str, Any]) -> bytes:
    """Converts a state to bytes. `unpack` restores the state from these bytes, with lists instead of tuples."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(_STATE, json.dumps(_without_arrays(dict(state), archive)))
    return file.getvalue()


def unpack(packed: bytes) -> dict[str, Any]:
    """Restores a state from the bytes that `pack` returned."""
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        return dict(json.loads(archive.read(_STATE), object_hook=lambda entry: _with_array(entry, archive)))


def _without_arrays(value: Any, archive: zipfile.ZipFile) -> Any:
    if isinstance(value, np.ndarray):
        name = f"array{len(archive.namelist())}"
        archive.writestr(name, value.tobytes())
        return {_ARRAY: name, "dtype": value.dtype.name, "shape": value.shape}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
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
    return np.frombuffer(archive.read(entry[_ARRAY]), np.dtype(entry["dtype"])).reshape(entry["shape"]).copy()
