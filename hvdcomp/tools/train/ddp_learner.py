"""Trains in PyTorch under torch.distributed: `DistributedDataParallel` with `hvdcomp.ddp.register`."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hvdcomp
from hvdcomp.compression import Compression
from hvdcomp.tools.train.torch_learner import TorchLearner, loss_of

_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_LEAVES_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"
OWN_BUFFERS: dict[str, Any] = {_LEAVES_BUFFERS: False}
"""The option that keeps forward passes from synchronizing buffers. In newer versions of PyTorch, the older name of this
option causes a warning."""


class DDPLearner(TorchLearner):
    """A `Learner` that trains with DistributedDataParallel."""

    def broadcast(self) -> None:
        # As with Horovod, each rank keeps its own statistics of normalization layers until the end of an epoch.
        options: dict[str, Any] = {**OWN_BUFFERS}
        if self._options.bucket_bytes is not None:
            options["bucket_cap_mb"] = self._options.bucket_bytes / 2**20
        self._serve_tables()
        self._ddp = DistributedDataParallel(self._model, **options)  # this copies the weights and buffers of rank 0
        self._begin()

    def compression(self, spec: str, **options: Any) -> Compression:
        # None: DistributedDataParallel's buckets are used
        return super().compression(spec, **{**options, "bucket_bytes": None})

    def distribute(self, compression: Compression) -> None:
        if self._steps_alone:
            self._distribute_steps(compression)
            return
        self._compression = compression
        hvdcomp.ddp.register(self._ddp, compression, self._optimizer)

    def _backward(self, inputs: Tensor, targets: Tensor, passes: int, last: bool) -> Tensor:
        with nullcontext() if last and not self._steps_alone else self._ddp.no_sync():
            loss = loss_of(self._ddp(inputs), targets) / passes
            loss.backward()
        return loss.detach()
