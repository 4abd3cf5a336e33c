"""What compressing costs: the time of a whole engine step without a network, against one copy of the gradients.

Every method is measured in a process of its own, so that its peak memory is its own too, and takes turns with the
copy, so that the ratio holds when the machine's speed drifts. A step is all that compression adds to training but the
network: error feedback, the check for non-finite gradients, encoding, packing, decoding.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange import Engine
from hvdcomp.perfmodel.shapes import tensors_of

PEER = "torch powerSGD_hook, rank 4"
MOST_SPREAD = 0.15
"""By how much the copy may differ between methods for them to be compared: it is the same work in every row."""


class UnsteadyError(Exception):
    """The machine was not equally fast for all methods; the message says by how much, and what to do."""


@dataclass(frozen=True)
class Measurement:
    """One method on one model.

    Attributes:
        step_ms, copy_ms: medians over the repeats.
        ratio: the median of step / copy, pair by pair.
        encode_ms, decode_ms: the part of the compressor and the memory in the last step; None for the peer.
        peak_mb: the rise of the process's peak memory over having the gradients and one copy of them, in MiB.
        bytes_sent: by one rank in a step; None for the peer.
    """

    method: str
    step_ms: float
    copy_ms: float
    ratio: float
    encode_ms: float | None
    decode_ms: float | None
    peak_mb: float
    bytes_sent: int | None
    compression_factor: float | None


@dataclass(frozen=True)
class Request:
    """What to measure, in words that travel to another process."""

    method: str
    model: str
    repeats: int
    ranks: int
    threads: int
    device: str


def measure(request: Request) -> Measurement:
    """Measures one method in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (request,))


def _measure(request: Request) -> Measurement:
    import torch

    torch.set_num_threads(request.threads)
    generator = torch.Generator().manual_seed(0)
    gradients = {
        tensor.name: (torch.randn(tensor.shape, generator=generator) * 1e-3).to(request.device)
        for tensor in tensors_of(request.model)
    }
    run, engine = (_peer(gradients), None) if request.method == PEER else _ours(request, gradients)
    copies = [gradient.clone() for gradient in gradients.values()]
    del copies
    start_memory = _peak_memory(request.device)
    for _ in range(2):  # the first step makes the state
        run()
    peak_memory = _peak_memory(request.device) - start_memory
    # Into memory that is there: what fresh memory costs depends on what the method freed before.
    targets = [gradient.clone() for gradient in gradients.values()]

    def copy() -> None:
        for target, gradient in zip(targets, gradients.values(), strict=True):
            target.copy_(gradient)

    steps, copies_s = [], []
    for _ in range(request.repeats):
        copies_s.append(_timed(copy, request.device))
        steps.append(_timed(run, request.device))
    last = engine.ledger.last if engine is not None else None
    return Measurement(
        method=request.method,
        step_ms=1000 * statistics.median(steps),
        copy_ms=1000 * statistics.median(copies_s),
        ratio=statistics.median(step / copy for step, copy in zip(steps, copies_s, strict=True)),
        encode_ms=None if last is None or last.encode_seconds is None else 1000 * last.encode_seconds,
        decode_ms=None if last is None or last.decode_seconds is None else 1000 * last.decode_seconds,
        peak_mb=peak_memory / 2**20,
        bytes_sent=None if last is None else last.bytes_sent,
        compression_factor=None if last is None else last.dense_bytes / last.bytes_sent,
    )


def _ours(request: Request, gradients: dict[str, Any]) -> tuple[Callable[[], Any], Engine]:
    engine = Engine(
        LoopbackCommunicator(request.ranks), tensors_of(request.model), parse_compressor(request.method)
    )

    def run() -> None:
        engine.begin()
        engine.step(gradients)

    return run, engine


class _Bucket:
    """All gradients as one bucket, with the methods of DistributedDataParallel's buckets that its hooks call."""

    def __init__(self, gradients: dict[str, Any]) -> None:
        import torch

        self._flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
        parts = self._flat.split([gradient.numel() for gradient in gradients.values()])
        self._parts = [part.view(like.shape) for part, like in zip(parts, gradients.values(), strict=True)]

    def buffer(self) -> Any:
        return self._flat

    def gradients(self) -> Any:
        return self._parts

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def _peer(gradients: dict[str, Any]) -> Callable[[], Any]:
    """PyTorch's own PowerSGD hook, in a world of one; error feedback and warm start are on by default."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    state.iter = state.start_powerSGD_iter  # compress from the first step
    bucket = _Bucket(gradients)
    return lambda: powerSGD_hook.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]


def _timed(work: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _peak_memory(device: str) -> int:
    """Bytes: the highest so far."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    import torch

    return torch.cuda.max_memory_allocated()


def check_steady(measurements: Sequence[Measurement]) -> None:
    """Sees that all methods were measured on an equally fast machine, by the copy that took turns with each.

    Raises:
        UnsteadyError: if the slowest copy took more than `MOST_SPREAD` longer than the fastest.
    """
    fast, slow = (pick(measurements, key=lambda one: one.copy_ms) for pick in (min, max))
    spread = slow.copy_ms / fast.copy_ms - 1
    if spread > MOST_SPREAD:
        raise UnsteadyError(
            f"one copy of the same gradients took {fast.copy_ms:.1f} ms beside {fast.method} and {slow.copy_ms:.1f} ms "
            f"beside {slow.method}: {spread:.0%} more, where {MOST_SPREAD:.0%} is allowed. The machine was not equally "
            "fast for all methods, so their rows cannot be compared. End what else runs on it, or take another "
            "machine, and measure again with more --repeats"
        )


def as_json(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """The measurements as plain data."""
    return [asdict(measurement) for measurement in measurements]
