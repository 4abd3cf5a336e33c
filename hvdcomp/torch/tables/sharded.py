"""`ShardedTables` shards embedding tables by rows over the ranks. `LookAhead` trains these tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvdcomp.communicators import Communicator
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import refused_on_every_rank
from hvdcomp.exchange.rows import EmbeddingTable, RowMeans
from hvdcomp.torch.ranks import started_ranks
from hvdcomp.torch.tables.batch_keys import ReadBatch
from hvdcomp.torch.tables.rows import EMBEDDINGS, leave_alone, name_of, tables_of
from hvdcomp.torch.unaveraged import note_tables

_ON_HOST = torch.empty(0)

Fill = Callable[[str, torch.Tensor], torch.Tensor]
"""A function that takes the name of a table's weight and a tensor of n ids, and returns the initial rows of these ids,
as a tensor of shape (n, columns)."""


class ShardedTables:
    """Shards embedding tables by rows. Each rank keeps only the rows whose id modulo the number of ranks equals its
    rank. `LookAhead` trains the rows, and fetches the rows that coming batches look up.

        rows = hvdcomp.torch.ShardedTables(model)  # on every rank, before DistributedDataParallel and the optimizer
        optimizer = hvdcomp.torch.RowWiseAdagrad([table.weight for table in rows.tables.values()], lr=0.05)
        ahead = hvdcomp.torch.LookAhead(loader, rows, optimizer, lambda batch: {"items.weight": batch[0]})

    The weight of each table then contains only the rows that this rank owns, in the order of their ids. The
    `state_dict` of the model and of the optimizer also contain only these rows, so each rank must save its own state.
    In evaluation mode, a lookup fetches rows from their owners, so every rank must take part in each lookup. In
    training mode, look up only rows of the batch that LookAhead has returned.

    Args:
        model: the model with the tables, before it is wrapped in DistributedDataParallel.
        tables: the names of weights of `nn.Embedding` or `nn.EmbeddingBag` with sparse=True. Default: all weights of
            such modules.
        fill: a function that takes the name of a weight and a tensor of n ids, and returns the rows, as a tensor of
            shape (n, columns). Use this function for tables that were created with device="meta", which no rank has as
            a whole.
        communicator: the communicator of the ranks, as in `RowExchange`.

    Attributes:
        tables, ranks, ahead, ledger: attributes that `RowExchange` describes. The bytes in the ledger include the rows
            that were fetched.
        means: the object that exchanges rows and computes their means.

    Raises:
        ConfigurationError: on every rank, if a name is not a table; if a table is not sparse, is on a device, is used
            by another kind of layer, or has max_norm; or if no ranks were started.
        RankMismatchError: on every rank, if settings differ.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tables: Iterable[str] | None = None,
        *,
        fill: Fill | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self.model = model
        self.ranks: Any = started_ranks() if communicator is None else communicator
        with refused_on_every_rank(self.ranks, _ON_HOST):
            self.tables: dict[str, Any] = tables_of(model, tables, "ShardedTables")
            for name, table in self.tables.items():
                _check(model, name, table, fill)
            parts = {name: self._part(name, table, fill) for name, table in self.tables.items()}
        shapes = {
            name: EmbeddingTable(name_of(part.dtype), self.tables[name].num_embeddings, part.shape[1])
            for name, part in parts.items()
        }
        self.means = RowMeans(self.ranks, shapes, None, _ON_HOST)
        self.ledger = self.means.ledger
        self.ahead: Any = None
        # For the current batch and each table: the ids, and their rows. One additional row is for ids that `ids` did
        # not return for the batch.
        self._present: dict[str, tuple[torch.Tensor, torch.nn.Parameter]] = {}
        self._unnamed: str | None = None
        for name, part in parts.items():
            whole = self.tables[name].weight
            for module in model.modules():
                if getattr(module, "weight", None) is whole:
                    self._serve(module, name, part)
        leave_alone(model, parts.values())
        note_tables(parts.values())

    def enter(self, batch: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Makes lookups in training mode use these sorted ids, of shape (n,), and their rows, of shape (n, columns)."""
        self._unnamed = None
        for name, (ids, rows) in batch.items():
            self._present[name] = ids, torch.nn.Parameter(torch.cat([rows, rows.new_zeros(1, rows.shape[1])]))

    def looked_up(self) -> dict[str, torch.Tensor]:
        """The rows of the current batch, with their gradients."""
        return {name: rows for name, (_, rows) in self._present.items()}

    def leave(self) -> str | None:
        """Ends the lookups of a batch. Returns a row that the batch looked up although `ids` did not return it, or
        None."""
        self._present.clear()
        return self._unnamed

    def start_fetch(
        self,
        by_rank: Sequence[Sequence[torch.Tensor]],
        owned: Sequence[Sequence[torch.Tensor]],
        ranks: Communicator,
        name: str,
    ) -> Callable[[], list[list[torch.Tensor]]]:
        """Starts to fetch rows from their owners. Call this method on every rank.

        Args:
            by_rank: for each rank and table, the ids of the rows that the rank needs.
            owned: the arrays of each table, such as its weight. An array has an entry, of any shape, for each row that
                this rank owns.

        Returns:
            A function that waits for the rows. This function returns a list for each table. For each array of the
            table, the list has the entries of the ids that this rank needs.
        """
        size, rank = ranks.world_size, ranks.rank
        row_bytes = [sum(array.new_empty(1, *array.shape[1:]).nbytes for array in arrays) for arrays in owned]
        lengths = np.zeros((size, size), np.int64)  # number of bytes for each rank from each owner
        for wants, length in zip(by_rank, lengths, strict=True):
            for ids, of_table in zip(wants, row_bytes, strict=True):
                length += of_table * np.bincount((ids % size).numpy(), minlength=size)
        longest = int(lengths.max())
        chunks = []
        for wants in by_rank:
            asked = [ids[ids % size == rank] // size for ids in wants]
            parts = [_bytes(array[ids]) for ids, arrays in zip(asked, owned, strict=True) for array in arrays]
            packed = torch.cat(parts)
            chunks.append(torch.nn.functional.pad(packed, (0, longest - len(packed))))
        wait = self.means.start_alltoall(chunks, ranks, name)

        def finish() -> list[list[torch.Tensor]]:
            received = wait()
            ends = [0] * size
            fetched = []
            for ids, arrays in zip(by_rank[rank], owned, strict=True):
                from_owner = [ids % size == owner for owner in range(size)]
                fetched.append([array.new_empty(len(ids), *array.shape[1:]) for array in arrays])
                for array in fetched[-1]:
                    for owner, chosen in enumerate(from_owner):
                        entries = array[chosen]
                        start, ends[owner] = ends[owner], ends[owner] + entries.nbytes
                        # The entries are copied to new storage, because in the received bytes they may not be aligned
                        # for their element type.
                        entry_bytes = received[owner, start : ends[owner]].clone()
                        array[chosen] = entry_bytes.view(array.dtype).view(entries.shape)
            return fetched

        return finish

    @staticmethod
    def resharded(states: Sequence[Any], rank: int, ranks: int) -> Any:
        """Makes the state of a rank for a new number of ranks, from the states of all old ranks.

        Args:
            states: the states of the old ranks, in the order of the ranks. A state is a dictionary, which may be
                nested, of tensors with an entry for each owned row. Such a dictionary can be `{name: state[name] for
                name in rows.tables}` from a state of the model, or the state of the optimizer.

        Example:
            >>> old = [{"items.weight": torch.tensor([[0.0], [2.0]])}, {"items.weight": torch.tensor([[1.0], [3.0]])}]
            >>> ShardedTables.resharded(old, 0, 1)["items.weight"].flatten()
            tensor([0., 1., 2., 3.])
        """
        first, size = states[0], len(states)
        if isinstance(first, Mapping):
            return {key: ShardedTables.resharded([state[key] for state in states], rank, ranks) for key in first}
        if not isinstance(first, torch.Tensor) or not first.ndim:
            return first
        ids = torch.arange(sum(map(len, states)))[rank::ranks]
        entries = first.new_empty(len(ids), *first.shape[1:])
        for owner, state in enumerate(states):
            entries[ids % size == owner] = state[ids[ids % size == owner] // size]
        return entries

    def _part(self, name: str, table: Any, fill: Fill | None) -> torch.nn.Parameter:
        """The rows that this rank owns."""
        # a small table may give a rank no rows
        ids = torch.arange(table.num_embeddings)[self.ranks.rank :: self.ranks.world_size]
        if not table.weight.is_meta:
            return torch.nn.Parameter(table.weight.detach()[ids])
        assert fill is not None
        rows = fill(name, ids)
        if rows.shape != (len(ids), table.weight.shape[1]):
            raise ConfigurationError(
                f"ShardedTables: `fill` returned rows of the shape {tuple(rows.shape)} for {name}; for these ids it "
                f"must return the shape {(len(ids), table.weight.shape[1])}"
            )
        return torch.nn.Parameter(rows.detach().to("cpu", table.weight.dtype, copy=True))

    def _serve(self, module: Any, name: str, part: torch.nn.Parameter) -> None:
        """Gives a module the owned rows as its weight. During a lookup, the module gets the rows that it looks up."""
        padding = module.padding_idx
        module.weight = part

        def before(_: Any, args: Any, kwargs: Any) -> Any:
            ids = args[0] if args else kwargs["input"]
            find = self._find if module.training else self._fetch
            places, module.weight = find(name, ids)
            if padding is not None:
                at = places[ids == padding]
                module.padding_idx = int(at[0]) if len(at) else None
            places = places.to(ids.dtype)
            return ((places, *args[1:]), kwargs) if args else ((), {**kwargs, "input": places})

        def after(*_: Any) -> None:
            module.weight, module.padding_idx = part, padding

        def check(_: Any, state: Any, prefix: str, *__: Any) -> None:
            if len(state.get(f"{prefix}weight", part)) != len(part):
                raise ConfigurationError(
                    f"{name} has {len(part)} rows on rank {self.ranks.rank} of {self.ranks.world_size}, but the state "
                    f"has {len(state[f'{prefix}weight'])}; to change the number of ranks, make a new state with "
                    "ShardedTables.resharded"
                )

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)
        module.register_load_state_dict_pre_hook(check)

    def _find(self, name: str, ids: torch.Tensor) -> tuple[torch.Tensor, torch.nn.Parameter]:
        """The indices of ids in the rows of the current batch, and these rows."""
        if name not in self._present:
            raise ConfigurationError(
                f"{name} is sharded, but was looked up outside of the batches of a LookAhead; look rows up after "
                "LookAhead has returned a batch and before step(), or call model.eval() on every rank"
            )
        known, rows = self._present[name]
        places = torch.searchsorted(known, ids.long().contiguous())
        missing = torch.nn.functional.pad(known, (0, 1), value=-1)[places] != ids
        if bool(missing.any()):
            self._unnamed = f"row {int(ids[missing][0])} of {name}"
            places[missing] = len(known)
        return places, rows

    def _fetch(self, name: str, ids: torch.Tensor) -> tuple[torch.Tensor, torch.nn.Parameter]:
        """Fetches rows from their owners. Returns the indices of ids in these rows, and the rows."""
        if self.ahead is not None:
            self.ahead.flush()
        unique, places = ids.long().unique(return_inverse=True)
        last = self.tables[name].num_embeddings - 1
        refused = None
        if len(unique) and not 0 <= int(unique[0]) <= int(unique[-1]) <= last:
            refused = f"rows from {int(unique[0])} to {int(unique[-1])} of {name}, which has only rows 0 to {last}"
        read = ReadBatch(self.ranks, None, unique, refused, f"hvdcomp.lookup.ids.{name}")
        wanted = [[asked] for asked in read.by_rank()]
        owned = [[self.tables[name].weight.detach()]]
        [[rows]] = self.start_fetch(wanted, owned, self.ranks, f"hvdcomp.lookup.rows.{name}")()
        return places, torch.nn.Parameter(rows, requires_grad=False)


def _bytes(array: torch.Tensor) -> torch.Tensor:
    return array.reshape(-1).view(torch.uint8)


def _check(model: torch.nn.Module, name: str, table: Any, fill: Fill | None) -> None:
    weight = table.weight
    if not table.sparse or weight.device.type not in ("cpu", "meta"):
        raise ConfigurationError(
            f"ShardedTables needs tables with sparse=True in the host's memory, but {name} has sparse={table.sparse} "
            f"and is on {weight.device}; leave it out of `tables`"
        )
    if weight.is_meta and fill is None:
        raise ConfigurationError(
            f"{name} is on the meta device, so it has no rows; give ShardedTables the argument `fill`, a function that "
            "makes the rows"
        )
    others = [module for module in model.modules() if not isinstance(module, EMBEDDINGS)]
    if any(own is weight for module in others for own in module.parameters(recurse=False)):
        raise ConfigurationError(
            f"{name} is also the weight of another layer, which needs the whole table; leave it out of `tables`"
        )
