"""How all ranks learn that a step is not to count, because something in it is not finite.

Each rank makes a flag, an element that is 0, or NaN if what it would send holds an inf or NaN. The flags travel with
the first collectives of the step. What comes back is 0 or NaN on all ranks alike: the step's `found_inf`. What comes
of the exchange is the same on all ranks, so that each checks it by itself, without another collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from hvdcomp.arrays.types import Array
from hvdcomp.compressors.protocol import AllGather, AllReduce, Request


def flag_of(xp: ModuleType, waiting: Sequence[tuple[Array, Request | None]]) -> Array:
    """This rank's flag, float32 (1,).

    Args:
        waiting: of each tensor x, its gradient with what was kept back, and its first request, if it has one. Not the
            gradient itself: the sum may overflow, and an infinity must not be kept.
    """
    casts = [
        request.array
        for x, request in waiting
        if isinstance(request, AllReduce)
        and xp.dtype_name(request.array) == "float16"  # for the wire: large values become infinite
        and xp.dtype_name(x) != "float16"
    ]
    return xp.found_inf([x for x, _ in waiting] + casts)


def flag_of_outcomes(xp: ModuleType, outcomes: Sequence[tuple[Array, tuple[Array, ...]]]) -> Array:
    """The same flag on all ranks, float32 (1,): whether what a compressor made of the exchange is not finite.

    Sums overflow within a method, or over the ranks, although all that was put in is finite.

    Args:
        outcomes: of each tensor the result, and the compressor's state for the next step.
    """
    return xp.found_inf([array for result, state in outcomes for array in (result, *state)])


def flag_request(xp: ModuleType, requests: Sequence[Request], flag: Array) -> Request:
    """The request that spreads the flag, fused with one of the collectives that are under way anyway."""
    for request in requests:
        if isinstance(request, AllReduce) and request.op == "mean":
            return AllReduce(xp.astype(flag, xp.dtype_name(request.array)))
    return AllGather((flag,))


def found_inf_of(xp: ModuleType, request: Request, answer: Any) -> Array:
    """What the ranks' flags come to, float32 (1,), from the answer to `flag_request`'s request."""
    total = sum(part for (part,) in answer) if isinstance(request, AllGather) else answer
    return xp.astype(total, "float32")
