"""Sweeps: predictions for all methods while one quantity of the setting varies over a range.

Sweeps answer the questions of Agarwal et al. 2022. They vary the bandwidth (figures 3 and 19), the speed of computers
(figure 20), the speed of encoding at the price of more bytes (figure 21), the batch size (figure 9) and the number of
ranks (figures 6 to 8). Each sweep also computes the compression factor that an ideal method would need (figures 12 and
18).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdcomp.perfmodel.advice import Adviser
from hvdcomp.perfmodel.predict import Setting
from hvdcomp.perfmodel.rates import GBPS, parse_gbps

_POINTS = 200


@dataclass(frozen=True)
class Axis:
    """A quantity that a sweep can vary.

    Attributes:
        label: name and unit of the quantity in a figure.
        whole: whether the quantity must be a whole number.
        apply: function that returns a setting with these values of the quantity.
    """

    label: str
    whole: bool
    apply: Callable[[Setting, Any], Setting]


AXES: dict[str, Axis] = {
    "bandwidth": Axis("bandwidth (Gb/s)", False, lambda setting, x: replace(setting, bytes_per_s=x * GBPS)),
    "world_size": Axis("world size (ranks)", True, lambda setting, x: replace(setting, world_size=x)),
    "batch": Axis("batch size of a rank", True, lambda setting, x: replace(setting, batch_size=x)),
    "compute": Axis("times faster computing", False, lambda setting, x: replace(setting, compute_speed=x)),
    "encode": Axis("times faster encoding", False, lambda setting, x: replace(setting, encode_speed=x)),
}


@dataclass(frozen=True)
class Sweep:
    """The predictions of a sweep.

    Attributes:
        axis: the varied quantity, a key of `AXES`.
        values: the values of the quantity, (points,), ascending.
        step_s: predicted seconds of a step at each value, (points,), by spec of the method.
        least_factor: the compression factor that an ideal compressor would need at each value
            (`least_compression_factor`), (points,). The factor is NaN if no factor suffices.
    """

    axis: str
    values: np.ndarray
    step_s: dict[str, np.ndarray]
    least_factor: np.ndarray


def parse_axis(text: str) -> tuple[str, np.ndarray]:
    """Parses an axis and its values, such as `bandwidth=0.1..100` or `batch=16,32,64`. The values of a range are evenly
    spaced on a logarithmic scale.

    Bandwidths may have a unit: `bandwidth=100mbit..10gbit`.

    Returns:
        The axis, a key of `AXES`, and its values, (points,), ascending.

    Raises:
        ValueError: if the axis is unknown, or if the values are not a range of positive numbers.
    """
    name, equals, values_text = (part.strip() for part in text.partition("="))
    if name not in AXES or not equals:
        raise ValueError(
            f"{text!r} does not name a quantity to vary; begin with one of: {', '.join(AXES)}, as in bandwidth=1..30"
        )
    low, dots, high = values_text.partition("..")
    try:
        number = parse_gbps if name == "bandwidth" else float
        numbers = [number(low), number(high)] if dots else sorted({number(part) for part in values_text.split(",")})
    except ValueError:
        numbers = []
    if len(numbers) < 2 or not numbers[0] > 0 or not numbers[0] < numbers[-1] or not np.all(np.isfinite(numbers)):
        raise ValueError(
            f"{text!r} is not a range of positive numbers; write {name}=LOW..HIGH with 0 < LOW < HIGH, or a list of "
            f"values: {name}=1,2,4"
        )
    values = np.geomspace(numbers[0], numbers[1], _POINTS) if dots else np.array(numbers)
    if AXES[name].whole:
        if any(number != int(number) for number in numbers):
            raise ValueError(f"{text!r}: {name} must be a whole number")
        values = np.unique(np.round(values))
    return name, values


def sweep(adviser: Adviser, setting: Setting, axis: str, values: np.ndarray, growth: float | None = None) -> Sweep:
    """Predicts the step times of all methods that may be recommended, while one quantity of the setting varies.

    Args:
        adviser: the adviser, which predicts the step times of the methods for a model.
        setting: the conditions of the training except the varied quantity. Its values are numbers, not arrays.
        axis: the varied quantity, a key of `AXES`.
        values: the values of the quantity, (points,), ascending.
        growth: only for the axis "encode": a compressor that encodes k times faster sends k times `growth` times the
            bytes. None if the number of bytes does not change.

    Raises:
        ValueError: if `growth` is used with another axis, or if a value is out of range.
    """
    varied = AXES[axis].apply(setting, values)
    if growth is not None:
        if axis != "encode":
            raise ValueError(f"growth works only in a sweep over encode, not over {axis}")
        varied = replace(varied, payload=growth * values)
    shape = np.shape(values)
    return Sweep(
        axis,
        values,
        {spec: np.broadcast_to(adviser.step_s(spec, varied), shape) for spec in adviser.recommended},
        np.broadcast_to(adviser.least_factor(varied), shape),
    )
