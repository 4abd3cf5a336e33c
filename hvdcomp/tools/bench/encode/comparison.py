"""Decides which measurements may be compared.

Each method is measured together with a copy of the gradients. The copy is always the same work, so its time shows the
speed of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdcomp.files import parse_json
from hvdcomp.tools.bench.encode.measurement import Measurement
from hvdcomp.tools.bench.encode.peers import POWERSGD

MOST_SPREAD = 0.15
"""Methods may be compared only if the times of the copies that were measured with them differ by at most this share."""
MOST_QUARTILES = 0.3
"""A row is steady only if the quartiles of its steps differ by at most this share."""


class UnsteadyError(Exception):
    """The machine was not equally fast for all methods. The message gives the difference and the remedy."""


@dataclass(frozen=True)
class Row:
    """A measurement with its comparisons.

    Attributes:
        measurement: the measurement of a method.
        ratio_to_peer: the median time of a step, divided by the median time of PyTorch's PowerSGD hook with the same
            number of threads; None if the hook was not measured.
        steady: whether other work on the machine left the measurement undisturbed.
        before_ms: the median time of a step in an earlier comparison, for the same method, model and options; None if
            the earlier comparison did not measure it.
    """

    measurement: Measurement
    ratio_to_peer: float | None
    steady: bool
    before_ms: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The row as a dictionary of numbers and texts, without nesting."""
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
"""The milliseconds of each step in an earlier comparison. The keys are the values of the fields in `_SAME`."""

_SAME = ("method", "model", "framework", "device", "threads", "ranks", "dtype", "memory")


def earlier(text: str) -> Earlier:
    """Reads the JSON of an earlier comparison.

    Raises:
        ValueError: if the text is not the JSON of a comparison.
    """
    try:
        # Earlier versions of hvdcomp measured only float32, and only the default memory of each method.
        entries = [{"dtype": "float32", "memory": None} | entry for entry in parse_json(text)["measurements"]]
        return {tuple(entry[name] for name in _SAME): float(entry["step_ms"]) for entry in entries}
    except (KeyError, TypeError) as error:
        raise ValueError(f"the field {error} is missing" if isinstance(error, KeyError) else str(error)) from None


def rows(measurements: Sequence[Measurement], before: Earlier | None = None) -> list[Row]:
    """One row for each measurement, in the given order.

    Each row compares the measurement with PyTorch's hook and with the same measurement in an earlier comparison. The
    row also says whether the measurement is steady.
    """
    steady_places = steady(measurements)
    hooks = {
        measurement.request.threads: measurement.step_ms.median
        for measurement in measurements
        if measurement.request.method == POWERSGD
    }
    all_rows = []
    for place, measurement in enumerate(measurements):
        hook = hooks.get(measurement.request.threads)
        same = tuple(getattr(measurement.request, name) for name in _SAME)
        ratio_to_peer = None if hook is None else measurement.step_ms.median / hook
        all_rows.append(Row(measurement, ratio_to_peer, place in steady_places, (before or {}).get(same)))
    return all_rows


def steady(measurements: Sequence[Measurement]) -> set[int]:
    """The indices of the steady measurements. The machine was equally fast during all steady measurements, and all
    steps of a steady measurement took about equally long.

    Measurements with the same framework, device and number of threads make the same copy, so the times of their copies
    are compared. The largest group of measurements in which every copy took at most `MOST_SPREAD` longer than the
    fastest copy counts as equally fast. For a small model, the copy is so short that other work rarely disturbs it.
    Therefore the times of the steps are also checked.
    """
    return {place for place in _equally_fast(measurements) if _uninterrupted(measurements[place])}


def _uninterrupted(measurement: Measurement) -> bool:
    """Whether all steps took equally long, and the thread had a core all the time."""
    equal = measurement.step_ms.high <= measurement.step_ms.low * (1 + MOST_QUARTILES)
    had_core = measurement.step_ms.median <= measurement.cpu_ms.median * (1 + MOST_SPREAD)
    return equal and (measurement.request.device != "cpu" or had_core)


def _equally_fast(measurements: Sequence[Measurement]) -> set[int]:
    equally_fast: set[int] = set()
    for places in _same_copies(measurements):
        copies = {place: measurements[place].copy_ms.median for place in places}
        bands = [
            {place for place, copy in copies.items() if fastest <= copy <= fastest * (1 + MOST_SPREAD)}
            for fastest in sorted(copies.values())
        ]
        equally_fast |= max(bands, key=len)  # if several groups are equally large, the fastest group
    return equally_fast


def _same_copies(measurements: Sequence[Measurement]) -> list[list[int]]:
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, measurement in enumerate(measurements):
        request = measurement.request
        groups.setdefault((request.framework, request.device, request.threads), []).append(place)
    return list(groups.values())


def unsteady(measurements: Sequence[Measurement]) -> list[int]:
    """The indices of the measurements that other work on the machine has disturbed."""
    return sorted(set(range(len(measurements))) - steady(measurements))


def check_steady(measurements: Sequence[Measurement]) -> None:
    """Checks that the machine was equally fast for all methods. The check compares the times of the copies.

    Raises:
        UnsteadyError: if the slowest copy took more than `MOST_SPREAD` longer than the fastest copy.
    """
    equally_fast = _equally_fast(measurements)
    for places in _same_copies(measurements):
        group = [measurements[place] for place in places]
        fast, slow = (pick(group, key=lambda measurement: measurement.copy_ms.median) for pick in (min, max))
        spread = slow.copy_ms.median / fast.copy_ms.median - 1
        if spread > MOST_SPREAD:
            apart = [measurements[place].request.method for place in places if place not in equally_fast]
            raise UnsteadyError(
                f"a copy of the same gradients took {fast.copy_ms.median:.3g} ms while {fast.request.method} was "
                f"measured, and {slow.copy_ms.median:.3g} ms while {slow.request.method} was measured, which is "
                f"{spread:.0%} more; at most {MOST_SPREAD:.0%} more is allowed. The machine was not equally fast for "
                "all methods, so the rows of different methods cannot be compared. The copy was unusually fast or slow "
                f"for these methods: {', '.join(apart)}. End other programs, or use another machine, and measure again "
                "with more --seconds or --retries"
            )
