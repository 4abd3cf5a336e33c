"""Counts the bytes that a compressor sends for a tensor. To count the bytes, the compressor's generator is run on
arrays without values."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from hvdcomp.arrays import shapes
from hvdcomp.arrays.types import number_of_elements
from hvdcomp.compressors import checked
from hvdcomp.compressors.protocol import AllReduce, Context, Group, ReduceScatter, Request, run_alone


class SentPayload(NamedTuple):
    """One rank's payload for one collective and one tensor.

    Attributes:
        kind: kind of collective, that is, "allreduce", "reducescatter", "allgather" or "alltoall".
        bytes: the bytes of the payload, including indices and scales. If the payload has a different part for each
            rank, the bytes of all parts are added.
        reduction: the operation and element type of an allreduce or reduce-scatter, such as "mean float32". Payloads
            with different reductions do not share a collective. The reduction is empty for allgather and alltoall,
            which send bytes.
        among: the ranks that take part, as a `Group`.
    """

    kind: str
    bytes: float
    reduction: str = ""
    among: Group = "all"


@lru_cache(maxsize=1 << 14)  # called for every plan, step and prediction, but a model has few different shapes
def payloads_of(compressor: Any, shape: tuple[int, ...], dtype: str, ranks: int = 1) -> tuple[SentPayload, ...]:
    """The payloads of one step of a `Compressor` for a tensor, in order. If the payloads differ between steps, the
    result is the mean of the payloads over a period.
    """
    steps = [payloads_of_step(compressor, shape, dtype, step, ranks) for step in range(compressor.period)]
    if len(steps) == 1:
        return steps[0]
    rounds = zip(*steps, strict=True)
    return tuple(
        payloads[0]._replace(bytes=sum(payload.bytes for payload in payloads) / len(payloads)) for payloads in rounds
    )


def payloads_of_step(
    compressor: Any, shape: tuple[int, ...], dtype: str, step: int, ranks: int = 1
) -> tuple[SentPayload, ...]:
    """The payloads of one step of a period, in order. A tensor without elements has no payloads.

    Args:
        compressor: the compressor of the tensor.
        shape: shape of the tensor.
        dtype: element type of the tensor.
        step: number of the step, counted from 0.
        ranks: the number of ranks. Some payloads depend on this number.
    """
    if not number_of_elements(shape):
        return ()
    x = shapes.ShapeArray(shape, dtype)
    context = Context("", step, seed=0, rank=0, world_size=ranks)  # sizes are the same on all ranks
    generator = checked.aggregate(compressor, shapes, x, checked.prepare(compressor, shapes, x, (), context), context)
    return tuple(map(payload_of, run_alone(generator)[1]))


def state_elements(compressor: Any, shape: tuple[int, ...]) -> int:
    """The number of elements that the method itself stores between steps for a float32 tensor. Residuals are not
    counted."""
    x, context = shapes.ShapeArray(shape, "float32"), Context("", 0, seed=0, rank=0, world_size=1)
    return sum(number_of_elements(array.shape) for array in checked.prepare(compressor, shapes, x, (), context))


def payload_of(request: Request) -> SentPayload:
    """The payload of a request."""
    kind = type(request).__name__.lower()
    if isinstance(request, AllReduce | ReduceScatter):
        return SentPayload(kind, bytes_of(request), f"{request.op} {request.array.dtype}")
    return SentPayload(kind, bytes_of(request))


def bytes_of(request: Request) -> int:
    """The number of bytes that a request passes to a collective."""
    if isinstance(request, AllReduce | ReduceScatter):
        return int(request.array.nbytes)
    return int(sum(part.nbytes for part in request.parts))
