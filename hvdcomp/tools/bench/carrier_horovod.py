"""The `Carrier` for Horovod, whose `DistributedOptimizer` exchanges gradients. Measurements use the library through
this class."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvdcomp.compression import Compression
from hvdcomp.compressors import BUCKET_BYTES, Compressor
from hvdcomp.tools.bench.carrier import Carrier, Distributed, named_parameters, sgd
from hvdcomp.tools.bench.workload import Workload
from hvdcomp.tools.train.ranks import Ranks


class HorovodCarrier(Carrier):
    """A `Carrier` whose library is Horovod."""

    title = network = "Horovod"
    warm_up = 1
    early_bytes = BUCKET_BYTES
    shares_buckets = False

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self.start_s = float(os.environ.get("HOROVOD_CYCLE_TIME") or 1.0) / 1000  # Horovod's cycle time
        self.bucket_bytes = float(os.environ.get("HOROVOD_FUSION_THRESHOLD") or 128 * 1024 * 1024) or 1.0

    def facts(self) -> dict[str, str]:
        return {
            "Horovod's controller": self.ranks.controller,
            "Horovod's cycle": f"{1000 * self.start_s:g} ms",
            "horovod": importlib.metadata.version("horovod"),
        }

    def with_stock(self, workload: Workload, method: str, name: str) -> Distributed:
        dense, _ = self.stock
        return _distributed(workload, name, hvd.Compression.none if method == dense else hvd.Compression.fp16)

    def with_one_number(self, workload: Workload, name: str) -> Distributed:
        return _distributed(workload, name, _OneNumber())

    def with_cast(self, workload: Workload, compressor: Compressor, name: str) -> Distributed:
        return _distributed(workload, name, _Cast(compressor))

    def compressed(
        self, workload: Workload, spec: str, name: str, *, bucket_bytes: int | None = None, **options: Any
    ) -> Distributed:
        named = named_parameters(workload, name)
        compression = Compression.from_spec(spec, named_parameters=named, bucket_bytes=bucket_bytes, **options)
        return _distributed(workload, name, compression)

    @property
    def fused_allreduce(self) -> Callable[[Sequence[torch.Tensor], str], Any]:
        return lambda parts, name: hvd.synchronize(hvd.grouped_allreduce_async_(parts, name=name, op=hvd.Average))


class _OneNumber:
    """Sends one number for each gradient, as hvdcomp's engine does, but does not send the gradients."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by Horovod for each gradient."""
        return torch.full((1,), 1), tensor

    def decompress(self, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Called by Horovod after the exchange of the number."""
        return gradient


class _Cast:
    """Sends each gradient in the element type of a compressor."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by Horovod for each gradient."""
        wire = self._compressor.wire_dtype(str(tensor.dtype).removeprefix("torch."))
        return tensor.to(getattr(torch, wire or "")), tensor

    def decompress(self, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Called by Horovod after the exchange."""
        return tensor.to(gradient.dtype)


def _distributed(workload: Workload, name: str, compression: Any) -> Distributed:
    named = named_parameters(workload, name)
    optimizer = hvd.DistributedOptimizer(sgd(workload), named_parameters=named, compression=compression)
    own_compression = compression if isinstance(compression, Compression) else None
    return Distributed(workload.loss, optimizer, optimizer.synchronize, own_compression)
