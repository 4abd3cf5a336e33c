"""Runs collectives with torch.distributed, on PyTorch tensors."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hvdcomp.communicators import Communicator
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.errors import ConfigurationError

UNNAMED = ""
"""The name of all collectives of torch.distributed. All of them can have the same name, because torch.distributed
matches the collectives of different ranks by their order."""

_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# Newer versions of PyTorch have renamed two functions, and warn if the old names are used.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Started(NamedTuple):
    """A collective that was started and may not have ended yet.

    Attributes:
        work: the handle of the collective, from torch.distributed.
        result: the tensor into which torch.distributed writes.
        finish: function that computes the result of `wait` from `result`.
        sent: the tensor that this rank sends. This reference keeps the tensor alive until the collective ends.
    """

    work: Any
    result: torch.Tensor
    finish: Callable[[torch.Tensor], torch.Tensor]
    sent: torch.Tensor


class TorchDistributedCommunicator(Ranks):
    """Runs collectives among the ranks of a process group of torch.distributed, with asynchronous operations.

    torch.distributed matches the collectives of different ranks by their order, and ignores their names.

    Tensors on the CPU are sent through the process group if its backend accepts them, as Gloo does. Other backends,
    such as NCCL, do not accept such tensors. In this case, the constructor creates a second process group of the same
    ranks with Gloo. Therefore every rank must create the communicator at the same point.

    Args:
        group: the process group; None for the process group of all ranks.

    Attributes:
        group: the process group.

    Raises:
        ConfigurationError: if torch.distributed was not started, or this process is not in the process group.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun needs "gloo" alone
        >>> ranks = TorchDistributedCommunicator()
        >>> ranks.wait(ranks.start_allreduce(torch.ones(3), "mean", "any name"))
        tensor([1., 1., 1.])
        >>> dist.destroy_process_group()
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise ConfigurationError(
                "torch.distributed was not started: start the ranks with torchrun, and call "
                "torch.distributed.init_process_group() first"
            )
        world = dist.group.WORLD
        assert world is not None
        self.group = world if group is None else group
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ConfigurationError(
                f"rank {dist.get_rank()} was given a process group that does not contain rank {dist.get_rank()}; give "
                "each rank a process group that contains this rank"
            )
        self._next: dist.ProcessGroup | None = None
        self._root = dist.get_global_rank(self.group, 0)
        self._host_group = self.group if _takes_cpu(self.group) else _group_beside(self.group, "gloo")

    def move_to(self, group: dist.ProcessGroup) -> None:
        """Marks this communicator as stale, because its ranks have joined another process group. `renewed` then returns
        a communicator of `group`."""
        self._next = group

    @property
    def is_stale(self) -> bool:
        return self._next is not None

    def renewed(self) -> TorchDistributedCommunicator:
        if self._next is None:
            raise ConfigurationError(
                "roll_back works only if ranks join or leave during the training. With torch.distributed, ranks join "
                "or leave only through LocalSteps.change_ranks. Restart all ranks instead, and pass the state from a "
                "checkpoint to load_state_dict() before the first step"
            )
        return TorchDistributedCommunicator(self._next)

    def gather_bytes(self, own: np.ndarray, name: str) -> torch.Tensor:
        return self.wait(self.start_allgather(torch.from_numpy(own), name))

    def duplicate(self) -> TorchDistributedCommunicator:
        """A communicator of the same ranks with a process group of its own. A separate process group is needed because
        a collective waits for earlier collectives of the same process group."""
        return TorchDistributedCommunicator(_group_beside(self.group, _backend(self.group)))

    def start_allreduce(self, array: torch.Tensor, op: str, name: str) -> Started:
        work = dist.all_reduce(array, op=_OPS[op], group=self._group_for(array), async_op=True)
        return Started(work, array, self._finish(op), array)

    def start_allgather(self, array: torch.Tensor, name: str) -> Started:
        array = array.contiguous()
        gathered = array.new_empty(self.world_size * array.shape[0])
        work = all_gather(gathered, array, group=self._group_for(array), async_op=True)
        return Started(work, gathered, self._as_rows, array)

    def start_alltoall(self, array: torch.Tensor, name: str) -> Started:
        array = array.contiguous()
        received = torch.empty_like(array)
        work = dist.all_to_all_single(received, array, group=self._group_for(array), async_op=True)
        return Started(work, received, self._as_rows, array)

    def start_reducescatter(self, array: torch.Tensor, op: str, name: str) -> Started:
        group, finish = self._group_for(array), self._finish(op)
        if f"{array.device.type}:gloo" in _backend(group).split(","):
            # With Gloo, the reduce-scatter of torch.distributed would be an allreduce of all rows, which sends twice as
            # many bytes as an alltoall.
            work, rows, _, sent = self.start_alltoall(array, name)
            return Started(work, rows, lambda rows: finish(self._as_rows(rows).sum(0)), sent)
        array = array.contiguous()
        own = array.new_empty(array.shape[0] // self.world_size)
        work = reduce_scatter(own, array, op=_OPS[op], group=group, async_op=True)
        return Started(work, own, finish, array)

    def start_broadcast(self, array: torch.Tensor, name: str) -> Started:
        work = dist.broadcast(array, self._root, group=self._group_for(array), async_op=True)
        return Started(work, array, _unchanged, array)

    def is_done(self, started: Started) -> bool:
        """Whether `wait` would return at once."""
        return bool(started.work.is_completed())

    def wait(self, started: Started) -> torch.Tensor:
        started.work.wait()
        return started.finish(started.result)

    # Methods of `Ranks`.

    @property
    def number(self) -> int:
        return dist.get_rank()

    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Communicator]:
        every, backend = dist.get_process_group_ranks(self.group), _backend(self.group)
        has_all = len(every) == dist.get_world_size()
        handles = {
            members: _part_of(self.group, [every[rank] for rank in members], backend)
            for members in groups
            if has_all or self.rank in members
        }
        return {members: TorchDistributedCommunicator(handles[members]) for members in groups if self.rank in members}

    def place(self) -> tuple[int, int]:
        """The number of this rank's node and the number of ranks on this node, from torchrun's environment variables.
        Other launchers do not set these variables. With such launchers, the result is a hash of the host's name, and
        0."""
        node, size = os.environ.get("GROUP_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
        if node is not None and size is not None:
            return int(node), int(size)
        return zlib.crc32(socket.gethostname().encode()) >> 1, 0

    def _group_for(self, array: torch.Tensor) -> dist.ProcessGroup:
        return self._host_group if array.device.type == "cpu" else self.group

    def _finish(self, op: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that computes the final result from what torch.distributed returned. For "mean", it divides the
        sum by the number of ranks, because Gloo cannot compute means."""
        return (lambda result: result.mul_(1 / self.world_size)) if op == "mean" else _unchanged

    def _as_rows(self, result: torch.Tensor) -> torch.Tensor:
        return result.view(self.world_size, -1)


def _unchanged(result: torch.Tensor) -> torch.Tensor:
    return result


def _backend(group: dist.ProcessGroup) -> str:
    """The backend of each type of device in a process group, such as "cpu:gloo,cuda:nccl"."""
    return str(dist.get_backend_config(group))


def _takes_cpu(group: dist.ProcessGroup) -> bool:
    return any(backend.partition(":")[0] == "cpu" for backend in _backend(group).split(","))


def _group_beside(group: dist.ProcessGroup, backend: str) -> dist.ProcessGroup:
    """Creates a new process group of the same ranks. Call this function on all ranks of `group`."""
    return _part_of(group, dist.get_process_group_ranks(group), backend)


def _part_of(group: dist.ProcessGroup, ranks: list[int], backend: str) -> dist.ProcessGroup:
    """Creates a new process group of some ranks of the process group `group`. If `group` has all ranks of the job, all
    ranks must call this function with the same `ranks`. If not, all ranks of `group` call this function at the same
    point, and each rank passes as `ranks` the members of the new process group that contains itself."""
    alike = {"backend": backend, **_waits_like(group)}
    if dist.get_world_size(group) == dist.get_world_size():
        return dist.new_group(ranks, **alike)
    world = dist.distributed_c10d._world
    before = world.group_count
    try:
        world.group_count = _agree_on_a_name(group)
        return dist.new_group(ranks, use_local_synchronization=True, **alike)
    finally:
        # From PyTorch 2.14 on, creating the process group increases this count, but only on the ranks that create it.
        # When all ranks create a process group later, its name contains the count. If the counts differed, the ranks
        # would use different names and wait forever.
        world.group_count = before


# The next count for the name of a process group that only some ranks create. PyTorch's own counts are always smaller.
_next_count = 2**32


def _agree_on_a_name(group: dist.ProcessGroup) -> int:
    """Ensures that the ranks of a process group will compute the same name for a new process group that other ranks of
    the job do not create.

    Up to PyTorch 2.13, torch.distributed computes the name from the number of process groups that the rank is in. If a
    rank is in fewer process groups than another rank, this function creates process groups of this single rank, until
    the numbers are equal. Later versions of PyTorch use a count, which this function returns.
    """
    global _next_count
    world = dist.distributed_c10d._world
    own = len(world.pg_names), _next_count
    every = [own] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group)
    numbers, counts = zip(*every, strict=True)
    world.group_count = max(counts)
    for _ in range(own[0], max(numbers)):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    agreed = max(counts) + max(numbers) - min(numbers)  # no rank has a higher count than this number now
    _next_count = agreed + 1
    return agreed


def _waits_like(group: dist.ProcessGroup) -> dict[str, Any]:
    """The keyword argument that gives a new process group the timeout of `group`. The argument is omitted if the
    timeout is unknown, because PyTorch 2.1 does not accept None."""
    timeout = _timeout(group)
    return {} if timeout is None else {"timeout": timeout}


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a process group's collectives; None if its backend does not provide it."""
    device = _backend(group).partition(":")[0]
    backend = group._get_backend(torch.device(device))
    return getattr(getattr(backend, "options", None), "_timeout", None)
