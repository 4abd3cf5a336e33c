"""Measures the costs of collectives on all ranks together, with the library that exchanges gradients. This module needs
PyTorch.

In a two-level exchange, all groups of ranks on a level exchange at the same time and share links, as they do in
training.

Two passes measure all sizes. If something disturbs a measurement, the two passes differ. Sizes whose times differ are
measured in two more passes, so that the disturbance hardly affects the median.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hvdcomp.communicators import Communicator
from hvdcomp.perfmodel.network import (
    ALGORITHMS,
    Among,
    CollectiveCost,
    Network,
    TwoLevelCosts,
    reduction_of_scatter,
)
from hvdcomp.tools.bench.carrier import Carrier
from hvdcomp.tools.bench.fit import Reading, extra_per_byte, fit_collective, reading
from hvdcomp.tools.bench.levels import Levels
from hvdcomp.tools.bench.marks import wait_for

Show = Callable[[str], None]
Kind = tuple[str, str]  # the kind of a collective, and its group of ranks

IN_LEVELS: tuple[Kind, ...] = (
    *((kind, "node") for kind in ("allreduce", "allgather", "reducescatter")),
    *((kind, "across") for kind in ("allreduce", "allgather", "alltoall")),
)
"""The collectives that are measured for two-level exchanges. The costs of other collectives are predicted from the
costs of these collectives."""

_PASSES = 2
_TINY = 64  # bytes
_SMALLEST = 1 << 12
_LEAST = 1 << 18  # every calibration measures sizes up to this number of bytes
_GROWTH = 4
_COMPARED = 2  # element types and fusion are compared at this number of the largest sizes
_FUSED_PARTS = 16
_SMALL_SHARE = 0.5  # about this share of the sizes is so small that the transfer takes no time
_IN_WORDS = {"all": "", "node": " within nodes", "across": " between nodes"}
_FITTED = {"allreduce": "ring", "allgather": "ring", "alltoall": "pairwise", "reducescatter": "ring"}
_FEWEST, _MOST = 3, 20  # minimum and maximum number of samples for each size in a pass
# Collectives that take longer than a limit between these two numbers are not measured. Their times are computed from
# the bandwidth.
_SHORTEST_S, _LONGEST_S = 0.05, 1.5
# If every size of one kind of collective is measured with the minimum number of samples, all sizes together take as
# long as this number of collectives of the largest size.
_RUNS = (2 + _FEWEST) * _PASSES * _GROWTH / (_GROWTH - 1)


@dataclass(frozen=True)
class NetworkProbe:
    """The results of measuring the network.

    Attributes:
        network: the costs of collectives, for the performance model.
        readings: all measured times, by name. The costs were computed from these times.
        source: a text that names the source of the costs, if the network was not measured; empty if it was measured.
    """

    network: Network
    readings: dict[str, Reading]
    source: str = ""


def probe_network(
    largest: Mapping[Kind, int], carrier: Carrier, levels: Levels, device: torch.device, seconds: float, show: Show
) -> NetworkProbe:
    """Measures each kind of collective for several sizes, the reduction of float16, and the fusion of several tensors.

    Every rank must call this function with the same arguments.

    Args:
        largest: for each kind of collective, in the order of measurement, the bytes that a rank sends in the largest
            collective that is needed. The keys are all kinds of collectives among all ranks and, if a two-level
            exchange is possible, the kinds in `IN_LEVELS`.
        carrier: the library that exchanges the gradients.
        levels: how the ranks are distributed over nodes.
        device: device of the arrays that the collectives send.
        seconds: approximate duration of the measurements.
        show: function that is called with the name of the next measurement.
    """
    sizes = {kind: _sizes(most) for kind, most in largest.items()}
    fuses = carrier.fused_allreduce is not None
    alike = ("float32", "float16", *(["fused"] if fuses else []))
    number = sum(map(len, sizes.values())) + len(alike) * _COMPARED
    longest = min(_LONGEST_S, max(_SHORTEST_S, seconds / (len(sizes) + len(alike)) / _RUNS))
    measuring = _Measuring(carrier, levels, device, seconds / number, longest, show)
    costs: dict[Kind, CollectiveCost] = {}
    for (kind, among), wanted_sizes in sizes.items():
        times = measuring.by_size((kind,), wanted_sizes, among)[kind]
        if (kind, among) == ("allreduce", "all"):
            compared = [size for size in times if size >= _LEAST][-_COMPARED:]
        ranks = levels.ranks.part(among).world_size
        payloads = [_handed(kind, size, ranks) for size in times]
        cost = fit_collective(kind, _FITTED[kind], ranks, payloads, list(times.values()), carrier.start_s)
        costs[kind, among] = cost
    # The measurements of these kinds alternate, because only the differences between their times are used.
    plain, half, *fused = (list(times.values()) for times in measuring.by_size(alike, compared).values())
    traffic = [float(ALGORITHMS["allreduce"]["ring"](size, float(carrier.ranks.size)).bytes) for size in compared]
    float16 = extra_per_byte(traffic, half, plain)
    reduced, scattered = costs["allreduce", "all"], costs["reducescatter", "all"]
    costs["allreduce", "all"] = reduced = replace(
        reduced,
        fusion_s_per_byte=extra_per_byte(compared, fused[0], plain) if fuses else 0.0,
        reduction_s_per_byte={"float16": float16} if float16 else {},
    )
    added = reduction_of_scatter(reduced.reduction_s_per_byte)
    costs["reducescatter", "all"] = replace(scattered, reduction_s_per_byte=added)
    return NetworkProbe(_network(costs, levels.ranks_per_node), measuring.readings)


def _sizes(most: int) -> list[int]:
    """The sizes to measure for a kind of collective, up to about `most` bytes."""
    sizes = [_TINY, _SMALLEST]
    while sizes[-1] < max(most, _LEAST):
        sizes.append(sizes[-1] * _GROWTH)
    return sizes


def _network(costs: Mapping[Kind, CollectiveCost], ranks_per_node: int | None) -> Network:
    def costs_among(group: str) -> dict[str, Any]:
        return {kind: cost for (kind, among), cost in costs.items() if among == group}

    if ranks_per_node is None:
        return Network(**costs_among("all"))
    levels = TwoLevelCosts(ranks_per_node, Among(**costs_among("node")), Among(**costs_among("across")))
    return Network(**costs_among("all"), levels=levels)


class _Measuring:
    """Times collectives, by kind and size, and keeps the readings.

    Args:
        carrier: the library that runs the collectives.
        levels: how the ranks are distributed over nodes.
        device: device of the arrays that the collectives send.
        seconds: mean duration of the measurements for each kind and size of collective.
        longest: the longest duration of a collective, in seconds. Sizes that would take longer are left out, except for
            the smallest size.
        show: function that is called with the name of the next measurement.
    """

    def __init__(
        self, carrier: Carrier, levels: Levels, device: torch.device, seconds: float, longest: float, show: Show
    ) -> None:
        self._carrier = carrier
        self._device = device
        self._longest = longest
        self._per_size = seconds / _SMALL_SHARE / _PASSES
        self._ranks = levels.ranks
        self._show = show
        self.readings: dict[str, Reading] = {}

    def by_size(self, kinds: Sequence[str], sizes: list[int], among: str = "all") -> dict[str, dict[int, float]]:
        """Measures each kind of collective for each size. Returns, for each kind, the seconds for each size in bytes.
        After a size that takes too long, larger sizes are left out."""

        def words(kind: str, size: int) -> str:
            return f"{kind} of {_in_words(size)}{_IN_WORDS[among]}"

        samples: dict[tuple[str, int], list[list[float]]] = {}
        kept_sizes = list(sizes)
        for number in range(_PASSES):
            for size in list(kept_sizes):
                slow = False
                for kind in kinds:
                    self._show(f"{words(kind, size)}, pass {number + 1} of {_PASSES}")
                    seconds, first = self._sample(kind, size, among)
                    samples.setdefault((kind, size), []).append(seconds)
                    slow = slow or (size >= _LEAST and first * _GROWTH > self._longest)
                if slow:
                    kept_sizes = kept_sizes[: kept_sizes.index(size) + 1]
                    break
        disturbed = [size for size in kept_sizes if any(reading(samples[kind, size]).noisy for kind in kinds)]
        for _ in range(_PASSES):
            for size in disturbed:
                for kind in kinds:
                    self._show(f"{words(kind, size)}, once more")
                    samples[kind, size].append(self._sample(kind, size, among)[0])
        times: dict[str, dict[int, float]] = {kind: {} for kind in kinds}
        for (kind, size), passes in samples.items():
            if size in kept_sizes:
                self.readings[words(kind, size)] = result = reading(passes)
                times[kind][size] = result.seconds
        return times

    def _sample(self, kind: str, size: int, among: str) -> tuple[list[float], float]:
        """Runs the same collective several times. Returns the seconds of each run, and the seconds of one earlier run.
        All times are means over the ranks."""
        carry_out = self._collective(self._ranks.part(among), kind, size)
        carry_out()  # here Horovod negotiates the new name
        first = self._agreed([self._timed(carry_out)])[0]
        count = int(min(_MOST, max(_FEWEST, self._per_size / max(first, 1e-6))))
        return self._agreed([self._timed(carry_out) for _ in range(count)]), first

    def _collective(self, ranks: Communicator, kind: str, size: int) -> Callable[[], Any]:
        """Returns a function that runs one collective under its own name. The collective computes a mean, like the
        exchange of gradients.

        Args:
            ranks: the communicator that runs the collective.
            kind: one of `ALGORITHMS`; or "float32", "float16" or "fused" (several tensors) for an allreduce.
            size: approximate bytes that a rank sends.
        """
        name = f"hvdcomp.calibrate.{kind}.{size}"
        payload = _handed(kind, size, ranks.world_size)
        if kind == "fused":
            fused_allreduce = self._carrier.fused_allreduce
            assert fused_allreduce is not None
            parts = [torch.zeros(size // 4 // _FUSED_PARTS, device=self._device) for _ in range(_FUSED_PARTS)]
            return lambda: fused_allreduce(parts, name)
        if kind in ("allgather", "alltoall"):
            sent = torch.zeros(payload, dtype=torch.uint8, device=self._device)
            start = getattr(ranks, f"start_{kind}")
            return lambda: ranks.wait(start(sent, name))
        dtype, width = (torch.float16, 2) if kind == "float16" else (torch.float32, 4)
        reduced = torch.zeros(payload // width, dtype=dtype, device=self._device)
        start = ranks.start_reducescatter if kind == "reducescatter" else ranks.start_allreduce
        return lambda: ranks.wait(start(reduced, "mean", name))

    def _timed(self, carry_out: Callable[[], Any]) -> float:
        wait_for(self._device)
        begin = time.perf_counter()
        carry_out()
        wait_for(self._device)
        return time.perf_counter() - begin

    def _agreed(self, seconds: list[float]) -> list[float]:
        """Returns the means of these times over the ranks. All ranks get the same means, so all ranks make the same
        decisions."""
        return (self._carrier.ranks.sum(np.array(seconds), "agreed") / self._carrier.ranks.size).tolist()


def _handed(kind: str, size: int, ranks: int) -> int:
    """The number of bytes, near `size`, that a rank actually sends. An alltoall and a reduce-scatter need the same
    number of float32 values for each rank."""
    rows = 4 * ranks if kind in ("alltoall", "reducescatter") else 1
    return max(1, size // rows) * rows


def _in_words(size: int) -> str:
    for unit, amount in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= amount:
            return f"{size / amount:g} {unit}"
    return f"{size} bytes"
