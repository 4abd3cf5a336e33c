"""Gradient compression for Horovod, and for PyTorch's DistributedDataParallel and FSDP.

Pass an `hvdcomp.Compression` as the `compression=` argument of `hvd.DistributedOptimizer`, or to `hvdcomp.ddp.register`
or `hvdcomp.fsdp.register`. For trainers, use `hvdcomp.accelerate`, `hvdcomp.lightning` or `hvdcomp.transformers`.
Compressors and memories are frozen dataclasses. They contain the parameters of a method, but no tensors. `import
hvdcomp` imports no framework: PyTorch or TensorFlow is imported when the first gradient arrives.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hvdcomp.bindings.elastic import track as track
from hvdcomp.bindings.frameworks import NAMES
from hvdcomp.bindings.metrics import write_metrics as write_metrics
from hvdcomp.bindings.prometheus import serve_metrics as serve_metrics
from hvdcomp.bindings.world import state_for as state_for
from hvdcomp.compression import Compression as Compression
from hvdcomp.compressors import COMPRESSORS, MEMORIES
from hvdcomp.compressors import Compressor as Compressor
from hvdcomp.compressors.casts import BF16 as BF16
from hvdcomp.compressors.casts import FP16 as FP16
from hvdcomp.compressors.casts import NoCompression as NoCompression
from hvdcomp.compressors.low_rank import PowerSGD as PowerSGD
from hvdcomp.compressors.low_rank_sampling import ATOMO as ATOMO
from hvdcomp.compressors.memory import ErrorFeedback as ErrorFeedback
from hvdcomp.compressors.memory import MomentumCorrection as MomentumCorrection
from hvdcomp.compressors.memory import NoMemory as NoMemory
from hvdcomp.compressors.quantization import QSGD as QSGD
from hvdcomp.compressors.quantization import GlobalQSGD as GlobalQSGD
from hvdcomp.compressors.quantization import Natural as Natural
from hvdcomp.compressors.quantization import TernGrad as TernGrad
from hvdcomp.compressors.quantization_blocks import FP8 as FP8
from hvdcomp.compressors.quantization_blocks import Int4 as Int4
from hvdcomp.compressors.quantization_blocks import Int8 as Int8
from hvdcomp.compressors.quantization_rotated import EDEN as EDEN
from hvdcomp.compressors.routing import ByDimensions as ByDimensions
from hvdcomp.compressors.routing import ByName as ByName
from hvdcomp.compressors.routing import BySize as BySize
from hvdcomp.compressors.signs import EFSignSGD as EFSignSGD
from hvdcomp.compressors.signs import OneBit as OneBit
from hvdcomp.compressors.signs import SignSGD as SignSGD
from hvdcomp.compressors.sparse_random import RandomK as RandomK
from hvdcomp.compressors.sparsification import SparseTernary as SparseTernary
from hvdcomp.compressors.sparsification import TopK as TopK
from hvdcomp.compressors.thresholds import DGC as DGC
from hvdcomp.compressors.thresholds import MSTopK as MSTopK
from hvdcomp.compressors.thresholds import RedSync as RedSync
from hvdcomp.compressors.thresholds import SIDCo as SIDCo
from hvdcomp.compressors.two_level import TwoLevel as TwoLevel
from hvdcomp.errors import ConfigurationError as ConfigurationError
from hvdcomp.errors import RankMismatchError as RankMismatchError
from hvdcomp.errors import SpecError as SpecError
from hvdcomp.files import VERSION
from hvdcomp.policies import POLICIES
from hvdcomp.policies.accordion import Accordion as Accordion
from hvdcomp.policies.adaqs import AdaQS as AdaQS
from hvdcomp.policies.auto import Auto as Auto
from hvdcomp.policies.batch_size import AccordionBatchSize as AccordionBatchSize
from hvdcomp.policies.batch_size import IncreaseBatchSize as IncreaseBatchSize
from hvdcomp.policies.budget import Budget as Budget
from hvdcomp.policies.constant import Constant as Constant
from hvdcomp.policies.gravac import GraVAC as GraVAC
from hvdcomp.policies.lgreco import LGreCo as LGreCo
from hvdcomp.policies.schedules import Legacy as Legacy
from hvdcomp.policies.schedules import Schedule as Schedule
from hvdcomp.policies.schedules import WarmUp as WarmUp

__version__ = VERSION

# The imports above are for type checkers. hvdcomp finds its compressors, memories and policies in their folders, so
# that a new class works without an import here.
globals().update({kind.__name__: kind for kind in (*COMPRESSORS.values(), *MEMORIES.values(), *POLICIES.values())})
__all__ = [
    "__version__",
    "serve_metrics",
    "state_for",
    "track",
    "write_metrics",
    *sorted(
        name for name, value in globals().items() if isinstance(value, type) and value.__module__.startswith(__name__)
    ),
]


def __getattr__(name: str) -> Any:
    """Imports the modules that need a framework or a trainer when they are first used."""
    if name in ("accelerate", "compiled", "dcp", "ddp", "fsdp", "lightning", "transformers", *NAMES):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
