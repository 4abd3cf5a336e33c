"""Memories: what is added to a gradient before compression, and what is kept of it afterwards.

A memory is a frozen description; its state is a tuple of arrays in the gradient's shape that the engine holds by
parameter name.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from hvdcomp.collectives import Array, SparseVector
from hvdcomp.errors import SpecError

State = tuple[Array, ...]


@dataclass(frozen=True)
class Memory:
    """Base of all memories. Class attribute `name`: the memory's name in a spec string."""

    name: ClassVar[str]

    def prepare(self, xp: ModuleType, gradient: Array, state: State) -> State:
        """State to start a step from: made anew (zeros) when `state` is empty."""
        raise NotImplementedError

    def compensate(self, xp: ModuleType, gradient: Array, state: State) -> tuple[Array, State]:
        """What is compressed in place of the gradient, in fresh storage, and the state to hand to `update`."""
        raise NotImplementedError

    def update(self, xp: ModuleType, x: Array, sent: Array | SparseVector, state: State) -> State:
        """State for the next step, given x and C(x); may reuse the storage of `x`, not that of `prepare`'s state."""
        raise NotImplementedError


@dataclass(frozen=True)
class ErrorFeedback(Memory):
    """x = g + r is compressed; r = x - C(x) is kept (Karimireddy et al. 2019, arXiv:1901.09847, algorithm 2).

    Attributes:
        decay: the residual is multiplied by this before it is added; 1 loses nothing.
    """

    decay: float = 1.0

    name: ClassVar[str] = "error_feedback"

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise SpecError(f"error_feedback: decay={self.decay} is not allowed; it must be above 0 and at most 1")

    def prepare(self, xp: ModuleType, gradient: Array, state: State) -> State:
        return state or (xp.zeros(gradient.shape, like=gradient),)

    def compensate(self, xp: ModuleType, gradient: Array, state: State) -> tuple[Array, State]:
        (residual,) = state
        return gradient + (residual if self.decay == 1 else residual * self.decay), ()

    def update(self, xp: ModuleType, x: Array, sent: Array | SparseVector, state: State) -> State:
        return (without(xp, x, sent),)


@dataclass(frozen=True)
class NoMemory(Memory):
    """Nothing is added and nothing kept."""

    name: ClassVar[str] = "none"

    def prepare(self, xp: ModuleType, gradient: Array, state: State) -> State:
        return ()

    def compensate(self, xp: ModuleType, gradient: Array, state: State) -> tuple[Array, State]:
        return gradient, ()

    def update(self, xp: ModuleType, x: Array, sent: Array | SparseVector, state: State) -> State:
        return ()


def without(xp: ModuleType, x: Array, sent: Array | SparseVector) -> Array:
    """x - C(x); may reuse the storage of `x`."""
    if isinstance(sent, SparseVector):
        return xp.reshape(xp.add_at(xp.flatten(x), sent.indices, -sent.values), x.shape)
    return x - sent


MEMORIES: dict[str, type[Memory]] = {kind.name: kind for kind in (ErrorFeedback, NoMemory)}
