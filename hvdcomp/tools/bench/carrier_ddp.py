"""The `Carrier` for DistributedDataParallel, which exchanges gradients during `loss.backward()`. Measurements use the
library through this class."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import hvdcomp
from hvdcomp.compression import Compression
from hvdcomp.compressors import LEAST_BYTES, Compressor
from hvdcomp.tools.bench.carrier import Carrier, Distributed, Ready, named_parameters, sgd
from hvdcomp.tools.bench.workload import Workload
from hvdcomp.tools.train.ddp_learner import OWN_BUFFERS

_MIB = 2**20
FIRST_BUCKET_BYTES, BUCKET_BYTES = _MIB, 25 * _MIB  # DistributedDataParallel's own sizes


class DDPCarrier(Carrier):
    """A `Carrier` whose library is DistributedDataParallel.

    As in `hvdcomp train`, each rank keeps its own statistics of normalization layers, so only gradients are sent.
    """

    title = "DistributedDataParallel"
    network = "torch.distributed"
    warm_up = 4  # DDP rebuilds its buckets after the first step, and hvdcomp does not overlap in the first three steps
    start_s = 0.0
    bucket_bytes = float(BUCKET_BYTES)
    early_bytes = LEAST_BYTES  # a smaller bucket waits, and is sent with the next bucket
    shares_buckets = True

    def facts(self) -> dict[str, str]:
        return {
            "torch.distributed's backend": str(dist.get_backend()),
            "DistributedDataParallel's buckets": f"{FIRST_BUCKET_BYTES // _MIB}, then {BUCKET_BYTES // _MIB} MiB",
        }

    def with_stock(self, workload: Workload, method: str, name: str) -> Distributed:
        dense, _ = self.stock
        model = _wrapped(workload)
        if method != dense:
            model.register_comm_hook(None, fp16_compress_hook)
        return Distributed(model, sgd(workload))

    def with_one_number(self, workload: Workload, name: str) -> Distributed:
        model = _wrapped(workload)
        model.register_comm_hook(_OneNumber(), _hooked)
        return Distributed(model, sgd(workload))

    def with_cast(self, workload: Workload, compressor: Compressor, name: str) -> Distributed:
        return self.compressed(workload, str(compressor), name)

    def compressed(
        self, workload: Workload, spec: str, name: str, *, bucket_bytes: int | None = None, **options: Any
    ) -> Distributed:
        compression = Compression.from_spec(spec, named_parameters=named_parameters(workload, name), **options)
        model, optimizer = _wrapped(workload, bucket_bytes), sgd(workload)
        hvdcomp.ddp.register(model, compression, optimizer)
        return Distributed(model, optimizer, compression=compression)

    def sent_together(self, ready: Ready, dense_bytes: float) -> Ready:
        """The time at which each of DistributedDataParallel's buckets is full. A bucket ends with the gradient that
        fills it."""
        full: list[tuple[float, float]] = []
        begin, least = 0.0, FIRST_BUCKET_BYTES
        for sent, moment in ready:
            if (sent - begin) * dense_bytes >= least * (1 - 1e-9):
                full.append((sent, moment))
                begin, least = sent, BUCKET_BYTES
        return tuple(full if full and full[-1] == ready[-1] else [*full, ready[-1]])


class Loss(torch.nn.Module):
    """A workload as a PyTorch module, so that any loss can be wrapped in DistributedDataParallel."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model = workload.model
        self._loss = workload.loss

    def forward(self) -> torch.Tensor:
        return self._loss()


class _OneNumber:
    """Runs an allreduce of one number in each step, like hvdcomp's engine, but does not send gradients."""

    def __init__(self) -> None:
        self._number: Any = None

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Called by DistributedDataParallel for each bucket."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._number = dist.all_reduce(torch.full((1,), 1), async_op=True)
        on_host = buffer.device.type == "cpu"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=None if on_host else [buffer.device])
        if bucket.is_last():
            self._number.get_future().add_done_callback(lambda _: future.set_result(buffer))
        else:
            future.set_result(buffer)
        return future


def _hooked(state, bucket):
    """The hook for DistributedDataParallel. This function has no annotations, because DistributedDataParallel compares
    annotations with types. In this module, annotations are strings."""
    return state.reduce(bucket)


def _wrapped(workload: Workload, bucket_bytes: int | None = None) -> Any:
    """Wraps the loss of a workload in DistributedDataParallel, by default with DistributedDataParallel's own bucket
    sizes."""
    cap = None if bucket_bytes is None else bucket_bytes / _MIB
    options: dict[str, Any] = {**OWN_BUFFERS, "bucket_cap_mb": cap}
    return DistributedDataParallel(Loss(workload), **options)
