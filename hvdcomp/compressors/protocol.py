"""The interface between compressors and the engine: requests for collectives, and the outcome of a step.

The method `aggregate` of a compressor is a generator. The generator yields requests for collectives (`AllReduce`,
`AllGather`, `AllToAll`, `ReduceScatter`), and the engine sends it the results. The engine fuses the requests of all
tensors into a few collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from hvdcomp.arrays.types import AnyArray, Array, number_of_elements

Group = Literal["all", "node", "across"]
"""The ranks that take part in a collective: all ranks, the ranks of this rank's node, or the ranks with this rank's
local rank, one on each node. "All ranks" in a request means all ranks of its group."""


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Requests the elementwise mean (or "sum", "max") over all ranks. The answer is an array of the same shape.

    Attributes:
        array: the array to reduce.
        op: the operation, which is "mean", "sum" or "max".
        with_room: used only for a NumPy vector. It is the storage of the vector with at least 4 unused bytes after its
            end (`bucket.Payload`). The engine can then append its flag and send the vector without a copy.
        group: the ranks that take part, as a `Group`.
        is_fixed: whether this same object is yielded in every step. If True, the engine plans the collective once, and
            reuses the plan in later steps.
    """

    array: Array
    op: str = "mean"
    with_room: AnyArray | None = None
    group: Group = "all"
    is_fixed: bool = False

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays that this rank sends."""
        return (self.array,)


@dataclass(frozen=True, eq=False)
class AllGather:
    """Requests every rank's parts. The answer is one tuple of arrays for each rank, in rank order.

    The parts may differ in dtype (values, indices, scales). They are packed into one byte buffer for sending. The
    parts' shapes and dtypes must be the same on all ranks.

    Attributes:
        parts: the arrays to gather.
        with_room: storage of the single part with unused bytes after its end, as in `AllReduce`. It is allowed only if
            the part consists of bytes and `in_rows` is set.
        group: the ranks that take part, as a `Group`.
        in_rows: whether the answer is instead one array with a row for each rank. Creating such an answer takes the
            same time for any number of ranks. Only bucket forms may set `in_rows`, and the request must then have a
            single part, which is a vector.
        is_fixed: whether this same object is yielded in every step, as in `AllReduce`.
    """

    parts: tuple[Array, ...]
    with_room: AnyArray | None = None
    group: Group = "all"
    in_rows: bool = False
    is_fixed: bool = False

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays that this rank sends."""
        return self.parts


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Sends each rank its rows. The answer is one tuple of arrays for each rank, in rank order. The tuples contain the
    rows that this rank has received.

    Attributes:
        parts: arrays with one row for each rank. Row r is sent to rank r. As in `AllGather`, shapes and dtypes must be
            the same on all ranks.
        with_room: always None. The attribute exists because other requests have it.
        group: the ranks that take part, as a `Group`.
        in_rows: whether the answer is one array with a row for each rank, as in `AllGather`.
    """

    parts: tuple[Array, ...]
    with_room: None = None
    group: Group = "all"
    in_rows: bool = False

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays that this rank sends."""
        return self.parts


@dataclass(frozen=True, eq=False)
class ReduceScatter:
    """Requests this rank's row of the elementwise mean (or "sum") over all ranks.

    Attributes:
        array: an array with one row for each rank. The answer is one row.
        op: the operation, which is "mean" or "sum".
        with_room: always None. The attribute exists because other requests have it.
        group: the ranks that take part, as a `Group`.
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
    """A flat vector with `values` (k,) at `indices` (k,), and zeros elsewhere. No index occurs twice."""

    indices: Array
    values: Array


class Outcome(NamedTuple):
    """What a compressor returns at the end of a step: the mean, what this rank has sent, and its new state.

    Attributes:
        mean: the mean over the ranks, which the optimizer gets. The mean has the shape of the gradient and is not yet
            rounded to the gradient's element type.
        sent: C(x), this rank's contribution as receivers decode it, without further rounding. `sent` is dense in the
            gradient's shape, or sparse with indices of the flat gradient. Error feedback keeps x - C(x).
        state: the compressor's state for the next step, a tuple of arrays of fixed shapes.
    """

    mean: Array
    sent: Array | SparseVector
    state: tuple[Array, ...] = ()


Request = AllReduce | AllGather | AllToAll | ReduceScatter
Aggregation = Generator[Request, Any, Outcome]


Result = TypeVar("Result")


def run_alone(generator: Generator[Request, Any, Result], ranks: int = 1) -> tuple[Result, list[Request]]:
    """Runs a generator to its end as if this rank were the only rank. Returns the generator's result and its requests.

    Args:
        generator: the generator that `aggregate` or `aggregate_bucket` returned for the step.
        ranks: the number of ranks. All ranks are assumed to send the same values, so a sum is this number times the
            values of one rank.
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
    """The same generator, but its requests go to the group "across", which has one rank on each node.

    Args:
        generator: the generator that `aggregate` or `aggregate_bucket` returned for the step.
        nodes: the number of nodes. With one node, the generator gets its own arrays as answers.
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
    """The description of a tensor before training. The description is enough to choose a compressor and to count the
    bytes that it sends.

    Attributes:
        name: the parameter's name.
        shape: the shape that compressors see. Methods for matrices use the first dimension as the rows.
        dtype: name of the element type, such as "float32".
        in_framework: the shape in the framework, if it differs from `shape`.
        is_shared: whether ranks of another group have a copy of this tensor with the same gradient. The copies must get
            the same mean. But in each group, the tensor shares its bucket with different tensors, so the compressed
            means of the copies would differ. Therefore the tensor is sent uncompressed, or cast.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    in_framework: tuple[int, ...] | None = None
    is_shared: bool = False

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in its framework."""
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
    """The places of this rank in the groups "node" and "across".

    Attributes:
        node: number of this rank among the ranks of its node.
        across: number of this rank among the ranks with the same local rank. There is one such rank on each node.
        owner: the local rank that compresses the tensor on each node, for methods that do not cut tensors.
    """

    node: Place
    across: Place
    owner: int = 0


@dataclass(frozen=True)
class Context:
    """The tensor, the step and the rank for which a compressor is called.

    Attributes:
        name: name of the tensor.
        step: number of the step, counted from 0.
        seed: seed of the run's random numbers.
        rank: number of this rank.
        world_size: number of ranks.
        node_places: a function that returns this rank's `NodePlaces` for a tensor's name. The first call of this
            function in a training run may run a collective, so all ranks must call it in the same step. `node_places`
            is None if every rank is treated as a node of its own.
    """

    name: str
    step: int
    seed: int
    rank: int
    world_size: int
    node_places: Callable[[str], NodePlaces] | None = None

    @property
    def has_other_nodes(self) -> bool:
        """Whether there is more than one node. Only methods that also send data within nodes use this."""
        return self.node_places is not None and self.node_places(self.name).across.size > 1
