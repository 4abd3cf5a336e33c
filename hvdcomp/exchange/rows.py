"""Averages rows of embedding tables over all ranks. Each rank has some rows of each table, and sends only these rows.

First, all ranks gather the ids of all rows. Then there are two ways to average the rows:

- Gather: all ranks gather all rows.
- Owners: each row is sent to one rank, its owner, which sends the mean to all ranks. The owner follows from the place
  of the row's id in the sorted ids of all ranks.

In each step, each rank computes from the ids of all ranks in which of the two ways a rank receives fewer bytes. This
result is the same on all ranks, so all ranks use the same way. Both ways give all ranks the same bits: rows are added
up in the order of the ranks, in float32 or the table's wider type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import DTYPE_BYTES, FLOATING, AnyArray, wide_dtype
from hvdcomp.communicators import Communicator
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import gather_rows, require_agreement
from hvdcomp.exchange.ledger import Cost, Ledger, Sent

_INT8, _LARGEST = "int8", 127
_COUNT_BYTES, _SCALE_BYTES = 8, 4


def wire_name(dtype: Any) -> str | None:
    """The name of the element type in which rows are sent; None if `dtype` is None.

    Args:
        dtype: an element type of the framework, or its name.

    Raises:
        ConfigurationError: if rows cannot be sent in this type.
    """
    if dtype is None:
        return None
    name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    if name not in (*FLOATING, _INT8):
        raise ConfigurationError(
            f"RowExchange: wire_dtype={dtype!r} is not allowed; give the type bfloat16, float16 or int8 of the "
            "framework"
        )
    return name


class EmbeddingTable(NamedTuple):
    """What all ranks know about a table: the name of its element type, its number of rows, and its number of
    columns."""

    dtype: str
    rows: int
    columns: int


class Rows(NamedTuple):
    """Rows (n, columns) and their ids (n,). No id occurs twice."""

    ids: AnyArray
    values: AnyArray


class RowMeans:
    """Averages the rows of tables over all ranks.

    Args:
        ranks: the communicator of all ranks that take part.
        tables: the descriptions of the tables, by name; the same on every rank.
        wire: the element type in which rows and means are sent, as returned by `wire_name`; None for the element types
            of the tables. With int8, each row is sent with a scale in float32. There is no error feedback for the
            rounding error.
        host: an array of the framework on the host.

    Attributes:
        ledger: the ledger, with the bytes of each step but no times. Its `dense_bytes` are the bytes of the whole
            tables.

    Raises:
        RankMismatchError: on every rank, if the arguments differ between ranks.
    """

    def __init__(
        self, ranks: Communicator, tables: Mapping[str, EmbeddingTable], wire: str | None, host: AnyArray
    ) -> None:
        shapes = {f"table {name}": f"{table.dtype} {(table.rows, table.columns)}" for name, table in tables.items()}
        facts = {"tables of RowExchange": list(tables), **shapes, "wire_dtype of RowExchange": wire}
        require_agreement(ranks, facts, host)
        self._ranks = ranks
        self._tables = dict(tables)
        self._host = host
        self._wires = [_Wire(wire or table.dtype, table.columns) for table in tables.values()]
        self._id_wires = [_IdWire.of(table.rows) for table in tables.values()]
        self._sent = 0  # bytes that this rank sent in this step
        self._rows = np.zeros(len(tables), np.int64)  # number of rows of each table that this rank sent in this step
        self.ledger = Ledger()

    def exchange(self, given: Sequence[Rows], present: Sequence[bool]) -> list[Rows | None]:
        """Averages the rows of one step. Returns, for each table, the mean rows and their ids, which are the sorted ids
        of all ranks; None for a table if no rank has a gradient of it.

        Args:
            given: this rank's rows of each table, with their ids.
            present: for each table, whether this rank has a gradient. This gradient may have no rows.
        """
        xp = arrays_for(given[0].values)
        ids = [wire.encoded(rows.ids) for rows, wire in zip(given, self._id_wires, strict=True)]
        own_counts = [len(own) if there else -1 for own, there in zip(ids, present, strict=True)]
        sent = np.array(own_counts, np.int64).tobytes()
        gathered = gather_rows(self._ranks, sent, self._host, "hvdcomp.rows.counts")
        self._sent += _COUNT_BYTES * len(own_counts)
        counts = np.array([np.frombuffer(of_rank, np.int64) for of_rank in gathered])  # (ranks, tables)
        id_bytes = (counts.clip(0) * [DTYPE_BYTES[wire.dtype] for wire in self._id_wires]).tolist()
        wait = self._start_gather(list(map(xp.as_bytes, ids)), max(map(sum, id_bytes)), self._ranks, "hvdcomp.rows.ids")

        by_rank = [
            [
                wire.decoded(part.view(own.dtype))
                for part, own, wire in zip(_parts(packed, of_rank), ids, self._id_wires, strict=True)
            ]
            for packed, of_rank in zip(wait(), id_bytes, strict=True)
        ]
        means = self.exchange_known([rows.values for rows in given], by_rank)
        self.record(ids)
        return [mean if most >= 0 else None for mean, most in zip(means, counts.max(0).tolist(), strict=True)]

    # The parts of a step, for callers that already know the ids of all ranks.

    def exchange_known(self, rows: Sequence[AnyArray], by_rank: Sequence[Sequence[AnyArray]]) -> list[Rows]:
        """Averages rows whose ids are known on all ranks. Returns, for each table, the mean rows and their ids, which
        are the sorted ids of all ranks.

        Args:
            rows: this rank's rows of each table, (n, columns).
            by_rank: for each rank and table, the ids of the rows, in the order of the rows. No id occurs twice.
        """
        unions, places = _united(by_rank)
        return self._as_rows(unions, self._means(rows, list(map(len, unions)), places))

    def start_known(
        self, rows: Sequence[AnyArray], by_rank: Sequence[Sequence[AnyArray]], ranks: Communicator, name: str
    ) -> Callable[[], list[Rows]]:
        """Starts to average rows as `exchange_known` does, but always gathers all rows, and does not wait for them.

        Args:
            ranks: the communicator that sends the rows. It has the same ranks in the same order as the communicator of
                this object.
            name: the name of the collective.

        Returns:
            A function that waits, and returns the mean rows.
        """
        unions, places = _united(by_rank)
        finish = self._start_whole(rows, list(map(len, unions)), places, ranks, name)
        return lambda: self._as_rows(unions, finish())

    def start_taken(
        self,
        rows: Sequence[AnyArray],
        by_rank: Sequence[Sequence[AnyArray]],
        taken: Sequence[AnyArray],
        ranks: Communicator,
        name: str,
    ) -> Callable[[], list[Rows]]:
        """Starts to average rows as `start_known` does, but each rank gets only the means of the rows that it needs.

        Args:
            taken: for each table, a boolean array of shape (ranks, ids) that tells which rank needs which ids. The ids
                are the sorted ids of all ranks.
        """
        size, rank = ranks.world_size, ranks.rank
        unions, places = _united(by_rank)
        takers = [[mask[:, at] for at in of_table] for mask, of_table in zip(taken, places, strict=True)]
        lengths = np.zeros((size, size), np.int64)  # number of bytes from each rank to each rank
        for wire, of_table in zip(self._wires, takers, strict=True):
            lengths += wire.row_bytes * np.array([mask.sum(1).tolist() for mask in of_table], np.int64)
        part = int(lengths.max())
        chunks = [
            _packed(self._encoded([row[mask[rank][to]] for row, mask in zip(rows, takers, strict=True)]), part)
            for to in range(size)
        ]
        self._rows += [int(of_table[rank].sum()) for of_table in takers]
        wait = self.start_alltoall(chunks, ranks, name)
        own = [mask[rank] for mask in taken]
        at = [
            [(mine.cumsum(0) - 1)[of_rank[mine[of_rank]]] for of_rank in of_table]
            for mine, of_table in zip(own, places, strict=True)
        ]
        sums = [int(mine.sum()) for mine in own]
        ids = [union[mine] for union, mine in zip(unions, own, strict=True)]
        return lambda: self._as_rows(ids, self._decoded(_packed(self._sums(wait(), at, sums)), sums))

    def start_alltoall(self, chunks: Sequence[AnyArray], ranks: Communicator, name: str) -> Callable[[], AnyArray]:
        """Starts an all-to-all; returns a function that waits, and returns the bytes from all ranks, uint8 (ranks,
        length).

        Args:
            chunks: the bytes that this rank sends to each rank, uint8 (length,). All chunks of all ranks have the same
                length.
        """
        packed = _packed(chunks)
        self._sent += len(packed)
        if not len(packed):
            return lambda: packed.reshape(len(chunks), 0)
        handle = ranks.start_alltoall(packed, name)
        return lambda: ranks.wait(handle)

    def record(self, ids: Sequence[AnyArray], beside: int = 0) -> None:
        """Enters the bytes of the step in the ledger.

        Args:
            ids: for each table, the ids of this rank's rows, in the element type in which they were sent.
            beside: number of bytes that were sent in the step, but not by this object.
        """
        part = {}
        for (name, table), own, rows, wire in zip(self._tables.items(), ids, self._rows, self._wires, strict=True):
            dense_bytes = table.rows * table.columns * FLOATING[table.dtype]
            sent = int(rows) * wire.row_bytes
            part[name] = Cost(own.nbytes + sent, dense_bytes, sent / 4)
        self.ledger.record(self.ledger.step_cost(self.ledger.steps, [part], Sent(self._sent + beside)))
        self._sent, self._rows = 0, np.zeros_like(self._rows)

    def _as_rows(self, unions: Sequence[AnyArray], means: Sequence[AnyArray]) -> list[Rows]:
        """The mean rows, cast to the element types of the tables, with their ids, cast to int64."""
        xp = arrays_for(means[0])
        return [
            Rows(xp.astype(union, "int64"), xp.astype(mean, table.dtype))
            for table, union, mean in zip(self._tables.values(), unions, means, strict=True)
        ]

    def _means(self, rows: Sequence[AnyArray], sums: list[int], places: list[list[AnyArray]]) -> list[AnyArray]:
        """Computes the mean rows of each table, in the order of the sorted ids of all ranks.

        Args:
            rows: this rank's rows of each table.
            sums: for each table, the number of different ids over all ranks.
            places: for each table and rank, the indices of the rank's ids in the sorted ids of all ranks.
        """
        xp = arrays_for(rows[0])
        size, rank = self._ranks.world_size, self._ranks.rank
        whole = self._most_bytes(places)
        to_owners = np.zeros((size, size), np.int64)
        for wire, of_table in zip(self._wires, places, strict=True):
            for number, of_rank in enumerate(of_table):
                to_owners[number] += wire.row_bytes * np.array(xp.counts(of_rank % size, size).tolist(), np.int64)
        part, back = int(to_owners.max()), self._bytes([-(-length // size) for length in sums])
        if whole <= part + back:
            return self._start_whole(rows, sums, places, self._ranks, "hvdcomp.rows.gathered")()

        own = [of_table[rank] % size for of_table in places]  # the owner of each row of this rank
        chunks = [
            _packed(self._encoded([row[to == owner] for row, to in zip(rows, own, strict=True)]), part)
            for owner in range(size)
        ]
        received = self.start_alltoall(chunks, self._ranks, "hvdcomp.rows.parts")()
        owned = [[of_rank[of_rank % size == rank] // size for of_rank in of_table] for of_table in places]
        of_owner = [[len(range(owner, length, size)) for length in sums] for owner in range(size)]
        owned_means = self._sums(received, owned, of_owner[rank])
        wait = self._start_gather(owned_means, back, self._ranks, "hvdcomp.rows.means")
        by_owner = [self._decoded(packed, of) for packed, of in zip(wait(), of_owner, strict=True)]
        means = []
        for by_place, length in zip(zip(*by_owner, strict=True), sums, strict=True):
            mean: AnyArray = xp.zeros((length, by_place[0].shape[1]), by_place[0])
            for owner, some in enumerate(by_place):
                mean[owner::size] = some
            means.append(mean)
        self._rows += [len(row) + mean for row, mean in zip(rows, of_owner[rank], strict=True)]
        return means

    def _start_whole(
        self, rows: Sequence[AnyArray], sums: list[int], places: list[list[AnyArray]], ranks: Communicator, name: str
    ) -> Callable[[], list[AnyArray]]:
        """Starts to average rows as `_means` does, but gathers all rows. Returns a function that waits, and returns the
        mean rows."""
        self._rows += [len(row) for row in rows]
        wait = self._start_gather(self._encoded(rows), self._most_bytes(places), ranks, name)
        return lambda: self._decoded(_packed(self._sums(wait(), places, sums)), sums)

    def _sums(self, received: AnyArray, places: Sequence[Sequence[AnyArray]], lengths: Sequence[int]) -> list[AnyArray]:
        """Averages rows from all ranks, and encodes the means as bytes."""
        xp = arrays_for(received)
        by_rank = [
            self._decoded(packed, [len(of_table[rank]) for of_table in places]) for rank, packed in enumerate(received)
        ]
        means = []
        for of_table, at, length in zip(zip(*by_rank, strict=True), places, lengths, strict=True):
            total = xp.zeros((length, of_table[0].shape[1]), of_table[0])
            for rows, where in zip(of_table, at, strict=True):
                # No id occurs twice on a rank, so each sum is made in the order of the ranks.
                total = xp.add_at(total, where, rows)
            means.append(total / self._ranks.world_size)
        return self._encoded(means)

    def _start_gather(
        self, parts: Sequence[AnyArray], length: int, ranks: Communicator, name: str
    ) -> Callable[[], AnyArray]:
        """Starts an all-gather. Returns a function that waits, and returns the bytes of all ranks, uint8 (ranks,
        length).

        Args:
            parts: the bytes of this rank.
            length: the largest number of bytes of any rank. Ranks with fewer bytes append zeros.
            ranks: the communicator of the ranks that take part.
            name: the name of the collective.
        """
        self._sent += length
        packed = _packed(parts, length)
        if not length:
            return lambda: arrays_for(packed).zeros((ranks.world_size, 0), packed)
        handle = ranks.start_allgather(packed, name)
        return lambda: ranks.wait(handle)

    def _most_bytes(self, places: Sequence[Sequence[AnyArray]]) -> int:
        """The number of bytes of a rank's rows, as the maximum over all ranks."""
        return max(self._bytes(map(len, of_rank)) for of_rank in zip(*places, strict=True))

    def _bytes(self, lengths: Iterable[int]) -> int:
        """The number of bytes of rows. `lengths` has the number of rows of each table."""
        return sum(length * wire.row_bytes for length, wire in zip(lengths, self._wires, strict=True))

    def _encoded(self, rows: Iterable[AnyArray]) -> list[AnyArray]:
        return [wire.encoded(of_table) for wire, of_table in zip(self._wires, rows, strict=True)]

    def _decoded(self, packed: AnyArray, lengths: Sequence[int]) -> list[AnyArray]:
        """Decodes the rows of each table. `lengths` has the number of rows of each table."""
        parts = _parts(packed, [length * wire.row_bytes for length, wire in zip(lengths, self._wires, strict=True)])
        return [wire.decoded(part) for wire, part in zip(self._wires, parts, strict=True)]


