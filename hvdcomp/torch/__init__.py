"""The PyTorch binding: what Horovod calls for each gradient, and how a gradient is known."""

from __future__ import annotations

from hvdcomp.communicators import Communicator


def all_ranks() -> Communicator:
    """All of Horovod's ranks, through its PyTorch."""
    from hvdcomp.communicators.horovod_torch import HorovodTorchCommunicator

    return HorovodTorchCommunicator()
