"""A training with `LocalSteps.compressed` whose rank 2 kills itself, so that torchrun ends all ranks, or restarts them.

Arguments: a folder, and the number of steps in all, between checkpoints, and before rank 2 kills itself if there is no
checkpoint. Each rank saves its own state. Later ranks continue from the newest step that all four ranks have saved.
Four ranks end with the bits of a training that was never interrupted; fewer ranks share the residuals of four.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hvdcomp
from hvdcomp.torch import LocalSteps
from tests.multirank.models import batch, small_model, weights
from tests.multirank.training_ddp import assert_same_everywhere, own_generator, plain_loss

RANKS, EVERY = 4, 4


class Training:
    def __init__(self) -> None:
        self.model = small_model()
        inner = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.optimizer = LocalSteps.compressed(inner, EVERY, named_parameters=self.model.named_parameters())
        self.generator, self.done = own_generator(), 0

    def step(self) -> None:
        inputs, classes = batch(self.generator)
        self.optimizer.zero_grad()
        plain_loss(self.model, inputs, classes, 0).backward()
        self.optimizer.step()
        self.done += 1

    def save(self, folder: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }
        file = folder / f"{self.done}-of-rank-{dist.get_rank()}.pt"
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)  # a rank that is killed leaves no half of a file

    def load(self, states: list[dict[str, Any]], done: int) -> None:
        """Continues from the states of all four ranks, as docs/compressed-steps.md says."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        of_all = [state["optimizer"]["local_steps"]["compression"] for state in states]
        state = states[rank]
        state["optimizer"]["local_steps"]["compression"] = hvdcomp.state_for(of_all, rank, ranks)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.done = done


def newest(folder: Path) -> tuple[int, list[Path]]:
    """The newest step that all ranks have saved, and their files."""
    steps = {int(re.sub("-.*", "", file.name)) for file in folder.glob("*.pt")}
    of_ranks = {step: [folder / f"{step}-of-rank-{rank}.pt" for rank in range(RANKS)] for step in steps}
    saved = [step for step, files in of_ranks.items() if all(file.exists() for file in files)]
    return (max(saved), of_ranks[max(saved)]) if saved else (0, [])


def unsent(state: dict[str, Any]) -> torch.Tensor:
    kept = state["own"]["residuals"]
    return torch.cat([kept[name]["arrays"][0].reshape(-1).double() for name in sorted(kept)])


def main(folder: Path, steps: int, every: int, last: int) -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    training, (done, files) = Training(), newest(folder)
    if files:
        states = [torch.load(file) for file in files]
        lacking = torch.stack([unsent(state["optimizer"]["local_steps"]["compression"]) for state in states]).mean(0)
        training.load(states, done)
        training.step()
        assert training.done % EVERY, "without an exchange, the mean lacks what it lacked"
        lacks = unsent(training.optimizer.compression.state_dict())
        dist.all_reduce(lacks)
        torch.testing.assert_close(lacks / ranks, lacking, rtol=1e-5, atol=1e-9)
        with training.optimizer.outer_weights():
            assert_same_everywhere(weights(training.model))
    while training.done < steps:
        training.step()
        if training.done % every == 0:
            training.save(folder)
        if training.done == last and not files and dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    training.optimizer.exchange()
    assert_same_everywhere(weights(training.model))
    if ranks == RANKS:
        alone = Training()
        while alone.done < steps:
            alone.step()
        alone.optimizer.exchange()
        assert torch.equal(weights(alone.model), weights(training.model))
    print(f"rank {dist.get_rank()} of {ranks} continued after {done} steps", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
