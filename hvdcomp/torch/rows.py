"""`RowExchange`: the mean of gradients of embedding tables, of which only the rows that are not zero travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from hvdcomp.communicators import Communicator
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import WEIGHTS, gather_rows, refused_on_every_rank, require_agreement
from hvdcomp.exchange.ledger import Cost, Ledger, Sent
from hvdcomp.torch.local_steps import started_ranks
from hvdcomp.torch.training import checksums_of

EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_ON_HOST = torch.empty(0)
_COUNT_BYTES = 8

Means = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Of each table the ids of any rank, int64 and in order, and the mean rows, of the table's type."""


class RowExchange:
    """Puts the mean over all ranks in the place of the gradients of embedding tables, row by row.

        rows = hvdcomp.torch.RowExchange(model)  # on every rank, before DistributedDataParallel, which then
        model = DistributedDataParallel(model)   # leaves these tables alone
        loss.backward()
        rows.exchange()
        optimizer.step()

    The ids of the rows are gathered once. Then either all rows are gathered; or each goes to one rank, by its place
    among all ids, which sends the mean back to all. The way on which fewer bytes reach a rank is taken in each step,
    by the ids of all ranks. Sums are made in the order of the ranks, in float32 or the table's wider type, so that all
    ranks get the same bits on either way. What is inf or NaN is added up as any other number, and reaches all ranks.

    A gradient that is sparse (`nn.Embedding(sparse=True)`) stays sparse, with the rows of any rank. Of a dense one,
    rows whose elements are all zero do not travel.

    Args:
        model: whose tables these are, not yet wrapped.
        tables: names of weights of `nn.Embedding` or `nn.EmbeddingBag`, (rows, columns) each. Default: those with
            sparse=True.
        wire_dtype: in which rows and means travel, such as torch.bfloat16. What is rounded away is lost. Default: as
            they are.
        communicator: of the ranks. Default: all ranks of torch.distributed, or if that was not started, of Horovod.

    Attributes:
        model: as given.
        tables: the modules, by the names of their weights.
        ranks: the communicator.
        ledger: bytes of each step, as of `Compression.ledger`, without times. The dense bytes are the whole tables'.

    Raises:
        ConfigurationError: on every rank, for tables that are none, are sharded or have max_norm; or where no ranks
            were started.
        RankMismatchError: on every rank, if they were told different things, or in the first exchange, if the tables'
            weights differ.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tables: Iterable[str] | None = None,
        *,
        wire_dtype: torch.dtype | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self.model = model
        self.ranks: Any = started_ranks() if communicator is None else communicator
        with refused_on_every_rank(self.ranks, _ON_HOST):
            self.tables: dict[str, Any] = _tables_of(model, tables, wire_dtype)
        weights = {name: table.weight for name, table in self.tables.items()}
        shapes = {f"table {name}": f"{weight.dtype} {tuple(weight.shape)}" for name, weight in weights.items()}
        facts = {"tables of RowExchange": list(weights), **shapes, "wire_dtype of RowExchange": str(wire_dtype)}
        require_agreement(self.ranks, facts, _ON_HOST)
        _leave_alone(model, weights.values())
        self._wires = [wire_dtype or weight.dtype for weight in weights.values()]
        self._columns = [weight.shape[1] for weight in weights.values()]
        self._row_bytes = [wire.itemsize * n for wire, n in zip(self._wires, self._columns, strict=True)]
        self._id_dtype = torch.int32 if max(len(weight) for weight in weights.values()) <= 2**31 else torch.int64
        self._sent = 0  # bytes, in this step
        self._values = np.zeros(len(weights), np.int64)  # of each table, in this step
        self.ledger = Ledger()

    @torch.no_grad()
    def exchange(self) -> None:
        """To be called on every rank in each step, after the backward passes, and before clipping, `unscale_` of a
        scaler, and the optimizer's step. A table of which no rank has a gradient is left alone."""
        tables = list(self.tables.values())
        self.compare_weights()
        mine = [rows_of(one.weight) for one in tables]
        ids = [one.to(self._id_dtype) for one, _ in mine]

        found = [-1 if one.weight.grad is None else len(own) for one, own in zip(tables, ids, strict=True)]
        told = gather_rows(self.ranks, np.array(found, np.int64).tobytes(), _ON_HOST, "hvdcomp.rows.counts")
        self._sent += _COUNT_BYTES * len(tables)
        counts = np.array([np.frombuffer(one, np.int64) for one in told])  # (ranks, tables)
        lengths = counts.clip(0).tolist()
        gathered = self._gather(ids, "ids", max(map(sum, lengths)) * self._id_dtype.itemsize)
        by_rank = [
            _unpack(packed, [(n,) for n in of_rank], [self._id_dtype] * len(tables))
            for packed, of_rank in zip(gathered, lengths, strict=True)
        ]
        unions, means = self.means_of([rows for _, rows in mine], by_rank)
        for table, most, union, mean in zip(tables, counts.max(0).tolist(), unions, means, strict=True):
            if most >= 0:
                put(table, union, mean)
        self.record(ids)

    # What a loader that looks ahead asks, as it knows the ids of all ranks before.

    def compare_weights(self) -> None:
        """Before the first step: raises RankMismatchError on every rank, if the tables' weights differ."""
        if self.ledger.steps:
            return
        weights = {name: one.weight for name, one in self.tables.items()}
        sums = zip(weights, checksums_of(weights, list(weights)), strict=True)
        facts = {f"{WEIGHTS}{name}": f"{number:x}" for name, number in sums}
        same = "the same random seed, or the same checkpoint, on every rank"
        require_agreement(self.ranks, facts, _ON_HOST, same)

    def means_of(self, rows: Sequence[torch.Tensor], by_rank: Sequence[Sequence[torch.Tensor]]) -> Means:
        """Exchanges rows whose ids all ranks know.

        Args:
            rows: of this rank, (rows, columns) of each table.
            by_rank: the ids of each rank and table, each once, in the order of the rows.
        """
        sent, unions, places = self._to_add(rows, by_rank)
        means, values = self._means(sent, [list(map(len, one)) for one in by_rank], unions, places)
        self._values += values
        return self._as_gradients(unions, means)

    def start_means_of(
        self, rows: Sequence[torch.Tensor], by_rank: Sequence[Sequence[torch.Tensor]], ranks: Communicator, name: str
    ) -> Callable[[], Means]:
        """As `means_of`, by gathering all rows, without waiting for them.

        Args:
            ranks: that the rows travel through: the same ranks in the same order.
            name: of the collective.

        Returns:
            What waits, and returns the means.
        """
        sent, unions, places = self._to_add(rows, by_rank)
        length = max(self._bytes(map(len, one)) for one in by_rank)
        self._sent += length
        self._values += [row.numel() for row in sent]
        packed = _packed(sent, length)
        handle = ranks.start_allgather(packed, name) if length else None

        def finish() -> Means:
            received = packed.new_empty(ranks.world_size, 0) if handle is None else ranks.wait(handle)
            return self._as_gradients(unions, self._sums(received, places, list(map(len, unions))))

        return finish

    def record(self, ids: Sequence[torch.Tensor], beside: int = 0) -> None:
        """Ends a step in the ledger.

        Args:
            ids: of this rank's rows, of each table, as they travelled.
            beside: bytes that travelled otherwise than through this object.
        """
        part = {}
        for (name, table), own, sent, wire in zip(self.tables.items(), ids, self._values, self._wires, strict=True):
            sent_bytes = int(sent) * wire.itemsize
            part[name] = Cost(own.nbytes + sent_bytes, table.weight.nbytes, sent_bytes / 4)
        self.ledger.record(self.ledger.step_cost(self.ledger.steps, [part], Sent(self._sent + beside)))
        self._sent, self._values = 0, np.zeros_like(self._values)

    def _to_add(self, rows: Sequence[torch.Tensor], by_rank: Sequence[Sequence[torch.Tensor]]) -> tuple[Any, Any, Any]:
        """The rows as they travel; of each table the ids of any rank, in order, and where in them each rank's are."""
        unions, places = [], []
        for of_table in zip(*by_rank, strict=True):
            union, inverse = torch.cat(of_table).unique(return_inverse=True)
            unions.append(union)
            places.append(inverse.split([len(one) for one in of_table]))
        return [row.to(wire) for row, wire in zip(rows, self._wires, strict=True)], unions, places

    def _as_gradients(self, unions: Sequence[torch.Tensor], means: Sequence[torch.Tensor]) -> Means:
        dtypes = [table.weight.dtype for table in self.tables.values()]
        return [one.long() for one in unions], [one.to(dtype) for one, dtype in zip(means, dtypes, strict=True)]

    def _means(
        self, rows: list[torch.Tensor], lengths: list[list[int]], unions: list[torch.Tensor], places: list[Any]
    ) -> tuple[list[torch.Tensor], list[int]]:
        """The mean rows of each table, in the order of its union; and how many numbers this rank sent for it."""
        size, rank = self.ranks.world_size, self.ranks.rank
        sums = [len(union) for union in unions]
        whole = max(self._bytes(of_rank) for of_rank in lengths)
        to_owners = np.zeros((size, size), np.int64)
        for row_bytes, of_table in zip(self._row_bytes, places, strict=True):
            for number, one in enumerate(of_table):
                to_owners[number] += row_bytes * (one % size).bincount(minlength=size).cpu().numpy()
        part, back = int(to_owners.max()), self._bytes([-(-length // size) for length in sums])
        if whole <= part + back:
            gathered = self._gather(rows, "gathered", whole)
            return self._sums(gathered, places, sums), [row.numel() for row in rows]

        own = [of_table[rank] % size for of_table in places]  # the owner of each row of this rank
        chunks = [
            _packed([row[to == owner] for row, to in zip(rows, own, strict=True)], part) for owner in range(size)
        ]
        self._sent += size * part
        received = self.ranks.wait(self.ranks.start_alltoall(torch.cat(chunks), "hvdcomp.rows.parts"))
        owned = [[one[one % size == rank] // size for one in of_table] for of_table in places]
        of_owner = [[len(range(owner, length, size)) for length in sums] for owner in range(size)]
        mine = self._sums(received, owned, of_owner[rank])
        means = [one.new_empty(length, one.shape[1]) for one, length in zip(mine, sums, strict=True)]
        for owner, packed in enumerate(self._gather(mine, "means", back)):
            for mean, one in zip(means, self._unpack(packed, of_owner[owner]), strict=True):
                mean[owner::size] = one
        return means, [row.numel() + mean.numel() for row, mean in zip(rows, mine, strict=True)]

    def _sums(self, received: torch.Tensor, places: Sequence[Any], lengths: Sequence[int]) -> list[torch.Tensor]:
        """The means, as they travel, of rows that came from all ranks."""
        by_rank = [self._unpack(one, [len(of[rank]) for of in places]) for rank, one in enumerate(received)]
        means = []
        for of_table, at, length in zip(zip(*by_rank, strict=True), places, lengths, strict=True):
            wide = torch.promote_types(of_table[0].dtype, torch.float32)
            total = of_table[0].new_zeros(length, of_table[0].shape[1], dtype=wide)
            for rows, where in zip(of_table, at, strict=True):
                total.index_add_(0, where, rows.to(wide))  # ids occur once on a rank: the order is that of the ranks
            means.append((total / self.ranks.world_size).to(of_table[0].dtype))
        return means

    def _gather(self, parts: Sequence[torch.Tensor], name: str, length: int) -> torch.Tensor:
        """What each rank packed, uint8 (ranks, length); `length` is that of the rank with most."""
        self._sent += length
        packed = _packed(parts, length)
        if not length:
            return packed.new_empty(self.ranks.world_size, 0)
        gathered: torch.Tensor = self.ranks.wait(self.ranks.start_allgather(packed, f"hvdcomp.rows.{name}"))
        return gathered

    def _bytes(self, lengths: Iterable[int]) -> int:
        """Of so many rows of each table."""
        return sum(length * row_bytes for length, row_bytes in zip(lengths, self._row_bytes, strict=True))

    def _unpack(self, packed: torch.Tensor, lengths: Iterable[int]) -> list[torch.Tensor]:
        """So many rows of each table."""
        return _unpack(packed, list(zip(lengths, self._columns, strict=True)), self._wires)


def _tables_of(model: Any, names: Iterable[str] | None, wire_dtype: Any) -> dict[str, Any]:
    """The modules of the tables, by the names of their weights."""
    if isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            "RowExchange was given a model in DistributedDataParallel, which exchanges its tables already; give it the "
            "model before"
        )
    if wire_dtype is not None and not wire_dtype.is_floating_point:
        raise ConfigurationError(f"RowExchange: wire_dtype={wire_dtype} is not possible; give it torch.bfloat16")
    known = {f"{name}.weight": one for name, one in model.named_modules() if isinstance(one, EMBEDDINGS)}
    wanted = [name for name, one in known.items() if one.sparse] if names is None else list(names)
    missing = [name for name in wanted if name not in known]
    if missing or not wanted:
        given = f"{', '.join(missing)}, which is no weight of an embedding" if missing else "no table with sparse=True"
        raise ConfigurationError(f"RowExchange was given {given}; the model has {', '.join(known) or 'none'}")
    for name in wanted:
        if known[name].max_norm is not None:
            raise ConfigurationError(
                f"{name} has max_norm={known[name].max_norm}, by which each rank scales the rows that it looks up, so "
                "that weights would differ between the ranks; leave max_norm out"
            )
        if hasattr(known[name].weight, "device_mesh"):
            raise ConfigurationError(f"{name} is sharded, and RowExchange serves tables that each rank has in whole")
    of_weight = {id(known[name].weight): name for name in reversed(wanted)}  # tables may share one
    return {name: known[name] for name in wanted if of_weight[id(known[name].weight)] == name}


def _leave_alone(model: torch.nn.Module, weights: Iterable[torch.Tensor]) -> None:
    """Tells DistributedDataParallel, under all names that the weights have, beside what it was told before."""
    ours = {id(weight) for weight in weights}
    names = [name for name, one in model.named_parameters(remove_duplicate=False) if id(one) in ours]
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*before, *names])


def rows_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids, in order and each once, and the rows of the gradient that are not zero."""
    gradient = weight.grad
    if gradient is None:
        return weight.new_empty(0, dtype=torch.int64), weight[:0]
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return gradient.indices()[0], gradient.values()
    ids = (gradient != 0).any(1).nonzero()[:, 0]
    return ids, gradient[ids]


def put(table: Any, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Makes rows the gradient of a table; of the layout that it has, or would have."""
    weight = table.weight
    if table.sparse if weight.grad is None else weight.grad.is_sparse:
        shape = weight.shape
        weight.grad = torch.sparse_coo_tensor(ids[None], rows, shape, is_coalesced=True, check_invariants=False)
        return
    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.zero_()
    weight.grad[ids] = rows


def _packed(parts: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """The bytes of tensors, with zeros up to a length."""
    packed = torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in parts])
    return torch.nn.functional.pad(packed, (0, length - len(packed)))


def _unpack(
    packed: torch.Tensor, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """Tensors from their bytes; copies, since in the bytes they may lie where their type must not."""
    found, start = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        end = start + int(np.prod(shape)) * dtype.itemsize
        found.append(packed[start:end].clone().view(dtype).view(shape))
        start = end
    return found
