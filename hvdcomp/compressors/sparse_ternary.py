"""Sparse ternary compression: places and signs of the largest elements, and one magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from hvdcomp.arrays.magnitudes import Magnitudes
from hvdcomp.arrays.types import Array
from hvdcomp.compressors import sparse_payload
from hvdcomp.compressors.protocol import Aggregation, AllGather, Context, Outcome, SparseVector
from hvdcomp.compressors.signs import from_signs, to_signs
from hvdcomp.compressors.sparse_payload import elements_kept
from hvdcomp.compressors.sparsification import ByRatio
from hvdcomp.specs.levels import Level


@dataclass(frozen=True)
class SparseTernary(ByRatio):
    """Sparse ternary compression, STC: sends the k elements of largest magnitude, each as plus or minus their mean
    magnitude (Sattler et al. 2019, arXiv:1903.02891, algorithm 1).

        C(x)_i = mu sign(x_i) for the k largest |x_i|, else 0;  mu = the mean of these k magnitudes

    A zero among the k elements counts as positive. Indices are encoded as in `topk`. The paper's Golomb code is not
    used, because its length depends on the gradient, and the length of a payload must not. A sign takes one bit, and mu
    is one float32.

    Example:
        >>> SparseTernary(ratio=0.01).payload_bytes((100, 100))  # 100 places, 100 bits in 13 bytes, one float32
        217
    """

    name: ClassVar[str] = "stc"
    examples: ClassVar[tuple[str, ...]] = ("stc:ratio=0.01",)
    sends: ClassVar[str] = "k indices, k sign bits, and one magnitude"
    biased: ClassVar[bool] = True
    reference: ClassVar[str] = "Sattler et al. 2019, arXiv:1903.02891"

    def aggregate(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        vector = xp.flatten(x)
        count = elements_kept(self.ratio, vector.shape[0])
        (values, *places), chosen = sparse_payload.encode(xp, vector, Magnitudes(xp, vector, count).top(count), "same")
        encoded = to_signs(xp, values, x)
        ranks = yield AllGather((*encoded, *places))
        decoded = ((from_signs(xp, signs, magnitude, count), *places) for signs, magnitude, *places in ranks)
        mean = sparse_payload.mean_of_sparse(xp, decoded, vector, context)
        sent = xp.astype(from_signs(xp, *encoded, count), xp.dtype_name(x))
        return Outcome(xp.reshape(mean, x.shape), SparseVector(chosen.indices, sent))

    def payload_floats(self, shape: tuple[int, ...], level: Level | None = None) -> float:
        return 1 + super().payload_floats(shape, level) / 32

    def most_elements(self, budget: float, size: int) -> int:
        magnitude_and_last_byte = 4 + 1
        return sparse_payload.most_elements(budget - magnitude_and_last_byte, size, bytes_of_value=1 / 8)
