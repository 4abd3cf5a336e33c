"""Refuses a combination of compressor and memory if residuals, or the noise in momenta, would grow without limit.

Error feedback needs a contraction: the expected energy of the residual must be below that of x, E|x - C(x)|^2 < |x|^2
(Karimireddy et al. 2019, arXiv:1901.09847, assumption A). Otherwise the residual grows with each step. Some unbiased
methods have a variance (expected squared error) that is too large for error feedback, but unbiased methods need no
error feedback.
"""

from __future__ import annotations

from collections.abc import Iterable

from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.two_level import within
from hvdcomp.errors import SpecError


def require_bounded_residuals(compressor: Compressor, memory: Memory | None) -> None:
    """Raises SpecError if residuals would grow without limit.

    Args:
        compressor: the compressor to check. If it is a router, all compressors that it may choose are checked.
        memory: the memory that the user gave; None for the default of each compressor. If the default of one compressor
            is momentum correction, all tensors use momentum correction.
    """
    methods = list(compressor.leaves())
    if memory is None:
        memory = next((method.default_memory for method in methods if method.default_memory.is_momentum), None)
    if memory is None:
        return
    for method in methods:
        if _grows(method, memory):
            raise SpecError(
                f"{method} does not work with memory={memory}: the method is unbiased, and its error can have "
                f"{method.variance:.3g} times the energy (squared norm) of its input, so residuals would grow without "
                "limit. Leave memory at its default (memory=none, because an unbiased method needs no memory), raise "
                "the level until this number is below 1, or use a biased method, such as randomk without unbiased, "
                "topk or powersgd"
            )


def require_bounded_turns(compressors: Iterable[Compressor]) -> None:
    """Raises SpecError if residuals would grow without limit when a training run switches between these compressors,
    each with its own memory.

    After a switch, the new method has to send the residual of the old method, and keeps the part that it does not send.
    So once a method has used error feedback, every later method also uses error feedback.
    """
    methods = [method for compressor in compressors for method in compressor.leaves()]
    for keeper in methods:
        for method in methods:
            if _grows(method, keeper.default_memory):
                raise SpecError(
                    f"{method} and {keeper} cannot be used in one training run: {keeper} leaves residuals, which "
                    f"{method} may have to send. The error of {method} can have {method.variance:.3g} times the energy "
                    "(squared norm) of its input, so residuals would grow without limit. Leave out one of the two "
                    f"methods, or raise the level of {method.name} until this number is below 1"
                )


def require_bounded_noise(method: Compressor, b1: float, local_steps: int) -> None:
    """Raises SpecError if the noise of momenta that are sent without error feedback would grow without limit.

    A momentum still contains a fraction of the noise of the previous exchange. Let a be this fraction. The next
    exchange compresses this noise again. So noise with the energy E becomes noise with the energy a^2 (1 + known_error)
    E in the next exchange, and new noise is added. With exchange "scatter", means are compressed a second time.

    Args:
        method: the method, which is used without a memory. A method whose error is unknown is allowed.
        b1: the factor by which the momentum decays in each step. If ranks exchange in every step, a is b1.
        local_steps: number of steps from one exchange to the next. a is the mean of b1, b1^2, ... over these steps.
    """
    if method.known_error is None:
        return
    kept = b1 * (1 - b1**local_steps) / (1 - b1) / local_steps
    noise, inside = method.known_error, within(method)
    if isinstance(inside, Gathering) and inside.exchange != "gather":
        noise = (1 + noise) * (1 + (inside.of_means.known_error or 0.0)) - 1
    if kept**2 * (1 + noise) >= 1:
        raise SpecError(
            f"{method} does not work with CompressedAdam without error feedback. Each exchange adds noise whose energy "
            f"(squared norm) is {noise:.0%} of the momentum's energy, and the momentum accumulates this noise "
            f'(beta1={b1:g}), so the noise would grow without limit. Give memory=error_feedback, or warm_up="int4", '
            f"whose error feedback continues after the warm-up, or raise the level of {method.name}"
        )


def can_take_turns(compressors: Iterable[Compressor]) -> bool:
    """Whether residuals stay bounded if a training run switches between these compressors (`require_bounded_turns`)."""
    try:
        require_bounded_turns(compressors)
    except SpecError:
        return False
    return True


def _grows(method: Compressor, memory: Memory) -> bool:
    return method.variance * memory.keeps**2 >= 1
