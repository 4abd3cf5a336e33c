"""`RowExchange` averages the gradients of embedding tables, and exchanges only their nonzero rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hvdcomp.bindings.frameworks import not_compiled
from hvdcomp.communicators import Communicator
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import WEIGHTS, refused_on_every_rank, require_agreement
from hvdcomp.exchange.rows import EmbeddingTable, RowMeans, Rows, wire_name
from hvdcomp.torch.ranks import started_ranks
from hvdcomp.torch.training import checksums_of, refuse_capture
from hvdcomp.torch.unaveraged import note_tables

EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_ALL = "all"
_ON_HOST = torch.empty(0)


class RowExchange:
    """Averages the gradients of embedding tables over all ranks, row by row.

        rows = hvdcomp.torch.RowExchange(model)  # on every rank, before DistributedDataParallel
        model = DistributedDataParallel(model)   # does not average the gradients of these tables
        loss.backward()
        rows.exchange()
        optimizer.step()

    Rows are added in the order of the ranks, so all ranks get the same bits. Sums have the table's type, but at least
    float32. An inf or NaN is added like other numbers, and reaches all ranks.

    A sparse gradient (`nn.Embedding(sparse=True)`) stays sparse, with the rows of all ranks. All-zero rows of a dense
    gradient are not sent.

    Args:
        model: the model with the tables, before it is wrapped in DistributedDataParallel.
        tables: the names of the weights of the tables, such as ["items.weight"]. "all" for all embeddings whose weight
            no other kind of layer uses. Default: the embeddings with sparse=True.
        wire_dtype: the element type in which rows and means are sent, which is torch.bfloat16, torch.float16 or
            torch.int8. With torch.int8, the largest magnitude of each row is also sent, and the error of an element is
            at most 1/254 of this magnitude. The mean is rounded in the same way a second time. Rounding errors are not
            kept for later steps. Default: the table's own type.
        ratio: the share of a gradient's rows that a rank sends, above 0. The number of rows is rounded up. The rank
            sends the rows with the largest norms. The rank keeps the other rows in float32, and adds them to its next
            gradients (error feedback, as with `TopK`). The kept rows can take as much memory as the table in float32.
            Do not use `ratio` with a `torch.amp.GradScaler`. The kept rows have the loss scale of their own step, and
            if the scaler skips a step, the rows that were sent in this step are lost. Default: all rows.
        communicator: the communicator of the ranks. Default: all ranks of torch.distributed, or all ranks of Horovod if
            torch.distributed was not started.

    Attributes:
        tables: the modules, by the names of their weights.
        ranks: the communicator of the ranks that exchange rows.
        means: the object that exchanges rows and computes their means.
        ahead: the latest `LookAhead` for these tables; None if there is none.
        ledger: the ledger, with the bytes of each step as in `Compression.ledger`, but without times. The dense bytes
            are the bytes of whole tables.

    Raises:
        ConfigurationError: on every rank, if a name is not a table, if a table is sharded or has max_norm, or if no
            ranks were started.
        RankMismatchError: on every rank, if settings differ. In the first exchange, if the weights of the tables
            differ.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tables: Iterable[str] | None = None,
        *,
        wire_dtype: torch.dtype | None = None,
        ratio: float | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self.model = model
        self.ranks: Any = started_ranks() if communicator is None else communicator
        with refused_on_every_rank(self.ranks, _ON_HOST):
            wire = wire_name(wire_dtype)
            if ratio is not None and not 0 < ratio <= 1:
                raise ConfigurationError(
                    f"RowExchange: ratio={ratio!r} is not allowed; give a number above 0 and at most 1"
                )
            self.tables: dict[str, Any] = tables_of(model, tables, "RowExchange")
        weights = {name: table.weight for name, table in self.tables.items()}
        shapes = {name: EmbeddingTable(name_of(weight.dtype), *weight.shape) for name, weight in weights.items()}
        require_agreement(self.ranks, {"ratio of RowExchange": ratio}, _ON_HOST)
        self.means = RowMeans(self.ranks, shapes, wire, _ON_HOST)
        self.ratio = ratio
        self._kept: dict[str, Rows] = {}
        leave_alone(model, weights.values())
        note_tables(weights.values())
        self.ahead: Any = None
        self.ledger = self.means.ledger

    @not_compiled
    @torch.no_grad()
    def exchange(self) -> None:
        """Exchanges the gradients. Call this method on every rank in each step, after the backward passes. Call it
        before you clip gradients, and before a scaler's `unscale_` or the optimizer's step. A table is skipped if no
        rank has a gradient for it."""
        refuse_capture()
        tables = list(self.tables.values())
        self.compare_weights()
        present = [table.weight.grad is not None for table in tables]
        rows = {name: rows_of(table.weight) for name, table in self.tables.items()}
        if self.ratio is not None:
            rows = {name: self._largest(name, of_table) for name, of_table in rows.items()}
        means = self.means.exchange(list(rows.values()), present)
        for table, mean in zip(tables, means, strict=True):
            if mean is not None:
                put(table, mean)

    def _largest(self, name: str, rows: Rows) -> Rows:
        """Adds these rows to the kept rows of a table, returns the rows to send, and keeps all other rows."""
        assert self.ratio is not None
        # In 16 bits, adding a small gradient would not change a kept row.
        dtype = torch.promote_types(rows.values.dtype, torch.float32)
        given, count = rows.values.to(dtype), math.ceil(self.ratio * len(rows.ids))
        kept = self._kept.get(name, Rows(rows.ids[:0], given[:0]))
        ids, places = torch.cat([kept.ids, rows.ids]).unique(return_inverse=True)
        values = given.new_zeros(len(ids), given.shape[1])
        values.index_add_(0, places, torch.cat([kept.values.to(dtype), given]))
        sent = torch.zeros_like(ids, dtype=torch.bool)
        sent[values.norm(dim=1).topk(count).indices] = True
        self._kept[name] = Rows(ids[~sent], values[~sent])
        return Rows(ids[sent], values[sent].to(rows.values.dtype))

    def state_dict(self) -> dict[str, Any]:
        """The rows that this rank keeps for later steps (with `ratio`). Each rank has its own state."""
        return {name: rows._asdict() for name, rows in self._kept.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict` of the same rank.

        Raises:
            ConfigurationError: if the state belongs to other tables.
        """
        if unknown := state.keys() - self.tables.keys():
            raise ConfigurationError(
                f"RowExchange was given a state of the tables {', '.join(sorted(unknown))}, but it exchanges the "
                f"tables {', '.join(self.tables)}; load the state of a RowExchange of the same tables"
            )
        device = {name: table.weight.device for name, table in self.tables.items()}
        self._kept = {
            name: Rows(*(rows[part].to(device[name]) for part in Rows._fields)) for name, rows in state.items()
        }

    def compare_weights(self) -> None:
        """Raises RankMismatchError on every rank, before the first step, if the tables' weights differ."""
        if self.ledger.steps:
            return
        weights = {name: table.weight for name, table in self.tables.items()}
        sums = zip(weights, checksums_of(weights, list(weights)), strict=True)
        facts = {f"{WEIGHTS}{name}": f"{number:x}" for name, number in sums}
        remedy = "use the same random seed, or load the same checkpoint, on every rank"
        require_agreement(self.ranks, facts, _ON_HOST, remedy)


def tables_of(model: Any, names: Iterable[str] | None, user: str) -> dict[str, Any]:
    """The modules of the tables, by the names of their weights. `user` is a name for error messages."""
    if isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"{user} was given a model in DistributedDataParallel, which exchanges its tables already; give {user} the "
            "model before you put it in DistributedDataParallel"
        )
    embeddings = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, EMBEDDINGS)}
    if names is None:
        names = [name for name, table in embeddings.items() if table.sparse]
    elif names == _ALL:
        others = (module for module in model.modules() if not isinstance(module, EMBEDDINGS))
        shared = {id(weight) for module in others for weight in module.parameters(recurse=False)}
        names = [name for name, table in embeddings.items() if id(table.weight) not in shared]
    table_names = list(names)
    missing = [name for name in table_names if name not in embeddings]
    if missing or not table_names:
        given = "no table with sparse=True"
        if missing:
            given = f"{', '.join(missing)}, which is not the weight of an embedding"
        raise ConfigurationError(
            f"{user} was given {given}; the weights of embeddings in this model are: {', '.join(embeddings) or 'none'}"
        )
    for name in table_names:
        if embeddings[name].max_norm is not None:
            raise ConfigurationError(
                f"{name} has max_norm={embeddings[name].max_norm}, so each rank scales the rows that it looks up, and "
                "the ranks' weights would become different; leave max_norm out"
            )
        if hasattr(embeddings[name].weight, "device_mesh"):
            raise ConfigurationError(f"{name} is sharded, but {user} needs tables that are whole on each rank")
    of_weight = {id(embeddings[name].weight): name for name in reversed(table_names)}  # tables may share a weight
    return {name: embeddings[name] for name in table_names if of_weight[id(embeddings[name].weight)] == name}


def name_of(dtype: torch.dtype) -> str:
    """The name of an element type, as in `hvdcomp.exchange`."""
    return str(dtype).removeprefix("torch.")


def leave_alone(model: torch.nn.Module, weights: Iterable[torch.Tensor]) -> None:
    """Makes DistributedDataParallel ignore these weights, under all their names, in addition to the parameters that it
    already ignores."""
    ids = {id(weight) for weight in weights}
    parameters = model.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in parameters if id(parameter) in ids]
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*before, *names])


def rows_of(weight: torch.Tensor) -> Rows:
    """The nonzero rows of the gradient, and their ids, sorted and without duplicates."""
    gradient = weight.grad
    if gradient is None:
        return Rows(weight.new_empty(0, dtype=torch.int64), weight[:0])
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return Rows(gradient.indices()[0], gradient.values())
    ids = (gradient != 0).any(1).nonzero()[:, 0]
    return Rows(ids, gradient[ids])


def put(table: Any, rows: Rows) -> None:
    """Sets the gradient of a table to these rows. The gradient keeps its layout (sparse or dense). If there is no
    gradient yet, the new gradient gets the layout that the table's backward pass would give it."""
    weight, (ids, values) = table.weight, rows
    if table.sparse if weight.grad is None else weight.grad.is_sparse:
        shape = weight.shape
        weight.grad = torch.sparse_coo_tensor(ids[None], values, shape, is_coalesced=True, check_invariants=False)
        return
    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.zero_()
    weight.grad[ids] = values


def step_of_rows(optimizer: torch.optim.Optimizer, tables: Iterable[Any], rows: Iterable[Rows]) -> None:
    """Makes a step of the tables' optimizer, using these rows as the gradients."""
    for table, of_table in zip(tables, rows, strict=True):
        table.weight.grad = None
        if len(of_table.ids):
            put(table, of_table)
    optimizer.step()
