"""Sums of squares (energies) of x, and of the compression error x - C(x). Here x is the gradient plus the residual, and
C(x) is x after compression and decompression. The sums stay on the device of the gradients until they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hvdcomp.arrays.types import AllFunctions, AnyArray, Array, number_of_elements
from hvdcomp.compressors.protocol import SparseVector


class _Part(NamedTuple):
    names: tuple[str, ...]
    places: tuple[int, ...]
    weights: tuple[float, ...]
    values: AnyArray


class Energies:
    """A sum of squares for each tensor of a set of tensors."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def add(
        self, names: Sequence[str], values: Array, weights: Sequence[float] = (), places: Sequence[int] = ()
    ) -> None:
        """Adds energies to the sums of the named tensors.

        Args:
            names: the names of the tensors. A name may occur more than once.
            values: the energies to add, a vector of float64.
            weights: a weight for each name. Default: 1 for all.
            places: for each name, the index of its value in `values`. Default: 0, 1, 2, ...
        """
        count = len(names)
        self._parts.append(_Part(tuple(names), tuple(places or range(count)), tuple(weights or [1.0] * count), values))

    def extend(self, energies: Energies) -> None:
        """Adds all sums of another `Energies`. The tensors may be the same or different ones."""
        self._parts += energies._parts

    def total(self) -> float:
        """The sum over all tensors. Waits for the device."""
        return sum((value for part in self._parts for _, value in _numbers(part)), 0.0)

    def numbers(self) -> dict[str, float]:
        """The sum of each tensor. Waits for the device."""
        values: dict[str, float] = {}
        for part in self._parts:
            for name, value in _numbers(part):
                values[name] = values.get(name, 0.0) + value
        return values


def _numbers(part: _Part) -> Iterator[tuple[str, float]]:
    values = part.values.tolist()
    for name, place, weight in zip(part.names, part.places, part.weights, strict=True):
        # With weight 0, the product would be NaN if the value is infinite.
        yield name, weight * values[place] if weight else 0.0


def of_arrays(xp: AllFunctions, xs: dict[str, Array], factor: Array | None = None) -> Energies:
    """The energy ||factor * x||^2 of each array x, by name. If `factor` is None, it is 1."""
    energies = Energies()
    if xs:
        norms = xp.norms(list(xs.values()))
        energies.add(list(xs), (norms if factor is None else norms * factor) ** 2)
    return energies


def of_errors(xp: AllFunctions, pairs: dict[str, tuple[Array, Array | SparseVector]]) -> Energies:
    """The squared compression error ||x - C(x)||^2 of each pair of x and C(x), by name.

    If C(x) is sparse, the error is computed in three terms: ||x||^2, minus the squares of the sent elements of x, plus
    the squared errors of the sent elements.
    """
    names: list[str] = []
    weights: list[float] = []
    arrays: list[Array] = []
    for name, (x, sent) in pairs.items():
        if isinstance(sent, SparseVector):
            taken = xp.take(xp.flatten(x), sent.indices)
            terms = [(1.0, x), (-1.0, taken), (1.0, taken - sent.values)]
        else:
            terms = [(1.0, x - sent)]
        for weight, array in terms:
            names.append(name)
            weights.append(weight)
            arrays.append(array)
    energies = Energies()
    if arrays:
        energies.add(names, xp.norms(arrays) ** 2, weights)
    return energies


def densified(xp: AllFunctions, x: Array, sent: Array | SparseVector) -> Array:
    """C(x) in the shape of x."""
    if isinstance(sent, SparseVector):
        flat = xp.zeros((number_of_elements(tuple(x.shape)),), like=x)
        return xp.reshape(xp.add_at(flat, sent.indices, sent.values), x.shape)
    return xp.reshape(sent, x.shape)
