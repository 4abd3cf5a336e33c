"""Flat storage on a device; see `residuals`.

In a step, each tensor has two places: one contains the old residual, and the step writes x to the other one. The host
never waits to learn whether a step counts. It swaps the two places after every step. If the step did not count, the
kernel `settle` copies the old residual to where the next step reads it.

Between steps, a tensor has one place. In a step, a bucket allocates memory for x of its tensors, and at the end it
frees the memory of the old residuals. The forward and backward pass can use the freed memory, for example for
activations. The framework's allocator ensures that new work uses this memory only after the work that was on the step's
stream when the memory was freed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdcomp.arrays.types import AllFunctions, AnyArray
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.exchange.residuals import BUFFER, NEW, OLD, FlatStorage, Numbers, kinds_of
from hvdcomp.kernels import cuda
from hvdcomp.kernels.tables import EVERYTHING, NOT_NEGATIVE, NOTHING

_ALIGNMENT = 32  # the number of elements that a device reads at once


class DeviceResiduals(FlatStorage):
    """Residuals of several tensors on a device, by the tensors' numbers.

    Args:
        sizes: number of elements of each tensor.
        xp: the array functions for the device.
        like: an array without elements, float32, on the device.

    Attributes:
        device: the device. Only tensors on this device have places here.
    """

    def __init__(self, sizes: Sequence[int], xp: AllFunctions, like: AnyArray) -> None:
        super().__init__(sizes, xp, _ALIGNMENT)
        self._likes: dict[str, AnyArray] = {dtype: xp.astype(like, dtype) for dtype in ("float32", "int16")}
        self.device = like.device
        # A row of `_sent` describes the part of x that was sent, with a rule of `kernels.tables` and its two numbers.
        # `_rows` has the index of this row for each role (`OLD` or `NEW`) and tensor.
        self._sent: AnyArray = xp.zeros((2 * len(sizes), 4), like=like)
        self._rows = np.arange(2 * len(sizes)).reshape(2, -1)

    def enter(self, bucket: Bucket, numbers: Numbers) -> None:
        given = set(self._places["x"][NEW, BUFFER, numbers].tolist())
        if len(given) > 1 and 0 in given:
            self._free_places(self._places, NEW, numbers)  # a step that ended with an error has not freed these places
        super().enter(bucket, numbers)
        if not bucket.memory.rounds_to:  # rounded residuals are stored without the part that was sent
            bucket.kernels.sent[:] = self._sent.data_ptr() + 16 * self._rows[:, numbers]

    def _subtract_sent(self, x: AnyArray, number: int) -> None:
        rule, above, below, _ = self._sent[int(self._rows[OLD, number])]
        where = self._xp.where
        sent = where((x > 0) | ((x == 0) & (rule == NOT_NEGATIVE)), above, below)
        x -= where(rule == EVERYTHING, x, where(rule == NOTHING, 0.0, sent))

    def _clear_sent(self, number: int) -> None:
        self._sent[int(self._rows[OLD, number])] = 0

    def commit(self, bucket: Bucket, numbers: Numbers) -> None:
        super().commit(bucket, numbers)
        if not bucket.memory.rounds_to:
            self._rows[:, numbers] = self._rows[::-1, numbers]
            self._free_places(kinds_of(bucket.memory), NEW, numbers)

    def drop(self, numbers: Numbers) -> None:
        super().drop(numbers)
        self._free_places(self._places, OLD, numbers)

    def _before_free(self, buffer: AnyArray) -> None:
        cuda.let_go(buffer)

    def _buffer(self, count: int, dtype: str) -> AnyArray:
        return self._likes[dtype].new_empty(count)

    def _address(self, buffer: AnyArray) -> int:
        return int(buffer.data_ptr())
