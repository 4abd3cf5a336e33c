"""`LookAhead` against `RowExchange.exchange` in each step, over torch.distributed, bit for bit."""

from __future__ import annotations

import gc
import io
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hvdcomp import ConfigurationError, RankMismatchError
from hvdcomp.torch import LookAhead, RowExchange, RowWiseAdagrad
from hvdcomp.torch.ranks import started_ranks
from tests.multirank.models import weights
from tests.multirank.training_ddp import assert_same_everywhere, raised
from tests.multirank.worker import thorough

ROWS = {"items": (2000, 6), "words": (500, 3)}
OFTEN = {name: 1 / torch.arange(1, rows + 1).double() ** 1.1 for name, (rows, _) in ROWS.items()}
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.3}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.01}),
    (RowWiseAdagrad, {"lr": 0.1}),
]
Batch = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.items = torch.nn.Embedding(*ROWS["items"], sparse=True, padding_idx=1)
        self.words = torch.nn.EmbeddingBag(*ROWS["words"], sparse=True, mode="sum")

    def forward(self, batch: Batch) -> torch.Tensor:
        items = self.items(batch["items"]).sum(1)
        return items.sin().sum() + self.words(batch["words"]).cos().sum()


class Loader:
    """Batches that differ between ranks and epochs, in another order in each."""

    def __init__(self, steps: int, start: int = 0, size: int = 16) -> None:
        self.steps, self.start, self.size, self.epoch = steps, start, size, 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(100 * self.epoch + started_ranks().rank)
        self.epoch += 1
        for step in range(self.steps):
            batch = {
                name: torch.multinomial(often, 2 * self.size, replacement=True, generator=generator).view(-1, 2)
                for name, often in OFTEN.items()
            }
            if step >= self.start:
                yield batch


def ids_of(batch: Batch) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": ids for name, ids in batch.items()}


class Training:
    """A model whose learning rate changes in each step."""

    def __init__(self, kind: tuple[Any, dict[str, Any]], model: torch.nn.Module | None = None, **options: Any) -> None:
        self.model: Any = Model() if model is None else model
        self.rows = self.exchange(**options)
        self.optimizer = kind[0](self.model.parameters(), **kind[1])
        self.rate = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)

    def exchange(self, **options: Any) -> Any:
        return RowExchange(self.model, **options)

    def ahead(self, loader: Iterable[Batch], batches: int = 3) -> LookAhead:
        return LookAhead(loader, self.rows, self.optimizer, ids_of, batches)

    def synchronous(self, loader: Iterable[Batch]) -> None:
        for batch in loader:
            self.model(batch).backward()
            self.rows.exchange()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.rate.step()

    def look_ahead(self, ahead: Iterable[Batch], step: Any) -> None:
        for batch in ahead:
            self.model(batch).backward()
            step()
            self.rate.step()

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "rate": self.rate}
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.seek(0)
        return torch.load(file)

    def load(self, state: dict[str, Any]) -> None:
        for name, one in state.items():
            getattr(self, name).load_state_dict(one)

    def bits(self) -> torch.Tensor:
        """Of weights, and of what Adagrad adds up."""
        kept = [one["sum"].reshape(-1) for one in self.optimizer.state.values() if "sum" in one]
        return torch.cat([weights(self.model), *kept])


def assert_same_bits(ours: Training, plain: Training) -> None:
    assert torch.equal(ours.bits(), plain.bits())


def trained_ahead(
    training: type[Training],
    steps: int,
    epochs: int,
    most_batches: int,
    assert_same: Callable[[Training, Training], None],
) -> Iterator[Training]:
    """A training with each optimizer that looks ahead, in the end; after each epoch it is the same as a plain one."""
    for kind, batches in zip(OPTIMIZERS, (most_batches, 1, 2), strict=True):
        plain, ours = Training(kind), training(kind)
        loader, ahead = Loader(steps), ours.ahead(Loader(steps), batches)
        for _ in range(epochs):
            plain.synchronous(loader)
            ours.look_ahead(ahead, ahead.step)
            assert_same(ours, plain)
        assert ours.rows.ledger.steps == steps * epochs
        yield ours


