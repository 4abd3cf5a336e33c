"""Memories, such as error feedback and momentum. A memory adds its state to a gradient before compression, and updates
the state after compression.

A memory is a frozen dataclass without arrays. The state of a memory is a tuple of arrays in the gradient's shape, which
the engine stores by parameter name. States have at least single precision. 16-bit gradients are cast to float32 before
a memory gets them, so that residuals are not rounded in each step. With `ErrorFeedback.dtype`, you can choose rounded
residuals.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hvdcomp.arrays.types import AllFunctions, Array, ArrayFunctions
from hvdcomp.compressors.protocol import SparseVector
from hvdcomp.kernels.limits import LARGEST
from hvdcomp.specs.described import Described, Rule, Share

State = tuple[Array, ...]

_ROUNDS_TO = {"float32": None, "fp16": "float16", "bf16": "bfloat16"}
_DTYPE = Rule(lambda dtype: dtype in [*_ROUNDS_TO], "float32, fp16 or bf16")


@dataclass(frozen=True)
class Memory(Described):
    """Base of all memories.

    Class attributes:
        name: the memory's name in a spec string.
        is_momentum: whether the memory replaces the optimizer's momentum. Such a memory is used for every tensor,
            including uncompressed tensors, and the optimizer must have no momentum.
        keeps: the factor by which the residual is multiplied when the next step adds it.
        rounds_to: the 16-bit element type in which the residual is stored, or None if the residual is not rounded.
    """

    name: ClassVar[str]
    is_momentum: ClassVar[bool] = False
    keeps: ClassVar[float] = 1.0
    rounds_to: ClassVar[str | None] = None

    @property
    def needs_all_gradients(self) -> bool:
        """Whether `gradient_factor` returns a factor. To compute this factor, the memory needs all gradients of a
        step."""
        return type(self).gradient_factor is not Memory.gradient_factor

    def gradient_factor(self, xp: AllFunctions, gradients: Sequence[Array], size: int) -> Array | None:
        """The factor by which all gradients of a step are multiplied before `compensate`, as a scalar array; None for
        1.

        Args:
            xp: array functions.
            gradients: all gradients of this rank in the step.
            size: number of ranks that exchange.
        """
        return None

    def prepare(self, xp: ArrayFunctions, gradient: Array, state: State) -> State:
        """The state that a step starts from: zeros if `state` is empty. The residual is the last array of the state."""
        raise NotImplementedError

    def compensate(self, xp: ArrayFunctions, gradient: Array, state: State) -> tuple[Array, State]:
        """Computes the array x, which is compressed instead of the gradient. Returns x in new storage, and the state
        for `update`."""
        raise NotImplementedError

    def update(self, xp: ArrayFunctions, x: Array, sent: Array | SparseVector, state: State) -> State:
        """The state for the next step, computed from x and C(x). The new state may reuse the storage of `x`, but not
        the storage of the state from `prepare`."""
        raise NotImplementedError


@dataclass(frozen=True)
class ErrorFeedback(Memory):
    """Error feedback: compresses x = g + r, the gradient plus the residual. The new residual r = x - C(x) is the part
    that was not sent (Karimireddy et al. 2019, arXiv:1901.09847, algorithm 2).

        hvdcomp.Compression.from_spec("topk:ratio=0.01", memory="error_feedback:dtype=bf16")

    Attributes:
        decay: the factor by which the residual is multiplied before it is added. 1 keeps the whole residual.
        dtype: the element type of the residual between two steps. This is "float32" (4 bytes per element), "fp16" or
            "bf16" (2 bytes per element). With a 16-bit type, x - C(x) is rounded to nearest, and the rounding error is
            lost. Values beyond the range of the type become its largest number. x itself is not rounded.

    Example:
        >>> str(ErrorFeedback(decay=0.9))
        'error_feedback:decay=0.9'
    """

    decay: Share = 1.0
    dtype: Annotated[str, _DTYPE] = "float32"

    name: ClassVar[str] = "error_feedback"
    examples: ClassVar[tuple[str, ...]] = ("error_feedback:decay=0.9", "error_feedback:dtype=bf16")

    @property
    def keeps(self) -> float:  # type: ignore[override]
        """The factor by which the residual is multiplied: `decay`."""
        return self.decay

    @functools.cached_property  # every step reads it several times
    def rounds_to(self) -> str | None:  # type: ignore[override]
        """The 16-bit element type of the residual, or None for float32."""
        return _ROUNDS_TO[self.dtype]

    def prepare(self, xp: ArrayFunctions, gradient: Array, state: State) -> State:
        (residual,) = state or (xp.zeros(gradient.shape, like=gradient),)
        return (self._rounded(xp, residual),)

    def compensate(self, xp: ArrayFunctions, gradient: Array, state: State) -> tuple[Array, State]:
        residual = xp.astype(state[0], xp.dtype_name(gradient))
        if self.decay == 1:
            return gradient + residual, ()
        return gradient + residual * self.decay, ()

    def update(self, xp: ArrayFunctions, x: Array, sent: Array | SparseVector, state: State) -> State:
        return (self._rounded(xp, without(xp, x, sent)),)

    def _rounded(self, xp: ArrayFunctions, residual: Array) -> Array:
        if self.rounds_to is None or xp.dtype_name(residual) == self.rounds_to:
            return residual
        bound = LARGEST[self.rounds_to]
        return xp.astype(residual.clip(-bound, bound), self.rounds_to)


@dataclass(frozen=True)
class MomentumCorrection(Memory):
    """Applies momentum before compression, and keeps a residual of this momentum (Lin et al. 2018, arXiv:1712.01887,
    section 3).

        u = momentum u + g        v = v + u

    v is compressed. The values that a sparsifier sent are subtracted from v, and u becomes zero for these elements
    (momentum factor masking). Masking prevents old momentum from moving weights after their gradient was sent. With
    other compressors, and in uncompressed steps, no single elements are chosen. Then nothing is masked: C(v) is
    subtracted from v, and u is not changed. If everything is sent without masking, this is SGD with momentum. If a
    sparsifier sends everything with masking, this is SGD without momentum.

    With `nesterov`, v = v + g + momentum u, which gives the same sum as the Nesterov momentum of torch.optim.SGD. The
    momentum does not include weight decay that the optimizer adds later.

    Attributes:
        momentum: the factor of u. The optimizer's own momentum must be 0.
        nesterov: whether to use Nesterov momentum, as above.
        clip: the limit on the 2-norm of this rank's gradient; 0 for no clipping. The norm is computed over all tensors
            together, before u and v are added. With `size` ranks, the limit is multiplied by size**-1/2. With a loss
            scaler, gradients are multiplied by the loss scale, so the limit applies to the multiplied gradients.
        masking: whether u becomes zero for elements that are sent.

    Example:
        >>> str(MomentumCorrection(momentum=0.8))
        'momentum_correction:momentum=0.8'
    """

    momentum: float = 0.9
    nesterov: bool = False
    clip: float = 0.0
    masking: bool = True

    name: ClassVar[str] = "momentum_correction"
    examples: ClassVar[tuple[str, ...]] = ("momentum_correction:momentum=0.9",)
    is_momentum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.require(0 <= self.momentum < 1, "momentum", "at least 0 and below 1")
        self.require(0 <= self.clip < math.inf, "clip", "the largest norm of a gradient, or 0 for no clipping")

    @property
    def needs_all_gradients(self) -> bool:
        return bool(self.clip)

    def gradient_factor(self, xp: AllFunctions, gradients: Sequence[Array], size: int) -> Array | None:
        if not self.clip:
            return None
        norm, largest = (xp.norms(gradients) ** 2).sum() ** 0.5, self.clip / math.sqrt(size)
        return largest / xp.where(norm > largest, norm, largest)

    def prepare(self, xp: ArrayFunctions, gradient: Array, state: State) -> State:
        return state or (xp.zeros(gradient.shape, like=gradient), xp.zeros(gradient.shape, like=gradient))

    def compensate(self, xp: ArrayFunctions, gradient: Array, state: State) -> tuple[Array, State]:
        velocity, residual = state
        velocity = gradient + velocity * self.momentum
        if self.nesterov:
            return residual + gradient + velocity * self.momentum, (velocity,)
        return residual + velocity, (velocity,)

    def update(self, xp: ArrayFunctions, x: Array, sent: Array | SparseVector, state: State) -> State:
        (velocity,) = state
        if self.masking and isinstance(sent, SparseVector):
            kept = xp.flatten(velocity)
            velocity = xp.reshape(xp.add_at(kept, sent.indices, -xp.take(kept, sent.indices)), velocity.shape)
        return velocity, without(xp, x, sent)


@dataclass(frozen=True)
class NoMemory(Memory):
    """No memory: x is the gradient, and nothing is kept.

    Example:
        >>> str(NoMemory())
        'none'
    """

    name: ClassVar[str] = "none"
    examples: ClassVar[tuple[str, ...]] = ("none",)
    keeps: ClassVar[float] = 0.0

    def prepare(self, xp: ArrayFunctions, gradient: Array, state: State) -> State:
        return ()

    def compensate(self, xp: ArrayFunctions, gradient: Array, state: State) -> tuple[Array, State]:
        return gradient, ()

    def update(self, xp: ArrayFunctions, x: Array, sent: Array | SparseVector, state: State) -> State:
        return ()


def without(xp: ArrayFunctions, x: Array, sent: Array | SparseVector) -> Array:
    """x - C(x).

    The result may reuse the storage of `x`. An element that overflows becomes zero, because an infinity would spoil all
    later steps. Elements of a sparse C(x) have the same signs as in x, so the difference can overflow only if C(x) is
    dense.
    """
    if isinstance(sent, SparseVector):
        values = xp.astype(sent.values, xp.dtype_name(x))
        return xp.reshape(xp.add_at(xp.flatten(x), sent.indices, -values), x.shape)
    return xp.finite_or_zero(x - sent)
