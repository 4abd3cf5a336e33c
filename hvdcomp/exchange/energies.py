"""Sums of squares: of x, and of what compression loses of it. They stay where the gradients are until somebody asks."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from hvdcomp.arrays.types import Array, number_of_elements
from hvdcomp.compressors.protocol import SparseVector


class Energies:
    """A sum of squares for each of some tensors."""

    def __init__(self) -> None:
        self._parts: list[tuple[Sequence[str], Array, Sequence[float]]] = []

    def add(self, names: Sequence[str], values: Array, weights: Sequence[float] = ()) -> None:
        """Adds to the sums of tensors.

        Args:
            names: of the tensor of each value; a name may come more than once.
            values: float64 (values,).
            weights: of the values, 1 if there are none.
        """
        self._parts.append((names, values, weights or [1.0] * len(names)))

    def extend(self, others: Energies) -> None:
        """Adds all sums of others."""
        self._parts += others._parts

    def total(self) -> float:
        """The sum over all tensors. Waits for the device."""
        weighted = ((weights, values.tolist()) for _, values, weights in self._parts)
        # 0 times an infinity would be NaN.
        return float(sum(w * value for ws, values in weighted for w, value in zip(ws, values, strict=True) if w))

    def by_name(self) -> dict[str, Array]:
        """The sum of each tensor, a float64 scalar on the device."""
        found: dict[str, Array] = {}
        for names, values, weights in self._parts:
            for place, (name, weight) in enumerate(zip(names, weights, strict=True)):
                value = weight * values[place]
                found[name] = found[name] + value if name in found else value
        return found


def of_arrays(xp: ModuleType, xs: dict[str, Array]) -> Energies:
    """||x||^2 of each array, by name."""
    found = Energies()
    if xs:
        found.add(list(xs), xp.norms(list(xs.values())) ** 2)
    return found


def of_errors(xp: ModuleType, pairs: dict[str, tuple[Array, Array | SparseVector]]) -> Energies:
    """||x - C(x)||^2 of each pair of x and C(x), by name.

    For a sparse C(x) they come from x itself and, for the elements sent alone, their values before and what is left.
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
    found = Energies()
    if arrays:
        found.add(names, xp.norms(arrays) ** 2, weights)
    return found


def densified(xp: ModuleType, x: Array, sent: Array | SparseVector) -> Array:
    """C(x) in the shape of x."""
    if isinstance(sent, SparseVector):
        flat = xp.zeros((number_of_elements(tuple(x.shape)),), like=x)
        return xp.reshape(xp.add_at(flat, sent.indices, sent.values), x.shape)
    return xp.reshape(sent, x.shape)