def same_as_synchronous(steps: int, epochs: int) -> Iterator[torch.Tensor]:
    """The bits of each training, in the end."""
    for ours in trained_ahead(Training, steps, epochs, 3, assert_same_bits):
        yield ours.bits()


def case_it_is_synchronous_training_bit_for_bit() -> None:
    for bits in same_as_synchronous(20, 2):
        assert_same_everywhere(bits)


def in_turns() -> None:
    """Two trainings, whose exchanges are under way at the same time."""
    plain, ours = ([Training(kind) for kind in OPTIMIZERS[1:]] for _ in range(2))
    aheads = [training.ahead(Loader(6)) for training in ours]
    for batches in zip(*aheads, strict=True):
        for training, ahead, batch in zip(ours, aheads, batches, strict=True):
            training.look_ahead([batch], ahead.step)
    for one, other in zip(plain, ours, strict=True):
        one.synchronous(Loader(6))
        assert torch.equal(other.bits(), one.bits())


def case_two_of_them_take_turns() -> None:
    in_turns()


@thorough
def case_it_is_synchronous_training_bit_for_bit_after_500_steps() -> None:
    for bits in same_as_synchronous(250, 2):
        assert_same_everywhere(bits)


def resumed(steps: int, stop: int) -> None:
    for kind in OPTIMIZERS:
        plain, before, after = Training(kind), Training(kind), Training(kind)
        plain.synchronous(Loader(steps))
        ahead = before.ahead(Loader(steps))
        before.look_ahead(itertools.islice(ahead, stop), ahead.step)
        state = before.state()
        after.load(state)
        rest = after.ahead(Loader(steps, start=stop))
        after.look_ahead(rest, rest.step)
        assert torch.equal(after.bits(), plain.bits())


def case_it_resumes_in_mid_epoch_bit_for_bit() -> None:
    resumed(20, 7)


@thorough
def case_it_resumes_in_mid_epoch_bit_for_bit_after_500_steps() -> None:
    resumed(500, 207)


def batch_of(*items: int) -> Batch:
    return {"items": torch.tensor(items, dtype=torch.int64).view(-1, 1), "words": torch.zeros(1, 1, dtype=torch.int64)}


def case_a_rank_waits_only_for_rows_that_it_looks_up_and_reads_none_late() -> None:
    # Row 7 is rank 0's alone: late from step 1 on, urgent in step 3, and late again from step 4 on.
    first = dist.get_rank() == 0
    batches = [batch_of(*items) for items in ([[7, 8], [2], [7], [7], [2]] if first else [[2], [3], [2], [3], [2]])]
    plain, ours = Training(OPTIMIZERS[0]), Training(OPTIMIZERS[0])
    begun, ids = ours.model.items.weight[7].clone(), torch.arange(10).view(-1, 1)
    ahead = ours.ahead(batches)
    for step, batch in enumerate(ahead, 1):
        if step == 3:
            assert torch.equal(ours.model.items.weight[7], begun) == (not first)
        ours.model(batch).backward()
        ahead.step()
        ours.rate.step()
        plain.synchronous([batch])
        if step == 4:
            assert not torch.equal(ours.model.items.weight[7], plain.model.items.weight[7])
            with torch.inference_mode():
                assert torch.equal(ours.model.items(ids), plain.model.items(ids))
    assert torch.equal(ours.bits(), plain.bits())


class Broken:
    """A loader whose second batch cannot be read."""

    def __iter__(self) -> Iterator[Batch]:
        yield batch_of(5)
        raise OSError("the disk is gone")


