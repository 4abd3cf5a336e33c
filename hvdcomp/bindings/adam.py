"""Adam in all frameworks: the settings of `CompressedAdam`, and the methods that harm other Adams.

With error feedback, residuals enter the second moment, squared.
"""

from __future__ import annotations

from typing import Any

from hvdcomp.compressors.evidence import lost_with
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import ConfigurationError, warn_alone
from hvdcomp.exchange.engine import Engine
from hvdcomp.specs.described import is_number, is_whole

_KINDS = ("AdamW", "Adam", "NAdam", "Nadam", "RAdam", "Adamax")  # of PyTorch and of Keras
_COMPRESSED_ADAM = "CompressedAdam"


def name_of_adam(optimizer: Any) -> str | None:
    """The class name of an Adam-like optimizer; None for any other optimizer and for `CompressedAdam`."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    return None if _COMPRESSED_ADAM in kinds else next((kind for kind in kinds if kind in _KINDS), None)


def kind_of(optimizer: Any) -> str | None:
    """The optimizer's kind in the measured trainings (`hvdcomp.compressors.evidence`); None for another or unknown
    kind."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    if _COMPRESSED_ADAM in kinds:
        return _COMPRESSED_ADAM
    return "Adam" if name_of_adam(optimizer) else "SGD" if "SGD" in kinds else None


def refreshes_among(steps: int, per_gap: int | None) -> int:
    """The number of refreshes of the second moment among a training's first steps, by the schedule of 0/1 Adam.

    The first step is a refresh. The gaps between refreshes are 1, 2, 4, ... steps, each `per_gap` times (Lu et al.
    2023, arXiv:2202.06009: k[j + 1] - k[j] = 2**floor(j / kappa)).

    Args:
        steps: number of first steps.
        per_gap: kappa; None for no refresh.
    """
    if per_gap is None or not steps:
        return 0
    doublings = ((steps - 1) // per_gap + 1).bit_length() - 1
    since = steps - 1 - per_gap * (2**doublings - 1)  # steps since the last doubling of the gap
    return per_gap * doublings + since // 2**doublings + 1


def is_refresh(step: int, freeze_after: int, per_gap: int | None) -> bool:
    """Whether step `step`, counted from 0, refreshes second moments that are frozen after `freeze_after` steps."""
    return step >= freeze_after and refreshes_among(step + 1, per_gap) > refreshes_among(step, per_gap)


def check_freezing(freeze_after: Any, floor: Any, refreshes_per_gap: Any) -> None:
    """Raises ConfigurationError for invalid settings of a CompressedAdam of any framework."""
    if not is_whole(freeze_after, 1):
        raise ConfigurationError(
            f"CompressedAdam: freeze_after={freeze_after!r} is not possible; give the number of steps, at least 1, "
            "after which the second moment is frozen, 15 to 25 % of the training"
        )
    if not (is_number(floor) and 0 <= floor <= 1):
        raise ConfigurationError(
            f"CompressedAdam: floor={floor!r} is not possible; give a share from 0 to 1, such as 0.01"
        )
    if refreshes_per_gap is not None and not is_whole(refreshes_per_gap, 1):
        raise ConfigurationError(
            f"CompressedAdam: refreshes_per_gap={refreshes_per_gap!r} is not possible; give the number of refreshes of "
            "the second moment after which the gap between two of them doubles, 16 as published, or None for no refresh"
        )


def warn_of_harm(adam: str | None, engine: Engine) -> None:
    """Warns on rank 0 if the engine's compressor harms the optimizer.

    Args:
        adam: the result of `name_of_adam`.
        engine: the engine.
    """
    if adam is None or engine.communicator.rank != 0:
        return
    leaves = dict.fromkeys(engine.compressor.leaves())
    harmful = [leaf for leaf in leaves if leaf.harms_adam and engine.planner.memory_for(leaf).keeps]
    if harmful:
        warn_alone(harm_in_words(adam, ", ".join(map(str, harmful))))


def _lost(spec: str) -> str:
    """The measured loss of a method under a stock Adam."""
    lost = lost_with(parse_compressor(spec), "Adam")
    assert lost is not None
    return f"{100 * lost:.0f} %"


def harm_in_words(adam: str, methods: str) -> str:
    """The warning about methods that harm an Adam."""
    return (
        f"{adam} learns badly with error feedback of {methods}: what was held back enters its second moment, squared. "
        f"In a small GPT the validation loss was {_lost('topk:ratio=0.01')} (topk) and {_lost('efsignsgd')} "
        f"(efsignsgd) above that of uncompressed gradients, and {_lost('int4')} with int4, which sends 7 times fewer "
        "bytes. Take int4, or hvdcomp's CompressedAdam (docs/adam.md), with which efsignsgd does no harm"
    )
