"""How much a compressor sends for a tensor: counted by running its own generator on shapes, so that no size is written
a second time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from hvdcomp.arrays import shapes
from hvdcomp.arrays.types import number_of_elements
from hvdcomp.compressors.protocol import AllReduce, Context, Group, ReduceScatter, Request, run_alone


class Payload(NamedTuple):
    """What one rank hands to one collective for one tensor.

    kind: "allreduce", "reducescatter", "allgather" or "alltoall".
    bytes: of the tensor, indices and scales included; of the parts for all ranks together.
    group: operation and element type of the former two, such as "mean float32"; what differs in it does not share a
        collective. Empty for the latter two, which carry bytes.
    among: whose collective it is.
    """

    kind: str
    bytes: float
    group: str = ""
    among: Group = "all"


@lru_cache(maxsize=1 << 14)  # every plan, step and prediction asks; a model has few different shapes
def payloads_of(compressor: Any, shape: tuple[int, ...], dtype: str, ranks: int = 1) -> tuple[Payload, ...]:
    """The collectives of one step of a `Compressor` for a tensor, in order.

    Where the steps of a period differ, their mean.
    """
    steps = [payloads_of_step(compressor, shape, dtype, step, ranks) for step in range(compressor.period)]
    if len(steps) == 1:
        return steps[0]
    rounds = zip(*steps, strict=True)
    return tuple(each[0]._replace(bytes=sum(payload.bytes for payload in each) / len(each)) for each in rounds)


def payloads_of_step(
    compressor: Any, shape: tuple[int, ...], dtype: str, step: int, ranks: int = 1
) -> tuple[Payload, ...]:
    """The collectives of one step of a period.

    Args:
        ranks: their number, for a compressor whose payloads depend on it.
    """
    x = shapes.ShapeArray(shape, dtype)
    context = Context("", step, seed=0, rank=0, world_size=ranks)  # sizes are the same on all ranks
    generator = compressor.aggregate(shapes, x, compressor.prepare(shapes, x, (), context), context)
    return tuple(map(payload_of, run_alone(generator)[1]))


def state_elements(compressor: Any, shape: tuple[int, ...]) -> int:
    """How many numbers the method itself keeps of a float32 tensor from step to step."""
    x, context = shapes.ShapeArray(shape, "float32"), Context("", 0, seed=0, rank=0, world_size=1)
    return sum(number_of_elements(array.shape) for array in compressor.prepare(shapes, x, (), context))


def payload_of(request: Request) -> Payload:
    """What a request hands to a collective."""
    kind = type(request).__name__.lower()
    if isinstance(request, AllReduce | ReduceScatter):
        return Payload(kind, bytes_of(request), f"{request.op} {request.array.dtype}")
    return Payload(kind, bytes_of(request))


def bytes_of(request: Request) -> int:
    """Bytes that a request hands to a collective."""
    if isinstance(request, AllReduce | ReduceScatter):
        return int(request.array.nbytes)
    return int(sum(part.nbytes for part in request.parts))
