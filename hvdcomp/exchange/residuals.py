"""Flat storage: residuals and velocities of float32 tensors from step to step.

Each tensor has two places. A step reads the residual in one place and writes x (the gradient plus the residual) to the
other place. If the step counts, the two places swap roles: x minus the part that was sent is the new residual. If the
step does not count, the old residual is unchanged. On the host, both places stay allocated, because new memory is slow:
the system must clear it first. On a device (`device_residuals`), the place that is not in use is freed after each step.

A residual is stored as x, together with a rule that tells which part of x was sent. The next step reads x anyway, and
then subtracts this part. All other readers call `arrays`, which first subtracts the part from the stored x.

A residual that its memory rounds to 16 bits has a single place, which is written when the step is known to count. For
such a residual, the place of x is freed after each step, also on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.alignment import empty_aligned
from hvdcomp.arrays.types import AllFunctions, AnyArray
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.memory import ErrorFeedback, Memory, MomentumCorrection, NoMemory, without
from hvdcomp.exchange.recycled import ALIGNMENT
from hvdcomp.kernels.limits import LARGEST
from hvdcomp.kernels.tables import EVERYTHING, FACTORS, NARROW, NOT_NEGATIVE, NOTHING, PRODUCT, product

KNOWN_TO_KERNELS = (NoMemory, ErrorFeedback, MomentumCorrection)
"""The classes of memories that kernels support."""

BUFFER, START, ADDRESS = range(3)
"""Indices of the three numbers that describe a place: the number of its buffer (0 if there is no place), its first
element in the buffer, and its address."""

OLD, NEW = range(2)
"""The roles of a tensor's two places: one contains the residual, and a step writes x to the other one."""

Numbers: TypeAlias = slice | np.ndarray
"""The numbers of a bucket's tensors in flat storage. Use `numbers_of`, which returns a slice if possible: NumPy is
faster with a slice than with an array."""

_KINDS = {"x": "float32", "velocity": "float32", "rounded": "int16"}
"""The kinds of arrays that may be kept for a tensor, and their element types. A rounded residual is stored as the bits
of 16-bit floats."""

_COLUMNS = ("x", "kept", "x"), ("velocity", "velocity", "next_velocity")
"""For each kind of arrays: the name of the kind, and the two columns of a bucket's table that contain the addresses of
the old and of the new place."""


