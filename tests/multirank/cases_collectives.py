"""The collectives of Horovod's communicator for PyTorch, against the same in NumPy."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from hvdcomp.communicators.horovod_torch import HorovodTorchCommunicator
from tests.multirank.collectives import check


def case_every_collective() -> None:
    check(HorovodTorchCommunicator(), torch.from_numpy, hvd.rank(), list(range(hvd.size())))


def case_every_collective_of_a_process_set() -> None:
    members = list(range(1, hvd.size()))
    some = hvd.add_process_set(members)
    if hvd.rank() in members:
        check(HorovodTorchCommunicator(some), torch.from_numpy, hvd.rank(), members)
    hvd.remove_process_set(some)
