"""The collectives of torch.distributed, on PyTorch tensors."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hvdcomp.communicators import Communicator
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.errors import ConfigurationError

UNNAMED = ""
"""The name of any collective: torch.distributed matches them by their order."""

_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# The newer names of two functions whose older ones warn.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Started(NamedTuple):
    """A collective that is under way.

    Attributes:
        work: of torch.distributed.
        result: where its result comes to lie.
        finish: what is to be done with the result then.
        sent: what must live until then.
    """

    work: Any
    result: torch.Tensor
    finish: Callable[[torch.Tensor], torch.Tensor]
    sent: torch.Tensor


class TorchDistributedCommunicator(Ranks):
    """The ranks of a process group of torch.distributed, reached through asynchronous operations.

    Names of collectives are not used: they are matched by the order in which every rank starts them.

    Tensors on the CPU travel through the process group if its backend takes them, as Gloo does, and otherwise (NCCL)
    through a group of the same ranks with Gloo, which is made at once: every rank has to make the communicator at the
    same point.

    Args:
        group: the process group; None for all ranks.

    Raises:
        ConfigurationError: if torch.distributed was not started, or this process is not in the group.

    Example:
        >>> torch.distributed.init_process_group("gloo")  # under torchrun
        >>> ranks = TorchDistributedCommunicator()
        >>> ranks.wait(ranks.start_allreduce(torch.ones(3), "mean", "any name"))
        tensor([1., 1., 1.])
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise ConfigurationError(
                "torch.distributed was not started: start the ranks with torchrun, and call "
                "torch.distributed.init_process_group() first"
            )
        everyone = dist.group.WORLD
        assert everyone is not None
        self._group = everyone if group is None else group
        self.rank, self.world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        if self.rank < 0:
            raise ConfigurationError(
                f"rank {dist.get_rank()} is not in the process group that it was given; give each rank a group that "
                "it is in"
            )
        self._root = dist.get_global_rank(self._group, 0)
        self._host_group = self._group if _takes_cpu(self._group) else _with_gloo(self._group)

    def gather_bytes(self, mine: np.ndarray, name: str) -> torch.Tensor:
        return self.wait(self.start_allgather(torch.from_numpy(mine), name))

    def start_allreduce(self, array: torch.Tensor, op: str, name: str) -> Started:
        work = dist.all_reduce(array, op=_OPS[op], group=self._group_for(array), async_op=True)
        return Started(work, array, self._finish(op), array)

    def start_allgather(self, array: torch.Tensor, name: str) -> Started:
        array = array.contiguous()
        gathered = array.new_empty(self.world_size * array.shape[0])
        work = _all_gather(gathered, array, group=self._group_for(array), async_op=True)
        return Started(work, gathered, self._as_rows, array)

    def start_alltoall(self, array: torch.Tensor, name: str) -> Started:
        array = array.contiguous()
        received = torch.empty_like(array)
        work = dist.all_to_all_single(received, array, group=self._group_for(array), async_op=True)
        return Started(work, received, self._as_rows, array)

    def start_reducescatter(self, array: torch.Tensor, op: str, name: str) -> Started:
        group, finish = self._group_for(array), self._finish(op)
        if dist.get_backend(group) == dist.Backend.GLOO:
            # Gloo has none: torch.distributed reduces all of it everywhere and drops the rest, in twice the bytes.
            work, rows, _, sent = self.start_alltoall(array, name)
            return Started(work, rows, lambda rows: finish(self._as_rows(rows).sum(0)), sent)
        array = array.contiguous()
        mine = array.new_empty(array.shape[0] // self.world_size)
        work = reduce_scatter(mine, array, op=_OPS[op], group=group, async_op=True)
        return Started(work, mine, finish, array)

    def start_broadcast(self, array: torch.Tensor, name: str) -> Started:
        work = dist.broadcast(array, self._root, group=self._group_for(array), async_op=True)
        return Started(work, array, _as_it_is, array)

    def is_done(self, started: Started) -> bool:
        """Whether `wait` would not have to."""
        return bool(started.work.is_completed())

    def wait(self, started: Started) -> torch.Tensor:
        started.work.wait()
        return started.finish(started.result)

    # What `Ranks` asks.

    def check_grouping(self) -> None:
        if self.world_size != dist.get_world_size():  # all ranks must ask for a new group
            raise ConfigurationError(
                f"two levels work among all {dist.get_world_size()} ranks, and the process group has "
                f"{self.world_size}; give the model all ranks, or leave out two_level"
            )

    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Communicator]:
        made = {members: dist.new_group(list(members), backend=_backend(self._group)) for members in groups}
        return {members: TorchDistributedCommunicator(made[members]) for members in groups if self.rank in members}

    def place(self) -> tuple[int, int]:
        """As torchrun says; by the host's name where something else has started the ranks."""
        node, size = os.environ.get("GROUP_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
        if node is not None and size is not None:
            return int(node), int(size)
        return zlib.crc32(socket.gethostname().encode()) >> 1, 0

    def _group_for(self, array: torch.Tensor) -> dist.ProcessGroup:
        return self._host_group if array.device.type == "cpu" else self._group

    def _finish(self, op: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """Gloo cannot make means."""
        return (lambda result: result.mul_(1 / self.world_size)) if op == "mean" else _as_it_is

    def _as_rows(self, result: torch.Tensor) -> torch.Tensor:
        return result.view(self.world_size, -1)


def _as_it_is(result: torch.Tensor) -> torch.Tensor:
    return result


def _backend(group: dist.ProcessGroup) -> str:
    """As `init_process_group` takes it, such as "gloo" or "cpu:gloo,cuda:nccl"."""
    return str(dist.get_backend_config(group))


def _takes_cpu(group: dist.ProcessGroup) -> bool:
    return any(one.partition(":")[0] == "cpu" for one in _backend(group).split(","))


def _with_gloo(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks with Gloo.

    Where they are not all ranks, they alone ask for it. torch.distributed names such a group by how many this process
    has: ranks that have made different numbers of groups before would wait for each other for ever.
    """
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=len(ranks) < dist.get_world_size())
