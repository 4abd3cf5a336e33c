"""When measurements are too noisy to trust, and how much of a step that makes."""

from __future__ import annotations

from collections.abc import Mapping

NOISY = 0.15
"""Above this relative difference between repeated medians a measurement is called too noisy to trust."""


def uncertain_shares(noisy: Mapping[str, Mapping[str, float]], step_s: float) -> dict[str, float]:
    """How much longer or shorter a step could be, as a share of it, if a noisy measurement is wrong.

    A collective of 64 bytes may take twice as long in one minute as in the next. In a step of 500 ms that is nothing,
    in one of 5 ms it is a lot.

    Args:
        noisy: measurements by what they are: `seconds`, and `spread`, how far repetitions differ relative to that.
        step_s: what the step takes.

    Returns:
        By what they are, the largest first.

    Example:
        >>> uncertain_shares({"allreduce of 64 bytes": {"seconds": 0.001, "spread": 2.0}}, step_s=0.1)
        {'allreduce of 64 bytes': 0.02}
    """
    shares = {what: number["seconds"] * number["spread"] / step_s for what, number in noisy.items()}
    return dict(sorted(shares.items(), key=lambda pair: -pair[1]))
