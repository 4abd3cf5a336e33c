"""Adaptive gradient compression for Horovod.

`hvdcomp.Compression` goes into the `compression=` argument of `hvd.DistributedOptimizer`. The compressors
and memories named here are frozen descriptions: method and parameters, no tensors. Importing this package
imports no framework; PyTorch is imported when its first gradient arrives.
"""

from __future__ import annotations

from importlib.metadata import version

from hvdcomp.compression import Compression
from hvdcomp.compressors import (
    BF16,
    FP16,
    Compressor,
    NoCompression,
    PowerSGD,
    RandomK,
    TopK,
)
from hvdcomp.errors import ConfigurationError, RankMismatchError, SpecError
from hvdcomp.memory import ErrorFeedback, NoMemory

__version__ = version("hvdcomp")

__all__ = [
    "BF16",
    "FP16",
    "Compression",
    "Compressor",
    "ConfigurationError",
    "ErrorFeedback",
    "NoCompression",
    "NoMemory",
    "PowerSGD",
    "RandomK",
    "RankMismatchError",
    "SpecError",
    "TopK",
    "__version__",
]
