"""Adam in all frameworks: the settings of `CompressedAdam`, and the methods that harm other optimizers.

Errors of compression enter Adam's second moment squared, and so do residuals. Other optimizers have such a moment too.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from hvdcomp.bindings.training import Training
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.evidence import FIRST, MUON, is_at_best_rates
from hvdcomp.compressors.harm import Measured, harm_with, measured_with
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import ConfigurationError, warn_alone
from hvdcomp.exchange.engine import Engine
from hvdcomp.specs.described import is_number, is_whole

_KINDS = ("AdamW", "Adam", "NAdam", "Nadam", "RAdam", "Adamax")  # of PyTorch and of Keras
_COMPRESSED_ADAM = "CompressedAdam"
_SECOND_MOMENTS = {
    "exp_avg_var",  # of AdaBelief
    "exp_inf",  # of Adamax
    "row_var",  # of PyTorch's Adafactor
    "square_avg",  # of RMSprop
    "rms",  # of an older Keras's RMSprop
    "state2",  # of the Adams of bitsandbytes
    "vmean",  # of Adam-mini
    "v_mean",
}
"""What else than `exp_avg_sq` and `v` optimizers call a mean of squared gradients."""
_WAYS_OUT = {"Adam": FIRST["Adam"][0], MUON: FIRST.get(MUON, FIRST["Adam"])[0]}
"""By optimizer, the spec of the method to use instead of one that harms it."""


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
    if _is_muon(optimizer) and is_at_best_rates(MUON):  # else its trainings are too short to propose methods by
        return MUON
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
            f"CompressedAdam: freeze_after={freeze_after!r} is not allowed; give the number of steps after which the "
            "second moment is frozen: at least 1, and usually 15 to 25 % of the training"
        )
    if not (is_number(floor) and 0 <= floor <= 1):
        raise ConfigurationError(
            f"CompressedAdam: floor={floor!r} is not allowed; give a number from 0 to 1, such as 0.01"
        )
    if refreshes_per_gap is not None and not is_whole(refreshes_per_gap, 1):
        raise ConfigurationError(
            f"CompressedAdam: refreshes_per_gap={refreshes_per_gap!r} is not allowed. The gap between two refreshes of "
            "the second moment doubles after this number of refreshes: give a whole number of at least 1 (16 in the "
            "paper), or None to never refresh"
        )


class HarmWarning:
    """Warns on rank 0, once, if the user's optimizer is known to learn badly with a compressor.

    A known class is judged in the first step. Any other optimizer is judged by what it keeps of each parameter, so as
    soon as it has made a step.

    Args:
        training: the training of this rank.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._done = training.communicator.rank != 0

    def look(self) -> None:
        """To be called when a step begins; costs nothing once the optimizer is judged."""
        optimizer = None if self._done else self._training.optimizer
        if optimizer is None:
            return
        name = type(optimizer).__name__
        learns, kind = "", "Adam"
        if adam := name_of_adam(optimizer):
            learns = f"{adam} learns"
        elif _is_muon(optimizer):
            learns, kind = f"{name} learns", MUON
        elif kind_of(optimizer) is None:
            kept = _kept_by(optimizer)
            if not kept:
                return  # it has made no step
            if _keeps_second_moment(kept):
                learns = f"{name} keeps a second moment of gradients, as AdamW does, and such optimizers learn"
        self._done = True
        harmful = _harmful(self._training.engine, kind) if learns else {}
        if harmful:
            warn_alone(_in_words(learns, harmful, kind))


def _is_muon(optimizer: Any) -> bool:
    return any("muon" in kind.__name__.lower() for kind in type(optimizer).__mro__)


def _kept_by(optimizer: Any) -> set[str]:
    """The names of what an optimizer keeps of its parameters; empty before its first step."""
    if isinstance(state := getattr(optimizer, "state", None), Mapping):  # of PyTorch
        return {str(name) for kept in state.values() if isinstance(kept, Mapping) for name in kept}
    if hasattr(optimizer, "get_slot_names"):  # of an older Keras
        return set(optimizer.get_slot_names())
    # Name of the optimizer, if it was built in a step / name of what is kept / name of the model's variable.
    own = f"{getattr(optimizer, 'name', '')}/"
    names = (variable.name.removeprefix(own).split("/") for variable in getattr(optimizer, "variables", ()))
    return {parts[0] for parts in names if len(parts) > 1}


def _keeps_second_moment(kept: Set[str]) -> bool:
    """Whether one of these names is that of a mean of squared gradients, in the libraries of PyTorch and of Keras."""
    found = any("exp_avg_sq" in name for name in kept) or not kept.isdisjoint(_SECOND_MOMENTS)
    return found or {"m", "v"} <= kept or {"r", "c"} <= kept


def _harmful(engine: Engine, optimizer: str) -> dict[Compressor, Measured]:
    """The methods of the engine's compressor that harm the optimizer, with the trainings that show it."""
    leaves = dict.fromkeys(engine.compressor.leaves())
    found = {leaf: harm_with(leaf, optimizer, engine.planner.memory_for(leaf).keeps > 0) for leaf in leaves}
    return {leaf: measured for leaf, measured in found.items() if measured is not None}


def _in_words(learns: str, harmful: Mapping[Compressor, Measured], optimizer: str) -> str:
    """The warning about methods that harm an optimizer."""
    way_out = _WAYS_OUT[optimizer]
    also = f", or hvdcomp's CompressedAdam with {FIRST['CompressedAdam'][0]}" if optimizer == "Adam" else ""
    beside = measured_with(parse_compressor(way_out), optimizer)
    rows = [measured.in_words() for measured in dict.fromkeys((*harmful.values(), *filter(None, [beside])))]
    return (
        f"{learns} badly with {', '.join(map(str, harmful))}. Compared with uncompressed gradients in hvdcomp's own "
        f"trainings with {optimizer}, {', '.join(rows)}. Use {way_out}{also} (docs/adam.md)"
    )