def case_what_is_not_as_it_was_said_is_refused_on_every_rank() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    def train(loader: Iterable[Batch], **changes: Any) -> str:
        ours = Training(OPTIMIZERS[0])
        ahead = ours.ahead(loader)

        def run() -> None:
            for batch in ahead:
                ours.model({**batch, **changes}).backward()
                ahead.step()

        begun = weights(ours.model)
        said = raised(RankMismatchError, run)
        assert torch.equal(weights(ours.model), begun)
        return said

    assert f"rank {last} has fewer batches" in train(Loader(2 if rank == last else 3))
    said = train([batch_of(5, 2000 if rank == last else 3)])
    assert f"rank {last} could not find out which rows a batch looks up" in said
    assert rank != last or "returned rows from 5 to 2000 of items.weight, which has only rows 0 to 1999" in said
    # An error of the user's own code, in the function `ids` and in the loader.
    said = train([{**batch_of(5), **({"items": None} if rank == last else {})}])
    assert f"rank {last} could not find out which rows a batch looks up" in said
    assert rank != last or ": AttributeError: 'NoneType' object" in said
    said = train(Broken() if rank == last else [batch_of(5)] * 3)
    assert f"rank {last} could not find out which rows a batch looks up" in said
    assert rank != last or said.endswith(": OSError: the disk is gone")
    said = train([batch_of(5)], **({"items": torch.tensor([[5, 6]])} if rank == last else {}))
    assert f"rank {last} has a gradient of rows that the function `ids` did not return" in said
    assert rank != last or "row 6 of items.weight" in said


def case_wrong_uses_are_refused() -> None:
    ours = Training(OPTIMIZERS[0])
    parameters = list(ours.model.parameters())
    for optimizer, message in (
        (torch.optim.SparseAdam(parameters), "given a SparseAdam"),
        (torch.optim.SGD(parameters, lr=0.1, momentum=0.9), "momentum=0.9 of SGD"),
        (torch.optim.Adagrad(parameters, lr_decay=0.1), "lr_decay=0.1 of Adagrad"),
        (torch.optim.SGD(parameters[:1]), "pass an optimizer of items.weight, words.weight"),
    ):
        said = raised(ConfigurationError, lambda one=optimizer: LookAhead([], ours.rows, one, ids_of))
        assert message in said
    some = RowExchange(ours.model, ratio=0.5)
    said = raised(ConfigurationError, lambda: LookAhead([], some, ours.optimizer, ids_of))
    assert "ratio=0.5; leave ratio out" in said
    assert "batches=0" in raised(ConfigurationError, lambda: ours.ahead([], 0))
    names = ["items.weight", "dense.weight"]
    ours.model.dense = torch.nn.Embedding(3, 2)
    dense = RowExchange(ours.model, names)
    said = raised(ConfigurationError, lambda: LookAhead([], dense, ours.optimizer, ids_of))
    assert "dense.weight has sparse=False" in said

    ahead = ours.ahead(Loader(3))
    assert len(ahead) == 3
    assert "call it once for each" in raised(ConfigurationError, ahead.step)
    batches = iter(ahead)
    next(batches)
    assert "was not called" in raised(ConfigurationError, lambda: next(batches))
    first = iter(ahead)
    ours.model(next(first)).backward()
    ahead.step()
    assert "call it once for each" in raised(ConfigurationError, ahead.step)
    next(iter(ahead))
    assert "iterated over again" in raised(ConfigurationError, lambda: next(first))


def case_a_new_one_takes_over_from_a_broken_off_epoch() -> None:
    plain, ours = Training(OPTIMIZERS[2]), Training(OPTIMIZERS[2])
    first = ours.ahead(Loader(6))
    ours.look_ahead(itertools.islice(first, 3), first.step)
    second = ours.ahead(itertools.islice(Loader(6), 3, None))
    old = weakref.ref(first)
    assert "only the latest" in raised(ConfigurationError, iter(first).__next__)
    del first
    gc.collect()
    assert old() is None
    ours.look_ahead(second, second.step)
    plain.synchronous(Loader(6))
    assert torch.equal(ours.bits(), plain.bits())
    assert_same_everywhere(ours.bits())


def case_late_rows_are_updated_before_a_new_one_looks_rows_up() -> None:
    """Else each rank would update them when it first looks them up: between other updates than the other ranks."""
    ours = Training(OPTIMIZERS[2])
    first = ours.ahead([batch_of(5, 7), batch_of(2)])
    ours.look_ahead(itertools.islice(first, 1), first.step)
    second = ours.ahead([batch_of(5 if dist.get_rank() == 0 else 2)])
    ours.look_ahead(second, second.step)
    assert_same_everywhere(ours.bits())
