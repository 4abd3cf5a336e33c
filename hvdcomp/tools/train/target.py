"""The target of a run, such as `--until accuracy=0.93`. The run ends when it reaches this quality on the validation
part."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

METRICS = ("accuracy", "perplexity", "rmse")
"""The metrics of a model's quality, besides its loss. The data determine which metric is measured."""
_KNOWN = sorted((*METRICS, "loss"))


@dataclass(frozen=True)
class Target:
    """A value of a metric that a run should reach. An accuracy must be at least this value; other metrics must be at
    most this value.

    Example:
        >>> Target.parse("accuracy=0.93").is_reached({"loss": 0.2, "accuracy": 0.94})
        True
    """

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Reads a target from a text such as "loss=2.2".

        Raises:
            ValueError: if the text is not a metric, "=" and a number. The message names the allowed form.
        """
        metric, _, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if metric not in _KNOWN or not math.isfinite(value) or value <= 0:
            raise ValueError(f"{text!r} is not a target; give one of {', '.join(_KNOWN)} and a value: accuracy=0.93")
        if metric == "accuracy" and value > 1:
            raise ValueError(
                f"{text!r} cannot be reached, because an accuracy is at most 1; give a value such as accuracy=0.93"
            )
        return cls(metric, value)

    def is_reached(self, quality: dict[str, Any]) -> bool:
        """Whether the result of an evaluation is at least as good as the target."""
        reached = quality[self.metric]
        return bool(reached >= self.value if self.metric == "accuracy" else reached <= self.value)

    def __str__(self) -> str:
        return f"{self.metric}={self.value:g}"
