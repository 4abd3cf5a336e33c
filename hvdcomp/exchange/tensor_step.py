"""One tensor: what outlives a step, and its way through one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.compressors.protocol import Aggregation, Context, Outcome, Request, SparseVector
from hvdcomp.exchange.fusion import part_bytes, request_bytes
from hvdcomp.exchange.ledger import Cost


@dataclass
class TensorState:
    """What outlives a step for one tensor: the memory's arrays, and those of the method that last compressed it."""

    memory: tuple[Array, ...] = ()
    keeper: Memory = field(default_factory=NoMemory)  # whose arrays `memory` are
    method: str = ""
    compressor: tuple[Array, ...] = ()

    def prepare(self, xp: ModuleType, x: Array, compressor: Compressor, context: Context) -> tuple[Array, ...]:
        """The arrays that a compressor starts from; those that are kept are only for the method that left them."""
        kept = self.compressor if self.method == compressor.name else ()
        return compressor.prepare(xp, x, kept, context)

    def scale_residual(self, factor: float, momentum: bool) -> None:
        """Multiplies the residual, and the memory's momentum if that is asked for."""
        first = 0 if momentum else len(self.memory) - 1  # the residual is the last of a memory's arrays
        self.memory = tuple(
            arrays_for(array).finite_or_zero(array * factor) if place >= first else array
            for place, array in enumerate(self.memory)
        )


class TensorStep:
    """One tensor on its way through one step: made, then `open`, `advance` until no request is left, `finish`.

    Args:
        xp: the array functions of the gradient.
        name: of the tensor.
        gradient: is not changed.
        factor: what the memory multiplies the gradient with; None for 1.
        state: what the tensor kept; `finish` writes what it keeps next.
        memory: that goes with the plan's compressor.

    Attributes:
        x: what is to be sent: the gradient with what the memory kept back.
        outcome: what the generator came to; None while it waits for a collective.
        cost: in bytes and floats.
        marks: start and end of each turn: the memory's, the preparation, each of the generator's, the end.
    """

    def __init__(
        self,
        xp: ModuleType,
        name: str,
        gradient: Array,
        factor: Array | None,
        state: TensorState,
        memory: Memory,
    ) -> None:
        start = xp.mark(gradient)
        x = xp.reshape(xp.flatten(gradient), gradient.shape)
        if factor is not None:
            x = x * xp.astype(factor, xp.dtype_name(x))
        # What an earlier plan left is still to be sent, and only the memory that kept it knows how.
        if state.memory and type(memory) is not type(state.keeper):
            memory = state.keeper
        self.name = name
        self.compressor: Compressor = NoCompression()  # until it is opened
        self.memory = memory
        self.outcome: Outcome | None = None
        self._xp = xp
        self._gradient = gradient
        self._state = state
        self._before = TensorState(memory.prepare(xp, x, state.memory), memory)  # where a skipped step goes back to
        self.x, self._memory_state = memory.compensate(xp, x, self._before.memory)
        self._generator: Aggregation
        self._mean: Array | None = None  # the outcome's mean, like the gradient
        self.cost = Cost(dense_bytes=part_bytes(xp, gradient))
        self.marks = [(start, xp.mark(gradient))]

    def open(self, compressor: Compressor, source: Array, context: Context) -> None:
        """Makes the generator that compresses `source`, which is x, or stands for it."""
        xp, before = self._xp, self._before
        start = xp.mark(self._gradient)
        self.compressor = compressor
        before.method = compressor.name
        before.compressor = self._state.prepare(xp, source, compressor, context)
        self._generator = compressor.aggregate(xp, source, before.compressor, context)
        self.cost.floats_sent = compressor.payload_floats(tuple(self._gradient.shape))
        self.marks.append((start, xp.mark(self._gradient)))

    def advance(self, answer: Any) -> Request | None:
        """Gives the generator the answer to its last request, at first None; its next request, or None at its end."""
        xp = self._xp
        start = xp.mark(self._gradient)
        try:
            request = self._generator.send(answer)
            self.cost.bytes_sent += request_bytes(xp, request)
        except StopIteration as stop:
            self.outcome = stop.value
            self._mean = xp.like_original(stop.value.mean, self._gradient)
            request = None
        self.marks.append((start, xp.mark(self._gradient)))
        return request

    @property
    def sent(self) -> Array | SparseVector:
        """C(x), once the generator has ended."""
        assert self.outcome is not None
        return self.outcome.sent

    @property
    def made(self) -> tuple[Array, tuple[Array, ...]]:
        """What came of the exchange: the result, and the compressor's state for the next step."""
        assert self.outcome is not None
        return self._mean, self.outcome.state

    def finish(self, found_inf: Array) -> Array:
        """Keeps what was not sent, or everything as it was if `found_inf` is NaN; returns the result."""
        xp, before, state = self._xp, self._before, self._state
        mean, compressor_state = self.made
        start = xp.mark(self._gradient)
        result = xp.spoil(mean, found_inf)
        memory_state = self.memory.update(xp, self.x, self.sent, self._memory_state)
        state.memory = _select(xp, found_inf, memory_state, before.memory)
        state.keeper = self.memory
        if not self.compressor.lossless:  # a dense step keeps the warm start of the method it interrupts
            state.method = before.method
            state.compressor = _select(xp, found_inf, compressor_state, before.compressor)
        self.marks.append((start, xp.mark(self._gradient)))
        return result

    @property
    def had_residual(self) -> bool:
        """Whether the memory had kept something back that this step sends."""
        return bool(self._before.memory) and not self.memory.is_momentum


def _select(xp: ModuleType, found_inf: Array, after: tuple[Array, ...], before: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(xp.select(found_inf, new, old) for new, old in zip(after, before, strict=True))
