"""What collectives cost here, measured through Horovod itself, by all ranks at once. PyTorch's binding, on the CPU.

Each size is measured in two passes over all sizes, so that a disturbance shows as a difference between the passes.
Where it does, there are two more, and the median sees little of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import horovod.torch as hvd
import torch

from hvdcomp.bench.fit import Reading, extra_per_byte, fit_collective, reading
from hvdcomp.perfmodel.network import ALGORITHMS, Network, reduction_of_scatter

Show = Callable[[str], None]

_PASSES = 2
_TINY = 64  # bytes
_SMALLEST = 1 << 12
_LEAST = 1 << 18  # bytes up to which every calibration goes
_GROWTH = 4
_COMPARED = 2  # number of the largest sizes at which element types and fusion are compared
_FUSED_PARTS = 16
_FITTED = {"allreduce": "ring", "allgather": "ring", "alltoall": "pairwise", "reducescatter": "ring"}
_FEWEST, _MOST = 3, 20  # samples of a size in a pass
_LONGEST_S = 1.5  # a size that would take longer is left to the bandwidth


@dataclass(frozen=True)
class NetworkProbe:
    """What was measured.

    Attributes:
        network: as the performance model takes it.
        readings: every time that went into it, by what it is.
    """

    network: Network
    readings: dict[str, Reading]


def cycle_seconds() -> float:
    """Horovod's cycle time, as it was set or is by default."""
    return float(os.environ.get("HOROVOD_CYCLE_TIME") or 1.0) / 1000


def fusion_threshold() -> int:
    """Bytes that Horovod sends at a time at most, as it was set or is by default."""
    return int(os.environ.get("HOROVOD_FUSION_THRESHOLD") or 128 * 1024 * 1024) or 1


def probe_network(largest: Mapping[str, int], seconds: float, show: Show) -> NetworkProbe:
    """Measures each kind of collective by size, the adding up of float16, and Horovod's fusion.

    To be called on every rank, with the same arguments.

    Args:
        largest: by kind, in the order in which they are to be measured, the bytes that a rank hands to the largest one
            that matters.
        seconds: about how long to take.
        show: called with what comes next.
    """
    ranks = hvd.size()
    measuring = _Measuring(seconds, show)
    costs: dict[str, Any] = {}
    for kind, most in largest.items():
        sizes = [_TINY, _SMALLEST]
        while sizes[-1] < max(most, _LEAST):
            sizes.append(sizes[-1] * _GROWTH)
        times = measuring.by_size((kind,), sizes)[kind]
        if kind == "allreduce":
            compared = [size for size in times if size >= _LEAST][-_COMPARED:]
        handed = [_handed(kind, size) for size in times]
        costs[kind] = fit_collective(kind, _FITTED[kind], ranks, handed, list(times.values()), cycle_seconds())
    # In turns, as it is their differences that count.
    plain, half, fused = (
        list(times.values()) for times in measuring.by_size(("float32", "float16", "fused"), compared).values()
    )
    traffic = [float(ALGORITHMS["allreduce"]["ring"](size, float(ranks)).bytes) for size in compared]
    float16 = extra_per_byte(traffic, half, plain)
    costs["allreduce"] = replace(
        costs["allreduce"],
        fusion_s_per_byte=extra_per_byte(compared, fused, plain),
        reduction_s_per_byte={"float16": float16} if float16 else {},
    )
    added = reduction_of_scatter(costs["allreduce"].reduction_s_per_byte)
    costs["reducescatter"] = replace(costs["reducescatter"], reduction_s_per_byte=added)
    return NetworkProbe(Network(**costs), measuring.readings)


class _Measuring:
    """Times collectives, by kind and size, and keeps what was measured."""

    def __init__(self, seconds: float, show: Show) -> None:
        # Some thirty sizes and kinds, of which half are too small to take any time.
        self._per_size = seconds / 18 / _PASSES
        self._show = show
        self.readings: dict[str, Reading] = {}

    def by_size(self, kinds: Sequence[str], sizes: list[int]) -> dict[str, dict[int, float]]:
        """Seconds by bytes, of each kind; after a size that takes long, the larger ones are left out."""
        samples: dict[tuple[str, int], list[list[float]]] = {}
        kept = list(sizes)
        for number in range(_PASSES):
            for size in list(kept):
                slow = False
                for kind in kinds:
                    self._show(f"{kind} of {_in_words(size)}, pass {number + 1} of {_PASSES}")
                    taken, first = self._sample(kind, size)
                    samples.setdefault((kind, size), []).append(taken)
                    slow = slow or first * _GROWTH > _LONGEST_S
                if slow:
                    kept = kept[: kept.index(size) + 1]
                    break
        disturbed = [size for size in kept if any(reading(samples[kind, size]).noisy for kind in kinds)]
        for _ in range(_PASSES):
            for size in disturbed:
                for kind in kinds:
                    self._show(f"{kind} of {_in_words(size)}, once more")
                    samples[kind, size].append(self._sample(kind, size)[0])
        times: dict[str, dict[int, float]] = {kind: {} for kind in kinds}
        for (kind, size), passes in samples.items():
            if size in kept:
                self.readings[f"{kind} of {_in_words(size)}"] = one = reading(passes)
                times[kind][size] = one.seconds
        return times

    def _sample(self, kind: str, size: int) -> tuple[list[float], float]:
        """Seconds of several collectives, each the mean of all ranks, and of one before them."""
        start = _starter(kind, size)
        hvd.synchronize(start())  # Horovod negotiates a new name
        first = _agreed([_timed(start)])[0]
        count = int(min(_MOST, max(_FEWEST, self._per_size / max(first, 1e-6))))
        return _agreed([_timed(start) for _ in range(count)]), first


def _starter(kind: str, size: int) -> Callable[[], Any]:
    """A function that starts one collective under a name of its own; all are averages, as gradients are."""
    name = f"hvdcomp.calibrate.{kind}.{size}"
    if kind in ("allgather", "alltoall"):
        sent = torch.zeros(_handed(kind, size), dtype=torch.uint8)
        function = getattr(hvd, f"{kind}_async")
        return lambda: function(sent, name=name)
    if kind == "fused":
        parts = [torch.zeros(size // 4 // _FUSED_PARTS) for _ in range(_FUSED_PARTS)]
        return lambda: hvd.grouped_allreduce_async_(parts, name=name, op=hvd.Average)
    dtype, width = (torch.float16, 2) if kind == "float16" else (torch.float32, 4)
    reduced = torch.zeros(_handed(kind, size) // width, dtype=dtype)
    if kind == "reducescatter":
        return lambda: hvd.reducescatter_async(reduced, name=name, op=hvd.Average)
    return lambda: hvd.allreduce_async_(reduced, name=name, op=hvd.Average)


def _handed(kind: str, size: int) -> int:
    """The bytes that a rank really hands over: an alltoall and a reduce-scatter need as many for each rank, of whole
    float32."""
    rows = 4 * hvd.size() if kind in ("alltoall", "reducescatter") else 1
    return max(1, size // rows) * rows


def _timed(start: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    hvd.synchronize(start())
    return time.perf_counter() - begin


def _agreed(seconds: list[float]) -> list[float]:
    """The means of all ranks: the same on each, so that all decide alike."""
    mine = torch.tensor(seconds, dtype=torch.float64)
    return hvd.allreduce(mine, name=f"hvdcomp.calibrate.agreed.{len(seconds)}", op=hvd.Average).tolist()


def _in_words(size: int) -> str:
    for unit, amount in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= amount:
            return f"{size / amount:g} {unit}"
    return f"{size} bytes"
