"""A training that `make gpu-check` profiles, and whose steps it then times with methods.

    torchrun --nproc-per-node 2 -m hvdcomp profile -m tests.gpu.profiled --one-gpu
    torchrun --nproc-per-node 2 -m tests.gpu.profiled --one-gpu --method none --method int8 --output FILE

The model is that of `tests.gpu.ddp.Training`. On the host it is a small one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.gpu.ddp import Training
from tests.gpu.libraries import TorchDistributed

PROFILED_STEPS = 60
"""More than `hvdcomp profile` watches: it ends the program."""
ROUNDS, STEPS = 4, 5


def medians(library: TorchDistributed, place: str, methods: Sequence[str]) -> dict[str, float]:
    """Milliseconds of a step of the slowest rank, by method; the methods take turns. "none" is DDP alone."""
    trainings = {one: Training("" if one == "none" else one, "", place, place != "cuda") for one in methods}
    took: dict[str, list[float]] = {one: [] for one in methods}
    for _ in range(ROUNDS):
        for one, training in trainings.items():
            own = [str(ms) for ms in training.milliseconds(STEPS)]
            took[one] += [max(map(float, step)) for step in zip(*library.gathered_texts(own), strict=True)]
    return {one: statistics.median(ms) for one, ms in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one-gpu", action="store_true", help="ranks share a GPU, over Gloo")
    parser.add_argument("--method", action="append", default=[], help="time steps with this method")
    parser.add_argument("--output", type=Path, help="JSON file of rank 0, with the times by method")
    chosen = parser.parse_args()
    place = chosen.device
    if place == "cuda":
        torch.cuda.set_device(0 if chosen.one_gpu else int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    library = TorchDistributed(place, chosen.one_gpu)
    if chosen.method:
        found = medians(library, place, chosen.method)
        if library.rank == 0:
            chosen.output.write_text(json.dumps(found))
    else:
        training = Training("", "", place, place != "cuda")
        for _ in range(PROFILED_STEPS):
            training.step()
    library.end()


if __name__ == "__main__":
    main()
