"""PowerSGD for all matrices of a bucket at once, by the kernels of `isa_lowrank.c`.

All factors P of a bucket lie in one vector, all Q in another, each factor column by column.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdcomp.arrays.types import Array
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, Payload
from hvdcomp.compressors.protocol import AllReduce
from hvdcomp.kernels.tables import FACTORS, PRODUCT, TASK

_PIECE = 1 << 16  # elements of a task on rows
_WIDTHS = 256, 1024  # columns of a task on columns, least and most
_COLUMN_PIECE = 1 << 18  # elements of a task on columns, within the widths


class LowRankBucket:
    """Addresses and shapes of a bucket's matrices, and the storage of their factors, made once.

    Args:
        bucket: a bucket of `PowerSGD`.
        shapes: rows and columns of each matrix.
    """

    def __init__(self, bucket: Bucket, shapes: Sequence[tuple[int, int]]) -> None:
        ranks = [min(compressor.rank, *shape) for compressor, shape in zip(bucket.compressors, shapes, strict=True)]
        ends = np.cumsum(np.array(shapes) * np.array(ranks)[:, None], axis=0)
        segments = bucket.segments
        segments["count"] = ranks
        segments["p_factor"][1:], segments["q_factor"][1:] = ends[:-1].T
        segments["columns"] = [columns for _, columns in shapes]
        self._bucket = bucket
        self._p, self._q = (bucket.payload(int(end), "float32") for end in ends[-1])
        self._unit_p, self._unit_q = (bucket.zeros(int(end), "float32") for end in ends[-1])
        self._sent_factors: _SentFactors | None = None  # on a device, decoding subtracts P Q' from x,
        self._rows: tuple[int, ...] = ()  # and kernels divide the work themselves
        self._columns: tuple[int, ...] = ()
        if bucket.device is None:
            self._sent_factors = _SentFactors(segments, int(ends[-1, 0]), int(ends[-1, 1])) if bucket.keeps else None
            self._of_rows = Tasks([(rows, max(1, _PIECE // columns)) for rows, columns in shapes])
            self._of_columns = Tasks([(columns, _width(rows)) for rows, columns in shapes])
            self._rows, self._columns = self._of_rows.passed, self._of_columns.passed

    def iterate(self, iterations: int) -> BucketAggregation:
        """Whole power iterations."""
        states = self._bucket.states
        assert states is not None
        (q,) = states.kept
        for iteration in range(iterations):
            p = yield self._send_p(q, first=iteration == 0)
            q = yield self._send_q(p, first=False)
        found_inf = self._decode(self._unit_p, q)
        self._keep(0, q)
        return found_inf

    def half(self, even: bool) -> BucketAggregation:
        """One new factor: P in even steps, Q in odd ones."""
        states = self._bucket.states
        assert states is not None
        q, p = states.kept
        if even:
            new = yield self._send_p(q, first=True)
            found_inf = self._decode(new, self._unit_q)
        else:
            new = yield self._send_q(p, first=True)
            found_inf = self._decode(self._unit_p, new)
        self._keep(int(even), new)
        states.next[1 - even][:] = states.kept[1 - even]
        return found_inf

    def _send_p(self, q: Array, first: bool) -> AllReduce:
        """P = M Q with Q orthogonalised."""
        return self._send("lowrank_p", self._rows, q, self._unit_q, self._p, first)

    def _send_q(self, p: Array, first: bool) -> AllReduce:
        """Q = M' P with P orthogonalised."""
        return self._send("lowrank_q", self._columns, p, self._unit_p, self._q, first)

    def _send(
        self, kernel: str, tasks: tuple[int, ...], other: Array, unit: Array, sent: Payload, first: bool
    ) -> AllReduce:
        """Sends the product with the other factor, orthogonalised to `unit`; if `first`, makes x in the same pass."""
        found_inf = self._bucket.call(kernel, *tasks, other, unit, sent.vector, first)
        if first:
            self._bucket.found_inf = found_inf
        return AllReduce(sent.vector, with_room=sent.with_room)

    def _decode(self, p: Array, q: Array) -> bool | Array:
        if self._sent_factors is not None:
            self._sent_factors.write(self._bucket, p, q)
        return self._bucket.call("lowrank_decode", *self._rows, p, q)

    def _keep(self, kind: int, new: Array) -> None:
        states = self._bucket.states
        assert states is not None
        self._bucket.call("lowrank_keep", new, states.kept[kind], states.next[kind], kind)


class _SentFactors:
    """P and Q of the last step that counts, whose product the next step subtracts, and storage for the next P and Q."""

    def __init__(self, segments: np.ndarray, p: int, q: int) -> None:
        self._factors = [(np.empty(p, np.float32), np.empty(q, np.float32)) for _ in range(2)]
        self._products = [np.zeros(len(segments), FACTORS) for _ in range(2)]
        self._turn = 0  # index of the pair that a step writes
        for product, factors in zip(self._products, self._factors, strict=True):
            for name, factor in zip("pq", factors, strict=True):
                product[name] = factor.ctypes.data + factor.itemsize * segments[f"{name}_factor"]
            product["rank"], product["columns"] = segments["count"], segments["columns"]

    def write(self, bucket: Bucket, p: np.ndarray, q: np.ndarray) -> None:
        """Records in the bucket's table that P Q' is what was sent of x."""
        for kept, factor in zip(self._factors[self._turn], (p, q), strict=True):
            np.copyto(kept, factor)
        bucket.segments["sent_rule"] = PRODUCT
        bucket.segments["sent_product"] = self._products[self._turn]
        bucket.factors = self

    def commit(self) -> None:
        """Keeps this step's factors; the next step writes the other pair."""
        self._turn ^= 1


def _width(rows: int) -> int:
    least, most = _WIDTHS
    return min(most, max(least, _COLUMN_PIECE // rows // 16 * 16))


class Tasks:
    """Rows or columns of a bucket's matrices, divided into tasks for threads.

    Args:
        pieces: for each tensor, the number of rows or columns, and the number of these in a task.

    Attributes:
        passed: the kernels' arguments: the address of a `TASK` vector, and the number of tasks.
    """

    def __init__(self, pieces: Sequence[tuple[int, int]]) -> None:
        tasks = [
            (number, start, min(step, length - start))
            for number, (length, step) in enumerate(pieces)
            for start in range(0, length, step)
        ]
        self._vector = np.zeros(len(tasks), TASK)
        for field, values in zip(("segment", "start", "length"), np.array(tasks, np.int64).T, strict=True):
            self._vector[field] = values
        self.passed = self._vector.ctypes.data, len(tasks)
