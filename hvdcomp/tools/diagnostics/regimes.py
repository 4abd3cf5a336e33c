"""Which epochs of a training two criteria call critical: the Hessian's largest eigenvalue, and the gradient's norm.

Both are compared in the same way, the way Accordion compares norms, so that what differs is what is looked at.
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
    """Notes both measures at the end of each epoch and says which epochs are critical by each.

    The epochs are cut into spans of `interval`. A span is critical if the measure at its end differs from the one at
    the end of the span before by at least `eta` times the latter (Agarwal et al. 2021, section 4.1). What cannot be
    compared counts as critical, as in `hvdcomp.policies.accordion`: the first span, a value that is not finite, and a
    predecessor that is not above zero, which an eigenvalue can be.

    This looks back: a span is marked for the change that took place in it. Accordion cannot know that before the span
    has ended, acts in the next one, and bridges the delay after a fall of the learning rate by a rule of its own.

    Attributes:
        interval: epochs between comparisons.
        eta: the relative change from which on a span is critical.
        eigenvalues: by epoch, as noted; None where it was left out.
        gradient_norms: by epoch, as noted.
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
        """Epochs noted so far."""
        return len(self.gradient_norms)

    @property
    def compares_next(self) -> bool:
        """Whether the next epoch ends a span; at the end of others the eigenvalue is not needed."""
        return (self.epochs + 1) % self.interval == 0

    def note(self, *, eigenvalue: float | None, gradient_norm: float) -> None:
        """Notes the end of an epoch.

        Args:
            eigenvalue: the Hessian's largest; None, if it was not computed, only where `compares_next` is False.
            gradient_norm: of the gradient accumulated over the epoch.

        Raises:
            ValueError: not a number, or a norm below zero, or no eigenvalue where one is compared. Nothing is
                noted then.
        """
        if eigenvalue is None and self.compares_next:
            raise ValueError(
                f"eigenvalue=None at the end of epoch {self.epochs + 1}, where eigenvalues are compared; compute it "
                "where compares_next is True"
            )
        if eigenvalue is not None and not _is_float(eigenvalue):
            raise ValueError(f"eigenvalue={eigenvalue!r} is not allowed; give a number, such as result.value")
        if not _is_float(gradient_norm) or gradient_norm < 0:
            raise ValueError(f"gradient_norm={gradient_norm!r} is not allowed; give a number, 0 or more")
        self.eigenvalues.append(None if eigenvalue is None else float(eigenvalue))
        self.gradient_norms.append(float(gradient_norm))

    def critical(self, criterion: str) -> list[bool | None]:
        """By epoch, whether it is critical by one of `CRITERIA`; None in a span that has not ended."""
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
        """The share of spans on which both criteria agree; the first, critical by definition, is left out.

        None before two spans have ended.
        """
        ends = range(2 * self.interval - 1, self.epochs, self.interval)
        first, second = (self.critical(criterion) for criterion in CRITERIA)
        return sum(first[end] == second[end] for end in ends) / len(ends) if ends else None

    def as_json(self) -> dict[str, Any]:
        """The settings, the measures (null: left out or not finite) and the regimes, for JSON."""
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
    """A number, NaN and infinity included: a diverged training is noted too."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
