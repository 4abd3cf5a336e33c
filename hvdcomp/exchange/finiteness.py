"""Tells all ranks that a step does not count, because some data in it is not finite.

Each rank makes a flag. A flag is one element: 0 if the data that the rank will send is finite, and NaN if not. Each
rank sends its flag together with the first collectives of the step, and receives the sum or the mean of all flags. This
combined flag is 0 or NaN, and the same on all ranks.

After the exchange, each rank checks the results, and adds the answer to the combined flag. All ranks have the same
results, so this second check needs no collective. The final flag is the step's `found_inf`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np

from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.types import AllFunctions, AnyArray, Array
from hvdcomp.compressors.protocol import AllGather, AllReduce, Request


def flag_of(answers: Sequence[bool | Array]) -> Array:
    """This rank's flag, float32 (1,): in NumPy if the host knows the answers, else an array of the framework.

    Args:
        answers: for each bucket of the step, whether it has found an inf or NaN, as returned by `Bucket.call`.
    """
    total: Any = None
    for answer in answers:
        if answer is True:
            return np.array([np.nan], np.float32)
        if answer is not False:
            total = answer if total is None else total + answer
    return np.zeros(1, np.float32) if total is None else total


def flag_with(xp: AllFunctions, flag: Array, answers: Sequence[bool | Array], like: Array) -> Array:
    """Adds the answers of the check after the exchange to the combined flag. Returns the sum as an array of the
    framework on the device of `like`.

    Args:
        flag: the combined flag of all ranks, an array of the framework or of NumPy.
        answers: for each bucket of the step, whether its result contains an inf or NaN, as in `flag_of`.
    """
    total = of_framework(xp, flag, like)
    for answer in answers:
        if answer is True:
            total = total + float("nan")
        elif answer is not False:
            total = total + answer
    return total


def of_framework(xp: AllFunctions, flag: Array, like: Array) -> Array:
    """A flag of the framework or of NumPy, as an array of the framework on the device of `like`."""
    return xp.from_numpy(flag, like=like) if isinstance(flag, np.ndarray) else flag


class InRoom:
    """Appends the flag to the vector of a request.

    Args:
        request: a request with room for the flag.

    Attributes:
        request: the request that also sends the flag.
    """

    def __init__(self, request: AllGather | AllReduce) -> None:
        room: Any = request.with_room
        self._inside = arrays_for(room)
        self.request: AllGather | AllReduce
        if isinstance(request, AllReduce):
            self._length = request.array.shape[0]
            self._flag = room[self._length : self._length + 1]
            self.request = AllReduce(room[: self._length + 1], with_room=room)
        else:
            self._length = request.parts[0].shape[0]
            self._flag = self._inside.bitcast(room[self._length : self._length + 4], "float32")
            self.request = AllGather((room,), room, in_rows=True)

    def put(self, xp: AllFunctions, flag: AnyArray, like: Array) -> None:
        """Writes the flag of this rank, as returned by `flag_of`; the other arguments are those of `with_flag`."""
        if self._inside is not numpy_arrays:
            flag = of_framework(xp, flag, like)
        elif not isinstance(flag, np.ndarray):
            flag = xp.to_numpy(flag)
        self._flag[:] = flag

    def take(self, answer: Array) -> tuple[Array, Array]:
        """The answer without the flags, and the combined flag of all ranks, float32 (1,)."""
        length = self._length
        if isinstance(self.request, AllReduce):
            return answer[:length], self._inside.astype(answer[length:], "float32")
        return answer[:, :length], _sum_of(self._inside.bitcast(answer[:, length : length + 4], "float32"))


def with_flag(
    xp: AllFunctions, requests: Sequence[Request], flag: Array, like: Array
) -> tuple[list[Request], Callable[[list[Any]], Array]]:
    """Adds the flag as one more request, after the last request. Use this if no request has room for the flag.

    Args:
        flag: the flag of this rank, as returned by `flag_of`.
        like: an array of the framework, on the device of the gradients.

    Returns:
        The requests including the added request, and a function. The function gets the list of answers, removes the
        answer to the added request, and returns the combined flag of all ranks, float32 (1,).
    """
    means = [
        request.array
        for request in requests
        if isinstance(request, AllReduce) and request.op == "mean" and request.group == "all"
    ]
    # If the flag is fused with a mean in NumPy, the flag must be in NumPy too.
    if not (means and isinstance(means[0], np.ndarray)):
        flag = of_framework(xp, flag, like)
    if not means:
        return [*requests, AllGather((flag,), in_rows=True)], lambda answers: _sum_of(answers.pop())
    inside = arrays_for(flag)
    of_flag = AllReduce(inside.astype(flag, inside.dtype_name(means[0])))
    return [*requests, of_flag], lambda answers: inside.astype(answers.pop(), "float32")


def has_room(request: Request) -> TypeGuard[AllGather | AllReduce]:
    """Whether the flag can be appended to the array of a request. The request must reach all ranks. An all-reduce must
    be a mean, because sums may consist of integers, which cannot represent NaN."""
    if not isinstance(request, AllGather | AllReduce) or request.with_room is None or request.group != "all":
        return False
    return isinstance(request, AllGather) or request.op == "mean"


def _sum_of(flags: Array) -> Array:
    """The sum of all ranks' flags, which are in an array of shape (ranks, 1). For any number of ranks, this is a single
    operation."""
    total: Array = flags.sum(axis=0)
    return total
