"""`LookAhead` reads batches of a loader in advance, so that a step waits only for the rows that the next batch
needs."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from hvdcomp.communicators.ranks import Ranks
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import gather_rows, refused_on_every_rank, require_agreement
from hvdcomp.exchange.rows import Rows
from hvdcomp.specs.described import is_whole
from hvdcomp.torch.tables.batch_keys import END, ReadBatch, Share, by_table, refuse
from hvdcomp.torch.tables.row_wise_adagrad import RowWiseAdagrad
from hvdcomp.torch.tables.rows import EMBEDDINGS, RowExchange, rows_of, step_of_rows
from hvdcomp.torch.tables.sharded import ShardedTables
from hvdcomp.torch.tables.sharded_exchange import ShardedExchange

_ON_HOST = torch.empty(0)
# The allowed optimizers, and the allowed values of their options. With these values, the update of a row depends only
# on the row's own gradients, and not on the time of the update.
_RULES: dict[type, dict[str, Callable[[Any], bool]]] = {
    torch.optim.SGD: {"momentum": lambda value: value == 0, "weight_decay": lambda value: value == 0},
    torch.optim.Adagrad: {
        "weight_decay": lambda value: value == 0,
        "lr_decay": lambda value: value == 0,
        "eps": lambda value: value > 0,
    },
    RowWiseAdagrad: {},
}

Ids = Callable[[Any], Mapping[str, torch.Tensor]]
"""A function that takes a batch and returns the ids that the batch looks up. The result is a mapping from the name of
each table's weight to a tensor of ids, of any shape."""


