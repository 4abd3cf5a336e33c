"""What TensorFlow users need beside `hvdcomp.Compression`; `hvdcomp.tensorflow.keras` has a callback for Keras."""

from hvdcomp.tensorflow.checkpoint import CompressionState

__all__ = ["CompressionState"]
