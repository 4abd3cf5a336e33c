"""Communicators that include all ranks."""

from __future__ import annotations

import sys

import torch.distributed as dist

from hvdcomp.communicators.ranks import Ranks
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator


def all_ranks(backend: str = "horovod") -> Ranks:
    """The communicator of all ranks of Horovod, or of torch.distributed if the backend is "ddp"."""
    if backend == "ddp":
        return TorchDistributedCommunicator()
    from hvdcomp.communicators.horovod_torch import HorovodTorchCommunicator

    return HorovodTorchCommunicator()


def started_ranks() -> Ranks:
    """The communicator of all ranks of torch.distributed, or of Horovod if torch.distributed was not started."""
    started = dist.is_available() and dist.is_initialized()
    hvd = sys.modules.get("horovod.torch")
    return all_ranks("ddp" if started or hvd is None or not hvd.is_initialized() else "horovod")
