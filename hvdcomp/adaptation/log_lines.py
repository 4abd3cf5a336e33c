"""The short form of the lines of a decision log. Only the start line has the names of tensors. States and decisions are
written as changes from the previous line.

An object is an abbreviation if its only key is "by_tensor", "as", "changed" or "plain". The left column shows examples
of abbreviations, and the right column shows the objects that they replace:

    {"by_tensor": [0.5, 2.0]}              {"conv": 0.5, "fc": 2.0}, if the start line has the tensors conv and fc
    {"by_tensor": {"4.0": [0.5, 0.1]}}     {"conv": {"4.0": 0.5}, "fc": {"4.0": 0.1}}
    {"as": "norms"}                        the same object as the statistic "norms" in the same line
    {"changed": {"ends": 4}}               the object of the previous line, with "ends" set to 4
    {"changed": {"1": 2.0}}                the object of the previous line, with 2.0 for the second tensor
    {"plain": {"as": "norms"}}             {"as": "norms"} itself
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

BY_TENSOR, AS, CHANGED, PLAIN = "by_tensor", "as", "changed", "plain"
_WORDS = (BY_TENSOR, AS, CHANGED, PLAIN)

Parts = Mapping[str, Any]
"""The statistics, state and decision of a line, as JSON data; a start line has no statistics."""


class Shorthand:
    """Shortens the parts of lines, and restores them exactly: 1 does not become 1.0, and keys stay in the same order.

    Args:
        tensors: the names of the tensors, in the order of the start line.
    """

    def __init__(self, tensors: Iterable[str]) -> None:
        self._names = list(tensors)
        self._places = {str(place): name for place, name in enumerate(self._names)}

    def short(self, parts: Parts, before: Parts) -> dict[str, Any]:
        """Shortens the parts of a line by omitting values that are the same in the previous line.

        Args:
            parts: the parts of the line, by name.
            before: the parts of the previous line, by name; empty for a start line.
        """
        statistics = {name: value for name, value in parts.get("statistics", {}).items() if self._is_by_tensor(value)}
        return {
            name: self._short(part, None, {})
            if name == "statistics"
            else self._short(part, before.get(name), statistics)
            for name, part in parts.items()
        }

    def whole(self, parts: Parts, before: Parts) -> dict[str, Any]:
        """Restores the parts of a line from their short form.

        Raises:
            ValueError: if the short form does not fit the previous lines.
        """
        try:
            statistics = self._whole(parts.get("statistics", {}), None, {})
            return {
                name: statistics if name == "statistics" else self._whole(part, before.get(name), statistics)
                for name, part in parts.items()
            }
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"this line records only changes, and these changes do not match the lines before this line: {error!r}"
            ) from None

    def _is_by_tensor(self, value: Any) -> bool:
        return isinstance(value, Mapping) and bool(value) and list(value) == self._names

    def _short(self, value: Any, before: Any, statistics: Mapping[str, Any]) -> Any:
        if not isinstance(value, Mapping):
            return value
        if self._is_by_tensor(value):
            return self._short_by_tensor(value, before, statistics)
        if isinstance(before, Mapping) and list(before) == list(value):
            changed = {key: item for key, item in value.items() if _differ(item, before[key])}
            return {CHANGED: {key: self._short(item, before[key], statistics) for key, item in changed.items()}}
        if len(value) == 1 and next(iter(value)) in _WORDS:
            return {PLAIN: value}
        return {key: self._short(item, None, statistics) for key, item in value.items()}

    def _short_by_tensor(self, value: Mapping[str, Any], before: Any, statistics: Mapping[str, Any]) -> dict[str, Any]:
        if self._is_by_tensor(before):
            changed = {place: value[name] for place, name in self._places.items() if _differ(value[name], before[name])}
            if 2 * len(changed) <= len(value):
                return {CHANGED: changed}
        for name, statistic in statistics.items():
            if not _differ(value, statistic):
                return {AS: name}
        items = list(value.values())
        keys = list(items[0]) if isinstance(items[0], Mapping) else []
        if keys and all(isinstance(item, Mapping) and list(item) == keys for item in items):
            return {BY_TENSOR: {key: [item[key] for item in items] for key in keys}}
        return {BY_TENSOR: items}

    def _whole(self, value: Any, before: Any, statistics: Mapping[str, Any]) -> Any:
        if not isinstance(value, Mapping):
            return value
        word = next(iter(value)) if len(value) == 1 else ""
        if word == PLAIN:
            return value[PLAIN]
        if word == AS:
            return statistics[value[AS]]
        if word == BY_TENSOR:
            items = value[BY_TENSOR]
            if isinstance(items, Mapping):
                rows = zip(*items.values(), strict=True)
                items = [dict(zip(items, row, strict=True)) for row in rows]
            return dict(zip(self._names, items, strict=True))
        if word == CHANGED:
            by_tensor = self._is_by_tensor(before)
            if by_tensor:
                changed = {self._places[key]: item for key, item in value[CHANGED].items()}
            else:
                changed = {key: self._whole(item, before[key], statistics) for key, item in value[CHANGED].items()}
            return {**before, **changed}
        return {key: self._whole(item, None, statistics) for key, item in value.items()}


def _differ(before: Any, other: Any) -> bool:
    """Whether two JSON values differ, even slightly: True differs from 1, 1 from 1.0, and -0.0 from 0.0."""
    if before != other:
        return True
    return before is not other and not isinstance(before, str) and repr(before) != repr(other)
