"""Memories: what is added to a gradient before compression, and what is kept of it afterwards.

A memory is a frozen description; its state is a tuple of arrays in the gradient's shape that the engine holds by
parameter name. All are of single precision at least: of a gradient of 16 bits a memory gets the same numbers in 32, so
that what is kept is not rounded in each step, unless the user asks for that (`ErrorFeedback.dtype`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, ClassVar

from hvdcomp.arrays.types import LARGEST, Array
from hvdcomp.compressors.protocol import SparseVector
from hvdcomp.specs.described import Described, Rule, Share

State = tuple[Array, ...]

_ROUNDS_TO = {"float32": None, "fp16": "float16", "bf16": "bfloat16"}
_DTYPE = Rule(lambda dtype: dtype in [*_ROUNDS_TO], "float32, fp16 or bf16")


@dataclass(frozen=True)
class Memory(Described):
    """Base of all memories.

    Class attributes:
        name: the memory's name in a spec string.
        is_momentum: whether it does the momentum of the training itself. It is then used for every tensor, also for
            those that are sent dense, and the optimizer must have none.
        keeps: the share of what one step did not send that the next one adds.
        rounds_to: the element type of 16 bits in which the residual is kept, or None where it is not rounded.
    """

    name: ClassVar[str]
    is_momentum: ClassVar[bool] = False
    keeps: ClassVar[float] = 1.0
    rounds_to: ClassVar[str | None] = None

    @property
    def needs_all_gradients(self) -> bool:
        """Whether `gradient_factor` is anything but None."""
        return type(self).gradient_factor is not Memory.gradient_factor

    def gradient_factor(self, xp: ModuleType, gradients: Sequence[Array], size: int) -> Array | None:
        """The factor that all gradients of a step are multiplied by before `compensate`, as a scalar array; or None.

        Args:
            gradients: all of this rank's, of every shape and type.
            size: number of ranks.
        """
        return None

    def prepare(self, xp: ModuleType, gradient: Array, state: State) -> State:
        """State to start a step from: made anew (zeros) when `state` is empty. The residual is its last array."""
        raise NotImplementedError

    def compensate(self, xp: ModuleType, gradient: Array, state: State) -> tuple[Array, State]:
        """x, which is compressed in place of the gradient, in fresh storage, and the state to hand to `update`."""
        raise NotImplementedError

    def update(self, xp: ModuleType, x: Array, sent: Array | SparseVector, state: State) -> State:
        """State for the next step, given x and C(x); may reuse the storage of `x`, not that of `prepare`'s state."""
        raise NotImplementedError


@dataclass(frozen=True)
class ErrorFeedback(Memory):
    """x = g + r is compressed; r = x - C(x) is kept (Karimireddy et al. 2019, arXiv:1901.09847, algorithm 2).

        hvdcomp.Compression.from_spec("topk:ratio=0.01", memory="error_feedback:dtype=bf16")

    Attributes:
        decay: the residual is multiplied by this before it is added; 1 loses nothing.
        dtype: of the residual between two steps: "float32", or "fp16" or "bf16", which take 2 bytes an element in place
            of 4. Then x - C(x) is rounded to nearest, and the rounding error is lost: C(x) + r + that error = g + the
            earlier r. What exceeds the type becomes its largest number. x itself is not rounded.
    """

    decay: Share = 1.0
    dtype: Annotated[str, _DTYPE] = "float32"

    name: ClassVar[str] = "error_feedback"
    examples: ClassVar[tuple[str, ...]] = ("error_feedback:decay=0.9", "error_feedback:dtype=bf16")

    @property
    def keeps(self) -> float:  # type: ignore[override]
        """The decay."""
        return self.decay

    @property
    def rounds_to(self) -> str | None:  # type: ignore[override]
        """`dtype` by its common name."""
        return _ROUNDS_TO[self.dtype]

    def prepare(self, xp: ModuleType, gradient: Array, state: State) -> State:
        (residual,) = state or (xp.zeros(gradient.shape, like=gradient),)
        return (self._rounded(xp, residual),)

    def compensate(self, xp: ModuleType, gradient: Array, state: State) -> tuple[Array, State]:
        residual = xp.astype(state[0], xp.dtype_name(gradient))
        if self.decay == 1:
            return gradient + residual, ()
        return gradient + residual * self.decay, ()

    def update(self, xp: ModuleType, x: Array, sent: Array | SparseVector, state: State) -> State:
        return (self._rounded(xp, without(xp, x, sent)),)

    def _rounded(self, xp: ModuleType, residual: Array) -> Array:
        if self.rounds_to is None or xp.dtype_name(residual) == self.rounds_to:
            return residual
        bound = LARGEST[self.rounds_to]
        return xp.astype(residual.clip(-bound, bound), self.rounds_to)


