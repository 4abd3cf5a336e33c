"""A training with `LookAhead` that is killed in the middle of its second epoch, or goes on from its latest checkpoint.

Arguments: a folder, the number of steps of an epoch, of steps between checkpoints, and the step after which rank 1
kills itself, unless there is a checkpoint. In the end its bits are those of synchronous training, on each rank.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.multirank.cases_look_ahead import OPTIMIZERS, Loader, Training

EPOCHS = 2


def main(folder: str, steps: int, every: int, last: int) -> None:
    dist.init_process_group("gloo")
    file = Path(folder) / "checkpoint.pt"
    saved = torch.load(file) if file.exists() else None
    trainings, done = [Training(kind) for kind in OPTIMIZERS], 0
    if saved is not None:
        done = saved["steps"]
        for training, state in zip(trainings, saved["states"], strict=True):
            training.load(state)
    aheads = []
    for training in trainings:
        loader = Loader(steps, start=done % steps)
        loader.epoch = done // steps
        aheads.append((training, loader, training.ahead(loader)))
    while done < EPOCHS * steps:
        for batches in zip(*(ahead for _, _, ahead in aheads), strict=True):
            for batch, (training, loader, ahead) in zip(batches, aheads, strict=True):
                training.model(batch).backward()
                ahead.step()
                training.rate.step()
                loader.start = 0  # of the next epoch
            done += 1
            if done % every == 0 and dist.get_rank() == 0:
                torch.save({"steps": done, "states": [training.state() for training in trainings]}, file)
            if done == last and saved is None and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    for training, kind in zip(trainings, OPTIMIZERS, strict=True):
        plain, loader = Training(kind), Loader(steps)
        for _ in range(EPOCHS):
            plain.synchronous(loader)
        assert torch.equal(training.bits(), plain.bits())
    print(f"rank {dist.get_rank()} went on after {saved and saved['steps']} steps and has the bits", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
