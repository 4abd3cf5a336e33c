"""Numbers from noisy times: medians, their spread, and the fit of a collective's cost to its size. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdcomp.perfmodel.network import ALGORITHMS, CollectiveCost
from hvdcomp.perfmodel.noise import NOISY

_SMALL = 1 << 16  # bytes over a link, below which latency makes most of the time


@dataclass(frozen=True)
class Reading:
    """One measured time.

    Attributes:
        seconds: the median of all samples.
        spread: the largest difference between the medians of the repetitions, relative to `seconds`.
    """

    seconds: float
    spread: float

    @property
    def noisy(self) -> bool:
        """Whether it is too noisy to trust."""
        return self.spread > NOISY


def reading(repetitions: Sequence[Sequence[float]]) -> Reading:
    """The median of samples of several repetitions, and the spread between the repetitions.

    Args:
        repetitions: each a list of seconds, not all empty.
    """
    medians = [float(np.median(repetition)) for repetition in repetitions if len(repetition)]
    middle = float(np.median(np.concatenate([np.asarray(repetition, float) for repetition in repetitions])))
    return Reading(middle, (max(medians) - min(medians)) / middle if middle > 0 else 0.0)


def halves(samples: Sequence[float]) -> Reading:
    """The reading of samples in the order of time; its repetitions are the earlier and the later half."""
    middle = len(samples) // 2
    return reading([samples[:middle], samples[middle:]])


def fit_collective(
    kind: str, algorithm: str, ranks: int, sizes: Sequence[float], seconds: Sequence[float], cycle_s: float
) -> CollectiveCost:
    """The cost of a collective, from its time by size.

    The time of the smallest size is latency: Horovod's cycle, which does not depend on the number of ranks, and the
    latency of the algorithm's messages. The other times, less this latency, are the table of transfer times; they are
    made to rise with size (least squares, pool adjacent violators). The bandwidth is the median slope between all pairs
    of larger sizes (Theil and Sen), which a few outliers do not change.

    Args:
        kind, algorithm: keys of `ALGORITHMS`.
        ranks: 2 or more.
        sizes: bytes that each rank sends, rising; the first is so small that its transfer takes no time.
        seconds: the time of each.
        cycle_s: Horovod's cycle time.
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
    """The median over sizes of (longer - shorter) / size, or 0 if that is negative."""
    differences = (np.asarray(longer, float) - np.asarray(shorter, float)) / np.asarray(sizes, float)
    return max(0.0, float(np.median(differences)))


def pool_adjacent_violators(values: Sequence[float]) -> np.ndarray:
    """The rising sequence that is nearest to the values in the sense of least squares."""
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
