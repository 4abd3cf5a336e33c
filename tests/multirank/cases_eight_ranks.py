"""What needs eight ranks: groups of some ranks that have several nodes of several ranks, such as replicas in FSDP2."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

import hvdcomp
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.parsing import parse_compressor
from tests.multirank.cases_fsdp_meshes import gradient, parallelized
from tests.multirank.collectives import check, nodes_of
from tests.multirank.models import weights
from tests.multirank.training_ddp import distribute, large_model, train
from tests.multirank.worker import thorough
from tests.two_hops import stated

REPLICAS, NODES, PLACES = 2, 2, 2
ROWS, COLUMNS = 8, 30


@thorough
def case_a_group_of_some_ranks_is_split_into_its_nodes() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group(list(range(first, 8, 2))) for first in range(2)]  # two ranks of each node of four
    mine = TorchDistributedCommunicator(groups[rank % 2])
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)  # PyTorch counts it in the names of groups
    with nodes_of(4):
        node, across = mine.part("node"), mine.part("across")
    first_of_node = rank // 4 * 4 + rank % 2
    check(node, torch.from_numpy, rank, [first_of_node, first_of_node + 2])
    check(across, torch.from_numpy, rank, [rank % 4, rank % 4 + 4])


@thorough
def case_two_levels_in_a_group_of_some_ranks() -> None:
    """Each group trains alone, and its ranks stay equal."""
    rank = dist.get_rank()
    groups = [dist.new_group(list(range(first, first + 4))) for first in (0, 4)]
    model = large_model()
    with nodes_of(2):
        train(*distribute(model, "two_level(topk:ratio=0.05)", process_group=groups[rank // 4])[:2])
    everyone = [torch.empty_like(weights(model)) for _ in range(8)]
    dist.all_gather(everyone, weights(model))
    for other, theirs in enumerate(everyone):
        assert torch.equal(theirs, everyone[rank]) == (other // 4 == rank // 4), other


@thorough
def case_a_replica_reduces_exactly_in_its_nodes_and_quantizes_between_them() -> None:
    ranks, rank = NODES * PLACES, dist.get_rank()
    length = ROWS // ranks * COLUMNS
    torch.manual_seed(7)
    model = parallelized((REPLICAS, ranks), [torch.nn.Linear(COLUMNS, ROWS, bias=False)])
    within = hvdcomp.Compression.from_spec("int4", min_numel=1)  # with error feedback, as nodes have several ranks
    with nodes_of(PLACES):
        hvdcomp.fsdp.register(model, hvdcomp.Compression.from_spec("none"), shards=within)
    method = parse_compressor("int4")
    assert isinstance(method, Gathering)
    kept = np.zeros((REPLICAS, NODES, PLACES, NODES, length), np.float32)
    for step in range(3):
        every = [np.random.default_rng([step, one]).normal(size=(ROWS, COLUMNS)) for one in range(REPLICAS * ranks)]
        given = np.stack(every).astype(np.float32)
        model.zero_grad()
        (model(torch.eye(COLUMNS)).t() * torch.from_numpy(given[rank])).sum().backward()
        means = []
        for replica, gradients in enumerate(given.reshape(REPLICAS, ranks, ranks, length)):
            rows, kept[replica] = stated(method, list(gradients), kept[replica], step, "0", seed=replica)
            means.append(np.stack(rows))
        np.testing.assert_array_equal(gradient(model).numpy(), (means[0] + means[1]).reshape(-1) / 2)
