"""The collectives of Horovod's communicator for PyTorch, against the same in NumPy."""

from __future__ import annotations

import os

import horovod.torch as hvd
import torch

from hvdcomp.communicators.horovod_torch import HorovodTorchCommunicator
from hvdcomp.errors import ConfigurationError
from tests.multirank.collectives import RANKS_PER_NODE, check, check_groups
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
    wrong = {"0": "give a whole number of at least 1", "many": "give a whole number of at least 1"}
    if hvd.size() > 2:
        wrong[str(hvd.size() - 1)] = f"the same number of ranks on every node, and there are {hvd.size() - 1}, 1"
    for given, said in wrong.items():
        os.environ[RANKS_PER_NODE] = given
        assert said in raised(ConfigurationError, lambda: HorovodTorchCommunicator().part("node"))
    os.environ[RANKS_PER_NODE] = str(1 + hvd.rank() % 2)
    told = raised(ConfigurationError, lambda: HorovodTorchCommunicator().part("across"))
    assert "the ranks' environments differ in HVDCOMP_RANKS_PER_NODE" in told
    del os.environ[RANKS_PER_NODE]
