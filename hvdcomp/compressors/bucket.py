"""Buckets: the tensors of a step that one method compresses together, in a few passes of compiled code.

A compressor may have, beside `aggregate` for one tensor, a form for all tensors of a bucket, `aggregate_bucket`. It is
a generator as well: it yields one request a round for all of them. The kernels that it calls make x of the gradients
and what the memory kept, compress it in the same pass, and write the mean over the ranks to where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hvdcomp import kernels
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.compressors.protocol import Context, Request, SparseVector, TensorInfo
from hvdcomp.kernels.tables import Table

_QUICK = 1 << 20  # elements that kernels pass over in less than a millisecond


class BucketOutcome(NamedTuple):
    """What a bucket form returns at the end of a step. The means lie where the table's `result` says.

    found_inf: whether a mean, or a state, holds an inf or NaN.
    sent: of a tensor's place in the bucket, C(x) as of `Outcome`, in NumPy. It is called only where a policy looks.
    states: of each tensor, in NumPy, as of `Outcome`; empty if the method has none.
    keeps_nothing: whether C(x) is x: the residual is zero, whatever stands at `Bucket.x`.
    """

    found_inf: bool
    sent: Callable[[int], np.ndarray | SparseVector]
    states: Sequence[tuple[np.ndarray, ...]] = ()
    keeps_nothing: bool = False


BucketAggregation = Generator[Request, Any, BucketOutcome]


@dataclass(eq=False)
class Bucket:
    """What a bucket form knows: its tensors, and the step under way.

    Attributes:
        tensors: float32, of at least one element each.
        compressors: of the tensors; they are of one class, and differ in their level alone.
        memory: of all tensors.
        context: of the step; its name is empty.
        states: of the tensors, what the method returned in the step before, fitted by `prepare`; in NumPy.
        table: what kernels are told of the tensors.
        layout: what the form works out of the tensors and levels once, and not in each step; None at first.
        found_inf: whether x, or what is sent of it, holds an inf or NaN: to be set before the first request.
        x: of a tensor's place in the bucket, x as a vector, once a kernel has made it. If the memory keeps anything,
            what stands there when the generator ends is the residual, less what the table says by `sent_rule`.
        compressed: the same of what is compressed: x, or what stands for it.
    """

    tensors: Sequence[TensorInfo]
    compressors: Sequence[Any]
    memory: Memory
    context: Context = field(init=False)
    states: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    table: Table = field(init=False)
    layout: Any = None
    found_inf: bool = False
    x: Callable[[int], np.ndarray] = field(init=False, repr=False)
    compressed: Callable[[int], np.ndarray] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.table = Table([tensor.size for tensor in self.tensors])
        self._elements = sum(tensor.size for tensor in self.tensors)

    @property
    def segments(self) -> np.ndarray:
        """The table's rows."""
        return self.table.segments

    @property
    def keeps(self) -> bool:
        """Whether what is not sent is kept."""
        return not isinstance(self.memory, NoMemory)

    def call(self, kernel: str, *arguments: Any) -> bool:
        """Calls a kernel with the table.

        Args:
            kernel: its name in `src/kernels.def`.
            arguments: numbers, and arrays of NumPy, of which the kernel gets the addresses.

        Returns:
            Whether it has found an inf or NaN.
        """
        function = getattr(kernels.library(release=self._elements > _QUICK), f"hvd_{kernel}")
        addresses = (one.__array_interface__["data"][0] if isinstance(one, np.ndarray) else one for one in arguments)
        return bool(function(self.table.address, *addresses))


def gathered(ranks: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, int, int]:
    """What kernels take of an `AllGather`'s answer of one part each: the first rank's, the number of ranks, and how
    many bytes each begins behind the one before."""
    first = ranks[0][0]
    if len(ranks) == 1:
        return first, 1, 0
    addresses = [part.__array_interface__["data"][0] for (part,) in ranks[:2]]
    return first, len(ranks), addresses[1] - addresses[0]


class Payload:
    """Storage for what a bucket sends, which is used in each step anew.

    Args:
        count: of elements, rounded up to whole four bytes: ranks' payloads lie behind each other.

    Attributes:
        vector: (count,).
        with_room: the same storage with room for four bytes more, and whole eight in all.
    """

    def __init__(self, count: int, dtype: str = "uint8") -> None:
        size = np.dtype(dtype).itemsize
        used = -(-count * size // 4) * 4
        self.with_room = np.zeros(-(-(used + 4) // 8) * 8 // size, dtype)
        self.vector = self.with_room[: used // size]
