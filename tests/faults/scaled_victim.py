"""A training with hvdcomp and a loss scaler, in which gradients of one rank are spoilt.

    python -m tests.faults.scaled_victim --folder FOLDER --steps N [--rank R --kind KIND --bad STEPS]
        [--left-out STEPS] --horovod|--ddp

STEPS are such as `3,5,9`, or `5-` for all from 5 on. After each step every rank adds a line to its file
`weights-R.txt`, as the victim of the other rows does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

import hvdcomp
from tests.faults.mishaps import spoil
from tests.faults.victim import WEIGHTS, claims, rank_of


def _steps(text: str) -> Callable[[int], bool]:
    if text.endswith("-"):
        return lambda step: step >= int(text[:-1])
    return {int(part) for part in text.split(",") if part}.__contains__


@click.command()
@click.option("--folder", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--steps", type=int, required=True)
@click.option("--rank", type=int, default=0)
@click.option("--kind", type=click.Choice(["nan", "inf"]), default="nan")
@click.option("--bad", default="")
@click.option("--left-out", default="")
@click.option("--horovod/--ddp", required=True)
def main(folder: Path, steps: int, rank: int, kind: str, bad: str, left_out: str, horovod: bool) -> None:
    """Trains a small model for some steps."""
    mine, is_bad, is_left_out = rank_of(dict(os.environ)), _steps(bad), _steps(left_out)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    scaler = torch.amp.GradScaler("cpu", growth_interval=5)
    model, optimizer, synchronize, leave = (_with_horovod if horovod else _with_ddp)(model, scaler)
    draws = torch.Generator().manual_seed(mine)
    for number in range(1, steps + 1):
        inputs, classes = torch.randn(16, 64, generator=draws), torch.randint(10, (16,), generator=draws)
        if not is_left_out(number):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), classes)
            if mine == rank and is_bad(number):
                claims(folder, {"act": kind, "rank": rank, "step": number})
                spoil(next(iter(model.parameters())), float(kind))
            scaler.scale(loss).backward()
            synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize() if horovod else torch.enable_grad():
                scaler.step(optimizer)
            scaler.update()
        digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
        with (folder / WEIGHTS.format(mine)).open("a") as trace:
            trace.write(f"{number} {digest}\n")
    leave()


def _with_horovod(model: nn.Module, scaler: Any) -> tuple[nn.Module, Any, Callable[[], None], Callable[[], None]]:
    import horovod.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    compression = hvdcomp.Compression(
        hvdcomp.TopK(ratio=0.1), named_parameters=model.named_parameters(), grad_scaler=scaler
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    return model, optimizer, optimizer.synchronize, hvd.shutdown


def _with_ddp(model: nn.Module, scaler: Any) -> tuple[nn.Module, Any, Callable[[], None], Callable[[], None]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
    compression = hvdcomp.Compression(hvdcomp.TopK(ratio=0.1), grad_scaler=scaler)
    hvdcomp.ddp.register(model, compression)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def leave() -> None:
        dist.barrier()  # Gloo's threads may end a rank that goes away while they are at work
        dist.destroy_process_group()
        os._exit(0)

    return model, optimizer, lambda: None, leave


if __name__ == "__main__":
    main()
