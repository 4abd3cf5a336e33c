"""Adam in all frameworks: checks the settings of `CompressedAdam`, and warns about compressors that harm other
optimizers.

Adam squares gradients in its second moment. Therefore Adam also squares the errors of compression, and the residuals
that ranks send in later steps. Other optimizers that keep a second moment do the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from hvdcomp.bindings.training import Training
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.evidence import FIRST, MUON, Measured, is_at_best_rates, worst_with
from hvdcomp.compressors.harm import harm_with, is_measured
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import ConfigurationError, warn_alone
from hvdcomp.exchange.engine import Engine
from hvdcomp.specs.described import is_number, is_whole

_KINDS = ("AdamW", "Adam", "NAdam", "Nadam", "RAdam", "Adamax")  # class names in PyTorch and in Keras
_COMPRESSED_ADAM = "CompressedAdam"
_SECOND_MOMENTS = {
    "exp_avg_var",  # in AdaBelief
    "exp_inf",  # in Adamax
    "row_var",  # in PyTorch's Adafactor
    "square_avg",  # in RMSprop
    "rms",  # in RMSprop of older versions of Keras
    "state2",  # in the variants of Adam in bitsandbytes
    "vmean",  # in Adam-mini
    "v_mean",
}
"""The names that optimizers give to a mean of squared gradients, in addition to `exp_avg_sq` and `v`."""
_ADAFACTOR = "Adafactor"
_BY_STATE = {
    "row_var": _ADAFACTOR,  # in PyTorch
    "exp_avg_sq_row": _ADAFACTOR,  # in transformers and other packages
    "r": _ADAFACTOR,  # in Keras
    "state2": "AdamW8bit",  # in bitsandbytes, also if the state has 32 bits
    "projector": "GaLore",
    "GG": "SOAP",
    "z": "schedule-free AdamW",
}
"""The kind of an optimizer, by the name of a state that only this kind keeps. hvdcomp's own training runs measured all
of these kinds, and all of them keep a second moment."""
_LION = "Lion"
_ON_PAGE_OF_ADAM = ("Adam", MUON)
"""The kinds of optimizers whose results are in docs/adam.md. The results of all other kinds are in
docs/optimizers.md."""
_HARMS_LEAST = "int4"
"""The compressor with the smallest loss of accuracy across the optimizers of docs/optimizers.md. The warning recommends
it if the README recommends no compressor for an optimizer."""


def name_of_adam(optimizer: Any) -> str | None:
    """The class name of Adam or of one of its variants. The result is None for any other optimizer, and for
    `CompressedAdam`."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    return None if _COMPRESSED_ADAM in kinds else next((kind for kind in kinds if kind in _KINDS), None)


