"""`LookAhead` of `ShardedTables` against `RowExchange.exchange` of whole tables in each step, bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from hvdcomp.torch import ShardedTables
from tests.multirank.cases_look_ahead import OPTIMIZERS, Loader, Model, Training
from tests.multirank.training_ddp import gathered


class Sharded(Training):
    """A training whose tables are sharded."""

    def __init__(self, kind: tuple[Any, dict[str, Any]], model: Any = None) -> None:
        self.model = Model() if model is None else model
        self.rows: Any = ShardedTables(self.model)
        self.optimizer = kind[0](self.model.parameters(), **kind[1])
        self.rate = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)


def parts(training: Training) -> dict[str, Any]:
    state = training.optimizer.state_dict()["state"]
    return {"model": dict(training.model.state_dict()), "sums": {key: kept.get("sum") for key, kept in state.items()}}


def assert_same(ours: Training, plain: Training) -> None:
    whole, expected = ShardedTables.resharded(gathered(parts(ours)), 0, 1), parts(plain)
    for name, weight in expected["model"].items():
        assert torch.equal(whole["model"][name], weight), name
    for number, sums in expected["sums"].items():
        assert sums is None or torch.equal(whole["sums"][number], sums), number


def case_it_is_synchronous_training_of_whole_tables_bit_for_bit() -> None:
    for kind, batches in zip(OPTIMIZERS, (3, 1, 2), strict=True):
        plain, ours = Training(kind), Sharded(kind)
        loader, ahead = Loader(20), ours.ahead(Loader(20), batches)
        for _ in range(2):
            plain.synchronous(loader)
            ours.look_ahead(ahead, ahead.step)
            assert_same(ours, plain)
