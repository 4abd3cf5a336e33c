"""Routing: different compressors for different tensors, chosen by name, by size or by number of dimensions.

A router is itself a compressor. You can use it wherever a compressor is allowed, even inside another router. A router
never compresses. The method `route` returns the compressor of each tensor, and this compressor determines memory,
payload and bias. All tensors share the fused collectives of a round, even if their compressors differ.
"""

from __future__ import annotations

import difflib
import heapq
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NoReturn

from hvdcomp.arrays.types import Array, ArrayFunctions
from hvdcomp.compressors.base import Compressor, Count
from hvdcomp.compressors.choice import MIN_NDIM, MIN_NUMEL
from hvdcomp.compressors.protocol import Aggregation, Context, TensorInfo
from hvdcomp.errors import SpecError
from hvdcomp.specs.levels import Level

MOST_NESTED = 32  # maximum depth of nested routers; the depth is limited because most methods are recursive
ANY = "*"  # the pattern that matches every name
_PATTERNS_SHOWN, _NAMES_SHOWN = 3, 3  # numbers of patterns and names that an error message shows
_NUMBERED = re.compile(r"(allreduce\.noname\.)?\d+(\.\d+)*")  # names of parameters that the user has not named
CONDITION = re.compile(r"(numel|ndim)\s*<\s*(\d+)")  # a condition, which a rule may have instead of a pattern


@dataclass(frozen=True)
class Router(Compressor):
    """Base class of the compressors that choose a compressor for each tensor.

    Some of a router's compressors may have a level. If all these levels are of the same kind, such as ratio or rank,
    the router also has a level. Setting the level of the router sets the level of each of these compressors. If the
    kinds differ, levels can only be set for single tensors.
    """

    sends: ClassVar[str] = "the payloads of the chosen compressors"

    @property
    def choices(self) -> tuple[Compressor, ...]:
        """The compressors that tensors may get. Some of these compressors may be routers."""
        return tuple(self.rules().values())

    def choose(self, tensor: TensorInfo) -> Compressor:
        """The compressor that the rules choose for a tensor, one of `choices`."""
        raise NotImplementedError

    def rules(self) -> dict[str, Compressor]:
        """The compressor for each condition, as in a spec string, in the order in which conditions are tried."""
        raise NotImplementedError

    def route(self, tensor: TensorInfo) -> Compressor:
        """The compressor of a tensor. The rules choose a compressor, and the result is `route` of this compressor.

        Raises:
            SpecError: if no rule matches the tensor.
        """
        return self.choose(tensor).route(tensor)

    def method_for(self, tensor: TensorInfo) -> Compressor:
        return self.choose(tensor).method_for(tensor)

    @property
    def depth(self) -> int:
        """The depth of nested routers, including this one."""
        return 1 + max(choice.depth if isinstance(choice, Router) else 0 for choice in self.choices)

    def leaves(self) -> Iterator[Compressor]:
        """All compressors of this router and of its nested routers, but not the routers themselves."""
        for choice in self.choices:
            yield from choice.leaves()

    def name_patterns(self) -> Iterator[str]:
        for choice in self.choices:
            yield from choice.name_patterns()

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """Whether any compressor of this router is biased."""
        return any(choice.biased for choice in self.choices)

    @property
    def level_name(self) -> str | None:  # type: ignore[override]
        """The name of the compressors' level; None if the names differ or no compressor has a level."""
        names = {choice.level_name for choice in self._with_level()}
        return names.pop() if len(names) == 1 else None

    @property
    def level(self) -> Level | None:
        """The level, if all compressors that have a level have the same level; otherwise None."""
        levels = {choice.level for choice in self._with_level()}
        return levels.pop() if len(levels) == 1 and self.level_name else None

    def at_level(self, level: Level | None) -> Compressor:
        """The same router with a different level. Each compressor that has a level gets this level.

        Raises:
            SpecError: if the compressors have different kinds of level, or do not allow this level.
        """
        if level is None:
            return self
        if self.level_name is None:
            have = ", ".join(f"{choice} ({choice.level_name or 'no level'})" for choice in self.choices)
            raise SpecError(
                f"level {level} cannot be set for all of {have}: these compressors do not have the same kind of level. "
                "Use compressors with the same kind of level, or set the levels of single tensors"
            )
        return self._with(choice.at_level(level) if _has_level(choice) else choice for choice in self.choices)

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        self._refuse()

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        self._refuse()

    def __str__(self) -> str:
        """The JSON object that `parse_compressor` reads as this router."""
        return json.dumps(self.as_json())

    def as_json(self) -> dict[str, Any]:
        """The spec of the compressor for each condition."""
        return {
            condition: choice.as_json() if isinstance(choice, Router) else str(choice)
            for condition, choice in self.rules().items()
        }

    def _with(self, choices: Iterable[Compressor]) -> Router:
        """A router with the same rules, but with different compressors, given in the order of `choices`."""
        raise NotImplementedError

    def _with_level(self) -> list[Compressor]:
        return [choice for choice in self.choices if _has_level(choice)]

    def _refuse(self) -> NoReturn:
        raise TypeError(f"{self.name} only chooses compressors; call the compressor that route(tensor) returns")


