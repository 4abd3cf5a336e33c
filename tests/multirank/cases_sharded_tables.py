"""`LookAhead` of `ShardedTables` against `RowExchange.exchange` of whole tables in each step, bit for bit."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdcomp import ConfigurationError, RankMismatchError
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.torch import LookAhead, RowExchange, ShardedTables
from tests.multirank.cases_look_ahead import OPTIMIZERS, Batch, Loader, Training, batch_of, trained_ahead
from tests.multirank.cases_rows import Clicks
from tests.multirank.training_ddp import gathered, own_generator, raised
from tests.multirank.worker import thorough


class Sharded(Training):
    """A training whose tables are sharded."""

    def exchange(self, **options: Any) -> Any:
        return ShardedTables(self.model, **options)


def parts(training: Training) -> dict[str, Any]:
    state = training.optimizer.state_dict()["state"]
    return {"model": dict(training.model.state_dict()), "sums": {key: kept.get("sum") for key, kept in state.items()}}


def assert_same(ours: Training, plain: Training) -> None:
    """Asserts that this rank has its rows of the whole tables, and their sums."""
    ranks, own, whole = ours.rows.ranks, parts(ours), parts(plain)
    for name, weight in whole["model"].items():
        assert torch.equal(own["model"][name], weight[ranks.rank :: ranks.world_size]), name
    for number, sums in whole["sums"].items():
        assert sums is None or torch.equal(own["sums"][number], sums[ranks.rank :: ranks.world_size]), number


def same_as_whole_tables(steps: int, epochs: int) -> None:
    assert len(list(trained_ahead(Sharded, steps, epochs, 4, assert_same))) == len(OPTIMIZERS)


def case_it_is_synchronous_training_of_whole_tables_bit_for_bit() -> None:
    same_as_whole_tables(10, 2)


@thorough
def case_it_is_synchronous_training_of_whole_tables_bit_for_bit_after_200_steps() -> None:
    same_as_whole_tables(200, 1)


def case_it_takes_over_from_a_broken_off_epoch_and_evaluates_between() -> None:
    plain, ours = Training(OPTIMIZERS[1]), Sharded(OPTIMIZERS[1])
    first = ours.ahead(Loader(6))
    ours.look_ahead(itertools.islice(first, 3), first.step)
    plain.synchronous(itertools.islice(Loader(6), 3))
    batch = next(iter(Loader(1)))
    with torch.no_grad():
        ours.model.eval()
        assert torch.equal(ours.model(batch), plain.model(batch))
        ours.model.train()
    assert "outside of the batches of a LookAhead" in raised(ConfigurationError, lambda: ours.model(batch))
    second = ours.ahead(itertools.islice(Loader(6), 3, None))
    assert "only the latest" in raised(ConfigurationError, iter(first).__next__)
    ours.look_ahead(second, second.step)
    plain.synchronous(itertools.islice(Loader(6), 3, None))
    assert_same(ours, plain)


def case_it_goes_on_from_a_state_on_fewer_ranks() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    kind = OPTIMIZERS[2]
    plain, ours = Training(kind), Sharded(kind)
    ahead = ours.ahead(Loader(8))
    ours.look_ahead(itertools.islice(ahead, 3), ahead.step)
    plain.synchronous(itertools.islice(Loader(8), 3))
    states = gathered(ours.state())

    half = dist.new_group(range(size // 2))
    if rank < size // 2:
        ranks = TorchDistributedCommunicator(half)
        plain.rows = RowExchange(plain.model, communicator=ranks)
        fewer = Sharded(kind, communicator=ranks)
        going_on = fewer.ahead(itertools.islice(Loader(8), 3, None))
        for part in ("model", "optimizer"):
            with pytest.raises(ConfigurationError, match=r"make a new state with ShardedTables\.resharded"):
                getattr(fewer, part).load_state_dict(states[rank][part])
        for part in ("model", "optimizer"):
            state = ShardedTables.resharded([state[part] for state in states], rank, size // 2)
            getattr(fewer, part).load_state_dict(state)
        fewer.rate.load_state_dict(states[rank]["rate"])
        fewer.look_ahead(going_on, going_on.step)
        plain.synchronous(itertools.islice(Loader(8), 3, None))
        assert_same(fewer, plain)
    dist.barrier()


def case_a_loaded_state_ends_an_iteration() -> None:
    plain, ours = Training(OPTIMIZERS[0]), Sharded(OPTIMIZERS[0])
    begun = ours.model.state_dict()
    begun = {name: weight.clone() for name, weight in begun.items()}
    ahead = ours.ahead(Loader(5))
    batches = iter(ahead)
    ours.look_ahead(itertools.islice(batches, 2), ahead.step)
    ours.model.load_state_dict(begun)
    assert "a state was loaded into sharded tables" in raised(ConfigurationError, lambda: next(batches))
    assert_same(ours, plain)


def case_what_ids_do_not_name_and_no_table_is_refused_on_every_rank() -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    ours = Sharded(OPTIMIZERS[0])
    ahead = ours.ahead([batch_of(5)])

    def train() -> None:
        for batch in ahead:
            ours.model({**batch, "items": torch.tensor([[5, 6 if last else 5]])}).backward()
            ahead.step()

    said = raised(RankMismatchError, train)
    assert "has a gradient of rows that the function `ids` did not return" in said
    assert not last or "row 6 of items.weight" in said
    ours.model.eval()
    said = raised(RankMismatchError, lambda: ours.model(batch_of(2000 if last else 3)))
    assert not last or "rows from 2000 to 2000 of items.weight, which has only rows 0 to 1999" in said

    table = torch.nn.Embedding(7, 2)
    dense = torch.nn.ModuleList([table])
    assert "sparse=False and is on cpu" in raised(ConfigurationError, lambda: ShardedTables(dense, ["0.weight"]))
    table.sparse, other = True, torch.nn.Linear(2, 7)
    other.weight = table.weight
    tied = torch.nn.ModuleList([table, other])
    assert "also the weight of another layer" in raised(ConfigurationError, lambda: ShardedTables(tied))
    empty = torch.nn.ModuleList([torch.nn.Embedding(7, 2, sparse=True, device="meta")])
    assert "give ShardedTables the argument `fill`" in raised(ConfigurationError, lambda: ShardedTables(empty))
    said = raised(RankMismatchError, lambda: ShardedTables(empty, fill=lambda _, ids: torch.zeros(len(ids), 3)))
    assert "it must return the shape" in said

    def fill(_: str, ids: torch.Tensor) -> torch.Tensor:
        return {"rank 0": torch.zeros(len(ids), 2)}[f"rank {dist.get_rank()}"]

    said = raised(RankMismatchError, lambda: ShardedTables(empty, fill=fill))
    assert "rank 0: no error" in said
    assert "KeyError: 'rank 1'" in said


class Items(torch.nn.Module):
    """One table, with a sum of rows as its output."""

    def __init__(self, rows: int, columns: int, device: str) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(rows, columns, sparse=True, device=device)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.items(batch["items"]).sin().sum()


def filled(columns: int) -> Any:
    return lambda _, ids: torch.sin(ids[:, None] * torch.arange(1, columns + 1).double()).float()


ADAGRAD = OPTIMIZERS[1]


def looked_up(steps: int, rows: int, lookups: int) -> list[Batch]:
    generator = own_generator()
    return [{"items": torch.randint(rows, (lookups,), generator=generator)} for _ in range(steps)]


def case_tables_that_no_rank_has_in_whole() -> None:
    """Of 3 rows too, of which a fourth rank has none."""
    for rows in (1, 2, 3, 50):  # of which a rank may have none
        model = Items(rows, 2, "cpu")
        with torch.no_grad():
            model.items.weight.copy_(filled(2)("", torch.arange(rows)))
        plain = Training(ADAGRAD, model)
        ours = Sharded(ADAGRAD, Items(rows, 2, "meta"), fill=filled(2))
        batches = looked_up(5, rows, 4)
        plain.synchronous(batches)
        ahead = ours.ahead(batches)
        ours.look_ahead(ahead, ahead.step)
        assert_same(ours, plain)


def stated_rows(by_step: list[list[set[int]]], reach: int, size: int) -> list[tuple[int, int]]:
    """Before the first step and in each: the rows of gradients that a rank hands over, and those that it lends, with
    what makes the parts for all ranks as long as the longest."""
    held: list[set[int]] = [set() for _ in range(size)]
    handed = []
    for step in range(-1, len(by_step)):
        coming = by_step[step + 1 : step + 1 + reach]
        needed = [{key for batch in coming for key in batch[rank] if key % size != rank} for rank in range(size)]
        new = [needs - holds for needs, holds in zip(needed, held, strict=True)]
        lent = set().union(*new)
        counts = Counter[tuple[str, int, int]]()
        for sender, keys in enumerate(by_step[step] if step >= 0 else []):
            for key, taker in itertools.product(keys, range(size)):
                owned = key % size == taker
                if owned or key in held[taker] & needed[taker]:
                    soon = bool(coming) and key in coming[0][taker]
                    counts["first" if soon or (owned and key in lent) else "later", sender, taker] += 1
        for taker, keys in enumerate(new):
            for key in keys:
                counts["fetched", key % size, taker] += 1
        most = Counter[str]()
        for (kind, *_), count in counts.items():
            most[kind] = max(most[kind], count)
        handed.append((size * (most["first"] + most["later"]), size * most["fetched"]))
        held = needed
    return handed


def case_rows_and_bytes_are_those_of_the_plan_and_a_rank_keeps_its_shard_and_cache() -> None:
    rows, columns, lookups, steps, size = 100_000, 8, 64, 8, dist.get_world_size()
    gc.collect()
    plain_bytes = tensor_bytes()
    ours = Sharded(ADAGRAD, Items(rows, columns, "meta"), fill=filled(columns))
    shard = 2 * 4 * columns * len(range(dist.get_rank(), rows, size))  # with the sums of Adagrad
    popular = torch.arange(7)  # of each batch
    batches = [{"items": torch.cat([popular, batch["items"]])} for batch in looked_up(steps, rows, lookups)]
    everyone = gathered([set(batch["items"].tolist()) for batch in batches])
    by_step = [list(of_ranks) for of_ranks in zip(*everyone, strict=True)]
    ahead = ours.ahead(batches, 4)
    sent, kept = [], []
    for step, batch in enumerate(ahead):
        ours.look_ahead([batch], ahead.step)
        last = ours.rows.ledger.last
        assert last is not None
        sent.append(last.bytes_sent)
        if step in (3, steps - 1):
            kept.append(tensor_bytes() - plain_bytes - shard)
    stated = stated_rows(by_step, 3, size)
    row = 4 * columns
    expected = [gradients * row + fetched * 2 * row for gradients, fetched in stated[1:]]
    expected[0] += stated[0][1] * 2 * row  # fetched before the first step
    keys = [4 * max(map(len, of_ranks)) for of_ranks in by_step]
    assert sent == [rows_bytes + 8 + of_keys + 1 for rows_bytes, of_keys in zip(expected, keys, strict=True)]
    # Cached and late rows, and ids, of the batches read ahead; nothing as large as the other rows of the table.
    assert max(kept) < 0.1 * shard, kept


def tensor_bytes() -> int:
    """Bytes of all tensors in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
        storages = [one.untyped_storage() for one in tensors if one.layout == torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def case_distributed_data_parallel_averages_the_layers_alone() -> None:
    batches = looked_up(4, 30_000, 64)
    trained = []
    for kind in (RowExchange, ShardedTables):
        model = Clicks()
        rows = kind(model)
        tables = torch.optim.SGD([model.table.weight], lr=1.0)
        ahead = LookAhead(batches, rows, tables, lambda batch: {"table.weight": batch["items"]})
        ddp = DistributedDataParallel(model)
        layers = torch.optim.SGD(model.layer.parameters(), lr=1.0)
        for batch in ahead:
            loss = ddp(batch["items"]).square().mean()  # kept until the next, with its graph
            loss.backward()
            ahead.step()
            layers.step()
            layers.zero_grad()
        trained.append((model.table.weight.detach(), model.layer.weight.detach()))
    (table, layer), (part, same_layer) = trained
    assert torch.equal(part, table[dist.get_rank() :: dist.get_world_size()])
    assert torch.equal(same_layer, layer)
