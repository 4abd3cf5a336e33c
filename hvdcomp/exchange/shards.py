"""Reduce-scatter for sharded training (FSDP): exact within a node, compressed between nodes.

1. Within a node, a reduce-scatter in float32 adds up the gradients. If the node has n ranks, each rank gets one n-th of
   the sum. This part has one row for each node: the row of the rank with the same local rank on this node.
2. The ranks with the same local rank quantize these rows and exchange them. Each rank adds up its own row in float32.

Error feedback keeps only the part that this rank quantized. So the residual has less than one n-th of the gradient's
elements.

The two stages follow SDP4Bit (Jia et al. 2024, arXiv:2410.15526), but without SDP4Bit's rounding within the node. The
error feedback follows LoCo (Xie et al. 2024, arXiv:2407.04480), but without LoCo's average over steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

from hvdcomp import kernels
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import AllFunctions, AnyArray, Array
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

State = tuple[AnyArray, ...]


def averages_vectors(method: Compressor) -> bool:
    """Whether a `ShardReducer` can use a method. The method must be lossless, or quantize vectors without keeping a
    state."""
    return method.lossless or (isinstance(method, Gathering) and not (method.of_matrices or method.keeps_state))


class ShardReducer:
    """Averages flat gradients over the ranks in every step. Each rank gets one row of each mean.

    Args:
        communicator: the communicator of all ranks. The constructor exchanges the ranks' places in nodes, so all ranks
            must call it at the same point.
        compressor: the compressor: a `Gathering`, or a lossless compressor.
        memory: the memory of the flat gradients. If None is given and a node has several ranks, the compressor's
            default memory is used. If None is given and a node has one rank, no memory is used, because the residual
            would be as large as the whole gradient.
        seed: seed of all random choices; the same on all ranks.
        min_numel: flat gradients with fewer elements are not compressed.
        ledger: the ledger that records the costs of steps.
        like: an empty array of the framework, on the device where collectives run.

    Attributes:
        levels: the number of this rank in its node, and the number of its node.
        order: the ranks, sorted by their place in the node, and then by the node.
        memory: the memory in use.
        plan: the compressor of each flat gradient that was reduced so far, by name.
        states: the memory's state of each flat gradient, by name.
        step_number: number of the present step, from 0.

    Raises:
        ConfigurationError: as in `Communicator.part`.
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
        self._rows: dict[str, ShardKernels] = {}  # the kernels of each flat gradient, by name
        self.step_number = 0
        self._costs: dict[str, Cost] = {}  # the costs of the present step, by name of the flat gradient
        self._sent = Sent()

    @property
    def owners(self) -> list[int]:
        """The ranks that own the rows in this rank's residuals, in the order of the rows of `states`."""
        (place, _), (node, nodes) = self.levels.node, self.levels.across
        ranks = self.order[place * nodes : (place + 1) * nodes]
        return ranks[:node] + ranks[node + 1 :]

    def set_level(self, level: Level | None) -> None:
        """Sets the level of all flat gradients. Call it on every rank between the same two steps."""
        self.compressor = self.compressor.at_level(level)

    def compresses(self, name: str, size: int) -> bool:
        """Whether to compress a flat gradient of this size. If not, the caller averages it exactly, and reports that
        with `enter`."""
        exact = self.compressor.lossless or self.levels.across.size == 1 or size < self._min_numel
        self.plan[name] = NoCompression() if exact else self.compressor
        return not exact

    def reduce(self, name: str, rows: AnyArray, dense_bytes: int) -> AnyArray:
        """This rank's row of the mean over all ranks, float32 (length,).

        If the gradient of any rank contains an inf or NaN, the row of at least one rank contains one too. Residuals
        stay finite.

        Args:
            name: name of the flat gradient.
            rows: this rank's flat gradient, (ranks, length). Rank r gets the mean of row r. The array is not changed.
            dense_bytes: bytes that an uncompressed reduce-scatter would send.
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
            f"{name}: the rows of the gradient have {shape[1]} elements, but the rows of the residual have a different "
            "length, so the residual is lost"
        )
        return ()

    def _between_nodes(
        self, xp: AllFunctions, rows: AnyArray, state: State, shard: Context, name: str
    ) -> Generator[Request, Any, tuple[AnyArray, State]]:
        """Runs the reduce-scatter between nodes, with kernels if possible, or else with the function
        `reduce_scatter`."""
        method, memory = self.compressor, self.memory
        assert isinstance(method, Gathering)
        length = rows.shape[1]
        known = method.has_bucket_form and type(memory) in KNOWN_TO_KERNELS
        # In a step, residuals are float32. But if the memory has `rounds_to`, kernels on a device would read the
        # residual as 16-bit floats.
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
            # If the memory rounds residuals, `prepare` rounds this residual.
            state = memory.prepare(xp, rows[1:], (xp.from_numpy(residual, like=rows),))
        return xp.from_numpy(row, like=rows), state

    def _answer(self, request: Request, name: str, like: Array) -> tuple[Any, Sent]:
        made = Round(arrays_for(like), self.communicator, [request], f"hvdcomp.{name}", like)
        (answer,) = made.wait()
        return answer, made.sent

    def enter(self, name: str, dense_bytes: int, sent: Sent, floats: float) -> None:
        """Adds the cost of a flat gradient to the present step.

        Args:
            name: name of the flat gradient.
            dense_bytes: bytes that an uncompressed reduce-scatter would send.
            sent: bytes that this rank passed to collectives.
            floats: number of values that were sent between nodes, as 32-bit floats.
        """
        cost = Cost(sent.bytes, dense_bytes, floats, bytes_in_node=sent.in_node)
        self._costs.setdefault(name, Cost()).add(cost)
        self._sent += sent

    def end_step(self) -> None:
        """Enters the step in the ledger, and begins the next step."""
        self.ledger.record(self.ledger.step_cost(self.step_number, [self._costs], self._sent))
        self.step_number += 1
        self._costs, self._sent = {}, Sent()
