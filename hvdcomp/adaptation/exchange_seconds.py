"""What the performance model says of the time that exchanging takes, by how much is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdcomp.adaptation.level_errors import bytes_of, levels_around
from hvdcomp.adaptation.plans import Plans, levelled_tensors
from hvdcomp.adaptation.step_model import StepModel, errors_of
from hvdcomp.exchange.engine import Engine
from hvdcomp.specs.levels import Level

_DIGITS = 6  # of seconds: they stand in every line of the decision log


def exchange_seconds_of(
    engine: Engine,
    source: str,
    around: Sequence[float],
    model: str | None = None,
    batch: int | None = None,
    overlaps: bool = True,
) -> dict[int, float]:
    """The predicted time of the exchange of a step where all tensors are at so many times their own levels.

    That is by how much the step takes longer than without an exchange: encoding, exchanging and decoding, as far as
    the backward pass does not hide them. A tensor whose method has no such level is at the nearest that there is.

    Args:
        around: factors of the own levels; 1.0 is one of them.
        engine, source, model, batch, overlaps: as of `StepModel`.

    Returns:
        Seconds by the bytes that a rank sends in a step, both of all tensors; ascending.

    Raises:
        CalibrationError: if the calibration cannot be read, is of another model, or lacks what is needed.
    """
    with errors_of(source):
        steps = StepModel(engine, source, model, batch, overlaps)
        plans = Plans(engine, levelled_tensors(engine))
        steps.exchange(plans.own(), overlapped=False)  # refuses what the model does not know
        own, *others = levels_around(engine, plans.names, around)
        levels: dict[str, list[Level]] = {name: [level] for name, level in own.items()}
        for at_factor in others:
            for name, level in at_factor.items():
                levels[name].append(level)
        seconds_by_bytes = {}
        for factor in around:
            plan = plans.at_levels({name: _nearest(each, factor * own[name]) for name, each in levels.items()})
            sent = sum(bytes_of(engine, name, compressor) for name, compressor in plan.items())
            seconds = steps.seconds(plan, steps.encode_at(engine.compressor, factor)) - steps.alone_s()
            seconds_by_bytes[sent] = float(f"{seconds:.{_DIGITS}g}")
        return dict(sorted(seconds_by_bytes.items()))


def _nearest(levels: Sequence[Level], wanted: float) -> Level:
    return min(levels, key=lambda level: abs(math.log(level / wanted)))
