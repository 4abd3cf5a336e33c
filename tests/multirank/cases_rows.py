"""Embedding tables' gradients by `RowExchange`, the layers' by DistributedDataParallel, over torch.distributed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvdcomp
from hvdcomp.torch import RowExchange
from tests.multirank.models import weights
from tests.multirank.training_ddp import assert_same_everywhere, gathered, own_generator, raised

ROWS, COLUMNS, LOOKUPS = 30_000, 16, 512
OFTEN = 1 / torch.arange(1, ROWS + 1).double() ** 1.335  # Zipf: 1 % of the rows are 90 % of the accesses


class Clicks(torch.nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        self.layer = torch.nn.Linear(COLUMNS, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(ids))


def train(model: Any, rows: RowExchange | None, optimizer: Any, steps: int = 4) -> list[torch.Tensor]:
    """The ids that this rank looked up in each step."""
    generator, looked_up = own_generator(), []
    for _ in range(steps):
        looked_up.append(torch.multinomial(OFTEN, LOOKUPS, replacement=True, generator=generator))
        optimizer.zero_grad()
        model(looked_up[-1]).square().mean().backward()
        if rows is not None:
            rows.exchange()
        optimizer.step()
    return looked_up


def case_it_trains_as_dense_gradients_do_in_far_fewer_bytes() -> None:
    assert 0.89 < OFTEN[: ROWS // 100].sum() / OFTEN.sum() < 0.91
    dense = DistributedDataParallel(Clicks(sparse=False))
    train(dense, None, torch.optim.SGD(dense.parameters(), lr=1.0))
    size, dense_bytes = dist.get_world_size(), 4 * ROWS * COLUMNS
    for sparse in (True, False):
        model = Clicks(sparse)
        rows = RowExchange(model, ["table.weight"])
        ddp = DistributedDataParallel(model)
        compression = hvdcomp.Compression(hvdcomp.NoCompression())
        hvdcomp.ddp.register(ddp, compression)
        looked_up = train(ddp, rows, torch.optim.SGD(model.parameters(), lr=1.0))
        assert_same_everywhere(model)
        torch.testing.assert_close(weights(model), weights(dense), rtol=1e-5, atol=1e-6)
        assert compression.ledger.tensors.keys() == {"layer.weight", "layer.bias"}

        totals, last = rows.ledger.totals, rows.ledger.last
        assert totals.dense_bytes == 4 * dense_bytes
        assert 10 * totals.bytes_sent < totals.dense_bytes
        assert last is not None
        assert last.bytes_sent == stated_bytes(looked_up[-1])
        # What reaches a rank, of a ring's allreduce, of all looked-up rows with ids of 8 bytes, and at most of ours.
        ring, all_rows = 2 * (size - 1) / size * dense_bytes, (size - 1) * LOOKUPS * (8 + 4 * COLUMNS)
        unique = max(len(one.unique()) for one in gathered(looked_up[-1]))
        ours = (size - 1) * (8 + unique * (2 + 4 * COLUMNS))
        assert 10 * ours < ring
        assert 2 * ours < all_rows


def stated_bytes(looked_up: torch.Tensor) -> int:
    """That this rank hands over: a count, ids, and rows, either all to all ranks, or to owners and back."""
    size, row = dist.get_world_size(), 4 * COLUMNS
    ids = [np.unique(one) for one in gathered(looked_up.numpy())]
    union = np.unique(np.concatenate(ids))
    to_owners = max(np.bincount(np.searchsorted(union, one) % size).max() for one in ids)
    most, back = max(map(len, ids)), -(-len(union) // size)
    owners = most > to_owners + back
    assert owners == (size > 2)
    return 8 + 2 * most + row * (size * to_owners + back if owners else most)


def case_what_the_largest_rows_leave_is_kept() -> None:
    model, generator = Clicks(), own_generator()
    rows = RowExchange(model, ratio=0.2)
    given, sent = torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)
    for _ in range(4):
        model.zero_grad()
        ids = torch.multinomial(OFTEN, LOOKUPS, replacement=True, generator=generator)
        model.table(ids).square().sum().backward()
        given += model.table.weight.grad.to_dense()
        rows.exchange()
        sent += model.table.weight.grad.to_dense()
        last = rows.ledger.last
        most = max(-(-len(one.unique()) // 5) for one in gathered(ids))
        assert last is not None
        assert dist.get_world_size() > 2 or last.bytes_sent == 8 + most * (2 + 4 * COLUMNS)
    kept = rows.state_dict()["table.weight"]
    assert len(kept["ids"])
    given[kept["ids"]] -= kept["values"]
    torch.testing.assert_close(sent, torch.stack(gathered(given)).mean(0))
    assert_same_everywhere(sent)


def case_nan_on_one_rank_reaches_all_in_its_row_only() -> None:
    model = Clicks()
    rows = RowExchange(model)
    model(torch.tensor([dist.get_rank(), 9])).sum().backward()
    if dist.get_rank() == 1:
        model.table.weight.grad = model.table.weight.grad.coalesce()
        model.table.weight.grad.values()[0, 3] = torch.nan
    rows.exchange()
    gradient = model.table.weight.grad.to_dense()
    assert gradient.isnan().nonzero().tolist() == [[1, 3]]
    assert_same_everywhere(gradient.nan_to_num())
    assert gradient[: dist.get_world_size(), 0].all()


def case_what_does_not_fit_is_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    told = raised(hvdcomp.ConfigurationError, lambda: RowExchange(DistributedDataParallel(Clicks())))
    assert "before you put it in DistributedDataParallel" in told
    told = raised(hvdcomp.RankMismatchError, lambda: RowExchange(Clicks(), [["table", "layer"][rank % 2] + ".weight"]))
    assert "layer.weight, which is not the weight of an embedding" in told
    told = raised(
        hvdcomp.RankMismatchError, lambda: RowExchange(Clicks(), wire_dtype=torch.float16 if rank == 1 else None)
    )
    assert "wire_dtype of RowExchange" in told
    model = Clicks()
    rows = RowExchange(model)
    with torch.no_grad():
        model.table.weight += rank
    assert "weights of table.weight" in raised(hvdcomp.RankMismatchError, rows.exchange)
