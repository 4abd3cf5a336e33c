"""Noisy measurements, and their effect on the time of a step."""

from __future__ import annotations

from collections.abc import Mapping

NOISY = 0.15
"""Relative difference of repeated medians above which a measurement is too noisy to trust."""


def uncertain_shares(noisy: Mapping[str, Mapping[str, float]], step_s: float) -> dict[str, float]:
    """The change of a step's time, as a share of it, if a noisy measurement is wrong.

    A collective of 64 bytes may take twice as long in one minute as in the next. That is negligible in a step of 500 ms
    and large in a step of 5 ms.

    Args:
        noisy: measurements by name: `seconds`, and `spread`, the relative difference of repetitions.
        step_s: seconds of the step.

    Returns:
        The shares by name, the largest first.

    Example:
        >>> uncertain_shares({"allreduce of 64 bytes": {"seconds": 0.001, "spread": 2.0}}, step_s=0.1)
        {'allreduce of 64 bytes': 0.02}
    """
    shares = {name: number["seconds"] * number["spread"] / step_s for name, number in noisy.items()}
    return dict(sorted(shares.items(), key=lambda pair: -pair[1]))
