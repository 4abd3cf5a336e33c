"""What TensorFlow users need beside `hvdcomp.Compression`; `hvdcomp.tensorflow.keras` has a callback for Keras."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdcomp.tensorflow.checkpoint import CompressionState, saved_state
    from hvdcomp.tensorflow.simulated import serve_simulated

__all__ = ["CompressionState", "saved_state", "serve_simulated"]


def __getattr__(name: str) -> Any:
    """Imports TensorFlow when what needs it is asked for: the core reads `hvdcomp.tensorflow.framework` without it."""
    if name == "serve_simulated":
        from hvdcomp.tensorflow.simulated import serve_simulated

        return serve_simulated
    if name in __all__:
        from hvdcomp.tensorflow import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
