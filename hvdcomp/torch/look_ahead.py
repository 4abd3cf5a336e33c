"""`LookAhead`: a loader that is read ahead, so that only the rows that the next batch needs are waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdcomp.communicators.ranks import Ranks
from hvdcomp.errors import ConfigurationError, RankMismatchError
from hvdcomp.exchange.agreement import refused_on_every_rank, require_agreement
from hvdcomp.exchange.rows import Rows
from hvdcomp.specs.described import is_whole
from hvdcomp.torch.row_wise_adagrad import RowWiseAdagrad
from hvdcomp.torch.rows import EMBEDDINGS, RowExchange, put, rows_of

_ON_HOST = torch.empty(0)
_END = object()  # in the place of a batch
_ENDED, _REFUSED = -1, -2  # in the place of a number of rows
# Optimizers that update a row by its own gradients alone, and the same whenever they do it, with the values that some
# options must have for that.
_RULES: dict[type, dict[str, Callable[[Any], bool]]] = {
    torch.optim.SGD: {"momentum": lambda one: one == 0, "weight_decay": lambda one: one == 0},
    torch.optim.Adagrad: {
        "weight_decay": lambda one: one == 0,
        "lr_decay": lambda one: one == 0,
        "eps": lambda one: one > 0,
    },
    RowWiseAdagrad: {},
}

Ids = Callable[[Any], Mapping[str, torch.Tensor]]
"""Of a batch: the ids that it looks up, of any shape, by the names of the tables' weights."""


