"""Classes that TensorFlow users need in addition to `hvdcomp.Compression`. `hvdcomp.tensorflow.keras` has a Keras
callback."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdcomp.tensorflow.checkpoint import CompressionState, saved_state
    from hvdcomp.tensorflow.compressed_adam import CompressedAdam
    from hvdcomp.tensorflow.rows import RowExchange
    from hvdcomp.tensorflow.simulated import serve_simulated

_FILES = {
    "by_name": "names",  # only the project's own tools use by_name, matrix_of and refuse_keras_3
    "matrix_of": "layout",
    "refuse_keras_3": "caller",
    "CompressedAdam": "compressed_adam",
    "CompressionState": "checkpoint",
    "RowExchange": "rows",
    "saved_state": "checkpoint",
    "serve_simulated": "simulated",
}
__all__ = ["CompressedAdam", "CompressionState", "RowExchange", "saved_state", "serve_simulated"]


def __getattr__(name: str) -> Any:
    """Imports TensorFlow only when a name that needs it is used for the first time. The core can therefore import
    `hvdcomp.tensorflow.framework` without TensorFlow."""
    if name in _FILES:
        return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
