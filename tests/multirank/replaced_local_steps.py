"""A process of a training with `LocalSteps.compressed` is killed. The others continue without it, and a new one joins.

Arguments: a folder, and the number of this process. Process 1 kills itself in the middle of a round. The others notice
in the exchange, go back to what they saved, and start torch.distributed again in the same process. Process 3 joins them
later. Nobody else is restarted (docs/recovery.md).
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hvdcomp.torch import LocalSteps
from tests.multirank.models import batch, small_model, weights
from tests.multirank.training_ddp import assert_same_everywhere, plain_loss

EVERY = 4
GENERATIONS = ([0, 1, 2], [0, 2], [0, 2, 3])


def start(folder: Path, generation: int, number: int) -> None:
    """Starts torch.distributed with the processes of a generation."""
    members = GENERATIONS[generation]
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(str(folder / f"generation-{generation}"), len(members))
    dist.init_process_group("gloo", store=store, rank=members.index(number), world_size=len(members))


def residuals(optimizer: LocalSteps) -> torch.Tensor:
    kept = optimizer.compression.state_dict()["own"]["residuals"]
    return torch.cat([kept[name]["arrays"][0].reshape(-1) for name in sorted(kept)])


def main(folder: Path, number: int) -> None:
    generation = 0 if number < 3 else 2
    start(folder, generation, number)
    model, generator = small_model(), torch.Generator().manual_seed(number)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = LocalSteps.compressed(inner, EVERY, named_parameters=model.named_parameters())

    def train(steps: int) -> None:
        for _ in range(steps):
            inputs, classes = batch(generator)
            optimizer.zero_grad()
            plain_loss(model, inputs, classes, 0).backward()
            optimizer.step()

    if generation == 0:
        train(EVERY + 1)
        saved: Any = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        kept = residuals(optimizer)
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            train(EVERY)
            raise AssertionError("an exchange without process 1")
        except RuntimeError as error:
            print(f"process {number} lost process 1: {error}", flush=True)
        start(folder, 1, number)
        model.load_state_dict(saved[0])
        optimizer.roll_back(saved[1])
        optimizer.change_ranks(dist.group.WORLD)
        train(1)
        torch.testing.assert_close(residuals(optimizer), kept * 2 / 3)  # shares of two ranks instead of three
        train(EVERY)
        start(folder, 2, number)
    before = weights(model)
    optimizer.change_ranks(dist.group.WORLD)
    assert torch.equal(weights(model), before) == (number < 3), "only the new one begins with the outer weights"
    with optimizer.outer_weights():
        assert_same_everywhere(weights(model))
    train(2 * EVERY)
    optimizer.exchange()
    assert_same_everywhere(weights(model))
    print(f"process {number} ended as rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
