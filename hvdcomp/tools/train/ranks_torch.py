"""The ranks of a run with torch.distributed."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdcomp.tools.train import environment
from hvdcomp.tools.train.options import SetupError
from hvdcomp.tools.train.ranks import Ranks

_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchRanks(Ranks):
    """All ranks of torchrun, or of another launcher that sets the same variables. Without a launcher, this process is
    the only rank. torch.distributed is initialized if necessary. It uses Gloo, and NCCL for tensors on CUDA devices
    unless several ranks share a device.

    Args:
        timeout: seconds that a rank waits for another rank; None for PyTorch's default.

    Raises:
        SetupError: if a variable of the launcher is missing, or the job would hang after a restart.
    """

    backend = "ddp"
    controller = "gloo"

    def __init__(self, timeout: float | None = None) -> None:
        if not dist.is_initialized():
            _start(None if timeout is None else timedelta(seconds=timeout))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.restarts = environment.restarts()

    def gather(self, value: Any, name: str) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast(self, value: Any, name: str) -> Any:
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def leave(self, code: int) -> None:
        super().leave(code)
        dist.destroy_process_group()
        # PyTorch 2.13 does not end Gloo's threads when a process group is destroyed. If such a thread frees a tensor
        # while the interpreter ends, the process is aborted, and torchrun reports that a finished training run has
        # failed (https://github.com/pytorch/pytorch/pull/179291).
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _libraries(store: dist.Store, size: int) -> str:
    """The libraries that send tensors, in the notation of `init_process_group`. All ranks must call this function, and
    get the same result. NCCL is used for tensors on CUDA devices only if each rank has its own device, because NCCL
    does not allow ranks to share a device."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        store.add("hvdcomp/ranks with their own device", 1)
    # The last rank that calls this function sees the answers of all ranks.
    if store.add("hvdcomp/ranks that were asked", 1) == size:
        have_own_devices = store.add("hvdcomp/ranks with their own device", 0) == size
        store.set("hvdcomp/libraries", "cpu:gloo,cuda:nccl" if have_own_devices else "gloo")
    return store.get("hvdcomp/libraries").decode()


def _start(timeout: timedelta | None) -> None:
    """Calls `init_process_group`, in a way that also works after a restart by torchrun."""
    present = [name for name in _PLACE if name in os.environ]
    if not present:
        _connect(dist.HashStore(), 0, 1, timeout)
        return
    if len(present) < len(_PLACE):
        missing = ", ".join(name for name in _PLACE if name not in present)
        first = present[0]
        raise SetupError(f"{first} is set, but {missing} is not: start the ranks with torchrun, or unset {first}")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        store, rank, size = next(dist.rendezvous("env://", **options))
        _connect(dist.PrefixStore("hvdcomp", store), rank, size, timeout)
        return
    # All restarts of torchrun share a store, which still contains the addresses of earlier ranks.
    nodes, restarts = os.environ["GROUP_WORLD_SIZE"], os.environ["TORCHELASTIC_MAX_RESTARTS"]
    if nodes != "1" and restarts != "0":
        raise SetupError(
            f"--max-restarts {restarts} of torchrun does not work on {nodes} nodes. The ranks would wait forever after "
            "a restart, because torchrun gives them the addresses of earlier ranks. Set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every node, or give --max-restarts 0"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    restart_store = dist.PrefixStore(f"hvdcomp/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    _connect(restart_store, rank, size, timeout)


def _connect(store: dist.Store, rank: int, size: int, timeout: timedelta | None) -> None:
    libraries = _libraries(store, size)
    dist.init_process_group(libraries, store=store, rank=rank, world_size=size, timeout=timeout)
