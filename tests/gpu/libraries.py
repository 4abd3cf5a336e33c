"""What `ddp.py` asks of a library that connects ranks: DistributedDataParallel with torch.distributed, or Horovod."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvdcomp
from hvdcomp.communicators import Communicator
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator


class TorchDistributed:
    """Ranks that torchrun started.

    Args:
        one_gpu: whether they share a GPU, over Gloo.

    Attributes:
        rank, size: of this rank, and of the job.
        backend: what carries tensors.
    """

    def __init__(self, place: str, one_gpu: bool = False) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        nccl = place == "cuda" and not one_gpu  # which needs a GPU for each
        dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", timeout=timedelta(seconds=60))
        self.backend = dist.get_backend()
        self._apart = dist.new_group(backend="gloo")  # in which no training exchanges anything

    def communicator(self) -> Communicator:
        return TorchDistributedCommunicator()

    def distribute(self, model: torch.nn.Module, optimizer: Any, spec: str, **options: Any) -> tuple[Any, Any, Any]:
        """The model and the optimizer to train with, and the compression. options: of `Compression`."""
        distributed = DistributedDataParallel(model, bucket_cap_mb=1.5)
        compression = hvdcomp.Compression.from_spec(spec, **options)
        hvdcomp.ddp.register(distributed, compression, optimizer)
        return distributed, optimizer, compression

    def step(self, optimizer: Any, scaler: Any) -> None:
        scaler.step(optimizer)

    def mean(self, vector: torch.Tensor) -> torch.Tensor:
        """Over the ranks; may change the vector."""
        dist.all_reduce(vector)
        return vector / self.size

    def gathered(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Those of all ranks."""
        everyone = [torch.empty_like(vector) for _ in range(self.size)]
        dist.all_gather(everyone, vector)
        return everyone

    def gathered_texts(self, texts: list[str]) -> list[list[str]]:
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, texts, group=self._apart)
        return everyone

    def end(self) -> None:
        dist.destroy_process_group()


class Horovod:
    """The same of ranks that horovodrun started, each with a GPU of its own."""

    def __init__(self, place: str) -> None:
        import horovod
        import horovod.torch as hvd

        hvd.init()
        self._hvd = hvd
        self.rank, self.size = hvd.rank(), hvd.size()
        with_nccl = " with NCCL" if place == "cuda" and hvd.nccl_built() else ""
        self.backend = f"Horovod {horovod.__version__}{with_nccl}"

    def communicator(self) -> Communicator:
        from hvdcomp.communicators.horovod_torch import HorovodTorchCommunicator

        return HorovodTorchCommunicator()

    def distribute(self, model: torch.nn.Module, optimizer: Any, spec: str, **options: Any) -> tuple[Any, Any, Any]:
        compression = hvdcomp.Compression.from_spec(spec, named_parameters=model.named_parameters(), **options)
        named = list(model.named_parameters())
        return model, self._hvd.DistributedOptimizer(optimizer, named, compression=compression), compression

    def step(self, optimizer: Any, scaler: Any) -> None:
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)

    def mean(self, vector: torch.Tensor) -> torch.Tensor:
        return self._hvd.allreduce(vector, name="check.mean")

    def gathered(self, vector: torch.Tensor) -> list[torch.Tensor]:
        return list(self._hvd.allgather(vector[None], name="check.gathered"))

    def gathered_texts(self, texts: list[str]) -> list[list[str]]:
        return self._hvd.allgather_object(texts, name="check.texts")

    def end(self) -> None:
        self._hvd.shutdown()


Library = TorchDistributed | Horovod
