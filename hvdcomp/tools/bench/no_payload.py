"""A communicator for steps without a payload. Such a step does all the work of a real step, but does not send the
payload. This module needs PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from hvdcomp.communicators import Communicator, LoopbackCommunicator


class NoPayload(Communicator):
    """Runs every collective on all ranks, but sends only eight bytes in it (or eight bytes to each rank, if ranks get
    different bytes). The results are computed from this rank's own data, as if all ranks had sent the same data.

    Args:
        method: the beginning of the collectives' names.
        ranks: the communicator that runs the collectives.
    """

    def __init__(self, method: str, ranks: Communicator) -> None:
        self.rank, self.world_size = 0, ranks.world_size
        self._method = method
        self._ranks = ranks
        self._answers = LoopbackCommunicator(ranks.world_size)

    def part(self, group: str) -> Communicator:
        if group == "all":
            return self
        part = self._ranks.part(group)
        return part if part.world_size == 1 else (_Node if group == "node" else NoPayload)(self._method, part)

    def start_allreduce(self, array: torch.Tensor, op: str, name: str) -> Any:
        handle = self._ranks.start_allreduce(_zeros(8, array, torch.float32), "sum", f"{self._method}.{name}")
        return handle, self._answers.start_allreduce(array, op, name)

    def start_allgather(self, array: torch.Tensor, name: str) -> Any:
        handle = self._ranks.start_allgather(_zeros(8, array), f"{self._method}.{name}")
        return handle, self._answers.start_allgather(array, name)

    def start_alltoall(self, array: torch.Tensor, name: str) -> Any:
        sent = _zeros(8 * self.world_size, array)
        handle = self._ranks.start_alltoall(sent, f"{self._method}.{name}")
        return handle, self._answers.start_alltoall(array, name)

    def start_reducescatter(self, array: torch.Tensor, op: str, name: str) -> Any:
        sent = _zeros(8 * self.world_size, array, torch.float32)
        handle = self._ranks.start_reducescatter(sent, "sum", f"{self._method}.{name}")
        return handle, self._answers.start_reducescatter(array, op, name)

    def start_broadcast(self, array: torch.Tensor, name: str) -> Any:
        handle = self._ranks.start_broadcast(_zeros(8, array), f"{self._method}.{name}")
        return handle, self._answers.start_broadcast(array, name)

    def wait(self, started: Any) -> torch.Tensor:
        self._ranks.wait(started[0])
        return started[1]


def _zeros(size: int, like: torch.Tensor, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Zeros of `size` bytes, on the device of the payload `like`."""
    return torch.zeros(size // dtype.itemsize, dtype=dtype, device=like.device)


class _Node(NoPayload):
    """A communicator for the ranks of a node. The results are computed as if the other ranks of the node sent zeros.

    In a two-level exchange, a rank multiplies its residual by the number of ranks of the node, because the mean divides
    by this number. If the results were computed as if the other ranks sent the same residual, residuals would grow
    without limit.
    """

    def __init__(self, method: str, ranks: Communicator) -> None:
        super().__init__(method, ranks)
        self.rank = ranks.rank

    def start_allreduce(self, array: torch.Tensor, op: str, name: str) -> Any:
        handle, _ = super().start_allreduce(array, "mean", name)
        return handle, array / self.world_size if op == "mean" else array

    def start_reducescatter(self, array: torch.Tensor, op: str, name: str) -> Any:
        handle, _ = super().start_reducescatter(array, "mean", name)
        own_part = array.view(self.world_size, -1)[self.rank]
        return handle, own_part / self.world_size if op == "mean" else own_part.clone()
