"""Buckets. A bucket is a set of tensors that one method compresses together, in a few passes of compiled code.

A compressor has `aggregate` for one tensor. A compressor may also have `aggregate_bucket` for all tensors of a bucket.
This second form, the bucket form, is also a generator. In each round of the exchange, it yields one request for all
tensors. The kernels of this form compute x from the gradients and the residuals, compress x in the same pass, and write
the mean over the ranks to the results. If there are no kernels, or the compressor has no such form, tensors are not put
in buckets (`exchange.tensor_group`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hvdcomp import kernels
from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import AllFunctions, AnyArray
from hvdcomp.compressors.memory import Memory, MomentumCorrection, NoMemory
from hvdcomp.compressors.protocol import AllGather, AllReduce, Context, Request, TensorInfo
from hvdcomp.compressors.randomness import step_keys, tensor_keys
from hvdcomp.kernels.tables import NARROW, Table

BUCKET_BYTES = 25 * 2**20
"""The default smallest size, in bytes of gradients, of a bucket that is exchanged during the backward pass. PyTorch's
DDP uses the same size for its buckets (Li et al. 2020, arXiv:2006.15704, section 5.2)."""

LEAST_BYTES = 1_000_000
"""If rank 0 chooses the smallest size of a bucket, it chooses at least this number of bytes."""

GATHERED_BYTES = 2**30
"""The default largest number of bytes of payloads that a rank gathers at the same time. It is a sixteenth of the memory
of a V100 with 16 GB. If a step gathers more, the ranks exchange the payloads in several parts, and exchange no bucket
during the backward pass."""

_MOST_ON_DEVICE = 4  # largest number of buckets that are exchanged during the backward pass

ROW_ALIGNMENT = 8
"""The length of a payload's row is a multiple of this number of bytes, which is the size of the largest element
type."""

_QUICK = 1 << 20  # number of elements that a kernel processes in less than a millisecond


def least_early_bytes(least: int, everything: int, on_device: bool) -> int:
    """The smallest size, in bytes of gradients, of a bucket that is exchanged during the backward pass. On the host,
    the size is `least`. On a CUDA device, it is `least` or a quarter of all bytes, whichever is larger.

    On a CUDA device, the host launches the kernels of each bucket separately. Launching a small bucket takes about as
    long as launching one bucket with all tensors. In a measurement with a slow host, a step with thirteen buckets took
    1.9 times as long as a step with one bucket. A step with four buckets took 1.3 times as long (docs/encoding.md).

    Example:
        >>> least_early_bytes(LEAST_BYTES, 100_000_000, on_device=True)
        25000000
    """
    return max(least, everything // _MOST_ON_DEVICE) if on_device else least


BucketAggregation = Generator[Request, Any, bool | AnyArray]
"""The generator that runs a bucket's step. It returns whether a mean contains an inf or NaN, as `Bucket.call` does.