def _has_level(compressor: Compressor) -> bool:
    """Whether a compressor, or any compressor of a router, has a level."""
    return any(leaf.level_name is not None for leaf in compressor.leaves())


@dataclass(frozen=True, init=False)
class ByName(Router):
    """Chooses by the name of the tensor. The first pattern that matches the name determines the compressor.

    Patterns work as in Python's `fnmatch`: `*` matches any text (including dots and slashes), `?` matches one
    character, and `[abc]` matches one of the characters a, b and c. A pattern must match the whole name. Upper case and
    lower case are different.

    Args:
        patterns: a mapping from patterns to compressors, or pairs, in the order in which patterns are tried. It is an
            error if no pattern matches a tensor, so the last pattern is usually "*".

    Raises:
        SpecError: if there are no patterns, if a pattern is given twice or after "*", or if a value is not a
            compressor.

    Example:
        >>> from hvdcomp import NoCompression, PowerSGD, TopK
        >>> methods = ByName({"embed.*": TopK(0.001), "*.bias": NoCompression(), "*": PowerSGD(4)})
        >>> str(methods.route(TensorInfo("layer.weight", (256, 256))))
        'powersgd:rank=4'
    """

    patterns: tuple[tuple[str, Compressor], ...]

    name: ClassVar[str] = "by_name"

    def __init__(self, patterns: Mapping[str, Compressor] | Iterable[tuple[str, Compressor]]) -> None:
        pairs = tuple(patterns.items() if isinstance(patterns, Mapping) else patterns)
        object.__setattr__(self, "patterns", pairs)  # the dataclass is frozen
        if not pairs:
            raise SpecError(
                'by_name: no pattern was given; give at least one, such as {"*.bias": NoCompression(), "*": ...}'
            )
        names = [pattern for pattern, _ in pairs]
        for place, (pattern, choice) in enumerate(pairs):
            if not isinstance(pattern, str) or not pattern:
                raise SpecError(f"by_name: {pattern!r} is not a pattern; it must be text, such as 'embed.*'")
            if CONDITION.fullmatch(pattern.strip()):
                raise SpecError(f"by_name: {pattern!r} is a condition, not a pattern; use BySize or ByDimensions")
            if ANY in names[:place]:
                raise SpecError(f"by_name: pattern {pattern!r} comes after '*', which matches all names; put '*' last")
            if pattern in names[:place]:
                raise SpecError(f"by_name: pattern {pattern!r} is given twice")
            _require_compressor(self.name, pattern, choice)

    def choose(self, tensor: TensorInfo) -> Compressor:
        for pattern, choice in self.patterns:
            if fnmatchcase(tensor.name, pattern):
                return choice
        raise SpecError(
            f"no pattern matches tensor {tensor.name!r} of shape {tensor.own_shape}; the patterns are: "
            f"{', '.join(pattern for pattern, _ in self.patterns)}. Add a pattern for it, or '*' at the end for all "
            'other tensors ({"*": "none"} leaves them uncompressed)'
        )

    def rules(self) -> dict[str, Compressor]:
        return dict(self.patterns)

    def name_patterns(self) -> Iterator[str]:
        yield from (pattern for pattern, _ in self.patterns)
        yield from super().name_patterns()

    def _with(self, choices: Iterable[Compressor]) -> ByName:
        return ByName(zip((pattern for pattern, _ in self.patterns), choices, strict=True))


@dataclass(frozen=True)
class _ByThreshold(Router):
    """Base of routers that compare a number of the tensor with `threshold`. The two fields after `threshold` are the
    compressors between which a router chooses.

    Class attributes:
        condition: name, in a spec string, of the number that is compared with the threshold, such as "numel".
    """

    threshold: Count

    condition: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        for place, choice in self._by_field().items():
            _require_compressor(self.name, place, choice)

    def compared(self, tensor: TensorInfo) -> int:
        """The number of the tensor that is compared with the threshold. The first compressor is chosen if this number
        is below the threshold, otherwise the second."""
        raise NotImplementedError

    def choose(self, tensor: TensorInfo) -> Compressor:
        return self.choices[self.compared(tensor) >= self.threshold]

    def rules(self) -> dict[str, Compressor]:
        return dict(zip((f"{self.condition}<{self.threshold}", ANY), self._by_field().values(), strict=True))

    def _with(self, choices: Iterable[Compressor]) -> Router:
        return type(self)(self.threshold, *choices)

    def _by_field(self) -> dict[str, Compressor]:
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}


