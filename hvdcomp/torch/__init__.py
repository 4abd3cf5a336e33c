"""The PyTorch binding: what Horovod calls for each gradient, and how a gradient is known."""

from __future__ import annotations

from hvdcomp.communicators import Communicator


def all_ranks(backend: str = "horovod") -> Communicator:
    """All ranks: of Horovod, through its PyTorch, or of torch.distributed, where the backend is "ddp"."""
    if backend == "ddp":
        from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator

        return TorchDistributedCommunicator()
    from hvdcomp.communicators.horovod_torch import HorovodTorchCommunicator

    return HorovodTorchCommunicator()
