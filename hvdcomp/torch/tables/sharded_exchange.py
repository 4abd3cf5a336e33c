"""The exchange for sharded tables in `LookAhead`. Gradients of rows are sent to all ranks that have these rows, and
rows are fetched into a cache.

A rank has the rows that it owns. In a cache, a rank also has the rows that it looks up in the coming batches. Every
rank has the keys that all ranks look up in these batches. So each rank knows which rows the other ranks have, without
asking them. In a step, the gradient of a row is sent to the row's owner, and to the ranks that have the row and will
look it up again. All these ranks compute the same mean and make the same update. For the update the ranks need the
optimizer's state of the row, which is fetched together with the row. So the owner always has the latest row, and a
cache can drop a row after its last use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hvdcomp.communicators.ranks import Ranks
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.rows import Rows
from hvdcomp.torch.tables.batch_keys import Share, by_table
from hvdcomp.torch.tables.rows import step_of_rows
from hvdcomp.torch.tables.sharded import ShardedTables


class Prefetched(NamedTuple):
    """Rows that are being fetched from their owners.

    Attributes:
        keys: the keys of the rows.
        install: a function that waits for the rows and puts them into the cache.
    """

    keys: torch.Tensor
    install: Callable[[], None]


class _Cache(NamedTuple):
    """Rows of a table, sorted by id: the rows of the weight, and the rows of the optimizer's state."""

    ids: torch.Tensor
    arrays: list[torch.Tensor]


