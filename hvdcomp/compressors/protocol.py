"""What a compressor may ask of the other ranks, and what it gives back when it is done.

A compressor is a generator. It yields requests for collectives (`AllReduce`, `AllGather`, `AllToAll`, `ReduceScatter`)
and is sent the answers; the engine fuses the requests of all tensors into few collectives. These few classes are all
the two share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from hvdcomp.arrays.types import Array, number_of_elements

Group = Literal["all", "node", "across"]
"""Whose collective a request asks for: that of all ranks, of the ranks of this rank's node, or of those that have this
rank's place in the other nodes. What a request says of ranks is then said of these."""


@dataclass(frozen=True)
class AllReduce:
    """Asks for the elementwise mean (or "sum", "max") over all ranks; answered with an array of the same shape.

    Attributes:
        with_room: for a vector of NumPy alone: its storage, with four bytes or more behind its end (`bucket.Payload`).
            What is said then is that nobody else uses that storage, so that it may travel as it is, with the engine's
            flag behind it.
    """

    array: Array
    op: str = "mean"
    with_room: Array | None = None
    group: Group = "all"


@dataclass(frozen=True)
class AllGather:
    """Asks for every rank's parts; answered with one tuple of arrays per rank, in rank order.

    The parts may differ in dtype (values, indices, scales); they travel packed in one byte buffer. Their shapes
    and dtypes must be the same on all ranks.

    Attributes:
        with_room: as of `AllReduce`, for a single part of bytes.
    """

    parts: tuple[Array, ...]
    with_room: Array | None = None
    group: Group = "all"


@dataclass(frozen=True)
class AllToAll:
    """Sends each rank parts of its own; answered with one tuple of arrays per rank, in rank order: what it sent here.

    Attributes:
        parts: each of as many rows as there are ranks; row r goes to rank r, and a row is what comes of each rank. They
            travel as those of `AllGather` do: shapes and dtypes must be the same on all ranks.
        with_room: None; nothing but a whole request travels without a copy here.
    """

    parts: tuple[Array, ...]
    with_room: None = None
    group: Group = "all"


@dataclass(frozen=True)
class ReduceScatter:
    """Asks for this rank's row of the elementwise mean (or "sum") over all ranks.

    Attributes:
        array: of as many rows as there are ranks; answered with one row.
        with_room: None, as of `AllToAll`.
    """

    array: Array
    op: str = "mean"
    with_room: None = None
    group: Group = "all"


class SparseVector(NamedTuple):
    """A flat vector that is zero but for `values` (k,) at `indices` (k,), each index at most once."""

    indices: Array
    values: Array


class Outcome(NamedTuple):
    """What a compressor returns at the end of a step.

    mean: what the optimizer gets: the aggregate over the ranks, in the shape of the gradient, not yet rounded to its
        element type.
    sent: C(x), this rank's own contribution as the receivers understand it (dense in the gradient's shape, or
        sparse over its flat elements), rounded no further; error feedback keeps x - C(x).
    state: the compressor's state for the next step, a tuple of arrays of fixed shapes.
    """

    mean: Array
    sent: Array | SparseVector
    state: tuple[Array, ...] = ()


Request = AllReduce | AllGather | AllToAll | ReduceScatter
Aggregation = Generator[Request, Any, Outcome]


Result = TypeVar("Result")


def run_alone(generator: Generator[Request, Any, Result], ranks: int = 1) -> tuple[Result, list[Request]]:
    """Runs a generator to its end, answered as if this rank were the only one; its outcome, and what it asked for.

    Args:
        ranks: whose sums it is to be answered with; all of them send the same.
    """
    requests: list[Request] = []
    answer: Any = None
    while True:
        try:
            request = generator.send(answer)
        except StopIteration as stop:
            return stop.value, requests
        requests.append(request)
        answer = _alone(request, ranks)


def across(generator: Generator[Request, Any, Result], nodes: int) -> Generator[Request, Any, Result]:
    """The same generator among the ranks that have this rank's place in the other nodes.

    Args:
        nodes: how many there are; of a single one nothing is asked.
    """
    if nodes == 1:
        return run_alone(generator)[0]
    answer: Any = None
    while True:
        try:
            request = generator.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield dataclasses.replace(request, group="across")


def _alone(request: Request, ranks: int) -> Any:
    if isinstance(request, AllGather):
        return [request.parts]
    if isinstance(request, AllToAll):
        return [tuple(part[row] for part in request.parts) for row in range(request.parts[0].shape[0])]
    array = request.array if isinstance(request, AllReduce) else request.array[0]
    return array * ranks if request.op == "sum" and ranks > 1 else array


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before training: enough to choose a compressor and count its bytes.

    Attributes:
        shape: as compressors see it. To those that take tensors for matrices, the first dimension is that of the rows.
        in_framework: its shape there; None for the same.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    in_framework: tuple[int, ...] | None = None

    @property
    def own_shape(self) -> tuple[int, ...]:
        """As the user knows it."""
        return self.shape if self.in_framework is None else self.in_framework

    @property
    def size(self) -> int:
        """Number of elements."""
        return number_of_elements(self.shape)


class Place(NamedTuple):
    """A rank's number among some ranks, and how many these are."""

    rank: int
    size: int


class Levels(NamedTuple):
    """Where this rank is.

    Attributes:
        node: among the ranks of its node.
        across: among the ranks that have its place in the other nodes.
        owner: the rank of each node, by its number there, that works on the tensor where tensors are not cut.
    """

    node: Place
    across: Place
    owner: int = 0


@dataclass(frozen=True)
class Context:
    """Which tensor, when, and where: what a compressor may know beside the gradient itself.

    Attributes:
        levels: tells of a tensor's name where this rank is. The first call of a training may be collective: all ranks
            call it in the same step. None where every rank counts as a node.
    """

    name: str
    step: int
    seed: int
    rank: int
    world_size: int
    levels: Callable[[str], Levels] | None = None

    @property
    def has_other_nodes(self) -> bool:
        """Whether there are other nodes than this rank's; to be asked where something is sent within nodes."""
        return self.levels is not None and self.levels(self.name).across.size > 1
