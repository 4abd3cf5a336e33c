"""The collectives of Horovod's communicator for PyTorch, against the same in NumPy."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from hvdcomp.communicators.horovod_torch import HorovodTorchCommunicator
from tests.multirank.collectives import check, check_groups, check_refusals
from tests.multirank.training import raised


def case_every_collective() -> None:
    check(HorovodTorchCommunicator(), torch.from_numpy, hvd.rank(), list(range(hvd.size())))


def case_every_collective_of_a_process_set() -> None:
    members = list(range(1, hvd.size()))
    some = hvd.add_process_set(members)
    if hvd.rank() in members:
        check(HorovodTorchCommunicator(some), torch.from_numpy, hvd.rank(), members)
    hvd.remove_process_set(some)


def case_every_collective_of_a_node_and_across_nodes() -> None:
    check_groups(HorovodTorchCommunicator(), torch.from_numpy, hvd.rank(), hvd.size())


def case_nodes_that_do_not_fit_are_refused_by_all_ranks() -> None:
    check_refusals(HorovodTorchCommunicator, hvd.rank(), hvd.size(), raised)
