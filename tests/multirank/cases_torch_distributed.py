"""The collectives of the communicator for torch.distributed, against the same in NumPy."""

from __future__ import annotations

import os
from datetime import timedelta
from unittest import SkipTest

import torch
import torch.distributed as dist

from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator, _timeout
from tests.multirank.collectives import check, check_groups, check_refusals, nodes_of
from tests.multirank.training_ddp import raised


def case_every_collective() -> None:
    check(TorchDistributedCommunicator(), torch.from_numpy, dist.get_rank(), list(range(dist.get_world_size())))


def case_every_collective_of_a_group() -> None:
    members = list(range(1, dist.get_world_size()))
    some = dist.new_group(members)
    if dist.get_rank() in members:
        check(TorchDistributedCommunicator(some), torch.from_numpy, dist.get_rank(), members)


def case_every_collective_of_a_node_and_across_nodes() -> None:
    check_groups(TorchDistributedCommunicator(), torch.from_numpy, dist.get_rank(), dist.get_world_size())


def case_nodes_are_those_of_the_launcher() -> None:
    everyone = TorchDistributedCommunicator()
    assert everyone.part("node") is everyone
    assert everyone.part("across").world_size == 1
    del os.environ["GROUP_RANK"]  # as where mpirun or srun has started the ranks
    everyone = TorchDistributedCommunicator()
    assert everyone.part("node") is everyone
    os.environ["GROUP_RANK"] = "0"


def case_nodes_of_some_ranks_are_those_of_their_numbers_in_the_job() -> None:
    if dist.get_world_size() < 4:
        raise SkipTest("needs 4 ranks")
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for ranks_of_node, in_node in ((1, 1), (2, 1), (4, 2)):
        mine = TorchDistributedCommunicator(groups[dist.get_rank() % 2])
        with nodes_of(ranks_of_node):
            assert (mine.part("node").world_size, mine.part("across").world_size) == (in_node, 2 // in_node)


def case_a_group_of_some_ranks_gets_another_beside_it_however_many_its_ranks_have() -> None:
    if dist.get_world_size() < 4:
        raise SkipTest("needs 4 ranks")
    for others in ([2], [2, 3], [0, 1]):
        dist.new_group(others)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = TorchDistributedCommunicator(groups[dist.get_rank() % 2])
    for communicator in (mine.duplicate(), mine.duplicate()):
        total = communicator.wait(communicator.start_allreduce(torch.tensor([float(dist.get_rank())]), "sum", "any"))
        assert total == [2.0, 4.0][dist.get_rank() % 2]


def case_a_group_of_all_ranks_can_follow_one_that_some_ranks_have_made() -> None:
    """PyTorch 2.14 counts both kinds, and names groups of all ranks by the count."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first = dist.new_group([0])
    if rank == 0:
        ours = TorchDistributedCommunicator(first)
        for _ in range(3):
            ours.duplicate()
    counts = [0] * size
    dist.all_gather_object(counts, dist.distributed_c10d._world.group_count)
    assert len(set(counts)) == 1, "they would wait for each other in the next group"
    everyone = TorchDistributedCommunicator(dist.new_group())
    total = everyone.wait(everyone.start_allreduce(torch.tensor([1.0]), "sum", "any"))
    assert total == size


def case_nodes_that_do_not_fit_are_refused_by_all_ranks() -> None:
    check_refusals(TorchDistributedCommunicator, dist.get_rank(), dist.get_world_size(), raised)


def case_groups_of_our_own_wait_as_long_as_the_given_one() -> None:
    waits = timedelta(seconds=77)
    ours = TorchDistributedCommunicator(dist.new_group(timeout=waits))
    everyone = tuple(range(dist.get_world_size()))
    for made in (ours.duplicate(), ours.make_groups([everyone])[everyone]):
        assert isinstance(made, TorchDistributedCommunicator)
        assert _timeout(made.group) == waits
