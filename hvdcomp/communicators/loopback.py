"""A communicator that behaves as if all ranks sent the same payload. This communicator is used to measure, in one
process, how long a rank takes to decode the payloads of many ranks."""

from __future__ import annotations

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import AnyArray


class LoopbackCommunicator:
    """Returns the results of collectives as if each of `size` ranks had sent the payload of this rank. Gathered
    payloads need the same memory as with real ranks."""

    def __init__(self, size: int = 1, ranks_per_node: int = 1) -> None:
        self.rank = 0
        self.world_size = size
        self._ranks_per_node = ranks_per_node

    def part(self, group: str) -> LoopbackCommunicator:
        if group == "all":
            return self
        inside = self._ranks_per_node
        return LoopbackCommunicator(inside if group == "node" else self.world_size // inside)

    def start_allreduce(self, array: AnyArray, op: str, name: str) -> AnyArray:
        return array * self.world_size if op == "sum" and self.world_size > 1 else array

    def start_allgather(self, array: AnyArray, name: str) -> AnyArray:
        xp = arrays_for(array)
        ranks = xp.concatenate([array] * self.world_size) if self.world_size > 1 else array
        return xp.reshape(ranks, (self.world_size, array.shape[0]))

    def start_alltoall(self, array: AnyArray, name: str) -> AnyArray:
        xp = arrays_for(array)
        own = array[: array.shape[0] // self.world_size]
        return xp.reshape(xp.concatenate([own] * self.world_size), (self.world_size, own.shape[0]))

    def start_reducescatter(self, array: AnyArray, op: str, name: str) -> AnyArray:
        return self.start_allreduce(array, op, name)[: array.shape[0] // self.world_size]

    def start_broadcast(self, array: AnyArray, name: str) -> AnyArray:
        return array

    def wait(self, started: AnyArray) -> AnyArray:
        return started