def kind_of(optimizer: Any) -> str | None:
    """The kind of an optimizer, with the name that the results of hvdcomp's own training runs use
    (`hvdcomp.compressors.evidence`). The result is None for an optimizer that was not used in these runs."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    if _COMPRESSED_ADAM in kinds:
        return _COMPRESSED_ADAM
    # Otherwise our runs with Muon are too short to recommend methods.
    if _is_muon(optimizer) and is_at_best_rates(MUON):
        return MUON
    return "Adam" if name_of_adam(optimizer) else "SGD" if "SGD" in kinds else None


def refreshes_among(steps: int, per_gap: int | None) -> int:
    """The number of times that 0/1 Adam refreshes its frozen second moment in the first `steps` steps of a training
    run.

    The first step refreshes the second moment. The gaps between refreshes are 1, 2, 4, ... steps, and each gap occurs
    `per_gap` times (Lu et al. 2023, arXiv:2202.06009: k[j + 1] - k[j] = 2**floor(j / kappa)).

    Args:
        steps: number of steps since the start of training.
        per_gap: number of refreshes after which the gap doubles (kappa in the paper); None if there is no refresh.
    """
    if per_gap is None or not steps:
        return 0
    doublings = ((steps - 1) // per_gap + 1).bit_length() - 1
    since = steps - 1 - per_gap * (2**doublings - 1)  # steps since the last doubling of the gap
    return per_gap * doublings + since // 2**doublings + 1


def is_refresh(step: int, freeze_after: int, per_gap: int | None) -> bool:
    """Whether the step with the number `step`, counted from 0, refreshes second moments that were frozen after
    `freeze_after` steps. `per_gap` is as in `refreshes_among`."""
    return step >= freeze_after and refreshes_among(step + 1, per_gap) > refreshes_among(step, per_gap)


def check_freezing(freeze_after: Any, floor: Any, refreshes_per_gap: Any) -> None:
    """Raises ConfigurationError if a setting of `CompressedAdam` is invalid. All frameworks have the same settings."""
    if not is_whole(freeze_after, 1):
        raise ConfigurationError(
            f"CompressedAdam: freeze_after={freeze_after!r} is not allowed; give the number of steps after which the "
            "second moment is frozen, at least 1 and usually 15 to 25 % of all steps"
        )
    if not (is_number(floor) and 0 <= floor <= 1):
        raise ConfigurationError(
            f"CompressedAdam: floor={floor!r} is not allowed; give a number from 0 to 1, such as 0.01"
        )
    if refreshes_per_gap is not None and not is_whole(refreshes_per_gap, 1):
        raise ConfigurationError(
            f"CompressedAdam: refreshes_per_gap={refreshes_per_gap!r} is not allowed. The gap between two refreshes of "
            "the second moment doubles after this number of refreshes. Give a whole number of at least 1 (16 in the "
            "paper), or None to never refresh"
        )


class HarmWarning:
    """Warns once, on the first rank, if the user's optimizer is known to learn badly with a compressor that the
    training run uses.

    Optimizers of known classes are checked in the first step. For any other optimizer, the check looks at the state
    that the optimizer keeps for each parameter, which exists only after the optimizer's first step.

    Args:
        training: the `Training` of this rank.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._done = not training.is_first_rank

    def look(self) -> None:
        """Checks the optimizer if it was not checked before. Call this method when a step begins."""
        optimizer = None if self._done else self._training.optimizer
        if optimizer is None:
            return
        name = type(optimizer).__name__
        learns = f"{name} learns"
        kinds: tuple[str, ...] = ()
        if adam := name_of_adam(optimizer):
            learns, kinds = f"{adam} learns", ("Adam",)
        elif _is_muon(optimizer):
            kinds = (MUON,)
        elif _LION in (kind.__name__ for kind in type(optimizer).__mro__):  # Keras names its state as that of SGD
            kinds = (_LION,)
        elif kind_of(optimizer) is None:
            kept = _kept_by(optimizer)
            if not kept:
                return  # the optimizer has made no step
            if kinds := kinds_by_state(kept):
                like = f"the same state as {kinds[0]}"
                if kinds[0] == "Adam":
                    like = "a second moment of gradients, as AdamW does"
                learns = f"{name} keeps {like}, and such optimizers learn"
        self._done = True
        if harmful := _harmful(self._training.engine, kinds):
            warn_alone(_in_words(learns, harmful))


def _is_muon(optimizer: Any) -> bool:
    return any("muon" in kind.__name__.lower() for kind in type(optimizer).__mro__)


def _kept_by(optimizer: Any) -> set[str]:
    """The names of the state that an optimizer keeps for each parameter, such as "exp_avg"; empty before its first
    step."""
    if isinstance(state := getattr(optimizer, "state", None), Mapping):  # an optimizer of PyTorch
        return {str(name) for kept in state.values() if isinstance(kept, Mapping) for name in kept}
    if hasattr(optimizer, "get_slot_names"):  # an optimizer of an older Keras
        return set(optimizer.get_slot_names())
    # In Keras, a variable's name ends with the name of the state and the name of the model's variable. If a step has
    # built the optimizer, the optimizer's name comes before these two parts.
    own = f"{getattr(optimizer, 'name', '')}/"
    names = (variable.name.removeprefix(own).split("/") for variable in getattr(optimizer, "variables", ()))
    return {parts[0] for parts in names if len(parts) > 1}


