"""Runs PyTorch's communication hooks with one rank, on the same gradients in one bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdcomp.tools.bench.encode.gradients import TorchGradients

POWERSGD = "torch powerSGD_hook, rank 4"
FP16 = "torch fp16_compress_hook"
PEERS = (POWERSGD, FP16)


class _DDPBucket:
    """All gradients as one bucket. The class has only those methods of DistributedDataParallel's buckets that the hooks
    call."""

    def __init__(self, gradients: TorchGradients) -> None:
        self._flat = gradients.join()
        self._parts = list(gradients.arrays.values())

    def buffer(self) -> Any:
        return self._flat

    def gradients(self) -> Any:
        return self._parts

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def peer(name: str, gradients: TorchGradients, device: str) -> Callable[[], Any]:
    """Returns a function that runs one step of one of PyTorch's hooks and writes the result into the gradients.

    The step does not include gathering gradients into buckets, because DistributedDataParallel always keeps the
    gradients in its buckets. The PowerSGD hook uses error feedback and warm start, as it does by default.

    Args:
        name: name of a method of PyTorch, one of `PEERS`.
        gradients: the gradients of the measurement. The function moves these gradients into one bucket.
    """
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    bucket: Any = _DDPBucket(gradients)
    if name == FP16:
        world = dist.group.WORLD
        assert world is not None
        return lambda: default_hooks.fp16_compress_hook(world, bucket).wait()
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    state.iter = state.start_powerSGD_iter  # makes the first step compress
    return lambda: powerSGD_hook.powerSGD_hook(state, bucket).wait()