@dataclass(frozen=True)
class MomentumCorrection(Memory):
    """Momentum that is applied before compression, and a residual of it (Lin et al. 2018, arXiv:1712.01887, section 3).

        u = momentum u + g        v = v + u

    v is what is compressed. What a sparsifier has sent is taken out of v, and u becomes zero there as well (momentum
    factor masking), so that an old momentum does not carry weights on after the gradient behind it was sent. Of what
    other compressors have sent, which has no places, only v loses its share; nor are dense steps masked. So without
    masking, and with everything sent, this is SGD with momentum; with masking a sparsifier that sends everything is
    SGD without.

    With `nesterov` it is v = v + g + momentum u: in sum, what torch.optim.SGD calls Nesterov momentum. Weight decay
    that the optimizer adds later is outside of the momentum.

    Attributes:
        momentum: factor; the optimizer's own must then be 0.
        nesterov: see above.
        clip: the 2-norm that this rank's gradient, all tensors together and before anything is added, is held to,
            times size**-1/2 for `size` ranks; 0 for no clipping. In the units of gradients as they arrive, that is,
            with a loss scaler, multiplied by the loss scale.
        masking: whether momentum factor masking is done.
    """

    momentum: float = 0.9
    nesterov: bool = False
    clip: float = 0.0
    masking: bool = True

    name: ClassVar[str] = "momentum_correction"
    examples: ClassVar[tuple[str, ...]] = ("momentum_correction:momentum=0.9",)
    is_momentum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.require(0 <= self.momentum < 1, "momentum", "in [0, 1)")
        self.require(0 <= self.clip < math.inf, "clip", "the largest norm of a gradient, or 0 for no clipping")

    @property
    def needs_all_gradients(self) -> bool:
        return bool(self.clip)

    def gradient_factor(self, xp: ModuleType, gradients: Sequence[Array], size: int) -> Array | None:
        if not self.clip:
            return None
        norm, largest = (xp.norms(gradients) ** 2).sum() ** 0.5, self.clip / math.sqrt(size)
        return largest / xp.where(norm > largest, norm, largest)

    def prepare(self, xp: ModuleType, gradient: Array, state: State) -> State:
        return state or (xp.zeros(gradient.shape, like=gradient), xp.zeros(gradient.shape, like=gradient))

    def compensate(self, xp: ModuleType, gradient: Array, state: State) -> tuple[Array, State]:
        velocity, residual = state
        velocity = gradient + velocity * self.momentum
        if self.nesterov:
            return residual + gradient + velocity * self.momentum, (velocity,)
        return residual + velocity, (velocity,)

    def update(self, xp: ModuleType, x: Array, sent: Array | SparseVector, state: State) -> State:
        (velocity,) = state
        if self.masking and isinstance(sent, SparseVector):
            kept = xp.flatten(velocity)
            velocity = xp.reshape(xp.add_at(kept, sent.indices, -xp.take(kept, sent.indices)), velocity.shape)
        return velocity, without(xp, x, sent)


@dataclass(frozen=True)
class NoMemory(Memory):
    """Nothing is added and nothing kept."""

    name: ClassVar[str] = "none"
    examples: ClassVar[tuple[str, ...]] = ("none",)
    keeps: ClassVar[float] = 0.0

    def prepare(self, xp: ModuleType, gradient: Array, state: State) -> State:
        return ()

    def compensate(self, xp: ModuleType, gradient: Array, state: State) -> tuple[Array, State]:
        return gradient, ()

    def update(self, xp: ModuleType, x: Array, sent: Array | SparseVector, state: State) -> State:
        return ()


def without(xp: ModuleType, x: Array, sent: Array | SparseVector) -> Array:
    """x - C(x); may reuse the storage of `x`.

    An element that overflows becomes zero: its residual is lost, but an infinity would spoil all steps that follow. A
    sparse C(x) has the sign of the elements of x, so that only a dense one can make the difference overflow.
    """
    if isinstance(sent, SparseVector):
        values = xp.astype(sent.values, xp.dtype_name(x))
        return xp.reshape(xp.add_at(xp.flatten(x), sent.indices, -values), x.shape)
    return xp.finite_or_zero(x - sent)
