"""Adaptive gradient compression for Horovod.

`hvdcomp.Compression` goes into the `compression=` argument of `hvd.DistributedOptimizer`. The compressors
and memories named here are frozen descriptions: method and parameters, no tensors. Importing this package
imports no framework; PyTorch is imported when its first gradient arrives.
"""

from __future__ import annotations

from importlib.metadata import version

from hvdcomp.compression import Compression
from hvdcomp.compressors import (
    ATOMO,
    BF16,
    DGC,
    FP16,
    QSGD,
    ByDimensions,
    ByName,
    BySize,
    Compressor,
    EFSignSGD,
    GlobalQSGD,
    MSTopK,
    Natural,
    NoCompression,
    OneBit,
    PowerSGD,
    RandomK,
    RedSync,
    SIDCo,
    SignSGD,
    TernGrad,
    TopK,
)
from hvdcomp.compressors.memory import ErrorFeedback, MomentumCorrection, NoMemory
from hvdcomp.errors import ConfigurationError, RankMismatchError, SpecError
from hvdcomp.policies import (
    Accordion,
    AccordionBatchSize,
    AccordionJoint,
    AdaQS,
    Auto,
    AutoAccordion,
    Constant,
    GraVAC,
    IncreaseBatchSize,
    WarmUp,
)

__version__ = version("hvdcomp")

__all__ = [
    "ATOMO",
    "BF16",
    "DGC",
    "FP16",
    "QSGD",
    "Accordion",
    "AccordionBatchSize",
    "AccordionJoint",
    "AdaQS",
    "Auto",
    "AutoAccordion",
    "ByDimensions",
    "ByName",
    "BySize",
    "Compression",
    "Compressor",
    "ConfigurationError",
    "Constant",
    "EFSignSGD",
    "ErrorFeedback",
    "GlobalQSGD",
    "GraVAC",
    "IncreaseBatchSize",
    "MSTopK",
    "MomentumCorrection",
    "Natural",
    "NoCompression",
    "NoMemory",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "RankMismatchError",
    "RedSync",
    "SIDCo",
    "SignSGD",
    "SpecError",
    "TernGrad",
    "TopK",
    "WarmUp",
    "__version__",
]