class LookAhead:
    """Reads batches of a loader in advance. A step exchanges only the rows that the next batch of any rank looks up.
    Other rows are exchanged in the background, before their next use (Agarwal et al. 2023, Bagpipe, arXiv:2202.12429).
    With `ShardedTables`, rows are also fetched from their owners in the background, before they are looked up.

        rows = hvdcomp.torch.RowExchange(model)
        optimizer = torch.optim.Adagrad([table.weight for table in rows.tables.values()], lr=0.05)
        ahead = hvdcomp.torch.LookAhead(loader, rows, optimizer, lambda batch: {"items.weight": batch[0]})
        for inputs, targets in ahead:
            loss_of(ddp(inputs), targets).backward()
            ahead.step()        # the tables: instead of rows.exchange(), optimizer.step() and zero_grad()
            layers.step()       # an optimizer of all other parameters
            layers.zero_grad()

    The weights are the same, bit for bit, as with `RowExchange.exchange` in each step. No rank looks up a row after the
    gradient of this row was computed and before the row is updated. The update uses the learning rate of the gradient's
    step. All rows are updated at the end of an epoch, before a `state_dict` of the model or the optimizer is made or
    loaded, and by `flush`. A row is also updated before a table looks it up, in training or evaluation. Call `flush`
    before you read weights in any other way. If you create a new LookAhead for the same `RowExchange`, the old
    LookAhead ends.

    Each rank keeps the batches that were read in advance, and 5 bytes for each row of a `RowExchange`. If the loader
    can report its position, this position is ahead of the training loop. So save the number of steps in a checkpoint,
    not the position.

    Args:
        loader: an iterable of batches. The loader must have the same number of batches on each rank. Each iteration
            starts the loader again.
        rows: the `RowExchange` or `ShardedTables`, all in the host's memory and with sparse=True.
        optimizer: an optimizer that has only these tables. Use `torch.optim.SGD` without momentum,
            `torch.optim.Adagrad` without lr_decay (both without weight_decay), or `RowWiseAdagrad`.
        ids: a function that takes a batch, and returns a mapping from the name of each table's weight to a tensor of
            ids, of any shape. The tensor must contain all ids that the batch looks up, and may contain more.
        batches: the number of batches to read in advance, at least 1. A row may also be updated up to this number of
            steps late. With 1, a step waits for the ids of the next batch.

    Attributes:
        loader, rows, optimizer, batches: the arguments of the constructor. `rows.ledger` has the bytes of each step.

    Raises:
        ConfigurationError: on every rank, if the optimizer or a table is not suitable. During training: if `step` is
            not called for a batch, or called twice.
        RankMismatchError: on every rank, if settings differ. During training: if the loader of one rank ends before the
            loaders of other ranks, if ids are not in a table, or if a gradient has rows that `ids` did not return.
    """

    _made: ClassVar[Iterator[int]] = itertools.count()  # counts the LookAhead objects of this process

    def __init__(
        self,
        loader: Iterable[Any],
        rows: RowExchange | ShardedTables,
        optimizer: torch.optim.Optimizer,
        ids: Ids,
        batches: int = 4,
    ) -> None:
        with refused_on_every_rank(rows.ranks, _ON_HOST):
            _check(rows, optimizer, batches)
        facts = {"batches of LookAhead": batches, "optimizer of LookAhead": type(optimizer).__name__}
        require_agreement(rows.ranks, facts, _ON_HOST)
        self.loader, self.rows, self.optimizer, self.batches = loader, rows, optimizer, batches
        # The names of collectives contain rank 0's count of LookAhead objects, because collectives of two objects may
        # run at the same time.
        number, *_ = gather_rows(rows.ranks, next(self._made).to_bytes(4, "big"), _ON_HOST, "hvdcomp.ahead")
        self._name = f"hvdcomp.ahead{int.from_bytes(number, 'big')}"
        self._ids = ids
        self._background_ranks: Ranks = rows.ranks.duplicate()
        self._exchange: _WholeTables | ShardedExchange
        if isinstance(rows, ShardedTables):
            self._exchange = ShardedExchange(rows, optimizer, batches)
        else:
            self._exchange = _WholeTables(rows, optimizer)
        # The key of a row is its id plus the start of its table.
        self._starts: torch.Tensor = self._exchange.starts
        self._key_dtype = torch.int32 if int(self._starts[-1]) < 2**31 else torch.int64
        self._late: deque[_Late] = deque()
        self._window: deque[ReadBatch] = deque()  # the current batch, and the batches that were read in advance
        self._reads = self._steps = 0
        self._stepped = True
        self._hooks: list[Any] = []
        if rows.ahead is not None:
            rows.ahead.end()
        rows.ahead = self
        self._flush_before_reads()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self._require_latest()
        self._end_iteration()
        window = self._window
        batches, begun = iter(self.loader), False
        while True:
            while len(window) <= self.batches:
                if window:
                    window[-1].start_keys()  # the number of keys was sent while the model trained on a batch
                    if window[-1].ended:
                        break
                self._read(batches)
            window[0].start_keys()
            if window[0].ended:
                break
            if not begun:
                self._plan(0)
                self._prefetch()
                begun = True
            self._wait_for(window[0].own)
            self._wait_until(self._steps - self.batches)
            self._exchange.enter(window[0].own)
            self._stepped = False
            yield window[0].batch
            if self._window is not window:
                raise ConfigurationError(
                    "LookAhead was iterated over again, or a state was loaded into sharded tables, so this iteration "
                    "cannot continue; use only the latest iteration"
                )
            if not self._stepped:
                raise ConfigurationError("LookAhead.step() was not called for a batch; call it once for each batch")
            window.popleft()
        self.flush()

    @torch.no_grad()
    def step(self) -> None:
        """Exchanges and updates the rows that the next batch needs, starts the exchange of the other rows, and removes
        the gradients of the tables. Call this method on every rank, once for each batch, after the backward passes of
        the batch."""
        if self._stepped:
            raise ConfigurationError(
                "LookAhead.step() was called twice for a batch, or without a batch; call it once for each batch"
            )
        self._require_latest()
        batch, ranks = self._window[0], self.rows.ranks
        rows, refused = self._take_gradients(batch)
        flag = torch.tensor([refused is not None], dtype=torch.uint8)
        refusals = ranks.start_allgather(flag, f"{self._name}.refused")
        self._plan(1)
        first, later = self._exchange.split(batch.by_rank())
        means = first.start(rows, ranks, f"{self._name}.first")()
        refuse(
            ranks.wait(refusals)[:, 0].numpy() != 0,
            "has a gradient of rows that the function `ids` did not return",
            refused,
        )

        self._steps += 1
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        late = later.start(rows, self._background_ranks, self._turn("rows"))
        self._wait_for(first.keys)  # rows that were deferred in earlier steps
        self._update(means, rates)
        self._defer(later.keys, lambda: self._update(late(), rates))
        self._prefetch()
        self.rows.means.record(by_table(batch.own, self._starts), batch.sent + 1)
        self._stepped = True

    @torch.no_grad()
    def flush(self) -> None:
        """Waits for all deferred rows, and updates them. Other ranks need not call this method."""
        self._wait_until(self._steps)

    def end(self) -> None:
        """Calls `flush`, and stops using the tables. A new LookAhead for the same tables calls this method on every
        rank when it is created."""
        self._end_iteration()
        for hook in self._hooks:
            hook.remove()

    def _end_iteration(self) -> None:
        self.flush()
        for unused in self._window:  # batches of an iteration that was not finished
            unused.drop()
        self._window = deque()
        self._exchange.end()

    def _require_latest(self) -> None:
        if self.rows.ahead is not self:
            raise ConfigurationError("another LookAhead was made for these tables; use only the latest LookAhead")

    def _read(self, batches: Iterator[Any]) -> None:
        """Reads the next batch, or the end of the loader, into the window. An error of the loader or of the function
        `ids` is sent to all ranks, so that no rank waits for this one."""
        name = f"{self._name}.keys.{self._reads % (self.batches + 2)}"
        self._reads += 1
        batch, own = None, self._starts.new_empty(0)
        refused: Exception | None = None
        try:
            batch = next(batches, END)
            if batch is not END:
                own = self._keys_of(self._ids(batch))
        except Exception as error:
            refused = error
        self._window.append(ReadBatch(self._background_ranks, batch, own.to(self._key_dtype), refused, name))

    def _keys_of(self, ids: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The keys of the ids, sorted and without duplicates."""
        if set(ids) != set(self.rows.tables):
            raise ConfigurationError(
                f"the function `ids` returned ids for the tables {', '.join(ids)}, but it must return ids for the "
                f"tables {', '.join(self.rows.tables)}"
            )
        parts = []
        for start, (name, table) in zip(self._starts.tolist(), self.rows.tables.items(), strict=False):
            looked_up = ids[name].detach().reshape(-1).long()
            if len(looked_up) and not 0 <= int(looked_up.min()) <= int(looked_up.max()) < table.num_embeddings:
                raise ConfigurationError(
                    f"the function `ids` returned rows from {int(looked_up.min())} to {int(looked_up.max())} of "
                    f"{name}, which has only rows 0 to {table.num_embeddings - 1}"
                )
            looked_up = looked_up.unique()
            if table.padding_idx is not None and not self._exchange.caches:
                looked_up = looked_up[looked_up != table.padding_idx]
            parts.append(start + looked_up)
        return torch.cat(parts)

    def _plan(self, first: int) -> None:
        """Informs the exchange which rows the next batches look up. `first` is the index of the first of these batches
        in the window."""
        reads = itertools.islice(self._window, first, first + self._exchange.reach)
        self._exchange.plan([read.by_rank() for read in reads])

    def _prefetch(self) -> None:
        """Starts to fetch rows that a rank needs but does not have."""
        self._wait_for(self._exchange.lent())
        fetched = self._exchange.prefetch(self._background_ranks, self._turn("fetched"))
        if fetched is not None:
            self._defer(fetched.keys, fetched.install)

    def _turn(self, what: str) -> str:
        """A name for a collective of this step. The name differs from the names of earlier steps, whose collectives may
        still run."""
        return f"{self._name}.{what}.{self._steps % (self.batches + 2)}"

    def _defer(self, keys: torch.Tensor, update: Callable[[], None]) -> None:
        """Defers an update of rows until a step needs the rows."""
        self._late.append(_Late(self._steps, update))
        self._exchange.defer(keys, self._steps)

    def _take_gradients(self, batch: ReadBatch) -> tuple[list[torch.Tensor], str | None]:
        """Removes the gradients of the batch's rows from each table, and returns them. The second result is the first
        row that has a gradient although the batch does not name it, or None."""
        gradients, unnamed = [], None
        places = self._exchange.places(batch.own)
        for (name, weight), own in zip(self._exchange.looked_up().items(), places, strict=True):
            ids, rows = rows_of(weight)
            weight.grad = None
            if len(ids) != len(own) or not bool((ids == own).all()):
                known = torch.isin(ids, own)
                if not bool(known.all()):
                    unnamed = f"row {int(ids[~known][0])} of {name}"
                all_rows = rows.new_zeros(len(own), weight.shape[1])
                all_rows[torch.searchsorted(own, ids[known].to(own.dtype))] = rows[known]
                rows = all_rows
            gradients.append(rows)
        return gradients, self._exchange.leave() or unnamed

    def _wait_for(self, keys: torch.Tensor) -> None:
        """Updates these rows if they were deferred."""
        if self._late and len(keys):
            self._wait_until(self._exchange.latest(keys))

    @torch.no_grad()
    def _wait_until(self, step: int) -> None:
        """Updates all rows that were deferred in this step or earlier."""
        while self._late and self._late[0].step <= step:
            self._late.popleft().update()

    def _update(self, means: Sequence[Rows], rates: Sequence[float]) -> None:
        """Makes a step of the optimizer for these rows."""
        tables = list(self.rows.tables.values())
        gradients = [table.weight.grad for table in tables]
        present_rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._exchange.update(means)
        for table, gradient in zip(tables, gradients, strict=True):
            table.weight.grad = gradient
        for group, rate in zip(self.optimizer.param_groups, present_rates, strict=True):
            group["lr"] = rate

    def _flush_before_reads(self) -> None:
        """Registers hooks. A lookup first updates the rows that it looks up. Making or loading a state first updates
        all rows."""

        def flush(*_: Any) -> None:
            self.flush()

        def load(*_: Any) -> None:
            self.flush()
            if self._exchange.caches:
                self._end_iteration()  # the rows in the caches do not belong to the loaded state

        def load_optimizer(_: Any, state: Any) -> None:
            self._exchange.check_state(state)
            load()

        weights = [table.weight for table in self.rows.tables.values()]
        starts = {id(weight): start for weight, start in zip(weights, self._starts.tolist(), strict=False)}
        for module in self.rows.model.modules():
            start = starts.get(id(getattr(module, "weight", None))) if isinstance(module, EMBEDDINGS) else None
            if start is None:
                continue

            def before(_: Any, args: Any, kwargs: Any, start: int = start) -> None:
                ids = args[0] if args else kwargs["input"]
                self._wait_for(ids.reshape(-1).long() + start)

            if not self._exchange.caches:
                self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks += [
                module.register_state_dict_pre_hook(flush),
                module.register_load_state_dict_pre_hook(load),
            ]
        self._hooks += [
            self.optimizer.register_state_dict_pre_hook(flush),
            self.optimizer.register_load_state_dict_pre_hook(load_optimizer),
        ]


class _Late(NamedTuple):
    """The rows of a step that are exchanged in the background."""

    step: int
    update: Callable[[], None]


class _WholeTables:
    """The exchange for tables that every rank has as a whole.

    Attributes:
        starts: for each table, the key of its first row. The last entry is the end of all keys.
        reach: number of coming batches that the method `plan` gets.
        caches: whether lookups read a cache instead of the tables' weights.
    """

    reach = 1
    caches = False

    def __init__(self, rows: RowExchange, optimizer: torch.optim.Optimizer) -> None:
        self._rows, self._optimizer = rows, optimizer
        self.starts = torch.tensor([0, *(len(table.weight) for table in rows.tables.values())]).cumsum(0)
        length = int(self.starts[-1])
        self._late_in = torch.zeros(length, dtype=torch.int32)  # for each row, the latest step in which it was deferred
        self._wanted = torch.zeros(length, dtype=torch.bool)  # the rows of a step that the next batch looks up
        self._next = self.starts[:0]

    def plan(self, coming: Sequence[Sequence[torch.Tensor]]) -> None:
        """Stores the keys of each rank in each coming batch."""
        self._next = torch.cat(list(coming[0])).long()

    def split(self, by_rank: Sequence[torch.Tensor]) -> tuple[Share, Share]:
        """Divides the rows of a batch into rows to exchange now and rows to exchange later. `by_rank` has the keys of
        each rank."""
        self._rows.compare_weights()
        self._wanted[self._next] = True
        urgent = self._wanted[torch.cat(list(by_rank)).long()]
        self._wanted[self._next] = False
        return self._share(by_rank, urgent, self._at_once), self._share(by_rank, ~urgent, self._rows.means.start_known)

    def _at_once(self, rows: Sequence[torch.Tensor], by_rank: Any, *_: Any) -> Callable[[], list[Rows]]:
        means = self._rows.means.exchange_known(rows, by_rank)
        return lambda: means

    def _share(self, by_rank: Sequence[torch.Tensor], chosen: torch.Tensor, start: Any) -> Share:
        of_rank = chosen.split([len(keys) for keys in by_rank])
        ids = [by_table(keys[mask], self.starts) for keys, mask in zip(by_rank, of_rank, strict=True)]

        def start_chosen(rows: Sequence[torch.Tensor], ranks: Ranks, name: str) -> Callable[[], list[Rows]]:
            own = of_rank[ranks.rank].split([len(of_table) for of_table in rows])
            return start([of_table[mask] for of_table, mask in zip(rows, own, strict=True)], ids, ranks, name)

        return Share(torch.cat(list(by_rank))[chosen], start_chosen)

    def enter(self, own: torch.Tensor) -> None:
        """Does nothing: each rank has whole tables, so the model may look up any row."""

    def leave(self) -> None:
        """Ends the lookups of a batch. Returns None, because with whole tables the gradients show whether the batch
        looked up a row that `ids` did not return."""

    def lent(self) -> torch.Tensor:
        """The keys of rows that other ranks will fetch from this rank. The result is empty, because each rank has the
        whole tables."""
        return self.starts[:0]

    def prefetch(self, ranks: Ranks, name: str) -> None:
        """Does nothing: every rank has all rows."""

    def end(self) -> None:
        """Does nothing: there are no caches."""

    def check_state(self, state: Any) -> None:
        """Does nothing: PyTorch itself raises an error if an optimizer's state does not fit."""

    def looked_up(self) -> dict[str, torch.Tensor]:
        """The tensors that get the gradients of each table's lookups, by the name of the table's weight."""
        return {name: table.weight for name, table in self._rows.tables.items()}

    def places(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The sorted indices, in `looked_up`, of the rows with these keys."""
        return by_table(own, self.starts)

    def defer(self, keys: torch.Tensor, step: int) -> None:
        self._late_in[keys.long()] = step

    def latest(self, keys: torch.Tensor) -> int:
        """The latest step in which any of these rows was deferred."""
        return int(self._late_in[keys.long()].max())

    def update(self, means: Sequence[Rows]) -> None:
        """Makes a step of the optimizer."""
        step_of_rows(self._optimizer, self._rows.tables.values(), means)


def _check(rows: Any, optimizer: Any, batches: Any) -> None:
    if isinstance(rows, RowExchange) and rows.ratio is not None:
        raise ConfigurationError(
            f"LookAhead sends all rows, but the RowExchange has ratio={rows.ratio}; leave ratio out"
        )
    for name, table in rows.tables.items():
        if not table.sparse or table.weight.device.type != "cpu":
            raise ConfigurationError(
                f"LookAhead needs tables with sparse=True in the host's memory, but {name} has sparse={table.sparse} "
                f"and is on {table.weight.device}; exchange this table with RowExchange.exchange"
            )
    rule = _RULES.get(type(optimizer))
    if rule is None:
        raise ConfigurationError(
            f"LookAhead was given a {type(optimizer).__name__}, which may change rows that have no gradient; pass "
            "torch.optim.SGD, torch.optim.Adagrad or hvdcomp.torch.RowWiseAdagrad"
        )
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if parameters != {id(table.weight) for table in rows.tables.values()}:
        raise ConfigurationError(
            "LookAhead was given an optimizer whose parameters are not exactly the tables; pass an optimizer of "
            f"{', '.join(rows.tables)}, and use a separate optimizer for the layers"
        )
    for group in optimizer.param_groups:
        for option, allowed in rule.items():
            if not allowed(group[option]):
                raise ConfigurationError(
                    f"LookAhead: {option}={group[option]} of {type(optimizer).__name__} is not allowed, because it "
                    f"changes a row by more than the row's gradients; leave {option} out"
                )
    if not is_whole(batches, 1):
        raise ConfigurationError(
            f"LookAhead: batches={batches!r} is not allowed; give the number of batches to read ahead"
        )