def _keeps_second_moment(kept: Set[str]) -> bool:
    """Whether an optimizer keeps a mean of squared gradients, judged by the names of its state. The names that mean
    this were collected from optimizers for PyTorch and Keras."""
    found = any("exp_avg_sq" in name for name in kept) or not kept.isdisjoint(_SECOND_MOMENTS)
    return found or {"m", "v"} <= kept or {"r", "c"} <= kept


def kinds_by_state(kept: Set[str]) -> tuple[str, ...]:
    """The kinds of optimizers that hvdcomp's own training runs measured and that keep a similar state. The most similar
    kind comes first. The result is empty if no measured kind keeps a similar state.

    Args:
        kept: the names of the state that an optimizer keeps for each parameter.

    Example:
        >>> kinds_by_state({"exp_avg", "exp_avg_sq", "GG", "Q"})
        ('SOAP', 'Adam')
        >>> kinds_by_state({"exp_avg"})
        ('Lion',)
    """
    if not _keeps_second_moment(kept):
        return (_LION,) if "exp_avg" in kept else ()
    own = next((kind for name, kind in _BY_STATE.items() if name in kept), None)
    if own == _ADAFACTOR:
        # Without momentum, residuals did not harm Adafactor in our training runs. We did not measure Adafactor with
        # momentum.
        return ("Adam",) if "exp_avg" in kept else (own,)
    return ("Adam",) if own is None else (own, "Adam")


def _harmful(engine: Engine, kinds: Sequence[str]) -> dict[str, dict[Compressor, Measured]]:
    """Finds the methods in the engine's compressor that harm the user's optimizer. Returns a mapping with two levels.
    The outer key is the kind of optimizer with which hvdcomp's own training runs measured the harm. The inner key is
    the method, and its value is the measured result that shows the harm.

    Args:
        engine: the engine of the training run.
        kinds: the kinds that are similar to the user's optimizer. Each method is judged by its result with the first of
            these kinds with which the method was measured.
    """
    found: dict[str, dict[Compressor, Measured]] = {}
    for leaf in dict.fromkeys(engine.compressor.leaves()):
        kind = next((kind for kind in kinds if is_measured(leaf, kind)), None)
        if kind is not None:
            measured = harm_with(leaf, kind, engine.planner.memory_for(leaf).keeps > 0)
            if measured is not None:
                found.setdefault(kind, {})[leaf] = measured
    return found


def _in_words(learns: str, harmful: Mapping[str, Mapping[Compressor, Measured]]) -> str:
    """The text of the warning about methods that harm an optimizer.

    Args:
        learns: the beginning of the sentence, such as "AdamW learns".
        harmful: the harmful methods, as returned by `_harmful`.
    """
    methods = ", ".join(str(method) for found in harmful.values() for method in found)
    first = next(iter(harmful))
    way_out = next(iter(FIRST.get(first, ())), _HARMS_LEAST)
    results = []
    for kind, found in harmful.items():
        beside = worst_with(parse_compressor(way_out), kind)
        rows = [measured.in_words() for measured in dict.fromkeys((*found.values(), *filter(None, [beside])))]
        results.append(f"with {kind}, {', '.join(rows)}")
    frozen = FIRST["CompressedAdam"] if first == "Adam" else ()
    also = f", or hvdcomp's CompressedAdam with {frozen[0]}" if frozen else ""
    page = "docs/adam.md" if first in _ON_PAGE_OF_ADAM else "docs/optimizers.md"
    return (
        f"{learns} badly with {methods}. In hvdcomp's own training runs, compared with uncompressed gradients: "
        f"{'; '.join(results)}. Use {way_out}{also} ({page})"
    )