@dataclass(frozen=True)
class BySize(_ByThreshold):
    """Chooses by the number of elements.

    Attributes:
        threshold: a tensor with at least this number of elements is large.
        small: the compressor of tensors with fewer elements.
        large: the compressor of all other tensors.

    Example:
        >>> from hvdcomp import Int8, TopK
        >>> methods = BySize(threshold=100_000, small=Int8(), large=TopK(0.01))
        >>> str(methods.route(TensorInfo("layer.weight", (256, 256))))
        'int8'
    """

    small: Compressor
    large: Compressor

    name: ClassVar[str] = "by_size"
    condition: ClassVar[str] = "numel"

    def compared(self, tensor: TensorInfo) -> int:
        return tensor.size


@dataclass(frozen=True)
class ByDimensions(_ByThreshold):
    """Chooses by the number of dimensions. A bias has one dimension, a linear layer two, and a convolution four.

    Attributes:
        threshold: tensors with at least this number of dimensions get `others`.
        fewer: the compressor of tensors with fewer dimensions.
        others: the compressor of all other tensors.

    Example:
        >>> from hvdcomp import FP16, TopK
        >>> methods = ByDimensions(threshold=2, fewer=FP16(), others=TopK(0.01))
        >>> str(methods.route(TensorInfo("layer.bias", (256,))))
        'fp16'
    """

    fewer: Compressor
    others: Compressor

    name: ClassVar[str] = "by_dimensions"
    condition: ClassVar[str] = "ndim"

    def compared(self, tensor: TensorInfo) -> int:
        return len(tensor.own_shape)


def with_small(compressor: Compressor, small: Compressor) -> Router:
    """Makes a router with a separate compressor for small tensors, such as biases.

    By default, a `Compression` sends these tensors uncompressed. So also pass `min_numel=0, min_ndim=0` to the
    `Compression`.

    Args:
        compressor: the compressor of all other tensors.
        small: the compressor of tensors with fewer than `MIN_NUMEL` elements or `MIN_NDIM` dimensions.

    Example:
        >>> from hvdcomp import EFSignSGD, Int8
        >>> print(with_small(EFSignSGD(), small=Int8()))
        {"numel<1024": "int8", "*": {"ndim<2": "int8", "*": "efsignsgd"}}
    """
    return BySize(MIN_NUMEL, small, ByDimensions(MIN_NDIM, small, compressor))


def require_matches(compressor: Compressor, names: Collection[str]) -> None:
    """Checks that each pattern of a compressor matches the name of at least one tensor. The check accepts a match even
    if an earlier rule chooses the compressor of this tensor.

    A pattern without a match contains a typing error, or was written for another model. Without this check, the rule of
    such a pattern would be ignored silently. "*" needs no match.

    Args:
        compressor: the compressor. If it is a router or contains routers, their patterns are checked.
        names: the names of all parameters of the model, including frozen parameters.

    Raises:
        SpecError: if a pattern has no match. The message lists the most similar names.
    """
    patterns = (pattern for pattern in dict.fromkeys(compressor.name_patterns()) if pattern != ANY)
    wrong = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    if not wrong:
        return
    shown = [
        f"{pattern!r} (the nearest names are {', '.join(_nearest(pattern, names))})"
        for pattern in wrong[:_PATTERNS_SHOWN]
    ]
    more = f" and {len(wrong) - len(shown)} more" if len(wrong) > len(shown) else ""
    if all(map(_NUMBERED.fullmatch, names)):
        raise SpecError(
            f"{compressor} chooses by the names of tensors, but these tensors have only numbers as names (such as "
            f"{next(iter(names))!r}): give hvdcomp.Compression named_parameters=model.named_parameters()"
        )
    raise SpecError(
        f"none of the {len(names)} tensors has a name that matches {', '.join(shown)}{more}. A pattern must match the "
        "whole name, and * matches any text; correct the pattern, or leave out its rule"
    )


def _nearest(pattern: str, names: Collection[str]) -> list[str]:
    """The names that are most similar to the pattern. Names and pattern are split into parts at dots and slashes. The
    names that share the most parts with the pattern come first. If several names share equally many parts, the name
    with the most similar text comes first."""
    text = re.sub(r"[*?\[\]!]", "", pattern).lower()
    parts = set(filter(None, re.split(r"[./]", text)))

    def likeness(name: str) -> tuple[int, float]:
        shared = len(parts.intersection(re.split(r"[./]", name.lower())))
        return shared, difflib.SequenceMatcher(None, text, name.lower(), autojunk=False).ratio()

    return [repr(name) for name in heapq.nlargest(_NAMES_SHOWN, names, key=likeness)]


def _require_compressor(method: str, place: str, choice: object) -> None:
    if not isinstance(choice, Compressor):
        raise SpecError(
            f"{method}: {choice!r} for {place!r} is not a compressor; give a compressor, such as TopK(ratio=0.01)"
        )
    if isinstance(choice, Router) and choice.depth >= MOST_NESTED:
        raise nested_too_deep()


def nested_too_deep() -> SpecError:
    """The error for routers that are nested more than `MOST_NESTED` deep."""
    return SpecError(
        f"routers may be nested at most {MOST_NESTED} deep. Each numel<N or ndim<N contains all rules after it. "
        "Use fewer numel<N and ndim<N, and put all patterns of names into one object, side by side"
    )
