"""What TensorFlow users need in addition to `hvdcomp.Compression`. A Keras callback is in
`hvdcomp.tensorflow.keras`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdcomp.tensorflow.checkpoint import CompressionState, saved_state
    from hvdcomp.tensorflow.compressed_adam import CompressedAdam
    from hvdcomp.tensorflow.rows import RowExchange
    from hvdcomp.tensorflow.simulated import serve_simulated

_FILES = {
    "by_name": "names",  # by_name, matrix_of and refuse_keras_3 are for the project's own tools
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
    """Imports TensorFlow with the first name that needs it; the core imports `hvdcomp.tensorflow.framework` without."""
    if name in _FILES:
        return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
