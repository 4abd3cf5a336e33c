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
from hvdcomp.arrays.types import AllFunctions, Array
from hvdcomp.compressors.protocol import AllGather, AllReduce, Request


def flag_of(answers: Sequence[bool | Array]) -> Array:
    """This rank's flag, float32 (1,): in NumPy if the host knows the answers, else an array of the framework.

    Args:
        answers: for each part of the step, whether it found an inf or NaN, as returned by `Bucket.call`.
    """
    flags = [flag for flag in answers if not isinstance(flag, bool)]
    on_host = any(flag for flag in answers if isinstance(flag, bool))
    if on_host or not flags:
        return np.array([np.nan if on_host else 0.0], np.float32)
    return sum(flags[1:], flags[0])


def flag_with(xp: AllFunctions, flag: Array, answers: Sequence[bool | Array], like: Array) -> Array:
    """The flag, plus the answers of the check after the exchange; an array of the framework on the device of `like`.

    Args:
        flag: the combined flag of all ranks, an array of the framework or of NumPy.
        answers: for each part of the step, whether its result contains an inf or NaN, as in `flag_of`.
    """
    if any(answer for answer in answers if isinstance(answer, bool)):
        flag = flag + float("nan")
    return sum((answer for answer in answers if not isinstance(answer, bool)), of_framework(xp, flag, like))


def of_framework(xp: AllFunctions, flag: Array, like: Array) -> Array:
    """A flag of the framework or of NumPy, as an array of the framework on the device of `like`."""
    return xp.from_numpy(flag, like=like) if isinstance(flag, np.ndarray) else flag


def with_flag(
    xp: AllFunctions, requests: Sequence[Request], flag: Array, like: Array
) -> tuple[list[Request], Callable[[list[Any]], Array]]:
    """Adds the flag to the requests of the first round.

    If the array of a request has room for the flag, the flag is appended to this array. Otherwise, the flag becomes one
    more request, the last.

    Args:
        flag: the flag of this rank, as returned by `flag_of`.
        like: an array of the framework, on the device of the gradients.

    Returns:
        The new requests, and a function that gets their answers. It removes the flags from the answers, so that the
        answers are those of the old requests, and returns the combined flag of all ranks, float32 (1,).
    """
    requests = list(requests)
    for place, request in enumerate(requests):
        if _has_room(request):
            inside = arrays_for(request.with_room)
            there = inside.from_numpy(flag, like=like) if isinstance(flag, np.ndarray) else flag
            if inside is numpy_arrays and not isinstance(flag, np.ndarray):
                there = xp.to_numpy(flag)
            requests[place], take = _in_room_of(inside, request, place, there)
            return requests, take
    means = [
        request.array
        for request in requests
        if isinstance(request, AllReduce) and request.op == "mean" and request.group == "all"
    ]
    if not (means and isinstance(means[0], np.ndarray)):  # fused with a mean in NumPy, the flag must be in NumPy
        flag = of_framework(xp, flag, like)
    if not means:
        requests.append(AllGather((flag,), in_rows=True))
        return requests, lambda answers: _sum_of(answers.pop())
    inside = arrays_for(flag)
    requests.append(AllReduce(inside.astype(flag, inside.dtype_name(means[0]))))
    return requests, lambda answers: inside.astype(answers.pop(), "float32")


def _has_room(request: Request) -> TypeGuard[AllGather | AllReduce]:
    """Whether the flag can be appended to the array of a request. The flag must reach all ranks, and not as a sum of
    integers."""
    if not isinstance(request, AllGather | AllReduce) or request.with_room is None or request.group != "all":
        return False
    return isinstance(request, AllGather) or request.op == "mean"


def _in_room_of(
    xp: AllFunctions, request: AllGather | AllReduce, place: int, flag: Array
) -> tuple[Request, Callable[[list[Any]], Array]]:
    """A request with the flag appended to its vector; and the function of `with_flag`, which removes the flag from the
    answer at this place."""
    room: Any = request.with_room
    if isinstance(request, AllReduce):
        length = request.array.shape[0]
        room[length] = flag[0]

        def from_mean(answers: list[Any]) -> Array:
            mean = answers[place]
            answers[place] = mean[:length]
            return xp.astype(mean[length:], "float32")

        return AllReduce(room[: length + 1], with_room=room), from_mean
    length = request.parts[0].shape[0]
    room[length : length + 4] = xp.as_bytes(flag)

    def from_parts(answers: list[Any]) -> Array:
        rows = answers[place]
        answers[place] = rows[:, :length]
        return _sum_of(xp.bitcast(rows[:, length : length + 4], "float32"))

    return AllGather((room,), room, in_rows=True), from_parts


def _sum_of(flags: Array) -> Array:
    """The sum of all ranks' flags (ranks, 1), as of `flag_of`: an operation, however many ranks there are."""
    total: Array = flags.sum(axis=0)
    return total
