"""Sweeps: predictions of all methods with one quantity of the setting varied over a range.

The questions of Agarwal et al. 2022: bandwidth (figures 3 and 19), faster computers (figure 20), faster encoding
at the price of more bytes (figure 21), batch size (figure 9), world size (figures 6 to 8), and with each of them the
compression that an ideal method would need (figures 12 and 18).
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
    """A quantity that can be varied.

    Attributes:
        label: its name and unit on a plot.
        whole: whether only whole numbers make sense.
        apply: function from a setting and values to the setting with these values.
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
    """Predictions along one axis.

    Attributes:
        axis: a key of `AXES`.
        values: values on the axis (points,), ascending.
        step_s: seconds of a step (points,), by method.
        least_factor: the results of `least_compression_factor`, (points,); NaN where no factor suffices.
    """

    axis: str
    values: np.ndarray
    step_s: dict[str, np.ndarray]
    least_factor: np.ndarray


def parse_axis(text: str) -> tuple[str, np.ndarray]:
    """The axis and values of a text such as `bandwidth=0.1..100` (evenly on a logarithmic scale) or `batch=16,32,64`.

    Bandwidths may have a unit: `bandwidth=100mbit..10gbit`.

    Raises:
        ValueError: for an unknown axis, or values that are not a range of positive numbers.
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
    """Predicts along one axis every method of an adviser that may be recommended.

    Args:
        adviser: the model and methods.
        setting: the other conditions, numbers.
        axis: a key of `AXES`.
        values: values on the axis (points,).
        growth: for axis "encode": a compressor that encodes k times faster sends `growth` k times the bytes. None for
            the same bytes.

    Raises:
        ValueError: for `growth` with another axis, or values out of range.
    """
    varied = AXES[axis].apply(setting, values)
    if growth is not None:
        if axis != "encode":
            raise ValueError(f"growth can be used only in a sweep over encode, not over {axis}")
        varied = replace(varied, payload=growth * values)
    shape = np.shape(values)
    return Sweep(
        axis,
        values,
        {spec: np.broadcast_to(adviser.step_s(spec, varied), shape) for spec in adviser.recommended},
        np.broadcast_to(adviser.least_factor(varied), shape),
    )