At the end of the step, the means are at the addresses `result` of the table. If the memory keeps residuals, the
addresses `x` of the table contain the residual, or an x from which the next step subtracts the part that was sent
(`sent_rule`).
"""


class PayloadRows(NamedTuple):
    """The rows of a payload that has one row for each of several ranks.

    Attributes:
        numbers: for each tensor, the number of the row that contains it, int64 (tensors,).
        ranks: number of rows.
        length: the minimum number of bytes of a row. A row is longer if its contents need more bytes.
    """

    numbers: np.ndarray
    ranks: int
    length: int


@dataclass(frozen=True, eq=False)
class Payload:
    """The storage of the payload that a bucket sends.

    Attributes:
        vector: the bytes or elements that are sent, (count,).
        with_room: the same storage with at least 4 additional bytes at the end. The total is a multiple of 8 bytes.
        is_kept: whether later steps reuse the storage.
    """

    vector: AnyArray
    with_room: AnyArray
    is_kept: bool = True

    @cached_property
    def gather(self) -> AllGather:
        """Asks for the payloads of all ranks, in rows. The payload consists of bytes."""
        return AllGather((self.vector,), self.with_room, in_rows=True, is_fixed=self.is_kept)

    @cached_property
    def mean(self) -> AllReduce:
        """Asks for the mean of the payloads of all ranks."""
        return AllReduce(self.vector, with_room=self.with_room, is_fixed=self.is_kept)


@dataclass(eq=False)
class Bucket:
    """The tensors that one bucket form compresses, and the state of their current step.

    Attributes:
        tensors: names, shapes and element types of the tensors. Each has at least one element, and all have the same
            element type.
        compressors: the compressor of each tensor. All are of the same class and differ only in their level.
        memory: the memory of all tensors.
        device: the device of the bucket's kernels; None for the host.
        widens: whether gradients have a 16-bit type. If True, 16-bit gradients become float32 in `x`, and the results
            are cast back to 16 bits in `narrowed`. If False, gradients are float32.
        xp: the array functions for payloads. On the host, these are NumPy's.
        context: the context of the step; its name is empty.
        suffix: text that is appended to the tensors' names for random numbers.
        states: the states that the method keeps for the tensors, adapted by `prepare`; None if the method has no state.
        table: the description of the tensors for kernels.
        segments: the rows of `table`. Each row describes one tensor.
        keeps: whether the memory keeps the part of x that is not sent.
        x: the column of the table that holds x.
        layout: an object that the bucket form computes once from the tensors and levels; None at first.
        found_inf: whether x, or the sent part of x, contains an inf or NaN, in the form that `call` returns. The bucket
            form must set `found_inf` before its first request.
        factors: the object that owns the storage of the product that `sent_product` of the table points to, or None.
            The engine calls the method `commit` of this object unless the step is skipped because of an inf or NaN.
            Keep a reference to this object while you use the product.
        rows: the rows of the payload, if the payload has one row for each of several ranks.
        factor: the number by which this step multiplies the gradients; None for 1.
    """

    tensors: Sequence[TensorInfo]
    compressors: Sequence[Any]
    memory: Memory
    device: Any = None
    xp: AllFunctions = numpy_arrays
    widens: bool = False
    context: Context = field(init=False)
    suffix: str = field(default="", init=False)
    states: BucketStates | None = None
    table: Table = field(init=False)
    segments: np.ndarray = field(init=False, repr=False)
    keeps: bool = field(init=False)
    x: str = field(init=False)
    layout: Any = None
    found_inf: bool | AnyArray = False
    factors: Any = field(default=None, repr=False)
    rows: PayloadRows | None = None
    kernels: Any = field(init=False, repr=False)
    factor: AnyArray | None = field(default=None, init=False, repr=False)
    _threads: int | None = field(default=None, init=False, repr=False)
    # The keys of the random numbers, by suffix.
    _keys: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    # The suffix, step and rank of the keys that were drawn last, and these keys.
    _drawn: tuple[str, int, int | None] | None = field(default=None, init=False, repr=False)
    _keys_of_step: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = [tensor.size for tensor in self.tensors]
        self.keeps = not isinstance(self.memory, NoMemory)
        self.x = "x" if self.keeps or self.widens else "gradient"
        self._threads = kernels.chosen_threads()
        if self.device is None:
            self.table = Table(sizes)
        else:
            from hvdcomp.kernels.cuda.device import PIECE, DeviceKernels

            self.table = Table(sizes, PIECE)
            kept = 1 + NARROW[self.memory.rounds_to or "float32"] if self.keeps else 0
            self.kernels = DeviceKernels(self.table, self.device, kept)
        self.segments = self.table.segments
        self.table.bucket.keeps = self.keeps
        if self.widens:
            self.segments["narrow"] = NARROW[self.dtype]

    @property
    def dtype(self) -> str:
        """The element type of the tensors."""
        return self.tensors[0].dtype

    @property
    def masks(self) -> bool:
        """Whether an element's momentum is cleared when the element is sent (momentum factor masking)."""
        return isinstance(self.memory, MomentumCorrection) and self.memory.masking

    def draw_keys(self, shared: bool = False) -> np.ndarray:
        """Writes the keys of this step's random numbers to the table. Returns the keys, uint64 (tensors,).

        Args:
            shared: whether all ranks draw the same numbers.
        """
        if self.suffix not in self._keys:
            names = [tensor.name + self.suffix for tensor in self.tensors]
            self._keys[self.suffix] = tensor_keys(names, self.context.seed, self.compressors[0].name)
        drawn = self.suffix, self.context.step, None if shared else self.context.rank
        if self._drawn != drawn:  # some methods draw the same keys for encoding and for decoding
            self._drawn, self._keys_of_step = drawn, step_keys(self._keys[self.suffix], *drawn[1:])
        self.segments["key"] = self._keys_of_step
        return self._keys_of_step

    def begin(self, context: Context, factor: AnyArray | None = None, suffix: str = "") -> None:
        """Begins a step. Call it before the first kernel of the step.

        Args:
            context: the context of the step.
            factor: the number by which this step multiplies the gradients; None for 1.
            suffix: text that is appended to the tensors' names for random numbers.
        """
        self.context, self.suffix = context, suffix
        self.factor = factor
        self.found_inf = False
        self.segments["source"] = 0
        self.segments["sent_rule"] = 0
        settings, memory = self.table.bucket, self.memory
        settings.decay = memory.keeps
        if isinstance(memory, MomentumCorrection):
            settings.momentum, settings.nesterov = memory.momentum, memory.nesterov
        if self.device is None:
            settings.threads = self._threads or kernels.default_threads()
            settings.factor = 1.0 if factor is None else float(factor)
        else:
            self.kernels.begin(factor, memory.is_momentum)

    def call(self, kernel: str, *arguments: Any, aside: bool = False) -> bool | AnyArray:
        """Calls a kernel. The table is the kernel's first argument.

        Args:
            kernel: name of the kernel in `src/kernels.def`.
            arguments: further arguments, which are numbers or arrays of `xp`. The kernel gets the addresses of the
                arrays.
            aside: whether, on a device, the next request may be sent before the kernel has ended. The bucket's next
                call still waits for the kernel.

        Returns:
            Whether the kernel found an inf or NaN. On a device, this is an array of one element: NaN if the kernel
            found one, otherwise 0.
        """
        if self.device is not None:
            return self.kernels.call(kernel, *arguments, aside=aside)
        function = getattr(kernels.library(release=self.table.elements > _QUICK), f"hvd_{kernel}")
        addresses = [
            argument.__array_interface__["data"][0] if type(argument) is np.ndarray else argument
            for argument in arguments
        ]
        return bool(function(self.table.address, *addresses))

    def sums_of(self, kernel: str) -> AnyArray:
        """Calls a kernel that computes a sum for each tensor. Returns the sums, an array of `xp`, float64
        (tensors,)."""
        if self.device is not None:
            sums = self.zeros(len(self.tensors), "float64")
            self.call(kernel, sums)
            return sums
        self.call(kernel)
        return self.segments["sums"][:, 0].copy()

    def compressed(self) -> list[np.ndarray]:
        """The arrays that are compressed, as views of the storage that the table points to. Call this only on the host,
        and only after x was computed."""
        vectors = self.table.vectors("source" if self.segments["source"].all() else self.x)
        return [vector.reshape(tensor.shape) for vector, tensor in zip(vectors, self.tensors, strict=True)]

    def zeros(self, count: int, dtype: str = "uint8") -> AnyArray:
        """A vector of zeros on the kernels' device."""
        return np.zeros(count, dtype) if self.device is None else self.kernels.zeros(count, dtype)

    def places(self, *bytes_of: np.ndarray) -> tuple[np.ndarray, int]:
        """The offsets of the tensors' parts in a payload, or in each row of a payload. The first parts of all tensors
        come first, then the second parts, and so on.

        Args:
            bytes_of: for each kind of part, the number of bytes for each tensor, int64 (tensors,).

        Returns:
            The offsets, int64 (kinds, tensors), and the number of bytes of the payload.
        """
        sizes = np.stack(bytes_of)
        numbers, ranks, length = self.rows or PayloadRows(np.zeros(len(self.tensors), np.int64), 1, 0)
        starts = np.zeros_like(sizes)
        for row in range(ranks):
            of_row = sizes[:, numbers == row]
            ends = np.cumsum(of_row).reshape(of_row.shape)
            starts[:, numbers == row] = ends - of_row
            length = max(length, int(ends.max(initial=0)))
        if self.rows is not None:
            length = -(-length // ROW_ALIGNMENT) * ROW_ALIGNMENT
        return starts + numbers * length, ranks * length

    def payload(self, count: int, dtype: str = "uint8", kept: bool = True) -> Payload:
        """Creates the storage of a payload, on the device of the kernels.

        Args:
            count: number of elements. The payload's bytes are rounded up to a multiple of 4, so that every payload
                stays aligned when an all-gather places the payloads of all ranks one after another.
            dtype: element type of the payload.
            kept: whether later steps reuse the payload. If False, the payload is not set to zero, and the caller must
                pass it to `let_go` after use.
        """
        size = np.dtype(dtype).itemsize
        used = -(-count * size // 4) * 4
        make = self.zeros if kept else self.kernels.passing
        with_room = make(-(-(used + 4) // 8) * 8 // size, dtype)
        return Payload(with_room[: used // size], with_room, kept)


def gathered(rows: AnyArray) -> tuple[AnyArray, int, int]:
    """Converts the answer of an `AllGather` with `in_rows` (one row for the payload of each rank) into arguments for
    kernels. The arguments are the first payload, the number of ranks, and the distance in bytes between consecutive
    payloads."""
    stride = rows.strides[0] if isinstance(rows, np.ndarray) else rows.stride(0)
    return rows, rows.shape[0], stride


def any_found_inf(*flags: bool | AnyArray) -> bool | AnyArray:
    """Whether any of several kernel calls found an inf or NaN. The flags and the result have the form that
    `Bucket.call` returns."""
    on_device = [flag for flag in flags if not isinstance(flag, bool)]
    return sum(on_device[1:], on_device[0]) if on_device else any(flags)


def address_of(array: AnyArray) -> int:
    """The address of an array's first element."""
    return array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data_ptr()


def take_off(bucket: Bucket, zeros: np.ndarray, x: np.ndarray | None = None) -> None:
    """Subtracts the sent part from x, if a kernel has postponed this subtraction to the next step. Methods call this
    function if their chunks may change in the next step.

    Args:
        bucket: the bucket, after its tensors were encoded.
        zeros: a vector of zeros, as long as the largest tensor. It is used only on the host.
        x: the addresses to which the differences are written; None to overwrite x. If a product of factors was sent,
            None is not allowed.
    """
    segments = bucket.segments
    if not bucket.keeps or not segments["sent_rule"].any():
        return
    if bucket.device is not None:
        bucket.call("take_off")
        segments["sent_rule"] = 0
        return
    segments["kept"] = segments["x"]
    segments["x"] = segments["x"] if x is None else x
    segments["kept_type"] = 0
    for name in ("above", "below", "rule", "product"):
        segments[name] = segments[f"sent_{name}"]
    segments["gradient"] = zeros.ctypes.data
    for name in ("source", "velocity", "next_velocity", "sent_rule"):
        segments[name] = 0
    bucket.table.bucket.decay = 1.0
    bucket.call("make_x")


class BucketStates:
    """The states that a method keeps between steps for the tensors of a bucket, in flat storage.

    Each tensor has the same number of arrays (length, columns). One vector contains the first arrays of all tensors,
    another vector the second arrays, and so on. Each array is stored column by column.

    Args:
        states: the state of each tensor, as float32 arrays.
        xp: the array functions for the states.

    Attributes:
        kept: the vectors that a step reads and does not change.
        next: the vectors that a step writes. After each step that is not skipped, `kept` and `next` are swapped.
    """

    def __init__(self, states: Sequence[tuple[AnyArray, ...]], xp: AllFunctions = numpy_arrays) -> None:
        kinds = list(zip(*states, strict=True))
        self._xp = xp
        self._shapes = [[tuple(array.shape)[::-1] for array in kind] for kind in kinds]
        self._starts = [np.cumsum([0, *(rows * columns for rows, columns in kind)]).tolist() for kind in self._shapes]
        self.kept: list[AnyArray] = [xp.concatenate([xp.flatten(array.T) for array in kind]) for kind in kinds]
        self.next: list[AnyArray] = [xp.zeros(vector.shape, like=vector) for vector in self.kept]

    def arrays(self, place: int) -> tuple[AnyArray, ...]:
        """The state of the tensor at the position `place` in the bucket, as arrays (length, columns). Later steps reuse
        their storage."""
        return tuple(
            vector[starts[place] : starts[place + 1]].reshape(shapes[place]).T
            for vector, starts, shapes in zip(self.kept, self._starts, self._shapes, strict=True)
        )

    def places(self, members: Sequence[int]) -> list[np.ndarray]:
        """For each vector, the indices that the arrays of some tensors occupy. `members` are the positions of these
        tensors in the bucket."""
        empty = [np.zeros(0, np.int64)]
        ranges = [[np.arange(starts[member], starts[member + 1]) for member in members] for starts in self._starts]
        return [np.concatenate(empty + kind) for kind in ranges]

    @property
    def nbytes(self) -> int:
        """Bytes of all vectors."""
        return sum(int(vector.nbytes) for vector in (*self.kept, *self.next))

    def commit(self) -> None:
        """Keeps the new states after a step that was not skipped."""
        self.kept, self.next = self.next, self.kept

    def settle(self, found_inf: AnyArray) -> None:
        """Keeps the new states if `found_inf` is 0, and the old states if `found_inf` is NaN. The host does not wait
        for the value of `found_inf`."""
        self.next = [self._xp.where(found_inf == 0, new, old) for new, old in zip(self.next, self.kept, strict=True)]
        self.commit()