class _IdWire(NamedTuple):
    """The encoding of a table's ids: `less` is subtracted from each id, and the result is sent in the type `dtype`. So
    the ids of a table with at most 65,536 rows fit into 16 bits."""

    dtype: str
    less: int

    @classmethod
    def of(cls, rows: int) -> _IdWire:
        """The encoding of the ids of a table with this number of rows."""
        if rows <= 2**16:
            return cls("int16", 2**15)
        return cls("int32" if rows <= 2**31 else "int64", 0)

    def encoded(self, ids: AnyArray) -> AnyArray:
        return arrays_for(ids).astype(ids - self.less, self.dtype)

    def decoded(self, ids: AnyArray) -> AnyArray:
        return arrays_for(ids).astype(ids, "int32") + self.less if self.less else ids


class _Wire(NamedTuple):
    """The encoding of rows as bytes. `columns` is the number of elements of a row."""

    dtype: str
    columns: int

    @property
    def row_bytes(self) -> int:
        return _SCALE_BYTES + self.columns if self.dtype == _INT8 else FLOATING[self.dtype] * self.columns

    def encoded(self, rows: AnyArray) -> AnyArray:
        """The rows as bytes. With int8, the scales of all rows come first, and then the numbers of all rows."""
        xp = arrays_for(rows)
        if self.dtype != _INT8:
            return xp.as_bytes(xp.astype(rows, self.dtype))
        rows = xp.astype(rows, "float32")
        if not len(rows):
            return xp.as_bytes(rows)
        scales = xp.row_largest(rows) / _LARGEST
        numbers = xp.floor(rows * xp.reciprocal_or_zero(scales, scales * 0) + 0.5)
        return xp.concatenate([xp.as_bytes(scales), xp.as_bytes(xp.astype(numbers, _INT8))])

    def decoded(self, packed: AnyArray) -> AnyArray:
        """Decodes rows from bytes, in the element type in which they are added up."""
        xp = arrays_for(packed)
        if self.dtype != _INT8:
            rows = packed.view(xp.astype(packed[:0], self.dtype).dtype).reshape(-1, self.columns)
            return xp.astype(rows, wide_dtype(self.dtype))
        count = len(packed) // self.row_bytes
        scales, numbers = _parts(packed, [_SCALE_BYTES * count, self.columns * count])
        scales = scales.view(xp.astype(packed[:0], "float32").dtype).reshape(-1, 1)
        rows = xp.astype(xp.bitcast(numbers, _INT8), "float32")
        return xp.reshape(rows, (-1, self.columns)) * scales


def _united(by_rank: Sequence[Sequence[AnyArray]]) -> tuple[list[AnyArray], list[list[AnyArray]]]:
    """For each table, the sorted union of all ranks' ids, and each rank's positions in it."""
    unions, places = [], []
    for of_table in zip(*by_rank, strict=True):
        xp = arrays_for(of_table[0])
        union, inverse = xp.unique(xp.concatenate(of_table))
        unions.append(union)
        places.append(_parts(inverse, list(map(len, of_table))))
    return unions, places


def _packed(parts: Sequence[AnyArray], length: int | None = None) -> AnyArray:
    """Joins vectors of bytes into one vector, and appends zeros up to a length."""
    xp = arrays_for(parts[0])
    missing = 0 if length is None else length - sum(map(len, parts))
    return xp.concatenate([*parts, xp.zeros((missing,), parts[0])])


def _parts(x: AnyArray, lengths: Sequence[int]) -> list[AnyArray]:
    """Cuts a vector into parts. The parts are copies: in a vector of bytes, a part may not be aligned for its element
    type."""
    xp = arrays_for(x)
    ends = np.cumsum(lengths).tolist()
    return [xp.concatenate([x[end - length : end]]) for end, length in zip(ends, lengths, strict=True)]
