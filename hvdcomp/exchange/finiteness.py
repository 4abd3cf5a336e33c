"""How all ranks learn that a step is not to count, because something in it is not finite.

Each rank makes a flag, an element that is 0, or NaN if what it would send holds an inf or NaN. The flags travel with
the first collectives of the step. What comes back is 0 or NaN on all ranks alike: the step's `found_inf`. What comes
of the exchange is the same on all ranks, so that each checks it by itself, without another collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeGuard

import numpy as np

from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.types import Array
from hvdcomp.compressors.protocol import AllGather, AllReduce, Request


def flag_of(answers: Sequence[bool | Array]) -> Array:
    """This rank's flag, float32 (1,); of the framework or, where that is not needed, of NumPy.

    Args:
        answers: whether each part of the step has found an inf or NaN, as of `Bucket.call`.
    """
    flags = [flag for flag in answers if not isinstance(flag, bool)]
    on_host = any(flag for flag in answers if isinstance(flag, bool))
    if on_host or not flags:
        return np.array([np.nan if on_host else 0.0], np.float32)
    return sum(flags[1:], flags[0])


def flag_with(xp: ModuleType, flag: Array, answers: Sequence[bool | Array], like: Array) -> Array:
    """A flag, which may be of NumPy, with what was found after the exchange; of the framework, where `like` is."""
    if any(answer for answer in answers if isinstance(answer, bool)):
        flag = flag + float("nan")
    return sum((answer for answer in answers if not isinstance(answer, bool)), of_framework(xp, flag, like))


def of_framework(xp: ModuleType, flag: Array, like: Array) -> Array:
    """A flag that may be of NumPy, where `like` is."""
    return xp.from_numpy(flag, like=like) if isinstance(flag, np.ndarray) else flag


def with_flag(
    xp: ModuleType, requests: Sequence[Request], flag: Array, like: Array
) -> tuple[list[Request], Callable[[list[Any]], Array]]:
    """The requests of the first round with the flag among them, so that it travels with the collectives that are under
    way anyway: at the end of one that has room for it, or else as a request of its own, the last.

    Returns:
        The requests, and a function that takes the flag out of their answers, which are then those of the requests
        before, and returns what the ranks' flags come to, float32 (1,), as of `flag_of`.
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
    if not (means and isinstance(means[0], np.ndarray)):  # a mean in NumPy takes the flag in NumPy
        flag = of_framework(xp, flag, like)
    if not means:
        requests.append(AllGather((flag,)))
        return requests, lambda answers: sum(part for (part,) in answers.pop())
    inside = arrays_for(flag)
    requests.append(AllReduce(inside.astype(flag, inside.dtype_name(means[0]))))
    return requests, lambda answers: inside.astype(answers.pop(), "float32")


def _has_room(request: Request) -> TypeGuard[AllGather | AllReduce]:
    """Whether a flag can travel at the end of an array: not of one of whole numbers, and not to one rank alone."""
    if not isinstance(request, AllGather | AllReduce) or request.with_room is None or request.group != "all":
        return False
    return isinstance(request, AllGather) or request.op == "mean"


def _in_room_of(
    xp: ModuleType, request: AllGather | AllReduce, place: int, flag: Array
) -> tuple[Request, Callable[[list[Any]], Array]]:
    """A request with the flag behind its vector, and what takes it out of the answer at this place."""
    room: Any = request.with_room
    if isinstance(request, AllReduce):
        length = len(request.array)
        room[length] = flag[0]

        def from_mean(answers: list[Any]) -> Array:
            mean = answers[place]
            answers[place] = mean[:length]
            return xp.astype(mean[length:], "float32")

        return AllReduce(room[: length + 1], with_room=room), from_mean
    length = len(request.parts[0])
    room[length : length + 4] = xp.as_bytes(flag)

    def from_parts(answers: list[Any]) -> Array:
        ranks = [whole for (whole,) in answers[place]]
        answers[place] = [(whole[:length],) for whole in ranks]
        return sum(xp.from_bytes(whole[length : length + 4], like=flag) for whole in ranks)

    return AllGather((room,), room), from_parts
