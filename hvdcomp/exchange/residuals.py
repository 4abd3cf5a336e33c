"""Flat storage: residuals and velocities of float32 tensors from step to step.

Each tensor has two places. A step reads the residual in one place and writes x to the other. If the step counts, the
two places swap roles: x without what was sent of it is the new residual. If it does not count, nothing has changed. On
the host both places stay, because the system clears memory that is new to a process. On a device (`device_residuals`)
the place that is not in use is freed after each step.

A residual is stored as x, with a rule that tells what was sent of x. The next step reads x anyway, and then subtracts
what was sent. Any other reader of a residual has it subtracted first (`arrays`).

A residual that its memory rounds to 16 bits has a single place, which is written when the step is known to count. The
place of x is then freed after each step, on the host too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

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

_PLACE = np.dtype([("buffer", "i8"), ("start", "i8"), ("address", "u8")])
"""A place: the number of its buffer (0 if there is no place), its first element in the buffer, and its address."""

_KINDS: dict[str, np.dtype[Any]] = {"x": np.dtype("f4"), "velocity": np.dtype("f4"), "rounded": np.dtype("i2")}
"""The arrays that may be kept of a tensor, and their element types. A rounded residual is stored as its bits."""


class FlatStorage:
    """Residuals of several tensors, by the tensors' numbers, on the host or on a device.

    Args:
        sizes: number of elements of each tensor.
        xp: the array functions for the storage.
        alignment: each tensor begins at a multiple of this number of elements.

    Attributes:
        keepers: for each tensor, the memory that made its arrays, (tensors,).
        has_residual: for each tensor, whether any of its arrays is kept, (tensors,).
        released: how often a tensor's arrays were moved out of this storage.
        dropped: how often residuals were dropped.
    """

    def __init__(self, sizes: Sequence[int], xp: AllFunctions, alignment: int) -> None:
        self._sizes = sizes
        self._padded = np.array([-(-size // alignment) * alignment for size in sizes], np.int64)
        self._xp = xp
        self._buffers: dict[int, AnyArray] = {}
        self._numbers = itertools.count(1)  # gives each buffer a number
        self._places = {kind: np.zeros((2, len(sizes)), _PLACE) for kind in _KINDS}
        # Which of a tensor's two places contains the residual; it never changes for rounded residuals.
        self._turn = np.zeros(len(sizes), np.int64)
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
            return (_of_bits(self._xp, self._part("rounded", number, self._turn[number]), dtype),)
        x = self._part("x", number, self._turn[number])
        self._subtract_sent(x, number)
        self._clear_sent(number)
        if not self.keepers[number].is_momentum:
            return (x,)
        return self._part("velocity", number, self._turn[number]), x

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
            turn, x = self._turn[number], x.reshape(-1)
            for kind in _kinds_of(keeper):
                self._ensure_places(kind, self._turn[[number]], np.array([number]))
            if dtype := keeper.rounds_to:
                self._part("rounded", number, turn)[:] = _bits_of(self._xp, x, dtype)
                return
            self._part("x", number, turn)[:] = x
            if velocity:
                self._part("velocity", number, turn)[:] = velocity[0].reshape(-1)

    def scale(self, number: int, factor: float, momentum: bool) -> None:
        """Multiplies the residual, and if `momentum` also the velocity."""
        arrays, keeper = self.arrays(number), self.keepers[number]
        for array in arrays[0 if momentum else -1 :]:
            with np.errstate(over="ignore"):
                array *= factor
            array[:] = self._xp.finite_or_zero(array)
        if keeper.rounds_to:  # these arrays were copies
            self.keep(number, keeper, arrays)

    def drop(self, numbers: np.ndarray) -> None:
        """Drops residuals and velocities."""
        self.has_residual[numbers] = False
        self.dropped += 1

    # A step.

    def enter(self, bucket: Bucket, numbers: np.ndarray) -> None:
        """Writes the addresses of residuals and of x to a bucket's table. `numbers` has the numbers of the bucket's
        tensors in this storage."""
        segments, turn = bucket.segments, self._turn[numbers]
        if bucket.memory.rounds_to:
            self._add_missing_places("rounded", turn, numbers)
            self._add_missing_places("x", 1 - turn, numbers)
            rounded = self._places["rounded"]["address"][turn, numbers]
            segments["rounded"], segments["kept"] = rounded, np.where(self.has_residual[numbers], rounded, 0)
            segments["x"] = self._places["x"]["address"][1 - turn, numbers]
            return
        fields = [("x", "kept", "x")] + [("velocity", "velocity", "next_velocity")] * bucket.memory.is_momentum
        for kind, old, new in fields:
            self._ensure_places(kind, 1 - turn, numbers)
            addresses = self._places[kind]["address"]
            segments[old] = np.where(self.has_residual[numbers], addresses[turn, numbers], 0)
            segments[new] = addresses[1 - turn, numbers]

    def commit(self, bucket: Bucket, numbers: np.ndarray) -> None:
        """Makes x the new residual, after a step that counts; on a device after every step."""
        if bucket.memory.rounds_to:
            self._free_places(1 - self._turn[numbers], numbers)
        else:
            self._turn[numbers] ^= 1
        self.has_residual[numbers] = True
        self.keepers[numbers] = bucket.memory

    def x(self, number: int) -> AnyArray:
        """x of the present step, a vector."""
        return self._part("x", number, 1 - self._turn[number])

    # The part of x that was sent. A device stores its description for both places.

    def _subtract_sent(self, x: AnyArray, number: int) -> None:
        """Subtracts from a stored x the part that was sent."""
        raise NotImplementedError

    def _clear_sent(self, number: int) -> None:
        raise NotImplementedError

    # Places.

    def _part(self, kind: str, number: int, turn: int) -> AnyArray:
        place = self._places[kind][int(turn), number]
        start = int(place["start"])
        return self._buffers[int(place["buffer"])][start : start + self._sizes[number]]

    def _ensure_places(self, kind: str, turn: np.ndarray, numbers: np.ndarray) -> None:
        """Makes sure that tensors have places.

        Args:
            kind: kind of the arrays, a key of `_KINDS`.
            turn: for each tensor, which of its two places (0 or 1).
            numbers: the numbers of the tensors.
        """
        self._add_missing_places(kind, turn, numbers)

    def _add_missing_places(self, kind: str, turn: np.ndarray, numbers: np.ndarray) -> None:
        """Gives places to the tensors that lack them; arguments as for `_ensure_places`."""
        lacking = self._places[kind]["buffer"][turn, numbers] == 0
        if lacking.any():
            self._allocate(kind, turn[lacking], numbers[lacking])

    def _allocate(self, kind: str, turn: int | np.ndarray, numbers: np.ndarray) -> None:
        """Gives tensors places in a new, uninitialized buffer."""
        ends = np.cumsum(self._padded[numbers])
        buffer, number = self._buffer(int(ends[-1]), _KINDS[kind].name), next(self._numbers)
        starts = ends - self._padded[numbers]
        self._buffers[number] = buffer
        places = self._places[kind]
        places["buffer"][turn, numbers] = number
        places["start"][turn, numbers] = starts
        places["address"][turn, numbers] = self._address(buffer) + _KINDS[kind].itemsize * starts

    def _free_places(self, turn: np.ndarray, numbers: np.ndarray) -> None:
        """Takes these places from tensors, and frees the buffers that have no place left."""
        for places in self._places.values():
            buffers = places["buffer"]
            left = set(buffers[turn, numbers].tolist()) - {0}
            buffers[turn, numbers] = 0
            for number in left:
                if not (buffers == number).any():
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
        self._rule = np.zeros(len(sizes), np.int32)
        self._above = np.zeros(len(sizes), np.float32)
        self._below = np.zeros(len(sizes), np.float32)
        self._product = np.zeros(len(sizes), FACTORS)
        self._factors = np.full(len(sizes), None, object)  # objects that own the storage to which `_product` points
        self._dtypes = np.full(len(sizes), "", object)  # the element type of each tensor's result

    def enter(self, bucket: Bucket, numbers: np.ndarray) -> None:
        super().enter(bucket, numbers)
        segments = bucket.segments
        segments["rule"] = self._rule[numbers]
        segments["above"] = self._above[numbers]
        segments["below"] = self._below[numbers]
        segments["product"] = self._product[numbers]
        segments["kept_type"] = NARROW.get(bucket.memory.rounds_to or "", 0)

    def commit(self, bucket: Bucket, numbers: np.ndarray) -> None:
        if bucket.memory.rounds_to:
            bucket.call("round_left")
            super().commit(bucket, numbers)
            return
        super().commit(bucket, numbers)
        segments = bucket.segments
        self._rule[numbers] = segments["sent_rule"]
        self._above[numbers] = segments["sent_above"]
        self._below[numbers] = segments["sent_below"]
        self._product[numbers] = segments["sent_product"]
        self._factors[numbers] = bucket.factors
        self._dtypes[numbers] = bucket.dtype
        if bucket.factors is not None:
            bucket.factors.commit()

    def _subtract_sent(self, x: np.ndarray, number: int) -> None:
        if self._rule[number] == PRODUCT:
            sent, dtype = product(self._product[number], x.size), self._dtypes[number]
            with np.errstate(over="ignore"):
                x[:] = without(numpy_arrays, x, sent)
            if dtype != "float32":
                x += sent - _of_bits(numpy_arrays, _bits_of(numpy_arrays, sent, dtype), dtype)
        elif self._rule[number] == EVERYTHING:
            x[:] = 0
        elif self._rule[number] != NOTHING:
            upper = x >= 0 if self._rule[number] == NOT_NEGATIVE else x > 0
            x -= np.where(upper, self._above[number], self._below[number])

    def _clear_sent(self, number: int) -> None:
        self._rule[number] = NOTHING

    def _ensure_places(self, kind: str, turn: np.ndarray, numbers: np.ndarray) -> None:
        if kind == "rounded":
            self._add_missing_places(kind, turn, numbers)
        elif not self._places[kind]["buffer"][turn, numbers].all():
            for half in range(2):
                self._allocate(kind, half, np.arange(len(self._sizes)))

    def _buffer(self, count: int, dtype: str) -> np.ndarray:
        return empty_aligned(count, dtype)

    def _address(self, buffer: np.ndarray) -> int:
        return buffer.ctypes.data


def _kinds_of(memory: Memory) -> tuple[str, ...]:
    """The keys of `_KINDS` that a memory keeps."""
    return ("rounded",) if memory.rounds_to else ("x", "velocity")[: 1 + memory.is_momentum]


def _bits_of(xp: AllFunctions, x: AnyArray, dtype: str) -> AnyArray:
    """The bits, int16, of a vector rounded to a type of 16 bits, as kernels round it."""
    x = x.clip(-LARGEST[dtype], LARGEST[dtype])
    return xp.to_bfloat16_bits(x) if dtype == "bfloat16" else xp.bitcast(xp.astype(x, dtype), "int16")


def _of_bits(xp: AllFunctions, bits: AnyArray, dtype: str) -> AnyArray:
    return xp.from_bfloat16_bits(bits) if dtype == "bfloat16" else xp.astype(xp.bitcast(bits, dtype), "float32")