class LookAhead:
    """Reads a loader ahead, and exchanges in each step only the rows that the next batch of any rank looks up; the
    others follow in the background, and are there before their next use (Agarwal et al. 2023, Bagpipe,
    arXiv:2202.12429, where rows also lie on servers, and are fetched ahead).

        rows = hvdcomp.torch.RowExchange(model)
        optimizer = torch.optim.Adagrad([table.weight for table in rows.tables.values()], lr=0.05)
        ahead = hvdcomp.torch.LookAhead(loader, rows, optimizer, lambda batch: {"items.weight": batch[0]})
        for inputs, targets in ahead:
            loss_of(ddp(inputs), targets).backward()
            ahead.step()        # the tables: instead of rows.exchange(), optimizer.step() and zero_grad()
            layers.step()       # an optimizer of the rest
            layers.zero_grad()

    The weights are those of `RowExchange.exchange` in each step, bit for bit: a row is looked up on no rank between its
    gradient and its update, which has the learning rate of the gradient's step. All rows are updated when an epoch
    ends, before a `state_dict` of the model or the optimizer is made or loaded, and after `flush`; a row also before a
    table looks it up, in training or evaluation. To read weights otherwise, call `flush`.

    Each rank keeps 5 bytes for each row, and the batches that were read ahead. A loader that keeps its own place is
    ahead of the training: keep the number of steps.

    Args:
        loader: of batches, the same number on each rank. Each iteration begins it anew.
        rows: of the tables, all in the host's memory and with sparse=True.
        optimizer: of these tables alone: `torch.optim.SGD` without momentum or `torch.optim.Adagrad` without lr_decay,
            both without weight_decay, or `RowWiseAdagrad`.
        ids: what a batch looks up: gives a tensor of ids, of any shape, for the name of each table's weight. More than
            it looks up may be named, but not less.
        batches: how many are read ahead, and how many steps a row may be late; at least 1. With 1 the ids of the next
            batch are waited for.

    Attributes:
        loader, rows, optimizer, batches: as given. `rows.ledger` has the bytes of each step.

    Raises:
        ConfigurationError: on every rank, for an optimizer or tables that do not fit. In training: if a step is left
            out, or called twice.
        RankMismatchError: on every rank, if they were told different things; in training, if the loader of one ends
            before the others', ids are not in a table, or a gradient has rows that `ids` did not name.
    """

    def __init__(
        self, loader: Iterable[Any], rows: RowExchange, optimizer: torch.optim.Optimizer, ids: Ids, batches: int = 4
    ) -> None:
        with refused_on_every_rank(rows.ranks, _ON_HOST):
            _check(rows, optimizer, batches)
        facts = {"batches of LookAhead": batches, "optimizer of LookAhead": type(optimizer).__name__}
        require_agreement(rows.ranks, facts, _ON_HOST)
        self.loader, self.rows, self.optimizer, self.batches = loader, rows, optimizer, batches
        self._ids = ids
        self._beside: Ranks = rows.ranks.beside()
        lengths = [len(table.weight) for table in rows.tables.values()]
        # A row's key is its id behind the rows of the tables before.
        self._starts = torch.tensor([0, *lengths]).cumsum(0)
        self._key_dtype = torch.int32 if sum(lengths) < 2**31 else torch.int64
        self._late_in = torch.zeros(sum(lengths), dtype=torch.int32)  # the latest step from which each row was late
        self._wanted = torch.zeros(sum(lengths), dtype=torch.bool)  # of a step, the rows that its next batch looks up
        self._late: deque[_Late] = deque()
        self._window: deque[_Read] = deque()  # the batch under way, and those behind it
        self._reads = self._steps = 0
        self._stepped = True
        self._flush_before_others_read()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self.flush()
        for left in self._window:  # of an iteration that was not brought to its end
            left.by_rank()
        window = self._window = deque()
        batches = iter(self.loader)
        while True:
            while len(window) <= self.batches:
                if window:
                    window[-1].start_keys()  # the number of which has travelled while a batch was trained
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
        """Exchanges and updates the rows that the next batch needs, starts the exchange of the others, and takes the
        gradients of the tables away; to be called on every rank, once for each batch, after its backward passes."""
        if self._stepped:
            raise ConfigurationError("LookAhead.step() belongs to a batch; call it once for each")
        self.rows.compare_weights()
        now, following = self._window[0], self._window[1]
        rows, refused = self._taken(now)
        ranks = self.rows.ranks
        told = ranks.start_allgather(torch.tensor([refused is not None], dtype=torch.uint8), "hvdcomp.ahead.refused")
        by_rank = now.by_rank()
        everyone = torch.cat(by_rank)
        wanted = torch.cat(following.by_rank()).long()
        self._wanted[wanted] = True
        urgent = self._wanted[everyone.long()]
        self._wanted[wanted] = False
        of_rank = urgent.split([len(keys) for keys in by_rank])
        own = of_rank[ranks.rank].split([len(one) for one in rows])
        first = [self._by_table(keys[chosen]) for keys, chosen in zip(by_rank, of_rank, strict=True)]
        needed = [one[chosen] for one, chosen in zip(rows, own, strict=True)]
        means = self.rows.means.exchange_known(needed, first)
        _refuse(ranks.wait(told)[:, 0].numpy() != 0, "has a gradient of rows that `ids` did not name", refused)

        self._steps += 1
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        later = [self._by_table(keys[~chosen]) for keys, chosen in zip(by_rank, of_rank, strict=True)]
        left = [one[~chosen] for one, chosen in zip(rows, own, strict=True)]
        name = f"hvdcomp.ahead.rows.{self._steps % (self.batches + 2)}"
        late = self.rows.means.start_known(left, later, self._beside, name)
        self._late.append(_Late(self._steps, late, rates))
        self._wait_for(everyone[urgent])  # of earlier steps
        self._late_in[everyone[~urgent].long()] = self._steps
        self._update(means, rates)
        self.rows.means.record(self._by_table(now.own), now.sent + 1)
        self._stepped = True

    @torch.no_grad()
    def flush(self) -> None:
        """Waits for all rows that are late, and updates them. A rank may call it alone."""
        self._wait_until(self._steps)

    def _read(self, batches: Iterator[Any]) -> None:
        """Puts the next batch, or the end, into the window."""
        name = f"hvdcomp.ahead.keys.{self._reads % (self.batches + 2)}"
        self._reads += 1
        batch = next(batches, _END)
        own, refused = self._starts.new_empty(0), None
        if batch is not _END:
            try:
                own = self._keys_of(self._ids(batch))
            except ConfigurationError as error:
                refused = str(error)
        self._window.append(_Read(self._beside, batch, own.to(self._key_dtype), refused, name))

    def _keys_of(self, ids: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Each once and in order."""
        if set(ids) != set(self.rows.tables):
            raise ConfigurationError(f"`ids` named {', '.join(ids)}; it is to name {', '.join(self.rows.tables)}")
        parts = []
        for start, (name, table) in zip(self._starts.tolist(), self.rows.tables.items(), strict=False):
            given = ids[name].detach().reshape(-1).long()
            if len(given) and not 0 <= int(given.min()) <= int(given.max()) < len(table.weight):
                raise ConfigurationError(
                    f"`ids` named row {int(given.min())} to {int(given.max())} of {name}, which has 0 to "
                    f"{len(table.weight) - 1}"
                )
            given = given.unique()
            parts.append(start + (given if table.padding_idx is None else given[given != table.padding_idx]))
        return torch.cat(parts)

    def _by_table(self, keys: torch.Tensor) -> list[torch.Tensor]:
        """The ids of each table, of keys in order."""
        bounds = torch.searchsorted(keys, self._starts.to(keys.dtype))
        sizes = bounds.diff()
        return list((keys - self._starts[:-1].repeat_interleave(sizes).to(keys.dtype)).split(sizes.tolist()))

    def _taken(self, now: _Read) -> tuple[list[torch.Tensor], str | None]:
        """The gradients of each table's rows that the batch touches, which are then gone; and whether there are
        others, and where."""
        taken, others = [], None
        for (name, table), own in zip(self.rows.tables.items(), self._by_table(now.own), strict=True):
            ids, rows = rows_of(table.weight)
            table.weight.grad = None
            if len(ids) != len(own) or not bool((ids == own).all()):
                known = torch.isin(ids, own)
                if not bool(known.all()):
                    others = f"row {int(ids[~known][0])} of {name}"
                all_rows = rows.new_zeros(len(own), table.weight.shape[1])
                all_rows[torch.searchsorted(own, ids[known].to(own.dtype))] = rows[known]
                rows = all_rows
            taken.append(rows)
        return taken, others

    def _wait_for(self, keys: torch.Tensor) -> None:
        """Updates the rows, if they are late."""
        if self._late and len(keys):
            self._wait_until(int(self._late_in[keys.long()].max()))

    @torch.no_grad()
    def _wait_until(self, step: int) -> None:
        """Updates all rows that are late since that step or before."""
        while self._late and self._late[0].step <= step:
            late = self._late.popleft()
            self._update(late.means(), late.rates)

    def _update(self, means: Sequence[Rows], rates: Sequence[float]) -> None:
        """A step of the optimizer for these rows."""
        tables = list(self.rows.tables.values())
        gradients, now = [one.weight.grad for one in tables], [group["lr"] for group in self.optimizer.param_groups]
        for table, mean in zip(tables, means, strict=True):
            table.weight.grad = None
            if len(mean.ids):
                put(table, mean)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.step()
        for table, gradient in zip(tables, gradients, strict=True):
            table.weight.grad = gradient
        for group, rate in zip(self.optimizer.param_groups, now, strict=True):
            group["lr"] = rate

    def _flush_before_others_read(self) -> None:
        """Before a lookup updates what it looks up, before states are made or loaded all."""

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

            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_state_dict_pre_hook(flush)
            module.register_load_state_dict_pre_hook(flush)
        self.optimizer.register_state_dict_pre_hook(flush)
        self.optimizer.register_load_state_dict_pre_hook(flush)


class _Late(NamedTuple):
    """Rows that were exchanged in the background since a step."""

    step: int
    means: Callable[[], list[Rows]]
    rates: list[float]


class _Read:
    """A batch that was read, and the keys of the rows that it touches on each rank. First their number travels, then
    they; every rank calls the methods at the same places.

    Attributes:
        batch: `_END` behind the last.
        own: the keys of this rank.
        sent: bytes.
    """

    def __init__(self, ranks: Ranks, batch: Any, own: torch.Tensor, refused: str | None, name: str) -> None:
        self.batch, self.own, self.sent = batch, own, 8
        self._ranks, self._refused, self._name = ranks, refused, name
        length = _ENDED if self.ended else _REFUSED if refused else len(own)
        told = torch.tensor([length]).view(torch.uint8)
        self._handle = ranks.start_allgather(told, name)
        self._lengths: list[int] | None = None
        self._by_rank: list[torch.Tensor] | None = None

    @property
    def ended(self) -> bool:
        return self.batch is _END

    def start_keys(self) -> None:
        """Waits for the numbers.

        Raises:
            RankMismatchError: on every rank, if any was refused, or if some have ended.
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
            mine = torch.nn.functional.pad(self.own, (0, longest - len(self.own))).view(torch.uint8)
            self.sent += len(mine)
            self._handle = self._ranks.start_allgather(mine, self._name)

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


def _refuse(who: np.ndarray, what: str, own: str | None = None) -> None:
    """Raises RankMismatchError, on every rank, if it is true of any."""
    if who.any():
        detail = f": {own}" if own else ""
        raise RankMismatchError(f"LookAhead: rank {', '.join(map(str, np.flatnonzero(who)))} {what}{detail}")


def _check(rows: Any, optimizer: Any, batches: Any) -> None:
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
    given = {id(one) for group in optimizer.param_groups for one in group["params"]}
    if given != {id(table.weight) for table in rows.tables.values()}:
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
