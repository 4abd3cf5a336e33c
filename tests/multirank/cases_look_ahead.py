"""`LookAhead` against `RowExchange.exchange` in each step, over torch.distributed, bit for bit."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hvdcomp import ConfigurationError, RankMismatchError
from hvdcomp.torch import LookAhead, RowExchange
from tests.multirank.models import weights
from tests.multirank.training_ddp import assert_same_everywhere, raised
from tests.multirank.worker import thorough

ROWS = {"items": (2000, 6), "words": (500, 3)}
OFTEN = {name: 1 / torch.arange(1, rows + 1).double() ** 1.1 for name, (rows, _) in ROWS.items()}
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.3}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.01}),
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
        generator = torch.Generator().manual_seed(100 * self.epoch + dist.get_rank())
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

    def __init__(self, kind: tuple[Any, dict[str, Any]]) -> None:
        self.model = Model()
        self.rows = RowExchange(self.model)
        self.optimizer = kind[0](self.model.parameters(), **kind[1])
        self.rate = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)

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


def same_as_synchronous(steps: int, epochs: int) -> None:
    for kind, batches in itertools.product(OPTIMIZERS, (1, 3)):
        plain, ours = Training(kind), Training(kind)
        loader, ahead = Loader(steps), ours.ahead(Loader(steps), batches)
        for _ in range(epochs):
            plain.synchronous(loader)
            ours.look_ahead(ahead, ahead.step)
            assert torch.equal(ours.bits(), plain.bits())
        assert ours.rows.ledger.steps == steps * epochs
        assert_same_everywhere(ours.bits())


def case_it_is_synchronous_training_bit_for_bit() -> None:
    same_as_synchronous(20, 2)


@thorough
def case_it_is_synchronous_training_bit_for_bit_after_500_steps() -> None:
    same_as_synchronous(250, 2)


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
