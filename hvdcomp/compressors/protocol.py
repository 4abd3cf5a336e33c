"""The interface between compressors and the engine: requests for collectives, and the outcome of a step.

The method `aggregate` of a compressor is a generator. It yields requests for collectives (`AllReduce`, `AllGather`,
`AllToAll`, `ReduceScatter`), and the engine sends it the results. The engine fuses the requests of all tensors into a
few collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from hvdcomp.arrays.types import Array, number_of_elements

Group = Literal["all", "node", "across"]
"""The ranks that take part in a collective: all ranks, the ranks of this rank's node, or the ranks with this rank's
local rank, one on each node. "All ranks" in a request means all ranks of its group."""


@dataclass(frozen=True)
class AllReduce:
    """Asks for the elementwise mean (or "sum", "max") over all ranks; answered with an array of the same shape.

    Attributes:
        array: the array to reduce.
        op: "mean", "sum" or "max".
        with_room: for a NumPy vector only: its storage with 4 bytes or more behind its end (`bucket.Payload`), not used
            for anything else, so that the engine can append its flag and send the vector without a copy.
        group: the ranks that take part.
    """

    array: Array
    op: str = "mean"
    with_room: Array | None = None
    group: Group = "all"

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays that this rank sends."""
        return (self.array,)


@dataclass(frozen=True)
class AllGather:
    """Asks for every rank's parts; answered with one tuple of arrays per rank, in rank order.

    The parts may differ in dtype (values, indices, scales). They are sent packed in one byte buffer. Their shapes and
    dtypes must be the same on all ranks.

    Attributes:
        parts: the arrays to gather.
        with_room: as in `AllReduce`; for a single part of bytes, with `in_rows`.
        group: the ranks that take part.
        in_rows: for bucket forms, with a single part, a vector: whether the answer is one array with a row for each
            rank instead. The time to make such an answer does not depend on the number of ranks.
    """

    parts: tuple[Array, ...]
    with_room: Array | None = None
    group: Group = "all"
    in_rows: bool = False

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays that this rank sends."""
        return self.parts


@dataclass(frozen=True)
class AllToAll:
    """Sends each rank its rows; answered with one tuple of arrays per rank, in rank order: the rows for this rank.

    Attributes:
        parts: arrays with a row for each rank; row r is sent to rank r. As in `AllGather`, shapes and dtypes must be
            the same on all ranks.
        with_room: None.
        group: the ranks that take part.
        in_rows: as in `AllGather`.
    """

    parts: tuple[Array, ...]
    with_room: None = None
    group: Group = "all"
    in_rows: bool = False

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays that this rank sends."""
        return self.parts


@dataclass(frozen=True)
class ReduceScatter:
    """Asks for this rank's row of the elementwise mean (or "sum") over all ranks.

    Attributes:
        array: a row for each rank; the answer is one row.
        op: "mean" or "sum".
        with_room: None.
        group: the ranks that take part.
    """

    array: Array
    op: str = "mean"
    with_room: None = None
    group: Group = "all"

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays that this rank sends."""
        return (self.array,)


class SparseVector(NamedTuple):
    """A flat vector that is zero but for `values` (k,) at `indices` (k,), each index at most once."""

    indices: Array
    values: Array


class Outcome(NamedTuple):
    """The result of a compressor's step.

    Attributes:
        mean: the aggregate over the ranks, which the optimizer gets, in the shape of the gradient, not yet rounded to
            its element type.
        sent: C(x), this rank's contribution as receivers decode it: dense in the gradient's shape, or sparse over its
            flat elements, not rounded any further. Error feedback keeps x - C(x).
        state: the compressor's state for the next step, a tuple of arrays of fixed shapes.
    """

    mean: Array
    sent: Array | SparseVector
    state: tuple[Array, ...] = ()


Request = AllReduce | AllGather | AllToAll | ReduceScatter
Aggregation = Generator[Request, Any, Outcome]


Result = TypeVar("Result")


def run_alone(generator: Generator[Request, Any, Result], ranks: int = 1) -> tuple[Result, list[Request]]:
    """Runs a generator to its end as if this rank were the only rank. Returns its result and its requests.

    Args:
        generator: the step of a compressor.
        ranks: the number of ranks. All ranks count as sending the same, so sums are multiplied by this number.
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
    """The generator with its requests sent to the group "across": one rank on each node.

    Args:
        generator: the step of a compressor.
        nodes: number of nodes; with one, the generator runs alone.
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
        return request.parts[0][None] if request.in_rows else [request.parts]
    if isinstance(request, AllToAll):
        rows = request.parts[0]
        return rows if request.in_rows else [tuple(part[row] for part in request.parts) for row in range(rows.shape[0])]
    array = request.array if isinstance(request, AllReduce) else request.array[0]
    return array * ranks if request.op == "sum" and ranks > 1 else array


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's description before training: enough to choose a compressor and count its bytes.

    Attributes:
        name: the parameter's name.
        shape: the shape that compressors see. In methods for matrices the first dimension is the rows.
        dtype: element type.
        in_framework: the shape in the framework, if it is another.
        is_shared: whether ranks that exchange in other groups have the same tensor with the same gradient, and must get
            the same mean. These ranks compress this tensor together with other tensors than this rank does, so the
            tensor is sent uncompressed, or cast.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    in_framework: tuple[int, ...] | None = None
    is_shared: bool = False

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape in the framework."""
        return self.shape if self.in_framework is None else self.in_framework

    @property
    def size(self) -> int:
        """Number of elements."""
        return number_of_elements(self.shape)


class Place(NamedTuple):
    """A rank's number in a group of ranks, and the group's size."""

    rank: int
    size: int


class NodePlaces(NamedTuple):
    """This rank's places in the groups "node" and "across".

    Attributes:
        node: the place among the ranks of its node.
        across: the place among the ranks of its local rank, one on each node.
        owner: the local rank that compresses the tensor on each node, in methods that do not cut tensors.
    """

    node: Place
    across: Place
    owner: int = 0


@dataclass(frozen=True)
class Context:
    """The tensor, the step and the rank of a call of a compressor.

    Attributes:
        name: the tensor's name.
        step: number of the step.
        seed: the run's seed.
        rank: this rank's number.
        world_size: number of ranks.
        node_places: function from a tensor's name to this rank's `NodePlaces`. Its first call in a training may be
            collective: all ranks call it in the same step. None if every rank counts as a node.
    """

    name: str
    step: int
    seed: int
    rank: int
    world_size: int
    node_places: Callable[[str], NodePlaces] | None = None

    @property
    def has_other_nodes(self) -> bool:
        """Whether there is more than one node; matters to methods that send something within nodes."""
        return self.node_places is not None and self.node_places(self.name).across.size > 1
