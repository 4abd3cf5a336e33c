"""Which measurements may be compared.

The copy beside each method is the same work, so it shows how fast the machine was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdcomp.files import parse_json
from hvdcomp.tools.bench.encode.measurement import Measurement
from hvdcomp.tools.bench.encode.peers import POWERSGD

MOST_SPREAD = 0.15
"""By how much the copy may differ between methods for them to be compared."""
MOST_QUARTILES = 0.3
"""By how much the slow quartile of a method's steps may exceed the quick one for its row to be steady."""


class UnsteadyError(Exception):
    """The machine was not equally fast for all methods; the message says by how much, and what to do."""


@dataclass(frozen=True)
class Row:
    """A measurement among others.

    Attributes:
        ratio_to_peer: the median step over that of PyTorch's PowerSGD hook with the same number of threads; None where
            the hook was not measured.
        steady: whether other work left the measurement alone. See `steady`.
        before_ms: the median step of the same request in an earlier comparison; None where it was not measured.
    """

    measurement: Measurement
    ratio_to_peer: float | None
    steady: bool
    before_ms: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data, flat."""
        data = asdict(self.measurement)
        data = {**data.pop("request"), **data}
        for name in ("step_ms", "copy_ms", "ratio_to_copy", "cpu_ms", "device_ms", "device_copy_ms"):
            spread = data[name]
            if spread is None:
                continue
            data[name] = spread["median"]
            data[f"{name}_quartiles"] = [spread["low"], spread["high"]]
        return {
            **data, "ratio_to_peer": self.ratio_to_peer, "steady": self.steady, "before_ms": self.before_ms
        }  # fmt: skip


Earlier = Mapping[tuple[Any, ...], float]
"""Milliseconds of a step in an earlier comparison, by what was measured."""

_SAME = ("method", "model", "framework", "device", "threads", "ranks", "dtype")


def earlier(text: str) -> Earlier:
    """Reads the JSON of an earlier comparison.

    Raises:
        ValueError: if it is none.
    """
    try:
        found = [{"dtype": "float32"} | one for one in parse_json(text)["measurements"]]  # older ones have no other
        return {tuple(one[name] for name in _SAME): float(one["step_ms"]) for one in found}
    except (KeyError, TypeError) as error:
        raise ValueError(f"it lacks {error}" if isinstance(error, KeyError) else str(error)) from None


def rows(measurements: Sequence[Measurement], before: Earlier | None = None) -> list[Row]:
    """Each measurement beside its peer and an earlier one, and whether it is steady; in the order given."""
    kept = steady(measurements)
    hooks = {
        measurement.request.threads: measurement.step_ms.median
        for measurement in measurements
        if measurement.request.method == POWERSGD
    }
    found = []
    for place, one in enumerate(measurements):
        hook = hooks.get(one.request.threads)
        same = tuple(getattr(one.request, name) for name in _SAME)
        ratio_to_peer = None if hook is None else one.step_ms.median / hook
        found.append(Row(one, ratio_to_peer, place in kept, (before or {}).get(same)))
    return found


def steady(measurements: Sequence[Measurement]) -> set[int]:
    """The places of the measurements that were made on an equally fast machine, and whose steps took equally long.

    Of measurements whose copies are the same work (the same framework, device and number of threads), they are the most
    that have no copy which took more than `MOST_SPREAD` longer than the fastest of them. A copy of a small model is so
    short that other work rarely interrupts it, so the steps are looked at too.
    """
    return {place for place in _equally_fast(measurements) if _uninterrupted(measurements[place])}


def _uninterrupted(one: Measurement) -> bool:
    """Whether steps took equally long, and at least one thread had a core all the time."""
    equal = one.step_ms.high <= one.step_ms.low * (1 + MOST_QUARTILES)
    return equal and (one.request.device != "cpu" or one.step_ms.median <= one.cpu_ms.median * (1 + MOST_SPREAD))


def _equally_fast(measurements: Sequence[Measurement]) -> set[int]:
    kept: set[int] = set()
    for places in _same_copies(measurements):
        copies = {place: measurements[place].copy_ms.median for place in places}
        bands = [
            {place for place, copy in copies.items() if fastest <= copy <= fastest * (1 + MOST_SPREAD)}
            for fastest in sorted(copies.values())
        ]
        kept |= max(bands, key=len)  # of several the fastest
    return kept


def _same_copies(measurements: Sequence[Measurement]) -> list[list[int]]:
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, measurement in enumerate(measurements):
        request = measurement.request
        groups.setdefault((request.framework, request.device, request.threads), []).append(place)
    return list(groups.values())


def unsteady(measurements: Sequence[Measurement]) -> list[int]:
    """The places of all other measurements."""
    return sorted(set(range(len(measurements))) - steady(measurements))


def check_steady(measurements: Sequence[Measurement]) -> None:
    """Sees that all methods were measured on an equally fast machine, by the copy that took turns with each.

    Raises:
        UnsteadyError: if the slowest copy took more than `MOST_SPREAD` longer than the fastest.
    """
    kept = _equally_fast(measurements)
    for places in _same_copies(measurements):
        group = [measurements[place] for place in places]
        fast, slow = (pick(group, key=lambda one: one.copy_ms.median) for pick in (min, max))
        spread = slow.copy_ms.median / fast.copy_ms.median - 1
        if spread > MOST_SPREAD:
            apart = [measurements[place].request.method for place in places if place not in kept]
            raise UnsteadyError(
                f"one copy of the same gradients took {fast.copy_ms.median:.3g} ms beside {fast.request.method} and "
                f"{slow.copy_ms.median:.3g} ms beside {slow.request.method}: {spread:.0%} more, where "
                f"{MOST_SPREAD:.0%} is allowed. The machine was not equally fast for all methods, so their rows cannot "
                f"be compared; apart from most are: {', '.join(apart)}. End what else runs on it, or take another "
                "machine, and measure again with more --seconds or --retries"
            )
