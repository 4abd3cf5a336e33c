"""The settings of a user, and the checks of these settings before training begins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from hvdcomp.compressors import Compressor
from hvdcomp.compressors.bucket import GATHERED_BYTES
from hvdcomp.compressors.checked import require_named
from hvdcomp.compressors.contraction import require_bounded_noise, require_bounded_residuals, require_bounded_turns
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.routing import require_matches
from hvdcomp.compressors.two_level import within
from hvdcomp.errors import SpecError
from hvdcomp.policies import LevelSchedule, Policy
from hvdcomp.specs.described import is_whole
from hvdcomp.specs.levels import Level

# To find the strongest level that a method may get, hvdcomp computes the level for this compression factor and a tensor
# of this shape. Both are larger than any factor and any shape in practice.
_HARDEST_FACTOR = 1e12
_LARGEST_TENSOR = (2**20, 2**20)


@dataclass(frozen=True)
class Settings:
    """The user's settings that must be the same on every rank."""

    compressor: Compressor
    memory: Memory | None
    seed: int
    min_numel: int
    min_ndim: int
    policy: LevelSchedule | Policy[Any] | None
    steps_per_epoch: int | None
    overlap: bool | str = "auto"
    bucket_bytes: int | None = None
    gathered_bytes: int | None = GATHERED_BYTES

    def __post_init__(self) -> None:
        """Raises SpecError if `overlap` or a number is invalid."""
        if not (isinstance(self.overlap, bool) or self.overlap == "auto"):
            raise SpecError(f'overlap={self.overlap!r} is not allowed; give True, False or "auto"')
        _require_whole("bucket_bytes", self.bucket_bytes, 1, or_none=True)
        _require_whole("gathered_bytes", self.gathered_bytes, 1, or_none=True)
        _require_whole("seed", self.seed)
        _require_whole("min_numel", self.min_numel, 0)
        _require_whole("min_ndim", self.min_ndim, 0)
        if self.overlap is True and self.memory is not None and self.memory.needs_all_gradients:
            raise SpecError(
                f"overlap=True does not work with the memory {self.memory}: overlap compresses some gradients before "
                "other gradients are ready, but this memory clips each gradient by the norm of all gradients. Set "
                'overlap="auto" or False, or use a memory that does not clip'
            )

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """All compressors that the training run may use: its own compressor, and those that the policy may choose."""
        specs = self.policy.compressors if isinstance(self.policy, Policy) else ()
        return (self.compressor, *map(parse_compressor, specs))

    def require_matches(self, names: Collection[str]) -> None:
        """Checks all compressors that the training run may use. Raises SpecError if a router has a pattern that matches
        none of the tensor names `names`."""
        for compressor in self.compressors:
            require_matches(compressor, names)

    def require_momenta(self, warm_up: str, local_steps: int, b1: float) -> None:
        """Raises SpecError if these settings do not work with `CompressedAdam`, whose ranks send momenta instead of
        gradients after a warm-up.

        Args:
            warm_up: spec of the compressor that is used during the warm-up.
            local_steps: number of steps from one exchange to the next.
            b1: factor by which the momentum decays in each step (beta1 of Adam).
        """
        if local_steps > 1 and isinstance(self.policy, Policy):
            raise SpecError(
                f"local_steps={local_steps} of CompressedAdam does not work with the policy {self.policy}, because the "
                "policy counts only steps with an exchange; leave out one of the two"
            )
        methods = (*self.compressors, parse_compressor(warm_up))
        for leaf in (leaf for method in methods for leaf in method.leaves()):
            if not leaf.in_units:
                raise SpecError(
                    f"{leaf} does not work with CompressedAdam, because the result of this method has no magnitude, "
                    "and CompressedAdam needs the magnitude to compute momentum. Use efsignsgd, which sends the same "
                    "number of bytes, or keep AdamW"
                )
        if self.memory is None:
            require_bounded_turns(methods)
        others = [leaf for method in methods[1:] for leaf in method.leaves()]
        for leaf in self.compressor.leaves():
            # If the run switches between methods and one of them uses error feedback, all of them use it.
            defaults = [method.default_memory for method in (leaf, *others)]
            if all(memory.keeps == 0 for memory in (defaults if self.memory is None else [self.memory])):
                require_bounded_noise(leaf, b1, local_steps)
        self.require_all_turns(local_steps, f"local_steps={local_steps} of CompressedAdam")

    def require_all_turns(self, every: int | None, option: str) -> None:
        """Raises SpecError if some part of the gradient would never be sent. Some methods divide the gradient into
        parts, and send a different part in each step, in rotation. If the ranks exchange only in every n-th step, some
        parts may never be sent.

        Args:
            every: number of steps from one exchange to the next; None if this number changes.
            option: the user's option that sets this number, for the error message.
        """
        for leaf in (leaf for method in self.compressors for leaf in method.leaves()):
            divisor = leaf.period if every is None else math.gcd(every, leaf.period)
            if divisor > 1:
                raise SpecError(
                    f"{leaf} does not work with {option}: it sends its {leaf.period} parts in turn, one in each step, "
                    "and with these local steps some parts might never be sent. Use a number of steps that is not a "
                    f"multiple of {divisor}, or use powersgd without alternating and with half the rank, which sends "
                    "the same number of bytes"
                )

    def describe(self) -> dict[str, Any]:
        """The settings by name, with compressor, memory and policy as texts, for comparisons between ranks and for
        messages."""
        return {
            **vars(self),
            "compressor": str(self.compressor),
            "memory": "default" if self.memory is None else str(self.memory),
            "policy": "constant" if self.policy is None else str(self.policy),
        }


