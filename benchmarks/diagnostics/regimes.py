"""Finds the critical epochs of a training run by two criteria: the Hessian's largest eigenvalue, and the gradient's
norm.

Both measures are compared from span to span in the way in which Accordion compares norms, so that only the measure
differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hvdcomp.policies import finite, is_critical, is_number, is_whole

EIGENVALUE = "eigenvalue"
GRADIENT_NORM = "gradient_norm"
CRITERIA = (EIGENVALUE, GRADIENT_NORM)


@dataclass
class RegimeRecord:
    """Records both measures at the end of each epoch, and finds the critical epochs by each measure.

    The epochs are divided into spans of `interval` epochs. A span is critical if the measure has changed by at least
    the share `eta` since the end of the previous span (Agarwal et al. 2021, section 4.1). Spans that cannot be compared
    are critical, as in `hvdcomp.policies.accordion`: the first span, spans with a value that is not finite, and spans
    after a value that is not above zero (an eigenvalue may be negative).

    A span is marked for the change within the span. Accordion can only measure this change at the end of the span, so
    it acts in the next span. Because of this delay, Accordion has a special rule for a fall of the learning rate.

    Attributes:
        interval: number of epochs from one comparison to the next.
        eta: smallest relative change of the measure in a critical span.
        eigenvalues: the largest eigenvalue of the Hessian at the end of each epoch; None if it was not given.
        gradient_norms: the norm of the gradient at the end of each epoch.
    """

    interval: int = 10
    eta: float = 0.5
    eigenvalues: list[float | None] = field(default_factory=list, init=False)
    gradient_norms: list[float | None] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if not is_whole(self.interval, 1):
            raise ValueError(f"interval={self.interval!r} is not allowed; give a whole number of epochs, 1 or more")
        if not is_number(self.eta) or not self.eta > 0:
            raise ValueError(f"eta={self.eta!r} is not allowed; give a number above 0")

    @property
    def epochs(self) -> int:
        """The number of recorded epochs."""
        return len(self.gradient_norms)

    @property
    def compares_next(self) -> bool:
        """Whether the next epoch ends a span. No eigenvalue is needed for other epochs."""
        return (self.epochs + 1) % self.interval == 0

    def note(self, *, eigenvalue: float | None, gradient_norm: float) -> None:
        """Records the end of an epoch.

        Args:
            eigenvalue: the largest eigenvalue of the Hessian; None is allowed only if `compares_next` is False.
            gradient_norm: the norm of the gradient that was accumulated over the epoch.

        Raises:
            ValueError: if a value is not a number, a norm is below zero, or a needed eigenvalue is missing. In this
                case nothing is recorded.
        """
        if eigenvalue is None and self.compares_next:
            raise ValueError(
                f"eigenvalue is None at the end of epoch {self.epochs + 1}, at which eigenvalues are compared; "
                "compute it whenever compares_next is True"
            )
        if eigenvalue is not None and not _is_float(eigenvalue):
            raise ValueError(f"eigenvalue={eigenvalue!r} is not allowed; give a number, such as result.value")
        if not _is_float(gradient_norm) or gradient_norm < 0:
            raise ValueError(f"gradient_norm={gradient_norm!r} is not allowed; give a number, 0 or more")
        self.eigenvalues.append(None if eigenvalue is None else float(eigenvalue))
        self.gradient_norms.append(float(gradient_norm))

    def critical(self, criterion: str) -> list[bool | None]:
        """Whether each epoch is critical, by one of `CRITERIA`; None in a span that has not ended."""
        values = self._values(criterion)
        regimes: list[bool | None] = []
        previous: float | None = None
        for end in range(self.interval, self.epochs + 1, self.interval):
            current = values[end - 1]
            assert current is not None
            regimes += [is_critical(previous, current, self.eta)] * self.interval
            previous = finite(current)
        return regimes + [None] * (self.epochs - len(regimes))

    def agreement(self) -> float | None:
        """The share of spans on which both criteria agree, without the first span, which is critical by definition.

        The result is None before the end of the second span.
        """
        ends = range(2 * self.interval - 1, self.epochs, self.interval)
        first, second = (self.critical(criterion) for criterion in CRITERIA)
        return sum(first[end] == second[end] for end in ends) / len(ends) if ends else None

    def as_json(self) -> dict[str, Any]:
        """The settings, the measures and the regimes, for JSON. A measure is null if it was omitted or is not
        finite."""
        return {
            "interval": self.interval,
            "eta": self.eta,
            "epochs": self.epochs,
            **{
                criterion: {
                    "values": [None if value is None else finite(value) for value in self._values(criterion)],
                    "critical": self.critical(criterion),
                }
                for criterion in CRITERIA
            },
            "agreement": self.agreement(),
        }

    def _values(self, criterion: str) -> list[float | None]:
        if criterion not in CRITERIA:
            raise ValueError(f"criterion {criterion!r} is unknown; choose one of {', '.join(CRITERIA)}")
        return self.eigenvalues if criterion == EIGENVALUE else self.gradient_norms


def _is_float(value: object) -> bool:
    """Whether a value is a number. NaN and infinity count as numbers, because a diverged training run has them."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
