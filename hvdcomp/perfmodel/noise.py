"""The effect of noisy measurements on the predicted time of a step."""

from __future__ import annotations

from collections.abc import Mapping

NOISY = 0.15
"""A measurement is repeated, and each repetition has a median. If the medians differ by more than this share, the
measurement is too noisy to trust."""


def uncertain_shares(noisy: Mapping[str, Mapping[str, float]], step_s: float) -> dict[str, float]:
    """Estimates how much the time of a step changes if a noisy measurement is wrong.

    A collective of 64 bytes may be twice as slow in one minute as in the next. This difference is negligible in a step
    of 500 ms and large in a step of 5 ms.

    Args:
        noisy: the noisy measurements, by name. Each has `seconds`, the measured time, and `spread`, the relative
            difference between repetitions.
        step_s: seconds of the step.

    Returns:
        For each measurement, by name, the change as a share of the step's time. The largest share is first.

    Example:
        >>> uncertain_shares({"allreduce of 64 bytes": {"seconds": 0.001, "spread": 2.0}}, step_s=0.1)
        {'allreduce of 64 bytes': 0.02}
    """
    shares = {name: number["seconds"] * number["spread"] / step_s for name, number in noisy.items()}
    return dict(sorted(shares.items(), key=lambda pair: -pair[1]))
