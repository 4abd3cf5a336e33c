"""From noisy times to numbers that can be trusted, or are said not to be: medians, their spread, and the fit of what
a collective costs by its size. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdcomp.perfmodel.network import ALGORITHMS, CollectiveCost
from hvdcomp.perfmodel.noise import NOISY

_SMALL = 1 << 16  # bytes over a link below which latency, not bandwidth, makes the time


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
    """The median of samples that were taken in several repetitions, and how far those agree.

    Args:
        repetitions: each a list of seconds, not all empty.
    """
    medians = [float(np.median(repetition)) for repetition in repetitions if len(repetition)]
    middle = float(np.median(np.concatenate([np.asarray(repetition, float) for repetition in repetitions])))
    return Reading(middle, (max(medians) - min(medians)) / middle if middle > 0 else 0.0)


def halves(samples: Sequence[float]) -> Reading:
    """The same for samples in the order of time: their earlier half against their later one."""
    middle = len(samples) // 2
    return reading([samples[:middle], samples[middle:]])


def fit_collective(
    kind: str, algorithm: str, ranks: int, sizes: Sequence[float], seconds: Sequence[float], cycle_s: float
) -> CollectiveCost:
    """What a collective costs, from its time by size.

    The time of the smallest is latency: Horovod's cycle, which does not depend on the number of ranks, and what is
    left for the algorithm's messages. The rest, made to rise with size (least squares, pool adjacent violators), is
    the table of transfer times. The bandwidth is the median slope between all pairs of larger sizes (Theil and Sen),
    which a few bad ones do not move.

    Args:
        kind, algorithm: keys of `ALGORITHMS`.
        ranks: 2 or more.
        sizes: bytes that each rank hands over, rising; the first so small that its transfer is nothing.
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
            other, number = pools.pop()
            mean, count = (mean * count + other * number) / (count + number), count + number
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
