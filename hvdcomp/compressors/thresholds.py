"""Threshold sparsifiers do not sort. Instead, they search for a threshold that the magnitudes of about k elements
reach.

All these methods use the counts and means of `Magnitudes` above a threshold. The methods choose exactly k elements, so
that the payload has a fixed size. The methods differ in how they search for the threshold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hvdcomp.arrays.magnitudes import Magnitudes
from hvdcomp.arrays.types import Array, ArrayFunctions
from hvdcomp.compressors.base import Rounds
from hvdcomp.compressors.bucket import Bucket, BucketAggregation
from hvdcomp.compressors.memory import Memory, MomentumCorrection
from hvdcomp.compressors.sparsification import Sparsifier, aggregate_by_magnitude, stage_shares
from hvdcomp.kernels.tables import BISECT, FITTED, SAMPLED

_ROUNDS = 25  # 25 halvings reduce the range to 2**-25, which is the resolution of float32
_SAMPLED_ROUNDS = 1 + 10  # the threshold from the sample, and 10 more


class Bracket:
    """The bounds of the threshold. Tests narrow the bounds, and at the end the bounds determine which k elements are
    chosen.

    Args:
        magnitudes: the magnitudes of the elements of the vector.
        k: number of elements to choose.
        most: a threshold is good if at least k and at most this number of elements reach it.
    """

    def __init__(self, magnitudes: Magnitudes, k: int, most: int) -> None:
        self.where = magnitudes.xp.where
        self._magnitudes = magnitudes
        self._k = k
        self._most = most
        self.low: Any = 0.0  # the highest tested threshold that more than `most` elements reach, or 0
        self.high: Any = math.inf  # the lowest tested threshold that at most `most` elements reach

    def test(self, threshold: Any) -> tuple[Any, Any]:
        """Whether too few elements (fewer than k) reach the threshold, and whether too many (more than `most`) reach
        it."""
        count = self._magnitudes.count(threshold)
        too_few, too_many = count < self._k, count > self._most
        self.low = self.where(too_many & (threshold > self.low), threshold, self.low)
        self.high = self.where((count <= self._most) & (threshold < self.high), threshold, self.high)
        return too_few, too_many

    def choose(self) -> Array:
        """The indices of the k largest among `most` elements. These `most` elements are first the elements that reach
        `high`, and then elements that reach only `low`, both in index order."""
        return self._magnitudes.pick(self.low, self.high, self._k, self._most)


def bisect(magnitudes: Magnitudes, bracket: Bracket, rounds: int) -> None:
    """Halves the range from the mean to the largest magnitude, `rounds` times, as in algorithm 1 of MSTopK.

    If a round finds a good threshold, the range shrinks to this threshold, and later rounds test it again.
    """
    mean, width = magnitudes.mean, magnitudes.largest - magnitudes.mean
    left: Any = 0.0
    right: Any = 1.0
    for _ in range(rounds):
        middle = (left + right) / 2
        too_few, too_many = bracket.test(mean + middle * width)
        # At least k elements reach this threshold, so a higher threshold is possible.
        left = bracket.where(too_few, left, middle)
        # At most `most` elements reach this threshold, so a lower threshold is possible.
        right = bracket.where(too_many, right, middle)


@dataclass(frozen=True)
class ThresholdSparsifier(Sparsifier):
    """Base of methods that search for a threshold and choose k of the elements that reach it.

    Class attributes:
        room: a threshold is good if at least k and at most `room` k elements reach it.
    """

    room: ClassVar[int]

    def search(self, magnitudes: Magnitudes, bracket: Bracket) -> None:
        """Tests thresholds.

        Args:
            magnitudes: the magnitudes of the elements of the vector.
            bracket: the bounds of the threshold. Each test narrows the bounds.
        """
        raise NotImplementedError

    def choose(self, xp: ArrayFunctions, vector: Array, k: int) -> Array:
        """The k largest of the elements that reach the threshold found by `search`."""
        most = min(self.room * k, vector.shape[0])
        magnitudes = Magnitudes(xp, vector, k)
        bracket = Bracket(magnitudes, k, most)
        with np.errstate(invalid="ignore", over="ignore"):
            self.search(magnitudes, bracket)
        return bracket.choose()


@dataclass(frozen=True)
class MSTopK(ThresholdSparsifier):
    """Sends approximately the k largest elements. A bisection finds the threshold that they reach (Shi et al. 2021,
    arXiv:2010.10458, algorithm 1).

    The bisection starts between the mean and the largest magnitude. The bisection ends when exactly k elements reach
    the threshold, or after `rounds` rounds. All elements that reach the upper bound (at most k) are sent. If fewer than
    k elements reach the upper bound, elements between the lower and the upper bound are also sent, in index order,
    until k elements are sent. (The paper instead chooses a random run of these elements.) An element that is not sent
    is larger than a sent element by at most the distance between the two bounds.

    Attributes:
        rounds: maximum number of rounds of the bisection, at most 100.

    Example:
        >>> MSTopK(ratio=0.01).payload_bytes((1000, 1000))
        60064
    """

    rounds: Rounds = _ROUNDS

    name: ClassVar[str] = "mstopk"
    room: ClassVar[int] = 1
    examples: ClassVar[tuple[str, ...]] = ("mstopk:ratio=0.01",)
    reference: ClassVar[str] = "Shi et al. 2021, arXiv:2010.10458"

    def search(self, magnitudes: Magnitudes, bracket: Bracket) -> None:
        bisect(magnitudes, bracket, self.rounds)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        return aggregate_by_magnitude(bucket, self.values, BISECT, self.room, self.rounds)


@dataclass(frozen=True)
class RedSync(ThresholdSparsifier):
    """Sends the k largest elements. A bisection finds a threshold that between k and 2k elements reach. Exactly the k
    largest of these elements are chosen (Fang et al. 2019, arXiv:1808.04357, trimmed top-k with threshold binary
    search).

    If there is no such threshold (for example because many elements are equal), or 25 rounds do not find one, the k
    largest of 2k elements are sent. These 2k elements are first the elements that reach the nearest tested threshold
    with too few elements, and then, in index order, elements that reach the nearest tested threshold with too many
    elements.

    Example:
        >>> RedSync(ratio=0.01).payload_bytes((1000, 1000))
        60064
    """

    name: ClassVar[str] = "redsync"
    room: ClassVar[int] = 2
    examples: ClassVar[tuple[str, ...]] = ("redsync:ratio=0.01",)
    reference: ClassVar[str] = "Fang et al. 2019, arXiv:1808.04357"

    def search(self, magnitudes: Magnitudes, bracket: Bracket) -> None:
        bisect(magnitudes, bracket, _ROUNDS)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        return aggregate_by_magnitude(bucket, self.values, BISECT, self.room, _ROUNDS)


@dataclass(frozen=True)
class DGC(ThresholdSparsifier):
    """Deep gradient compression: sends the k largest elements of the gradients that momentum correction accumulates.
    The threshold is estimated from a sample (Lin et al. 2018, arXiv:1712.01887, sections 3 and 5).

    The first threshold is the magnitude that the fraction `ratio` of a sample reaches. The sample is about 1 % of the
    elements, at equal distances. While fewer than k elements reach the threshold, the threshold is multiplied by 0.8.
    While more than 2 k elements reach the threshold, it is multiplied by 1.3. The threshold is changed at most 10
    times. If a product would lie beyond a threshold that was already tested, the next threshold is halfway between the
    current threshold and the tested threshold. When between k and 2 k elements reach the threshold, the k largest of
    them are sent, which are the k largest of the tensor. If no such threshold is found, the k largest of 2 k elements
    are sent. These 2 k elements are first the elements that reach the nearest tested threshold with too few elements,
    and then, in index order, elements that reach the nearest tested threshold with too many elements.

    The optimizer must have no momentum of its own. Momentum and clipping are settings of the default memory
    (`MomentumCorrection`). These settings have no effect if you choose a different memory.

    Attributes:
        momentum, nesterov, clip: settings of the default memory, `MomentumCorrection`.

    Example:
        >>> DGC(ratio=0.01).payload_bytes((1000, 1000))
        60064
    """

    momentum: float = 0.9
    nesterov: bool = False
    clip: float = 0.0

    name: ClassVar[str] = "dgc"
    room: ClassVar[int] = 2  # the threshold from a sample is nearly right
    examples: ClassVar[tuple[str, ...]] = ("dgc:ratio=0.01",)
    reference: ClassVar[str] = "Lin et al. 2018, arXiv:1712.01887"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.default_memory  # raises an error for invalid settings

    @property
    def default_memory(self) -> Memory:
        """Momentum correction."""
        return MomentumCorrection(self.momentum, self.nesterov, self.clip)

    def search(self, magnitudes: Magnitudes, bracket: Bracket) -> None:
        where = bracket.where
        threshold = magnitudes.sample_threshold(self.ratio)
        for _ in range(_SAMPLED_ROUNDS):
            too_few, too_many = bracket.test(threshold)
            following = threshold * where(too_few, 0.8, where(too_many, 1.3, 1.0))
            # If the product passes a tested threshold, go halfway to the tested threshold instead.
            highest = where(bracket.high < magnitudes.largest, bracket.high, magnitudes.largest)
            untried = (following > bracket.low) & (following <= highest)
            threshold = where(untried, following, (bracket.low + highest) / 2)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        return aggregate_by_magnitude(bucket, self.values, SAMPLED, self.room, _SAMPLED_ROUNDS)


@dataclass(frozen=True)
class SIDCo(ThresholdSparsifier):
    """Sends approximately the k largest elements. The threshold is estimated from a fitted distribution (Abdelmoniem et
    al. 2021, arXiv:2101.10761, algorithm 1 with double-exponential gradients).

    If gradients are double-exponential, a fraction delta of the magnitudes is at least mean * log(1 / delta). The
    excess of magnitudes above a threshold then has the same distribution as the magnitudes. Therefore the estimate has
    several stages. The threshold of the first stage should keep a quarter of the elements. Each later stage should keep
    a fixed share of the elements that reached the previous threshold.

    The payload always has k elements, even if the estimate is bad. If between k and 4 k elements reach the last
    threshold, the k largest of these elements are sent. If more than 4 k elements reach the last threshold, the k
    largest of the first 4 k in index order are sent. If fewer than k elements reach the last threshold, all of them are
    sent. The other elements, up to k in total, are then the largest elements that reach the threshold of the previous
    stage. Only the first 4 k elements in index order are considered. If too few elements reach the previous threshold,
    all elements are considered. Each element is sent at most once, with its true value.

    Attributes:
        stages: number of stages of the estimate, at most 100. With 1 stage, the first threshold should already keep the
            share `ratio` of the elements. The paper adapts the number of stages during training. In hvdcomp, the number
            is fixed.

    Example:
        >>> SIDCo(ratio=0.01).payload_bytes((1000, 1000))
        60064
    """

    stages: Rounds = 2

    name: ClassVar[str] = "sidco"
    room: ClassVar[int] = 4  # the estimated number of elements may be wrong by this factor
    examples: ClassVar[tuple[str, ...]] = ("sidco:ratio=0.01",)
    reference: ClassVar[str] = "Abdelmoniem et al. 2021, arXiv:2101.10761"

    def search(self, magnitudes: Magnitudes, bracket: Bracket) -> None:
        threshold: Any = 0.0
        for share in stage_shares(self.ratio, self.stages):
            # A fraction delta of the elements above a threshold t exceeds t by at least the mean excess times log(1 /
            # delta).
            threshold = threshold + magnitudes.mean_excess(threshold) * math.log(1 / share)
            bracket.test(threshold)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        return aggregate_by_magnitude(bucket, self.values, FITTED, self.room, self.stages)