class FlatStorage:
    """Residuals of several tensors, by the tensors' numbers, on the host or on a device.

    Args:
        sizes: number of elements of each tensor.
        xp: the array functions for the storage.
        alignment: each tensor begins at a multiple of this number of elements.

    Attributes:
        keepers: the memory that made the arrays of each tensor. The shape is (tensors,).
        has_residual: whether the storage keeps any array for each tensor. The shape is (tensors,).
        released: how often a tensor's arrays were moved out of this storage.
        dropped: how often residuals were dropped.
    """

    def __init__(self, sizes: Sequence[int], xp: AllFunctions, alignment: int) -> None:
        self._sizes = sizes
        self._padded = np.array([-(-size // alignment) * alignment for size in sizes], np.int64)
        self._xp = xp
        self._buffers: dict[int, AnyArray] = {}
        self._numbers = itertools.count(1)  # gives each buffer a number
        # The places of each kind of arrays. The three axes are the role (`OLD` or `NEW`), the index (`BUFFER`, `START`
        # or `ADDRESS`), and the tensor. A rounded residual has only the place `OLD`.
        self._places = {kind: np.zeros((2, 3, len(sizes)), np.int64) for kind in _KINDS}
        self.keepers = np.full(len(sizes), NoMemory(), object)
        self.has_residual = np.zeros(len(sizes), bool)
        self.released = self.dropped = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all places, with or without a residual."""
        return sum(int(buffer.nbytes) for buffer in self._buffers.values())

    def arrays(self, number: int) -> tuple[AnyArray, ...]:
        """The state of a tensor's memory: float32 vectors. Later steps overwrite them."""
        if not self.has_residual[number]:
            return ()
        if dtype := self.keepers[number].rounds_to:
            return (_of_bits(self._xp, self._part("rounded", number), dtype),)
        x = self._part("x", number)
        self._subtract_sent(x, number)
        self._clear_sent(number)
        if not self.keepers[number].is_momentum:
            return (x,)
        return self._part("velocity", number), x

    def keep(self, number: int, keeper: Memory, arrays: Sequence[AnyArray]) -> None:
        """Replaces the arrays of a tensor.

        Args:
            number: the number of the tensor.
            keeper: the memory that made the new arrays.
            arrays: the new arrays of the tensor; empty to keep none.
        """
        self.keepers[number] = keeper
        self.has_residual[number] = bool(arrays)
        self._clear_sent(number)
        if arrays:
            *velocity, x = arrays
            x = x.reshape(-1)
            for kind in kinds_of(keeper):
                self._ensure_places(kind, OLD, slice(number, number + 1))
            if dtype := keeper.rounds_to:
                self._part("rounded", number)[:] = _bits_of(self._xp, x, dtype)
                return
            self._part("x", number)[:] = x
            if velocity:
                self._part("velocity", number)[:] = velocity[0].reshape(-1)

    def scale(self, number: int, factor: float, momentum: bool) -> None:
        """Multiplies the residual by a factor. If `momentum` is True, the velocity is multiplied too."""
        arrays, keeper = self.arrays(number), self.keepers[number]
        for array in arrays[0 if momentum else -1 :]:
            with np.errstate(over="ignore"):
                array *= factor
            array[:] = self._xp.finite_or_zero(array)
        if keeper.rounds_to:  # these arrays were copies
            self.keep(number, keeper, arrays)

    def drop(self, numbers: Numbers) -> None:
        """Drops residuals and velocities."""
        self.has_residual[numbers] = False
        self.dropped += 1

    # A step.

    def enter(self, bucket: Bucket, numbers: Numbers) -> None:
        """Writes the addresses of residuals and of x to a bucket's table. `numbers` has the numbers of the bucket's
        tensors in this storage."""
        segments, has_residual = bucket.segments, self.has_residual[numbers]
        if bucket.memory.rounds_to:
            self._add_missing_places("rounded", OLD, numbers)
            self._add_missing_places("x", NEW, numbers)
            segments["rounded"] = self._places["rounded"][OLD, ADDRESS, numbers]
            segments["kept"] = segments["rounded"] * has_residual
            segments["x"] = self._places["x"][NEW, ADDRESS, numbers]
            return
        for kind, old, new in _COLUMNS[: 1 + bucket.memory.is_momentum]:
            self._ensure_places(kind, NEW, numbers)
            places = self._places[kind]
            segments[old] = places[OLD, ADDRESS, numbers] * has_residual
            segments[new] = places[NEW, ADDRESS, numbers]

    def commit(self, bucket: Bucket, numbers: Numbers) -> None:
        """Makes x the new residual. On the host, call this only after a step that counts. On a device, call this after
        every step."""
        if bucket.memory.rounds_to:
            self._free_places(("x",), NEW, numbers)
        else:
            for kind in kinds_of(bucket.memory):
                places = self._places[kind]
                places[..., numbers] = places[::-1, :, numbers]
        self.has_residual[numbers] = True
        self.keepers[numbers] = bucket.memory

    def x(self, number: int) -> AnyArray:
        """x of the present step, a vector."""
        return self._part("x", number, NEW)

    # Functions for the part of x that was sent. On a device, a description of this part is stored for both places.

    def _subtract_sent(self, x: AnyArray, number: int) -> None:
        """Subtracts from a stored x the part that was sent."""
        raise NotImplementedError

    def _clear_sent(self, number: int) -> None:
        raise NotImplementedError

    # Places.

    def _part(self, kind: str, number: int, role: int = OLD) -> AnyArray:
        buffer, start, _ = self._places[kind][role, :, number].tolist()
        return self._buffers[buffer][start : start + self._sizes[number]]

    def _ensure_places(self, kind: str, role: int, numbers: Numbers) -> None:
        """Makes sure that tensors have places.

        Args:
            kind: kind of the arrays, a key of `_KINDS`.
            role: `OLD` or `NEW`.
            numbers: the numbers of the tensors.
        """
        self._add_missing_places(kind, role, numbers)

    def _add_missing_places(self, kind: str, role: int, numbers: Numbers) -> None:
        """Gives places to the tensors that lack them; arguments as for `_ensure_places`."""
        buffers = self._places[kind][role, BUFFER, numbers]
        if 0 in buffers:
            self._allocate(kind, role, np.arange(len(self._sizes))[numbers][buffers == 0])

    def _allocate(self, kind: str, role: int, numbers: Numbers) -> None:
        """Gives tensors places in a new, uninitialized buffer."""
        padded = self._padded[numbers]
        ends = padded.cumsum()
        buffer, number = self._buffer(int(ends[-1]), _KINDS[kind]), next(self._numbers)
        self._buffers[number] = buffer
        places = self._places[kind][role]
        places[BUFFER, numbers] = number
        places[START, numbers] = starts = ends - padded
        places[ADDRESS, numbers] = self._address(buffer) + np.dtype(_KINDS[kind]).itemsize * starts

    def _free_places(self, kinds: Iterable[str], role: int, numbers: Numbers) -> None:
        """Removes the places of tensors, and frees the buffers that no longer contain any place."""
        for kind in kinds:
            buffers = self._places[kind][:, BUFFER]
            left = set(buffers[role, numbers].tolist()) - {0}
            buffers[role, numbers] = 0
            for number in left:
                if number not in buffers:
                    self._before_free(self._buffers.pop(number))

    def _before_free(self, buffer: AnyArray) -> None:
        """Called before a buffer is freed."""

    def _buffer(self, count: int, dtype: str) -> AnyArray:
        raise NotImplementedError

    def _address(self, buffer: AnyArray) -> int:
        raise NotImplementedError


class Residuals(FlatStorage):
    """Residuals of several tensors on the host, by the tensors' numbers.

    Args:
        sizes: number of elements of each tensor.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes, numpy_arrays, ALIGNMENT)
        # The description of the part of x that was sent, by column of the table.
        types = {"rule": np.int32, "above": np.float32, "below": np.float32, "product": FACTORS}
        self._sent = {name: np.zeros(len(sizes), dtype) for name, dtype in types.items()}
        self._factors = np.full(len(sizes), None, object)  # objects that own the storage to which products point
        self._dtypes = np.full(len(sizes), "", object)  # the element type of each tensor's result

    def enter(self, bucket: Bucket, numbers: Numbers) -> None:
        super().enter(bucket, numbers)
        segments = bucket.segments
        for name, values in self._sent.items():
            segments[name] = values[numbers]
        segments["kept_type"] = NARROW.get(bucket.memory.rounds_to or "", 0)

    def commit(self, bucket: Bucket, numbers: Numbers) -> None:
        if bucket.memory.rounds_to:
            bucket.call("round_left")
            super().commit(bucket, numbers)
            return
        super().commit(bucket, numbers)
        for name, values in self._sent.items():
            values[numbers] = bucket.segments[f"sent_{name}"]
        self._factors[numbers] = bucket.factors
        self._dtypes[numbers] = bucket.dtype
        if bucket.factors is not None:
            bucket.factors.commit()

    def _subtract_sent(self, x: np.ndarray, number: int) -> None:
        rule, above, below, factors = (values[number] for values in self._sent.values())
        if rule == PRODUCT:
            sent, dtype = product(factors, x.size), self._dtypes[number]
            with np.errstate(over="ignore"):
                x[:] = without(numpy_arrays, x, sent)
            if dtype != "float32":
                x += sent - _of_bits(numpy_arrays, _bits_of(numpy_arrays, sent, dtype), dtype)
        elif rule == EVERYTHING:
            x[:] = 0
        elif rule != NOTHING:
            upper = x >= 0 if rule == NOT_NEGATIVE else x > 0
            x -= np.where(upper, above, below)

    def _clear_sent(self, number: int) -> None:
        self._sent["rule"][number] = NOTHING

    def _ensure_places(self, kind: str, role: int, numbers: Numbers) -> None:
        if kind == "rounded":
            self._add_missing_places(kind, role, numbers)
        elif 0 in self._places[kind][role, BUFFER, numbers]:
            for either in (OLD, NEW):
                self._allocate(kind, either, slice(None))

    def _buffer(self, count: int, dtype: str) -> np.ndarray:
        return empty_aligned(count, dtype)

    def _address(self, buffer: np.ndarray) -> int:
        return buffer.ctypes.data


def numbers_of(numbers: Sequence[int]) -> Numbers:
    """Numbers of tensors as a slice, if they follow each other, else as an array."""
    first, last = numbers[0], numbers[-1] + 1
    return slice(first, last) if list(numbers) == list(range(first, last)) else np.array(numbers)


def kinds_of(memory: Memory) -> tuple[str, ...]:
    """The keys of `_KINDS` that a memory keeps."""
    return ("rounded",) if memory.rounds_to else ("x", "velocity")[: 1 + memory.is_momentum]


def _bits_of(xp: AllFunctions, x: AnyArray, dtype: str) -> AnyArray:
    """Rounds a vector to a 16-bit float type in the same way as kernels do, and returns the bits as int16."""
    x = x.clip(-LARGEST[dtype], LARGEST[dtype])
    return xp.to_bfloat16_bits(x) if dtype == "bfloat16" else xp.bitcast(xp.astype(x, dtype), "int16")


def _of_bits(xp: AllFunctions, bits: AnyArray, dtype: str) -> AnyArray:
    return xp.from_bfloat16_bits(bits) if dtype == "bfloat16" else xp.astype(xp.bitcast(bits, dtype), "float32")
