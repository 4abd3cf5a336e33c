"""Compressors of a user's own, each with a mistake, and what hvdcomp says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.protocol import AllGather, AllReduce, Outcome, SparseVector


@dataclass(frozen=True)
class Mine(Compressor):
    """Without a mistake: half of x."""

    name = "mine"
    examples = ("mine",)
    sends = "all elements"
    biased = True
    says = ""

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        own = x * 0.5
        mean = yield AllReduce(own)
        return Outcome(mean, own)


class InPlace(Mine):
    says = "changes x in place"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        x *= 0.5
        mean = yield AllReduce(x)
        return Outcome(mean, x)


class InPlaceByAFunction(Mine):
    says = "changes x in place"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        mean = yield AllReduce(x)
        return Outcome(mean, xp.floor(x))


class InPlaceInPrepare(Mine):
    says = "prepare changes x in place"

    def prepare(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        x += 1
        return ()


@dataclass(frozen=True)
class Unwritten(Compressor):
    says = "aggregate is not implemented; write it as a generator: yield AllReduce(array)"

    name = "mine"
    biased = True


class NoYield(Mine):
    says = "has no yield, and returns an Outcome at once; yield AllReduce(array)"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        return Outcome(x, x)


class Nothing(Mine):
    says = "returns nothing; return Outcome(mean=..., sent=...)"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        yield AllReduce(x)


class Pair(Mine):
    says = "returns a tuple of 2; return Outcome(mean=..., sent=...)"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        mean = yield AllReduce(x)
        return mean, x


class FlatMean(Mine):
    says = "returns an array of float32 [24] as mean, but x has the shape [4, 6]"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        mean = yield AllReduce(xp.flatten(x))
        return Outcome(mean, x)


class ShortSent(Mine):
    says = "returns an array of float32 [3] as sent, but x has the shape [4, 6]"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        mean = yield AllReduce(x)
        return Outcome(mean, xp.flatten(x)[:3])


class OddSparse(Mine):
    says = "returns a SparseVector with indices of the shape [2] and values of the shape [3]"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        mean = yield AllReduce(x)
        return Outcome(mean, SparseVector(xp.top(abs(xp.flatten(x)), 2), xp.flatten(x)[:3]))


class ByElements(Mine):
    says = "aggregate raised TypeError: int() argument must be"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        mean = yield AllReduce(xp.flatten(x)[: int((x > 0).sum())])
        return Outcome(mean, x)


class ByElementsWhereThereAreSome(Mine):
    says = "Sizes and types must not depend on the values of the gradient, because the values differ"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        try:
            count = int((x > 0).sum())
        except TypeError:
            count = 1
        yield AllReduce(xp.flatten(x)[:count])
        return Outcome(x, x)


class ByRank(Mine):
    says = "on rank 1, but for AllReduce mean all of float32 [2] on rank 0; sizes and types must be the same on all"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        yield AllReduce(xp.flatten(x)[: 2 + context.rank])
        return Outcome(x, x)


class ByStep(Mine):
    says = "sizes must repeat after `period` steps, and `period` is 1 in this class"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        yield AllReduce(xp.flatten(x)[: 2 + context.step % 2])
        return Outcome(x, x)


class WithNumpy(Mine):
    says = "such arrays to count bytes before there are gradients. Use functions of xp"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        mean = yield AllReduce(np.abs(x))
        return Outcome(mean, x)


class Unwrapped(Mine):
    says = "yields an array of float32 [4, 6]; yield AllReduce(array)"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        mean = yield x
        return Outcome(mean, x)


class OnePart(Mine):
    says = "yields AllGather of an array of float32 [4, 6]; yield AllReduce(array), AllGather((array, ...))"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        yield AllGather(x)
        return Outcome(x, x)


class Misspelt(Mine):
    says = "aggregate raised AttributeError: module 'hvdcomp.arrays.shapes' has no attribute 'flaten'"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        mean = yield AllReduce(xp.flaten(x))
        return Outcome(mean, x)


class AnotherState(Mine):
    says = "returns a state of the shapes [[4, 6]], but was given a state of the shapes []; return the same number"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        mean = yield AllReduce(x)
        return Outcome(mean, x, (x,))


class OneArray(Mine):
    says = "prepare returns an array of float32 [3]; return a tuple of arrays, or () for no arrays"

    def prepare(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        return xp.zeros((3,), like=x)


class OnRank1InStep2(Mine):
    says = "aggregate raised KeyError: 'oops'"

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        if (context.rank, context.step) == (1, 2):
            raise KeyError("oops")
        return (yield from super().aggregate(xp, x, state, context))


BEFORE_STEPS = (
    Unwritten, NoYield, Nothing, Pair, FlatMean, ShortSent, OddSparse, ByElements, ByRank, ByStep, WithNumpy, Unwrapped,
    OnePart, Misspelt, AnotherState, OneArray,
)  # fmt: skip
"""Mistakes that are found before ranks wait for each other."""

IN_STEPS = (InPlace, InPlaceByAFunction, InPlaceInPrepare, ByElementsWhereThereAreSome)
"""Mistakes that are found when there are gradients, in the first step."""