def _require_whole(name: str, value: object, least: int | None = None, or_none: bool = False) -> None:
    if (value is None and or_none) or is_whole(value, -math.inf if least is None else least):
        return
    allowed = "a whole number" + ("" if least is None else f" of at least {least}") + (", or None" if or_none else "")
    raise SpecError(f"{name}={value!r} is not allowed; give {allowed}")


def check(
    compressor: Compressor,
    memory: Memory | None,
    policy: LevelSchedule | Policy[Any] | None,
    steps_per_epoch: int | None,
) -> LevelSchedule | Policy[Any] | None:
    """Checks the arguments of a `Compression`, and returns the policy from `check_policy`.

    Raises:
        SpecError: if the compressor, the memory, the policy or the number of steps is invalid, or if they do not work
            together.
    """
    _require_whole("steps_per_epoch", steps_per_epoch, 1, or_none=True)
    if not isinstance(compressor, Compressor):
        raise SpecError(
            f"{compressor!r} is not a compressor; give a compressor, such as hvdcomp.TopK(ratio=0.01), or use "
            "hvdcomp.Compression.from_spec('topk:ratio=0.01')"
        )
    for leaf in compressor.leaves():
        require_named(within(leaf))
    if memory is not None and not isinstance(memory, Memory):
        raise SpecError(
            f"{memory!r} is not a memory; give hvdcomp.ErrorFeedback() or hvdcomp.NoMemory(), or use "
            "hvdcomp.Compression.from_spec, where memory= may be a string"
        )
    if policy is not None:
        if not isinstance(policy, LevelSchedule | Policy):
            raise SpecError(
                f"{policy!r} is not a policy; give a policy, such as hvdcomp.Accordion(low=4, high=1), or use "
                "hvdcomp.Compression.from_spec, where policy= may be a string"
            )
        policy = check_policy(policy, steps_per_epoch, compressor, memory)
    require_bounded_residuals(compressor, memory)
    return policy


def check_policy(
    policy: LevelSchedule | Policy[Any], steps_per_epoch: int | None, compressor: Compressor, memory: Memory | None
) -> LevelSchedule | Policy[Any]:
    """Checks a policy. Residuals must stay bounded with every compressor and level that the policy may choose.

    Returns:
        The policy, with the specs of its compressors in canonical form. If the policy also lists the compressor of the
        training run itself, this spec is removed.

    Raises:
        SpecError: if the policy cannot work with this compressor, memory or run.
    """
    policy.check(steps_per_epoch, _Watched(compressor, memory))
    if isinstance(policy, Policy) and policy.first_decision.uses_factors:
        for method in compressor.leaves():
            hardest = method.at_level(method.level_for(_HARDEST_FACTOR, _LARGEST_TENSOR))
            require_bounded_residuals(hardest, memory)
    if not isinstance(policy, Policy):
        return policy
    if policy.loss and (memory is not None or any(leaf.default_memory.is_momentum for leaf in compressor.leaves())):
        given = compressor if memory is None else f"memory={memory}"
        raise SpecError(
            f"{policy.name}: loss={policy.loss:g} does not work with {given}: hvdcomp measured the loss of each method "
            "only with the method's own memory. Leave the memory at its default, and use a compressor without "
            "momentum, such as none. Or omit loss, and list the compressors yourself"
        )
    if not policy.compressors:
        return policy
    changes: dict[str, Any] = {"compressors": _checked_choices(policy, compressor, memory)}
    return dataclasses.replace(policy, **changes)


def _checked_choices(policy: Policy[Any], compressor: Compressor, memory: Memory | None) -> tuple[str, ...]:
    """The specs of the compressors that a policy may choose, in canonical form, without the compressor of the training
    run itself."""
    choices = [parse_compressor(spec) for spec in policy.compressors]
    specs = list(map(str, choices))
    if twice := sorted({spec for spec in specs if specs.count(spec) > 1}):
        raise SpecError(
            f"{policy.name}: the parameter compressors lists {', '.join(twice)} more than once; list each compressor "
            "only once"
        )
    if memory is not None:
        for choice in choices:
            require_bounded_residuals(choice, memory)
    else:
        own = [leaf.default_memory for leaf in compressor.leaves() if leaf.default_memory.is_momentum]
        for leaf in (leaf for choice in choices for leaf in choice.leaves()):
            if leaf.default_memory.is_momentum and leaf.default_memory not in own[:1]:
                raise SpecError(
                    f"{policy.name}: {leaf} is not allowed in the parameter compressors, because it replaces the "
                    f"optimizer's momentum with its own, which cannot change during training. Leave {leaf} out, or use "
                    f"{leaf} as the compressor of the run: then all compressors use its momentum"
                )
        require_bounded_turns([compressor, *choices])
    return tuple(spec for spec in specs if spec != str(compressor))


@dataclass(frozen=True)
class _Watched:
    """A compressor that is used to check a policy. If the policy tries a level with which residuals would grow without
    limit, `at_level` raises SpecError."""

    compressor: Compressor
    memory: Memory | None

    @property
    def level(self) -> Level | None:
        return self.compressor.level

    def at_level(self, level: Level | None) -> Compressor:
        chosen = self.compressor.at_level(level)
        require_bounded_residuals(chosen, self.memory)
        return chosen

    def leaves(self) -> Iterator[_Watched]:
        for method in self.compressor.leaves():
            yield _Watched(method, self.memory)
