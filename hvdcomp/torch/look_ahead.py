"""`LookAhead`: reads a loader ahead, so that a step waits only for the rows that the next batch needs."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from hvdcomp.communicators.ranks import Ranks
from hvdcomp.errors import ConfigurationError, RankMismatchError
from hvdcomp.exchange.agreement import gather_rows, refused_on_every_rank, require_agreement
from hvdcomp.exchange.rows import Rows
from hvdcomp.specs.described import is_whole
from hvdcomp.torch.row_wise_adagrad import RowWiseAdagrad
from hvdcomp.torch.rows import EMBEDDINGS, RowExchange, put, rows_of

_ON_HOST = torch.empty(0)
_END = object()  # stands for a batch at the end of the loader
_ENDED, _REFUSED = -1, -2  # stand for a number of rows
# Optimizers whose update of a row depends on its own gradients only, and not on the time of the update, with the
# allowed values of their options.
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
"""Function from a batch to the ids that it looks up, of any shape, by the names of the tables' weights."""


class LookAhead:
    """Reads a loader ahead, and exchanges in each step only the rows that the next batch of any rank looks up; other
    rows follow in the background, before their next use (Agarwal et al. 2023, Bagpipe, arXiv:2202.12429, where rows are
    also on servers and prefetched).

        rows = hvdcomp.torch.RowExchange(model)
        optimizer = torch.optim.Adagrad([table.weight for table in rows.tables.values()], lr=0.05)
        ahead = hvdcomp.torch.LookAhead(loader, rows, optimizer, lambda batch: {"items.weight": batch[0]})
        for inputs, targets in ahead:
            loss_of(ddp(inputs), targets).backward()
            ahead.step()        # the tables: instead of rows.exchange(), optimizer.step() and zero_grad()
            layers.step()       # an optimizer of the rest
            layers.zero_grad()

    The weights equal those of `RowExchange.exchange` in each step, bit for bit: no rank looks a row up between its
    gradient and its update, which has the learning rate of the gradient's step. All rows are updated at the end of an
    epoch, before a `state_dict` of the model or the optimizer is made or loaded, and by `flush`; a row also before a
    table looks it up, in training or evaluation. Call `flush` before reading weights in another way. A new LookAhead of
    the same `RowExchange` ends the one before.

    Each rank keeps 5 bytes for each row, and the batches read ahead. A loader with a position of its own is ahead of
    the training: save the number of steps instead.

    Args:
        loader: iterable of batches, the same number on each rank. Each iteration begins it anew.
        rows: the exchange of the tables, all in the host's memory and with sparse=True.
        optimizer: the optimizer of these tables only: `torch.optim.SGD` without momentum or `torch.optim.Adagrad`
            without lr_decay, both without weight_decay, or `RowWiseAdagrad`.
        ids: function from a batch to a tensor of ids, of any shape, for the name of each table's weight; all ids that
            the batch looks up, and possibly more.
        batches: number of batches read ahead, and of steps that a row may be late; at least 1. With 1, a step waits for
            the ids of the next batch.

    Attributes:
        loader, rows, optimizer, batches: the arguments. `rows.ledger` has the bytes of each step.

    Raises:
        ConfigurationError: on every rank, for an unsuitable optimizer or tables. In training: if a step is left out or
            made twice.
        RankMismatchError: on every rank, if settings differ; in training, if the loader of a rank ends before the
            others', ids are not in a table, or a gradient has rows that `ids` did not name.
    """

    _made: ClassVar[Iterator[int]] = itertools.count()  # in this process

    def __init__(
        self, loader: Iterable[Any], rows: RowExchange, optimizer: torch.optim.Optimizer, ids: Ids, batches: int = 4
    ) -> None:
        with refused_on_every_rank(rows.ranks, _ON_HOST):
            _check(rows, optimizer, batches)
        facts = {"batches of LookAhead": batches, "optimizer of LookAhead": type(optimizer).__name__}
        require_agreement(rows.ranks, facts, _ON_HOST)
        self.loader, self.rows, self.optimizer, self.batches = loader, rows, optimizer, batches
        # Of rank 0, for names of collectives: those of two may be in flight at once.
        number, *_ = gather_rows(rows.ranks, next(self._made).to_bytes(4, "big"), _ON_HOST, "hvdcomp.ahead")
        self._name = f"hvdcomp.ahead{int.from_bytes(number, 'big')}"
        self._ids = ids
        self._background_ranks: Ranks = rows.ranks.beside()
        lengths = [len(table.weight) for table in rows.tables.values()]
        # A row's key is its id plus the number of rows of the tables before.
        self._starts = torch.tensor([0, *lengths]).cumsum(0)
        self._key_dtype = torch.int32 if sum(lengths) < 2**31 else torch.int64
        self._late_in = torch.zeros(sum(lengths), dtype=torch.int32)  # latest step in which each row was deferred
        self._wanted = torch.zeros(sum(lengths), dtype=torch.bool)  # rows of a step that its next batch looks up
        self._late: deque[_Late] = deque()
        self._window: deque[_Read] = deque()  # the present batch and the batches read ahead
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
        window = self._window = deque()
        batches = iter(self.loader)
        while True:
            while len(window) <= self.batches:
                if window:
                    window[-1].start_keys()  # their number was sent during the training of a batch
                    if window[-1].ended:
                        break
                self._read(batches)
            window[0].start_keys()
            if window[0].ended:
                break
            self._wait_for(window[0].own)
            self._wait_until(self._steps - self.batches)
            self._stepped = False
            yield window[0].batch
            if self._window is not window:
                raise ConfigurationError("LookAhead was iterated over anew; go on with the latest iteration only")
            if not self._stepped:
                raise ConfigurationError("LookAhead.step() was left out; call it once for each batch")
            window.popleft()
        self.flush()

    @torch.no_grad()
    def step(self) -> None:
        """Exchanges and updates the rows that the next batch needs, starts the exchange of the others, and removes the
        gradients of the tables; to be called on every rank, once for each batch, after its backward passes."""
        if self._stepped:
            raise ConfigurationError("LookAhead.step() belongs to a batch; call it once for each")
        self._require_latest()
        self.rows.compare_weights()
        batch, next_batch = self._window[0], self._window[1]
        rows, refused = self._take_gradients(batch)
        ranks = self.rows.ranks
        flag = torch.tensor([refused is not None], dtype=torch.uint8)
        refusals = ranks.start_allgather(flag, f"{self._name}.refused")
        by_rank = batch.by_rank()
        all_keys = torch.cat(by_rank)
        wanted = torch.cat(next_batch.by_rank()).long()
        self._wanted[wanted] = True
        urgent = self._wanted[all_keys.long()]
        self._wanted[wanted] = False
        of_rank = urgent.split([len(keys) for keys in by_rank])
        own = of_rank[ranks.rank].split([len(table_rows) for table_rows in rows])
        first = [self._by_table(keys[chosen]) for keys, chosen in zip(by_rank, of_rank, strict=True)]
        needed = [table_rows[chosen] for table_rows, chosen in zip(rows, own, strict=True)]
        means = self.rows.means.exchange_known(needed, first)
        _refuse(ranks.wait(refusals)[:, 0].numpy() != 0, "has a gradient of rows that `ids` did not name", refused)

        self._steps += 1
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        later = [self._by_table(keys[~chosen]) for keys, chosen in zip(by_rank, of_rank, strict=True)]
        deferred = [table_rows[~chosen] for table_rows, chosen in zip(rows, own, strict=True)]
        name = f"{self._name}.rows.{self._steps % (self.batches + 2)}"
        late = self.rows.means.start_known(deferred, later, self._background_ranks, name)
        self._late.append(_Late(self._steps, late, rates))
        self._wait_for(all_keys[urgent])  # late from earlier steps
        self._late_in[all_keys[~urgent].long()] = self._steps
        self._update(means, rates)
        self.rows.means.record(self._by_table(batch.own), batch.sent + 1)
        self._stepped = True

    @torch.no_grad()
    def flush(self) -> None:
        """Waits for all deferred rows and updates them. Needs no call on other ranks."""
        self._wait_until(self._steps)

    def end(self) -> None:
        """Flushes, and leaves the tables to another LookAhead, which calls it on every rank when it is made."""
        self._end_iteration()
        self._window.clear()
        for hook in self._hooks:
            hook.remove()

    def _end_iteration(self) -> None:
        self.flush()
        for unused in self._window:  # of an iteration that was not finished
            unused.drop()

    def _require_latest(self) -> None:
        if self.rows.ahead is not self:
            raise ConfigurationError("another LookAhead was made of this RowExchange; go on with the latest only")

    def _read(self, batches: Iterator[Any]) -> None:
        """Puts the next batch, or the end, into the window."""
        name = f"{self._name}.keys.{self._reads % (self.batches + 2)}"
        self._reads += 1
        batch = next(batches, _END)
        own, refused = self._starts.new_empty(0), None
        if batch is not _END:
            try:
                own = self._keys_of(self._ids(batch))
            except ConfigurationError as error:
                refused = str(error)
        self._window.append(_Read(self._background_ranks, batch, own.to(self._key_dtype), refused, name))

    def _keys_of(self, ids: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The keys of the ids, unique and in order."""
        if set(ids) != set(self.rows.tables):
            raise ConfigurationError(f"`ids` named {', '.join(ids)}; it is to name {', '.join(self.rows.tables)}")
        parts = []
        for start, (name, table) in zip(self._starts.tolist(), self.rows.tables.items(), strict=False):
            looked_up = ids[name].detach().reshape(-1).long()
            if len(looked_up) and not 0 <= int(looked_up.min()) <= int(looked_up.max()) < len(table.weight):
                raise ConfigurationError(
                    f"`ids` named row {int(looked_up.min())} to {int(looked_up.max())} of {name}, which has 0 to "
                    f"{len(table.weight) - 1}"
                )
            looked_up = looked_up.unique()
            if table.padding_idx is not None:
                looked_up = looked_up[looked_up != table.padding_idx]
            parts.append(start + looked_up)
        return torch.cat(parts)

    def _by_table(self, keys: torch.Tensor) -> list[torch.Tensor]:
        """The ids of each table, from keys in order."""
        bounds = torch.searchsorted(keys, self._starts.to(keys.dtype))
        sizes = bounds.diff()
        return list((keys - self._starts[:-1].repeat_interleave(sizes).to(keys.dtype)).split(sizes.tolist()))

    def _take_gradients(self, batch: _Read) -> tuple[list[torch.Tensor], str | None]:
        """Removes the gradients of the batch's rows from each table and returns them; and the first row with a gradient
        that the batch does not name, or None."""
        gradients, unnamed = [], None
        for (name, table), own in zip(self.rows.tables.items(), self._by_table(batch.own), strict=True):
            ids, rows = rows_of(table.weight)
            table.weight.grad = None
            if len(ids) != len(own) or not bool((ids == own).all()):
                known = torch.isin(ids, own)
                if not bool(known.all()):
                    unnamed = f"row {int(ids[~known][0])} of {name}"
                all_rows = rows.new_zeros(len(own), table.weight.shape[1])
                all_rows[torch.searchsorted(own, ids[known].to(own.dtype))] = rows[known]
                rows = all_rows
            gradients.append(rows)
        return gradients, unnamed

    def _wait_for(self, keys: torch.Tensor) -> None:
        """Updates these rows if they were deferred."""
        if self._late and len(keys):
            self._wait_until(int(self._late_in[keys.long()].max()))

    @torch.no_grad()
    def _wait_until(self, step: int) -> None:
        """Updates all rows that were deferred in that step or before."""
        while self._late and self._late[0].step <= step:
            late = self._late.popleft()
            self._update(late.means(), late.rates)

    def _update(self, means: Sequence[Rows], rates: Sequence[float]) -> None:
        """A step of the optimizer for these rows."""
        tables = list(self.rows.tables.values())
        gradients = [table.weight.grad for table in tables]
        present_rates = [group["lr"] for group in self.optimizer.param_groups]
        for table, mean in zip(tables, means, strict=True):
            table.weight.grad = None
            if len(mean.ids):
                put(table, mean)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.step()
        for table, gradient in zip(tables, gradients, strict=True):
            table.weight.grad = gradient
        for group, rate in zip(self.optimizer.param_groups, present_rates, strict=True):
            group["lr"] = rate

    def _flush_before_reads(self) -> None:
        """Registers hooks: a lookup first updates its rows, and making or loading a state first updates all rows."""

        def flush(*_: Any) -> None:
            self.flush()

        weights = [table.weight for table in self.rows.tables.values()]
        starts = {id(weight): start for weight, start in zip(weights, self._starts.tolist(), strict=False)}
        for module in self.rows.model.modules():
            start = starts.get(id(getattr(module, "weight", None))) if isinstance(module, EMBEDDINGS) else None
            if start is None:
                continue

            def before(_: Any, args: Any, kwargs: Any, start: int = start) -> None:
                ids = args[0] if args else kwargs["input"]
                self._wait_for(ids.reshape(-1).long() + start)

            self._hooks += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_state_dict_pre_hook(flush),
                module.register_load_state_dict_pre_hook(flush),
            ]
        self._hooks += [
            self.optimizer.register_state_dict_pre_hook(flush),
            self.optimizer.register_load_state_dict_pre_hook(flush),
        ]


class _Late(NamedTuple):
    """The deferred rows of a step, exchanged in the background."""

    step: int
    means: Callable[[], list[Rows]]
    rates: list[float]


class _Read:
    """A batch that was read, and the keys of its rows on each rank. The ranks exchange the number of keys, and then the
    keys; every rank calls the methods in the same order.

    Attributes:
        batch: the batch, or `_END` after the last.
        own: the keys of this rank.
        sent: number of bytes sent.
    """

    def __init__(self, ranks: Ranks, batch: Any, own: torch.Tensor, refused: str | None, name: str) -> None:
        self.batch, self.own, self.sent = batch, own, 8
        self._ranks, self._refused, self._name = ranks, refused, name
        length = _ENDED if self.ended else _REFUSED if refused else len(own)
        self._handle = ranks.start_allgather(torch.tensor([length]).view(torch.uint8), name)
        self._lengths: list[int] | None = None
        self._by_rank: list[torch.Tensor] | None = None

    @property
    def ended(self) -> bool:
        return self.batch is _END

    def start_keys(self) -> None:
        """Waits for the numbers of keys and starts the exchange of keys.

        Raises:
            RankMismatchError: on every rank, if any rank's batch was refused, or if only some ranks have ended.
        """
        if self._lengths is not None:
            return
        lengths = self._ranks.wait(self._handle).contiguous().view(torch.int64)[:, 0]
        self._handle, self._lengths = None, lengths.clamp(min=0).tolist()
        _refuse((lengths == _REFUSED).numpy(), "cannot say which rows a batch looks up", self._refused)
        ended = (lengths == _ENDED).numpy()
        if not ended.all():
            _refuse(ended, "has fewer batches than others; give every rank the same number of batches")
        longest = max(self._lengths)
        if longest:
            keys = torch.nn.functional.pad(self.own, (0, longest - len(self.own))).view(torch.uint8)
            self.sent += len(keys)
            self._handle = self._ranks.start_allgather(keys, self._name)

    def drop(self) -> None:
        """Waits for the collective under way, if any."""
        if self._by_rank is None and self._handle is not None:
            self._ranks.wait(self._handle)
            self._handle = None

    def by_rank(self) -> list[torch.Tensor]:
        """The keys of each rank, in order."""
        if self._by_rank is None:
            self.start_keys()
            assert self._lengths is not None
            rows = [self.own] * len(self._lengths)
            if self._handle is not None:
                rows = list(self._ranks.wait(self._handle).view(self.own.dtype))
            self._by_rank = [row[:length] for row, length in zip(rows, self._lengths, strict=True)]
        return self._by_rank


def _refuse(at_fault: np.ndarray, reason: str, own: str | None = None) -> None:
    """Raises RankMismatchError, on every rank, if any rank is at fault."""
    if at_fault.any():
        detail = f": {own}" if own else ""
        raise RankMismatchError(f"LookAhead: rank {', '.join(map(str, np.flatnonzero(at_fault)))} {reason}{detail}")


def _check(rows: Any, optimizer: Any, batches: Any) -> None:
    if rows.ratio is not None:
        raise ConfigurationError(f"LookAhead sends all rows, and the RowExchange has ratio={rows.ratio}; leave it out")
    for name, table in rows.tables.items():
        if not table.sparse or table.weight.device.type != "cpu":
            raise ConfigurationError(
                f"LookAhead serves tables with sparse=True in the host's memory, and {name} has sparse={table.sparse} "
                f"on {table.weight.device}; exchange it with RowExchange.exchange"
            )
    rule = _RULES.get(type(optimizer))
    if rule is None:
        raise ConfigurationError(
            f"LookAhead was given a {type(optimizer).__name__}, by which a row may change while it has no gradient; "
            "give it torch.optim.SGD, torch.optim.Adagrad or hvdcomp.torch.RowWiseAdagrad"
        )
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if parameters != {id(table.weight) for table in rows.tables.values()}:
        raise ConfigurationError(
            f"LookAhead was given an optimizer of other parameters than the tables; give it {', '.join(rows.tables)}, "
            "and the layers an optimizer of their own"
        )
    for group in optimizer.param_groups:
        for option, allowed in rule.items():
            if not allowed(group[option]):
                raise ConfigurationError(
                    f"LookAhead: {option}={group[option]} of {type(optimizer).__name__} is not possible, as a row "
                    "would change otherwise than by its gradients; leave it out"
                )
    if not is_whole(batches, 1):
        raise ConfigurationError(f"LookAhead: batches={batches!r} is not possible; give how many are read ahead")
