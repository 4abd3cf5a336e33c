"""Adaptive gradient compression for Horovod.

`hvdcomp.Compression` goes into the `compression=` argument of `hvd.DistributedOptimizer`. The compressors
and memories named here are frozen descriptions: method and parameters, no tensors. Importing this package
imports no framework; PyTorch is imported when its first gradient arrives.
"""

from __future__ import annotations

from importlib.metadata import version

from hvdcomp.compression import Compression
from hvdcomp.compressors import COMPRESSORS, MEMORIES, Compressor
from hvdcomp.compressors.casts import BF16, FP16, NoCompression
from hvdcomp.compressors.low_rank import PowerSGD
from hvdcomp.compressors.low_rank_sampling import ATOMO
from hvdcomp.compressors.memory import ErrorFeedback, MomentumCorrection, NoMemory
from hvdcomp.compressors.quantization import QSGD, GlobalQSGD, Natural, TernGrad
from hvdcomp.compressors.routing import ByDimensions, ByName, BySize
from hvdcomp.compressors.signs import EFSignSGD, OneBit, SignSGD
from hvdcomp.compressors.sparse_ternary import SparseTernary
from hvdcomp.compressors.sparsification import RandomK, TopK
from hvdcomp.compressors.thresholds import DGC, MSTopK, RedSync, SIDCo
from hvdcomp.errors import ConfigurationError, RankMismatchError, SpecError
from hvdcomp.policies import POLICIES
from hvdcomp.policies.accordion import Accordion
from hvdcomp.policies.accordion_auto import AutoAccordion
from hvdcomp.policies.adaqs import AdaQS
from hvdcomp.policies.auto import Auto
from hvdcomp.policies.batch_size import AccordionBatchSize, IncreaseBatchSize
from hvdcomp.policies.constant import Constant
from hvdcomp.policies.gravac import GraVAC
from hvdcomp.policies.joint import AccordionJoint
from hvdcomp.policies.schedules import WarmUp

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
    "SparseTernary",
    "SpecError",
    "TernGrad",
    "TopK",
    "WarmUp",
    "__version__",
]

# What is written above is for type checkers. A class that registration found is offered without a line here.
_found = {kind.__name__: kind for kind in (*COMPRESSORS.values(), *MEMORIES.values(), *POLICIES.values())}
globals().update(_found)
__all__ += [name for name in _found if name not in __all__]
