"""Buckets: the tensors of a step that one method compresses together, in a few passes of compiled code.

A compressor may have, beside `aggregate` for one tensor, a form for all tensors of a bucket, `aggregate_bucket`. It is
a generator as well: it yields one request a round for all of them. The kernels that it calls make x of the gradients
and what the memory kept, compress it in the same pass, and write the mean over the ranks to where it belongs. For
compressors without such a form `each_tensor` has one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from hvdcomp import kernels
from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import Array
from hvdcomp.compressors.memory import Memory, MomentumCorrection, NoMemory
from hvdcomp.compressors.protocol import Context, Request, TensorInfo
from hvdcomp.compressors.randomness import tensor_keys
from hvdcomp.kernels.tables import NARROW, Table

BUCKET_BYTES = 25 * 2**20
"""Of gradients, the least that a bucket holds that starts in the backward pass: what PyTorch's DDP takes (Li et al.
2020, arXiv:2006.15704, section 5.2)."""

LEAST_BYTES = 1_000_000
"""The same where rank 0 chooses how much, at least."""

ROW_ALIGNMENT = 8
"""Bytes, of which rows that travel have whole numbers: of the largest element."""

_QUICK = 1 << 20  # elements that kernels pass over in less than a millisecond


BucketAggregation = Generator[Request, Any, bool | Array]
"""A bucket's step; returns whether a mean holds an inf or NaN, as of `Bucket.call`.

