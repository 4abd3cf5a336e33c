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

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.communicators import Communicator
from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.compressors.protocol import Context, Levels, ReduceScatter, Request, across
from hvdcomp.compressors.two_level_bucket import between
from hvdcomp.errors import warn_alone
from hvdcomp.exchange.agreement import gather_rows
from hvdcomp.exchange.fusion import Round
from hvdcomp.exchange.ledger import Cost, Ledger, Sent
from hvdcomp.exchange.nodes import FoundLevels
from hvdcomp.specs.levels import Level

State = tuple[Array, ...]


def reduce_scatter(
    method: Gathering, memory: Memory, xp: ModuleType, rows: Array, state: State, context: Context, levels: Levels
) -> Generator[Request, Any, tuple[Array, State]]:
    """This rank's row of the ranks' mean.

    Args:
        rows: this rank's gradient, float32 (ranks, length), ordered by the place in a node and then by the node.
        state: of the memory: what this returned in the step before, or nothing.
        context: of the step among all ranks.

    Returns:
        The row (length,), float32, and the memory's state, whose arrays are (nodes, length).
    """
    (place, ranks), nodes, length = levels.node, levels.across.size, rows.shape[1]
    if ranks > 1:
        dealt = yield ReduceScatter(xp.reshape(rows, (ranks, nodes * length)), group="node")
        rows = xp.reshape(dealt, (nodes, length))
    x, kept = memory.compensate(xp, rows, memory.prepare(xp, rows, state))
    shard = dataclasses.replace(between(context, levels), name=f"{context.name}@{place}")
    chunks = list(x)
    mean, encoded = yield from across(method.reduce_scatter(xp, chunks, shard), nodes)
    if isinstance(memory, NoMemory):
        return mean, ()
    sent = xp.concatenate(method.counted(xp, chunks, encoded, shard.rank))
    return mean, memory.update(xp, x, xp.reshape(sent, (nodes, length)), kept)


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
        place = b"".join(one.rank.to_bytes(4, "big") for one in (self.levels.node, self.levels.across))
        places = gather_rows(communicator, place, like, "hvdcomp.places")
        self._order = sorted(range(communicator.world_size), key=places.__getitem__)
        self.plan: dict[str, Compressor] = {}
        self.states: dict[str, State] = {}
        self.step_number = 0
        self._costs: dict[str, Cost] = {}  # of the step under way
        self._sent = Sent()

    def set_level(self, level: Level | None) -> None:
        """Sets the level of all flat gradients; to be called on every rank between the same two steps."""
        self.compressor = self.compressor.at_level(level)

    def takes(self, name: str, size: int) -> bool:
        """Whether `reduce` saves anything of a flat gradient of so many elements; else somebody reduces it exactly, and
        calls `enter`."""
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
        xp, ranks, method = arrays_for(rows), self.communicator, self.compressor
        assert isinstance(method, Gathering)
        ordered = xp.astype(xp.concatenate([rows[rank : rank + 1] for rank in self._order]), "float32")
        state = self.states.get(name, ())
        shape = (self.levels.across.size, rows.shape[1])
        if any(tuple(array.shape) != shape for array in state):
            warn_alone(
                f"{name}: the gradient has rows of {shape[1]} elements, and what was left to be sent has others: that "
                "is lost. Parameters that have a gradient in some steps only are best in a module of their own"
            )
            state = ()
        context = Context(name, self.step_number, self.seed, ranks.rank, ranks.world_size)
        generator = reduce_scatter(method, self.memory, xp, ordered, state, context, self.levels)
        sent, answer = Sent(), None
        while True:
            try:
                request = generator.send(answer)
            except StopIteration as stop:
                row, self.states[name] = stop.value
                break
            one = Round(xp, ranks, [request], f"hvdcomp.{name}", ordered)
            (answer,) = one.wait()
            sent += one.sent
        self.enter(name, dense_bytes, sent, method.payload_floats(shape))
        return row

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

