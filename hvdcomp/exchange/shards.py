"""Reduce-scatter of sharded trainings: exact among the ranks of a node, compressed between nodes.

The ranks of a node add up their gradients in float32 and deal the sum out, so that each has what the ranks with its
place in any node are to get: one part of as many as a node has ranks. Those ranks exchange it quantized, and each adds
up its own row in float32. Error feedback keeps what was lost of that part, so that memory does not grow with what a
node holds elsewhere. These are the two levels of SDP4Bit (Jia et al. 2024, arXiv:2410.15526), without its first
rounding, and the error feedback of LoCo (Xie et al. 2024, arXiv:2407.04480), without its average over steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from types import ModuleType
from typing import Any

from hvdcomp import kernels
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.communicators import Communicator
from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.compressors.node_shares import between
from hvdcomp.compressors.protocol import Context, ReduceScatter, Request, across
from hvdcomp.compressors.reduce_scatter import ShardKernels, reduce_scatter
from hvdcomp.errors import warn_alone
from hvdcomp.exchange.agreement import gather_rows
from hvdcomp.exchange.fusion import Round
from hvdcomp.exchange.ledger import Cost, Ledger, Sent
from hvdcomp.exchange.nodes import FoundLevels
from hvdcomp.exchange.residuals import KNOWN_TO_KERNELS
from hvdcomp.kernels import cuda
from hvdcomp.specs.levels import Level

State = tuple[Array, ...]


def averages_vectors(method: Compressor) -> bool:
    """Whether a `ShardReducer` can use a method: it is lossless, or quantizes vectors."""
    return method.lossless or (isinstance(method, Gathering) and not method.of_matrices)


class ShardReducer:
    """Averages flat gradients, of which each rank gets a row, step by step.

    Args:
        communicator: all ranks. They learn of their nodes at once, so every rank makes a reducer at the same point.
        compressor: a `Gathering`, or a lossless one.
        memory: None for the compressor's own where a node has several ranks. Where it has one, what a rank quantizes
            is the whole gradient, and so would its residual be: none is kept then.
        seed: of all random choices; the same on all ranks.
        min_numel: flat gradients with fewer elements are exchanged as they are.
        ledger: where costs are entered.
        like: an empty array of the framework, where the communicator works.

    Attributes:
        levels: where this rank is.
        order: the ranks, by their places in nodes, and then by nodes.
        memory: that is in use.
        plan: the compressor of each flat gradient so far, by name.
        states: of the memory, by name.
        step_number: of the step under way, from 0.

    Raises:
        ConfigurationError: as of `Communicator.part`.
    """

    def __init__(
        self,
        communicator: Communicator,
        compressor: Compressor,
        memory: Memory | None,
        seed: int,
        min_numel: int,
        ledger: Ledger,
        like: Array,
    ) -> None:
        self.communicator = communicator
        self.levels = FoundLevels(communicator, {})("")
        self.compressor = compressor
        self.memory = memory or (compressor.default_memory if self.levels.node.size > 1 else NoMemory())
        self.seed, self._min_numel, self.ledger = seed, min_numel, ledger
        place = b"".join(group.rank.to_bytes(4, "big") for group in (self.levels.node, self.levels.across))
        places = gather_rows(communicator, place, like, "hvdcomp.places")
        self.order = sorted(range(communicator.world_size), key=places.__getitem__)
        self.plan: dict[str, Compressor] = {}
        self.states: dict[str, State] = {}
        self._kernels = kernels.available()
        self._rows: dict[str, ShardKernels] = {}  # by name
        self.step_number = 0
        self._costs: dict[str, Cost] = {}  # of the step under way
        self._sent = Sent()

    @property
    def owners(self) -> list[int]:
        """The ranks of whose rows this rank has residuals, in the order of `states`."""
        (place, _), (node, nodes) = self.levels.node, self.levels.across
        ranks = self.order[place * nodes : (place + 1) * nodes]
        return ranks[:node] + ranks[node + 1 :]

    def set_level(self, level: Level | None) -> None:
        """Sets the level of all flat gradients; to be called on every rank between the same two steps."""
        self.compressor = self.compressor.at_level(level)

    def compresses(self, name: str, size: int) -> bool:
        """Whether to compress a flat gradient of this size. If not, the caller averages it exactly, and reports that
        with `enter`."""
        exact = self.compressor.lossless or self.levels.across.size == 1 or size < self._min_numel
        self.plan[name] = NoCompression() if exact else self.compressor
        return not exact

    def reduce(self, name: str, rows: Array, dense_bytes: int) -> Array:
        """This rank's row of the ranks' mean, float32 (length,).

        If a gradient of any rank holds an inf or NaN, so does a row of some rank; residuals stay finite.

        Args:
            rows: this rank's gradient (ranks, length), by the rank that gets the mean of a row. It is not changed.
            dense_bytes: that a reduce-scatter of it is handed.
        """
        xp, method = arrays_for(rows), self.compressor
        assert isinstance(method, Gathering)
        (place, ranks), nodes, length = self.levels.node, self.levels.across.size, rows.shape[1]
        if self.order != sorted(self.order):
            rows = xp.concatenate([rows[rank : rank + 1] for rank in self.order])
        rows, sent = xp.astype(rows, "float32"), Sent()
        if ranks > 1:
            request = ReduceScatter(xp.reshape(rows, (ranks, nodes * length)), group="node")
            dealt, sent = self._answer(request, name, rows)
            rows = xp.reshape(dealt, (nodes, length))
        context = Context(name, self.step_number, self.seed, self.communicator.rank, self.communicator.world_size)
        shard = dataclasses.replace(between(context, self.levels), name=f"{name}@{place}")
        generator = self._between_nodes(xp, rows, self._state_for(name, (nodes - 1, length)), shard, name)
        answer = None
        while True:
            try:
                answer, more = self._answer(generator.send(answer), name, rows)
            except StopIteration as stop:
                row, self.states[name] = stop.value
                break
            sent += more
        self.enter(name, dense_bytes, sent, method.payload_floats((nodes, length)))
        return row

    def _state_for(self, name: str, shape: tuple[int, int]) -> State:
        state = self.states.get(name, ())
        if all(tuple(array.shape) == shape for array in state):
            return state
        warn_alone(
            f"{name}: the rows of the gradient have {shape[1]} elements, but the rows of the residual have another "
            "length, so the residual is lost"
        )
        return ()

    def _between_nodes(
        self, xp: ModuleType, rows: Array, state: State, shard: Context, name: str
    ) -> Generator[Request, Any, tuple[Array, State]]:
        """`reduce_scatter`, with kernels if possible."""
        method, memory = self.compressor, self.memory
        assert isinstance(method, Gathering)
        length = rows.shape[1]
        known = method.has_bucket_form and type(memory) in KNOWN_TO_KERNELS
        # Kernels on a device would read residuals of 16 bits as such, and these are float32 in a step.
        serves = known and memory.rounds_to is None and cuda.takes(method, length)
        placed = cuda.placed([rows]) if serves else None
        hosted = xp.hosted([rows]) if known and self._kernels and placed is None else None
        if placed is None and hosted is None:
            return (yield from reduce_scatter(method, memory, xp, rows, state, shard))
        device = (rows.device, xp) if placed is not None else ()
        compiled = self._rows.get(name)
        if compiled is None or (compiled.method, compiled.length) != (method, length):
            compiled = self._rows[name] = ShardKernels(method, memory, length, shard, *device)
        if not isinstance(memory, NoMemory) and not state:
            state = memory.prepare(xp, rows[1:], ())
        if placed is not None:
            ((gradient,), _) = placed
            step = compiled.reduce_scatter(gradient, state[0] if state else None, shard)
            return (yield from across(step, rows.shape[0])), state
        assert hosted is not None
        residual = xp.to_numpy(xp.astype(state[0], "float32")) if state else None
        ((gradient,), _) = hosted
        row = yield from across(compiled.reduce_scatter(xp.to_numpy(gradient), residual, shard), rows.shape[0])
        if residual is not None:
            state = memory.prepare(xp, rows[1:], (xp.from_numpy(residual, like=rows),))  # rounds it, if it is kept so
        return xp.from_numpy(row, like=rows), state

    def _answer(self, request: Request, name: str, like: Array) -> tuple[Any, Sent]:
        made = Round(arrays_for(like), self.communicator, [request], f"hvdcomp.{name}", like)
        (answer,) = made.wait()
        return answer, made.sent

    def enter(self, name: str, dense_bytes: int, sent: Sent, floats: float) -> None:
        """Enters what a flat gradient has cost in the step under way.

        Args:
            sent: that this rank handed to collectives.
            floats: values sent between nodes, as 32-bit floats.
        """
        cost = Cost(sent.bytes, dense_bytes, floats, bytes_in_node=sent.in_node)
        self._costs.setdefault(name, Cost()).add(cost)
        self._sent += sent

    def end_step(self) -> None:
        """Enters the step, and begins the next."""
        self.ledger.record(self.ledger.step_cost(self.step_number, [self._costs], self._sent))
        self.step_number += 1
        self._costs, self._sent = {}, Sent()

