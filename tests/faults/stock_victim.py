"""A training of Horovod or DistributedDataParallel as they are, without hvdcomp, in which a fault is planted.

    python -m tests.faults.stock_victim --folder FOLDER --act NAME --rank R --group-timeout SECONDS --horovod|--ddp

The fault happens on rank R in a step, before its backward pass: the others are then in a collective. torch.distributed
waits for a rank for SECONDS.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import click
import torch
from torch import nn

from tests.faults.points import ACTS, Place
from tests.faults.stock import FINISHED
from tests.faults.victim import claims, rank_of

_STEP = 6
_STEPS = 4000  # which are not over before a launcher has ended


@click.command()
@click.option("--folder", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--act", type=click.Choice(list(ACTS)), required=True)
@click.option("--rank", type=int, required=True)
@click.option("--group-timeout", type=float, required=True)
@click.option("--horovod/--ddp", required=True)
def main(folder: Path, act: str, rank: int, group_timeout: float, horovod: bool) -> None:
    """Trains a small model for some steps."""
    mine = rank_of(dict(os.environ))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model, optimizer, leave = _with_horovod(model) if horovod else _with_ddp(model, group_timeout)
    for number in range(1, _STEPS + 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(16, 64)), torch.randint(10, (16,)))
        if mine == rank and number == _STEP and claims(folder, {"act": act, "rank": rank, "step": number}):
            ACTS[act](Place(rank, number, folder, {}))
        loss.backward()
        optimizer.step()
    (folder / FINISHED.format(mine)).touch()
    leave()


def _with_horovod(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    import horovod.torch as hvd

    hvd.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters()), hvd.shutdown


def _with_ddp(model: nn.Module, timeout: float) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), dist.destroy_process_group


if __name__ == "__main__":
    main()
