"""Computes medians and their spread from noisy times, and fits the cost of a collective to its size. This module needs
only NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdcomp.perfmodel.network import ALGORITHMS, CollectiveCost
from hvdcomp.perfmodel.noise import NOISY

_SMALL = 1 << 16  # bytes over a link; below this number, latency dominates


@dataclass(frozen=True)
class Reading:
    """One measured time.

    Attributes:
        seconds: median of all measured times, in seconds.
        spread: the largest difference between the medians of the repetitions, relative to `seconds`.
    """

    seconds: float
    spread: float

    @property
    def noisy(self) -> bool:
        """Whether the reading is too noisy to be reliable."""
        return self.spread > NOISY


def reading(repetitions: Sequence[Sequence[float]]) -> Reading:
    """The median of all samples of several repetitions, and the spread between the repetitions.

    Args:
        repetitions: for each repetition, a list of measured seconds. At least one list must not be empty.
    """
    medians = [float(np.median(repetition)) for repetition in repetitions if len(repetition)]
    middle = float(np.median(np.concatenate([np.asarray(repetition, float) for repetition in repetitions])))
    return Reading(middle, (max(medians) - min(medians)) / middle if middle > 0 else 0.0)


def halves(samples: Sequence[float]) -> Reading:
    """Computes the median and the spread of measured seconds, given in the order of measurement. The first half and the
    second half count as two repetitions."""
    middle = len(samples) // 2
    return reading([samples[:middle], samples[middle:]])


def fit_collective(
    kind: str, algorithm: str, ranks: int, sizes: Sequence[float], seconds: Sequence[float], cycle_s: float
) -> CollectiveCost:
    """Computes the cost of a collective from its times for several sizes.

    The time of the smallest size is the latency. The latency consists of Horovod's cycle, which does not depend on the
    number of ranks, and of the latency of the algorithm's messages. The times of the other sizes, minus this latency,
    form the table of transfer times. These times are adjusted so that they increase with size (least squares, pool
    adjacent violators). The bandwidth is the median slope between all pairs of larger sizes (Theil and Sen), so a few
    outliers do not change it.

    Args:
        kind, algorithm: the kind of collective (a key of `ALGORITHMS`), and the name of its algorithm.
        ranks: the number of ranks, 2 or more.
        sizes: the bytes that each rank sends, in ascending order. The first size must be so small that its transfer
            takes no time.
        seconds: the measured seconds for each size.
        cycle_s: Horovod's cycle time, in seconds.
    """
    traffic = ALGORITHMS[kind][algorithm](np.asarray(sizes, float), float(ranks))
    rising = pool_adjacent_violators(seconds)
    latency = float(rising[0])
    start = min(cycle_s, latency)
    moving = rising - latency
    return CollectiveCost(
        algorithm=algorithm,
        latency_s=(latency - start) / float(traffic.messages),
        bytes_per_s=_bandwidth(traffic.bytes, rising),
        transfer=tuple(zip(traffic.bytes[1:].tolist(), moving[1:].tolist(), strict=True)),
        start_s=start,
    )


def extra_per_byte(sizes: Sequence[float], longer: Sequence[float], shorter: Sequence[float]) -> float:
    """The median over all sizes of (longer - shorter) / size, or 0 if the median is negative."""
    differences = (np.asarray(longer, float) - np.asarray(shorter, float)) / np.asarray(sizes, float)
    return max(0.0, float(np.median(differences)))


def pool_adjacent_violators(values: Sequence[float]) -> np.ndarray:
    """The ascending sequence that is closest to the values (least squares)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            last_mean, last_count = pools.pop()
            mean, count = (mean * count + last_mean * last_count) / (count + last_count), count + last_count
        pools.append((mean, count))
    return np.concatenate([np.full(count, mean) for mean, count in pools])


def _bandwidth(traffic: np.ndarray, seconds: np.ndarray) -> float:
    large = traffic >= _SMALL
    if np.count_nonzero(large) < 2:
        large = np.arange(len(traffic)) >= len(traffic) - 2
    x, y = traffic[large], seconds[large]
    first, second = np.triu_indices(len(x), 1)
    slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
    return 1 / slope if slope > 0 else float(traffic[-1] / seconds[-1])
