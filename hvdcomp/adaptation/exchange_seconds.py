"""The predicted time of a step's exchange, as a function of the bytes sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdcomp.adaptation.level_errors import bytes_of, levels_around
from hvdcomp.adaptation.plans import Plans, levelled_tensors
from hvdcomp.adaptation.step_model import StepModel, errors_of
from hvdcomp.exchange.engine import Engine
from hvdcomp.specs.levels import Level

_DIGITS = 6  # significant digits of seconds; few, because every line of the decision log has them


def exchange_seconds_of(
    engine: Engine,
    source: str,
    around: Sequence[float],
    model: str | None = None,
    batch: int | None = None,
    overlaps: bool = True,
) -> dict[int, float]:
    """Predicts the time of a step's exchange for several factors. For each factor, the levels of all tensors are
    multiplied by this factor.

    The predicted time is the time of the whole step minus the time of a step without an exchange. This difference
    covers encoding, exchange and decoding, except for the parts that overlap with the backward pass. If a tensor's
    method does not allow the multiplied level, the tensor gets the nearest allowed level.

    Args:
        around: the factors by which levels are multiplied. One of the factors is 1.0.
        engine, source, model, batch, overlaps: as in `StepModel`.

    Returns:
        A table that maps the bytes that a rank sends in a step to the seconds of the exchange, in ascending order.

    Raises:
        CalibrationError: if the calibration cannot be read, belongs to another model, or lacks a time that is needed.
    """
    with errors_of(source):
        steps = StepModel(engine, source, model, batch, overlaps)
        plans = Plans(engine, levelled_tensors(engine))
        steps.exchange(plans.own(), overlapped=False)  # raises an error for methods that are unknown to the model
        own, *other_levels = levels_around(engine, plans.names, around)
        levels: dict[str, list[Level]] = {name: [level] for name, level in own.items()}
        for at_factor in other_levels:
            for name, level in at_factor.items():
                levels[name].append(level)
        seconds_by_bytes = {}
        for factor in around:
            plan = plans.at_levels({name: _nearest(choices, factor * own[name]) for name, choices in levels.items()})
            sent = sum(bytes_of(engine, name, compressor) for name, compressor in plan.items())
            seconds = steps.seconds(plan, steps.encode_at(engine.compressor, factor)) - steps.alone_s()
            seconds_by_bytes[sent] = float(f"{seconds:.{_DIGITS}g}")
        return dict(sorted(seconds_by_bytes.items()))


def _nearest(levels: Sequence[Level], target: float) -> Level:
    return min(levels, key=lambda level: abs(math.log(level / target)))
