"""Runs collectives with Horovod, on PyTorch tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvdcomp.communicators.horovod_ranks import HorovodRanks


class _Started(NamedTuple):
    handle: int
    name: str
    # Number of elements that each rank contributes to the result of an allgather or alltoall; otherwise None.
    length: int | None


class HorovodTorchCommunicator(HorovodRanks):
    """Runs collectives among the ranks of a Horovod process set, with Horovod's asynchronous operations. By default,
    the process set has all ranks."""

    def __init__(self, process_set: hvd.ProcessSet | None = None) -> None:
        super().__init__(hvd, process_set or hvd.global_process_set)

    def gather_bytes(self, own: np.ndarray, name: str) -> torch.Tensor:
        return self.wait(self.start_allgather(torch.from_numpy(own), name))

    def start_allreduce(self, array: torch.Tensor, op: str, name: str) -> _Started:
        handle = hvd.allreduce_async_(array, name=name, op=self._ops[op], process_set=self._process_set)
        return _Started(handle, name, None)

    def start_allgather(self, array: torch.Tensor, name: str) -> _Started:
        handle = hvd.allgather_async(array, name=name, process_set=self._process_set)
        return _Started(handle, name, array.shape[0])

    def start_alltoall(self, array: torch.Tensor, name: str) -> _Started:
        handle = hvd.alltoall_async(array, name=name, process_set=self._process_set)
        return _Started(handle, name, array.shape[0] // self.world_size)

    def start_reducescatter(self, array: torch.Tensor, op: str, name: str) -> _Started:
        handle = hvd.reducescatter_async(array, name=name, op=self._ops[op], process_set=self._process_set)
        return _Started(handle, name, None)

    def start_broadcast(self, array: torch.Tensor, name: str) -> _Started:
        handle = hvd.broadcast_async_(array, self.root, name=name, process_set=self._process_set)
        return _Started(handle, name, None)

    def is_done(self, started: _Started) -> bool:
        """Whether `wait` would return at once."""
        return bool(hvd.poll(started.handle))

    def wait(self, started: _Started) -> Any:
        try:
            result = hvd.synchronize(started.handle)
        except HorovodInternalError as error:
            if "Join" in str(error):
                raise HorovodInternalError(
                    "hvd.join() does not work with gradient compression: Horovod refuses to all-gather once a rank has "
                    "joined. Give every rank the same number of batches."
                ) from error
            raise
        if started.length is None:
            return result
        if isinstance(result, tuple):  # an alltoall also returns the number of elements from each rank
            result = result[0]
        self.check_gathered(result.shape[0], started.length, started.name)
        return result.view(self.world_size, started.length)
