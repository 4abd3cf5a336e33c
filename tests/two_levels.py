"""GraVAC's two compressions by TopK in NumPy, on the tensors of `tests.driven`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.driven import COMPRESSED, SHAPES, random_gradients


def top(x: np.ndarray, factor: float) -> np.ndarray:
    """The elements of `x` that TopK keeps at a compression factor.

    A value takes four bytes and its index two, so that k of d elements take 6 k bytes instead of 4 d.
    """
    k = max(1, math.floor(4 * x.size / factor / 6))
    flat = x.reshape(-1)
    result = np.zeros_like(flat)
    largest = np.argsort(-np.abs(flat), kind="stable")[:k]
    result[largest] = flat[largest]
    return result.reshape(x.shape)


def gain_of(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """The share of the energy of all x that all C(x) keep, for pairs (x, C(x))."""
    energy, kept_energy = (sum(np.sum(pair[place].astype(float) ** 2) for pair in pairs) for place in (0, 1))
    return float(kept_energy / energy)


class Model:
    """A step on one rank in NumPy: x = g + r of each tensor, and its two compressions."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.r = {name: np.zeros(SHAPES[name], np.float32) for name in COMPRESSED}

    def begin(self, step: int, minimum: float, candidate: float) -> None:
        self.gradients = random_gradients(self.rank, step)
        self.x = {name: self.gradients[name] + self.r[name] for name in COMPRESSED}
        self.first = {name: top(x, minimum) for name, x in self.x.items()}
        self.second = {name: top(x, candidate) for name, x in self.first.items()}

    def gains(self) -> tuple[float, float]:
        pairs = [[(self.x[name], compressed[name]) for name in COMPRESSED] for compressed in (self.first, self.second)]
        return gain_of(pairs[0]), gain_of(pairs[1])

    def send(self, method: str | None) -> dict[str, np.ndarray]:
        sent = {"dense": self.x, "minimum": self.first, "candidate": self.second}[method or ""]
        self.r = {name: self.x[name] - sent[name] for name in COMPRESSED}
        return {**sent, "bias": self.gradients["bias"]}