class ShardedExchange:
    """Exchanges rows for `LookAhead`, like `_WholeTables` of `look_ahead.py`, but for tables whose rows are distributed
    over the ranks.

    Attributes:
        starts: for each table, the key of its first row. The last entry is the end of all keys. All entries are
            multiples of the number of ranks, so that the owner of a key is the owner of its id.
        reach: number of coming batches that the method `plan` gets.
        caches: whether lookups read a cache instead of the tables' weights.
    """

    caches = True

    def __init__(self, tables: ShardedTables, optimizer: torch.optim.Optimizer, batches: int) -> None:
        self._tables, self._optimizer = tables, optimizer
        self._rank, self._size = tables.ranks.rank, tables.ranks.world_size
        self._weights: list[torch.Tensor] = [table.weight for table in tables.tables.values()]
        lengths = [-(-table.num_embeddings // self._size) * self._size for table in tables.tables.values()]
        self.starts = torch.tensor([0, *lengths]).cumsum(0)
        # Less than `batches`, because the keys of the latest batch are still being exchanged.
        self.reach = max(1, batches - 1)
        # there are two entries for each step
        self._deferred: deque[tuple[int, torch.Tensor]] = deque(maxlen=2 * batches + 4)
        self._needed = self._new = self._next = [self.starts[:0]] * self._size
        self.end()

    def end(self) -> None:
        """Clears the caches. Call this only when all updates are made."""
        self._held = [self.starts[:0]] * self._size  # the keys in the cache of each rank
        empty = [[array.new_empty(0, *array.shape[1:]) for array in self._owned(weight)] for weight in self._weights]
        self._caches = [_Cache(self.starts[:0], arrays) for arrays in empty]
        self._tables.leave()

    def plan(self, coming: Sequence[Sequence[torch.Tensor]]) -> None:
        """Finds the rows that each rank needs, from the keys of each rank in each coming batch."""
        needed = [torch.cat(of_rank).unique() for of_rank in map(list, zip(*coming, strict=True))]
        self._needed = [keys[keys % self._size != rank] for rank, keys in enumerate(needed)]
        self._new = [keys[~_within(keys, held)] for keys, held in zip(self._needed, self._held, strict=True)]
        self._next = list(coming[0])

    def split(self, by_rank: Sequence[torch.Tensor]) -> tuple[Share, Share]:
        """Divides the rows of a batch into rows to exchange now and rows to exchange later. `by_rank` has the keys of
        each rank."""
        keys = torch.cat(list(by_rank)).unique()
        lent = _within(keys, torch.cat(self._new).unique())
        taken, urgent = [], []
        for rank, (held, needed, following) in enumerate(zip(self._held, self._needed, self._next, strict=True)):
            owned = keys % self._size == rank
            taken.append(owned | (_within(keys, held) & _within(keys, needed)))
            urgent.append(_within(keys, following) | (owned & lent))
        mask, at_once = torch.stack(taken), torch.stack(urgent)
        return self._share(by_rank, keys, mask & at_once), self._share(by_rank, keys, mask & ~at_once)

    def _share(self, by_rank: Sequence[torch.Tensor], keys: torch.Tensor, taken: torch.Tensor) -> Share:
        ids = [by_table(of_rank, self.starts) for of_rank in by_rank]
        of_table = taken.split([len(of) for of in by_table(keys, self.starts)], 1)

        def start(rows: Sequence[torch.Tensor], ranks: Ranks, name: str) -> Callable[[], list[Rows]]:
            return self._tables.means.start_taken(rows, ids, of_table, ranks, name)

        return Share(keys[taken[self._rank]], start)

    def enter(self, own: torch.Tensor) -> None:
        """Makes the model look up the rows with these keys."""
        batch = {}
        for name, weight, ids, cache in zip(
            self._tables.tables, self._weights, self._ids(own), self._caches, strict=True
        ):
            owned = ids % self._size == self._rank
            rows = weight.new_empty(len(ids), weight.shape[1])
            rows[owned] = weight.detach()[ids[owned] // self._size]
            rows[~owned] = cache.arrays[0][torch.searchsorted(cache.ids, ids[~owned])]
            batch[name] = ids, rows
        self._tables.enter(batch)

    def looked_up(self) -> dict[str, torch.Tensor]:
        """The tensors that get the gradients of each table's lookups, by the name of the table's weight."""
        return self._tables.looked_up()

    def places(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The sorted indices, in `looked_up`, of the rows with these keys."""
        return [torch.arange(len(ids)) for ids in by_table(own, self.starts)]

    def leave(self) -> str | None:
        """Ends the lookups of a batch. Returns a row that the batch looked up although `ids` did not return it, or
        None."""
        return self._tables.leave()

    def lent(self) -> torch.Tensor:
        """The keys of rows that other ranks will fetch from this rank."""
        keys = torch.cat(self._new)
        return keys[keys % self._size == self._rank]

    def prefetch(self, ranks: Ranks, name: str) -> Prefetched:
        """Starts to fetch the rows that each rank needs but does not have. Call this after the rows of `lent` were
        updated."""
        new, needed = [self._ids(keys) for keys in self._new], self._ids(self._needed[self._rank])
        wait = self._tables.start_fetch(new, list(map(self._owned, self._weights)), ranks, name)
        self._held = self._needed

        def install() -> None:
            fetched = zip(self._caches, needed, wait(), strict=True)
            self._caches = [_moved(cache, ids, arrays) for cache, ids, arrays in fetched]

        return Prefetched(self._new[self._rank], install)

    def defer(self, keys: torch.Tensor, step: int) -> None:
        self._deferred.append((step, keys))

    def latest(self, keys: torch.Tensor) -> int:
        """The latest step in which any of these rows was deferred."""
        return next((step for step, deferred in reversed(self._deferred) if bool(_within(keys, deferred).any())), 0)

    def update(self, means: Sequence[Rows]) -> None:
        """Makes a step of the optimizer for the rows that this rank owns and the rows in its cache."""
        owned, cached = [], []
        for (ids, values), cache in zip(means, self._caches, strict=True):
            mine = ids % self._size == self._rank
            owned.append(Rows(ids[mine] // self._size, values[mine]))
            cached.append(Rows(torch.searchsorted(cache.ids, ids[~mine]), values[~mine]))
        step_of_rows(self._optimizer, self._tables.tables.values(), owned)
        kept = list(map(self._owned, self._weights))
        self._put([cache.arrays for cache in self._caches])
        try:
            step_of_rows(self._optimizer, self._tables.tables.values(), cached)
        finally:
            self._put(kept)

    def check_state(self, state: Any) -> None:
        """Raises ConfigurationError if an optimizer's state does not belong to the rows that this rank owns."""
        parameters = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        for number, weight in zip(numbers, parameters, strict=False):
            for array in state["state"].get(number, {}).values():
                if isinstance(array, torch.Tensor) and array.ndim and len(array) != len(weight):
                    raise ConfigurationError(
                        f"the optimizer has {len(weight)} rows on rank {self._rank} of {self._size}, but the state has "
                        f"{len(array)}; to change the number of ranks, make a new state with ShardedTables.resharded"
                    )

    def _ids(self, keys: torch.Tensor) -> list[torch.Tensor]:
        return [ids.long() for ids in by_table(keys, self.starts)]

    def _state_names(self, weight: torch.Tensor) -> list[str]:
        """The names of the entries that the optimizer keeps for each row."""
        state = self._optimizer.state[weight]
        return [name for name, kept in state.items() if isinstance(kept, torch.Tensor) and kept.ndim]

    def _owned(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """The owned rows of a weight, and the same rows of the optimizer's state."""
        state = self._optimizer.state[weight]
        return [weight.data, *(state[name] for name in self._state_names(weight))]

    def _put(self, arrays: Sequence[Sequence[torch.Tensor]]) -> None:
        """Makes the optimizer update these arrays instead of the arrays of the tables."""
        for weight, (rows, *kept) in zip(self._weights, arrays, strict=True):
            weight.grad, weight.data = None, rows
            self._optimizer.state[weight].update(zip(self._state_names(weight), kept, strict=True))


def _within(keys: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """A mask of the keys that occur in `others`, which is sorted."""
    places = torch.searchsorted(others.to(keys.dtype), keys)
    return torch.nn.functional.pad(others, (0, 1), value=-1)[places] == keys


def _moved(cache: _Cache, ids: torch.Tensor, fetched: Sequence[torch.Tensor]) -> _Cache:
    """A new cache with these ids. The rows that were not in the old cache are in `fetched`."""
    kept = _within(ids, cache.ids)
    arrays = []
    for before, new in zip(cache.arrays, fetched, strict=True):
        array = before.new_empty(len(ids), *before.shape[1:])
        array[kept] = before[torch.searchsorted(cache.ids, ids[kept])]
        array[~kept] = new
        arrays.append(array)
    return _Cache(ids, arrays)