At its end the means lie where the table's `result` says. If the memory keeps anything, the table's `x` holds what is
left: the residual, or an x of which `sent_rule` says what was sent.
"""


class Rows(NamedTuple):
    """A payload that has a row for each of several ranks.

    Attributes:
        numbers: of the row in which a tensor lies, int64 (tensors,).
        ranks: how many there are.
        length: bytes of each, or more if what lies in one takes more.
    """

    numbers: np.ndarray
    ranks: int
    length: int


@dataclass(eq=False)
class Bucket:
    """What a bucket form knows: its tensors, and the step under way.

    Attributes:
        tensors: of at least one element each, and of one element type.
        compressors: of the tensors; they are of one class, and differ in their level alone.
        memory: of all tensors.
        device: where the bucket's kernels work; None for the host.
        widens: whether what is called gradients is of the tensors' type where that has 16 bits, and becomes float32 in
            `x`; results become so in `narrowed`. Else it is float32.
        xp: the array functions of payloads: NumPy's on the host.
        context: of the step; its name is empty.
        like: an array of the framework, where the gradients are; set where there is no form of the method's own.
        states: what the method keeps of the tensors: `BucketStates`, fitted by `prepare`, or None if it keeps nothing.
            Without a form of its own, of each tensor the arrays in NumPy that the step before has left, none if that
            was another method's; at the end of a step those that it leaves.
        table: what kernels are told of the tensors.
        layout: what the form works out of the tensors and levels once, and not in each step; None at first.
        found_inf: whether x, or what is sent of it, holds an inf or NaN: to be set before the first request, to what
            `call` returned.
        handed: bytes that each tensor has handed to collectives in the step, in all and of these to those of its node,
            int64 (tensors, 2); None where the method says it (`bytes_in_bucket`).
        factors: the object whose storage the table's `sent_product` points into, None if there is none. Who keeps the
            product keeps it too. Its `commit` is called if the step counts.
        rows: where a payload has a row for each of several ranks.
        factor: of the step under way, what gradients are multiplied with; None for 1.
    """

    tensors: Sequence[TensorInfo]
    compressors: Sequence[Any]
    memory: Memory
    device: Any = None
    xp: ModuleType = numpy_arrays
    widens: bool = False
    context: Context = field(init=False)
    like: Array | None = None
    states: Any = None
    table: Table = field(init=False)
    layout: Any = None
    found_inf: bool | Array = False
    handed: np.ndarray | None = None
    factors: Any = field(default=None, repr=False)
    rows: Rows | None = None
    kernels: Any = field(init=False, repr=False)
    factor: Array | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = [tensor.size for tensor in self.tensors]
        if self.device is None:
            self.table = Table(sizes)
        else:
            from hvdcomp.kernels.cuda.device import PIECE, DeviceKernels

            self.table = Table(sizes, PIECE)
            kept = 1 + NARROW[self.memory.rounds_to or "float32"] if self.keeps else 0
            self.kernels = DeviceKernels(self.table, self.device, kept)
        self.table.bucket.keeps = self.keeps
        if self.widens:
            self.segments["narrow"] = NARROW[self.dtype]

    @property
    def segments(self) -> np.ndarray:
        """The table's rows."""
        return self.table.segments

    @property
    def dtype(self) -> str:
        """The element type of the tensors."""
        return self.tensors[0].dtype

    @property
    def x(self) -> str:
        """What the table calls x of the tensors."""
        return "x" if self.keeps or self.widens else "gradient"

    @property
    def keeps(self) -> bool:
        """Whether what is not sent is kept."""
        return not isinstance(self.memory, NoMemory)

    @property
    def masks(self) -> bool:
        """Whether the momentum of an element ends where it is sent."""
        return isinstance(self.memory, MomentumCorrection) and self.memory.masking

    def keys(self, purpose: str) -> np.ndarray:
        """The keys of the tensors' random numbers, for `step_keys`."""
        return tensor_keys([tensor.name for tensor in self.tensors], self.context.seed, purpose)

    def begin(self, context: Context, factor: Array | None = None) -> None:
        """Before the first kernel of a step.

        Args:
            factor: what gradients are multiplied with; None for 1.
        """
        self.context = context
        self.factor = factor
        self.found_inf = False
        self.segments["source"] = 0
        self.segments["sent_rule"] = 0
        settings, memory = self.table.bucket, self.memory
        settings.decay = memory.keeps
        if isinstance(memory, MomentumCorrection):
            settings.momentum, settings.nesterov = memory.momentum, memory.nesterov
        if self.device is None:
            settings.threads = kernels.threads()
            settings.factor = 1.0 if factor is None else float(factor)
        else:
            self.kernels.begin(factor, memory.is_momentum)

    def call(self, kernel: str, *arguments: Any, aside: bool = False) -> bool | Array:
        """Calls a kernel with the table.

        Args:
            kernel: its name in `src/kernels.def`.
            arguments: numbers, and arrays as of `xp`, of which the kernel gets the addresses.
            aside: whether what is sent next does not wait for it, on a device; the bucket's next call does.

        Returns:
            Whether it has found an inf or NaN; on a device an element that is NaN if so, and else 0.
        """
        if self.device is not None:
            return self.kernels.call(kernel, *arguments, aside=aside)
        function = getattr(kernels.library(release=self.table.elements > _QUICK), f"hvd_{kernel}")
        addresses = (
            argument.__array_interface__["data"][0] if isinstance(argument, np.ndarray) else argument
            for argument in arguments
        )
        return bool(function(self.table.address, *addresses))

    def sums_of(self, kernel: str) -> Array:
        """Calls a kernel that adds up something of each tensor; the sums, float64 (tensors,), an array as of `xp`."""
        if self.device is not None:
            sums = self.zeros(len(self.tensors), "float64")
            self.call(kernel, sums)
            return sums
        self.call(kernel)
        return self.segments["sums"][:, 0].copy()

    def holds_inf(self, name: str) -> bool:
        """On the host, whether an inf or NaN is among the numbers that lie, of all tensors, where a column of the table
        says."""
        addresses, sizes = (np.ascontiguousarray(self.segments[one]) for one in (name, "size"))
        library: Any = kernels.library(release=self.table.elements > _QUICK)
        threads = self.table.bucket.threads
        return bool(library.hvd_found_inf(addresses.ctypes.data, sizes.ctypes.data, len(sizes), threads))

    def zeros(self, count: int, dtype: str = "uint8") -> Array:
        """A vector where the kernels work."""
        return np.zeros(count, dtype) if self.device is None else self.kernels.zeros(count, dtype)

    def places(self, *bytes_of: np.ndarray) -> tuple[np.ndarray, int]:
        """Where things of tensors lie in a payload, or a row of it: the first things of all, then the second ones.

        Args:
            bytes_of: these things, of each tensor.

        Returns:
            The places, int64 (things, tensors), and how many bytes the payload has.
        """
        sizes = np.stack(bytes_of)
        numbers, ranks, length = self.rows or Rows(np.zeros(len(self.tensors), np.int64), 1, 0)
        starts = np.zeros_like(sizes)
        for row in range(ranks):
            of_row = sizes[:, numbers == row]
            ends = np.cumsum(of_row).reshape(of_row.shape)
            starts[:, numbers == row] = ends - of_row
            length = max(length, int(ends.max(initial=0)))
        if self.rows is not None:
            length = -(-length // ROW_ALIGNMENT) * ROW_ALIGNMENT
        return starts + numbers * length, ranks * length

    def payload(self, count: int, dtype: str = "uint8") -> Payload:
        """Storage for what is sent, where the kernels work."""
        return Payload(count, dtype, self.zeros)


def gathered(ranks: Sequence[tuple[Array, ...]]) -> tuple[Array, int, int]:
    """What kernels take of an `AllGather`'s answer of one part each: the first rank's, the number of ranks, and how
    many bytes each begins behind the one before."""
    first = ranks[0][0]
    if len(ranks) == 1:
        return first, 1, 0
    addresses = [address_of(part) for (part,) in ranks[:2]]
    return first, len(ranks), addresses[1] - addresses[0]


def either(*found: bool | Array) -> bool | Array:
    """Whether any of some kernels has found an inf or NaN, as of `Bucket.call`."""
    flags = [one for one in found if not isinstance(one, bool)]
    return sum(flags[1:], flags[0]) if flags else any(found)


def address_of(array: Array) -> int:
    """Of its first element."""
    return array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data_ptr()


class BucketStates:
    """What a method keeps of a bucket's tensors from step to step, in flat storage.

    Each tensor has the same number of arrays (length, columns). The first arrays of all tensors lie behind each other
    in one vector, the second ones in another; each of them column by column.

    Args:
        states: of each tensor, float32.
        xp: the array functions.

    Attributes:
        kept: the vectors that a step starts from. It does not change them.
        next: as many, which a step fills. If it counts, the two change their roles.
    """

    def __init__(self, states: Sequence[tuple[Array, ...]], xp: ModuleType = numpy_arrays) -> None:
        kinds = list(zip(*states, strict=True))
        self._xp = xp
        self._shapes = [[tuple(array.shape)[::-1] for array in kind] for kind in kinds]
        self._starts = [np.cumsum([0, *(rows * columns for rows, columns in kind)]).tolist() for kind in self._shapes]
        self.kept = [xp.concatenate([xp.flatten(array.T) for array in kind]) for kind in kinds]
        self.next = [xp.zeros(vector.shape, like=vector) for vector in self.kept]

    def arrays(self, place: int) -> tuple[Array, ...]:
        """What is kept of the tensor at a place of the bucket, (length, columns) each, in storage that steps reuse."""
        return tuple(
            vector[starts[place] : starts[place + 1]].reshape(shapes[place]).T
            for vector, starts, shapes in zip(self.kept, self._starts, self._shapes, strict=True)
        )

    def places(self, members: Sequence[int]) -> list[np.ndarray]:
        """Where in each vector the arrays of some tensors lie, which are at these places of the bucket."""
        empty = [np.zeros(0, np.int64)]
        ranges = [[np.arange(starts[member], starts[member + 1]) for member in members] for starts in self._starts]
        return [np.concatenate(empty + kind) for kind in ranges]

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return sum(int(vector.nbytes) for vector in (*self.kept, *self.next))

    def commit(self) -> None:
        """After a step that counts: what it has filled is what is kept."""
        self.kept, self.next = self.next, self.kept

    def settle(self, found_inf: Array) -> None:
        """The same after a step of which the host does not know whether it counts."""
        self.next = [self._xp.where(found_inf == 0, new, old) for new, old in zip(self.next, self.kept, strict=True)]
        self.commit()


class Payload:
    """Storage for what a bucket sends, which is used in each step anew.

    Args:
        count: of elements, rounded up to whole four bytes: ranks' payloads lie behind each other.
        zeros: makes the storage.

    Attributes:
        vector: (count,).
        with_room: the same storage with room for four bytes more, and whole eight in all.
    """

    def __init__(self, count: int, dtype: str = "uint8", zeros: Callable[[int, str], Array] = np.zeros) -> None:
        size = np.dtype(dtype).itemsize
        used = -(-count * size // 4) * 4
        self.with_room = zeros(-(-(used + 4) // 8) * 8 // size, dtype)
        self.vector = self.with_room[: used // size]
