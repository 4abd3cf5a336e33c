"""A training in elastic Horovod with PyTorch: `python -m tests.multirank.elastic_torch PLAN_FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import horovod.torch.elastic  # noqa: F401 - makes hvd.elastic
import torch

import hvdcomp
from hvdcomp.torch import CompressedAdam
from tests.multirank.elastic_training import Phases, batch_of, digits

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.1),
    "frozen": lambda parameters: CompressedAdam(parameters, 2e-3, freeze_after=10),
    "local": lambda parameters: CompressedAdam(parameters, 2e-3, freeze_after=10, local_steps=4),
}


def main(plan: dict[str, Any]) -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())  # Horovod gives all ranks the weights of rank 0
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    compression = hvdcomp.Compression.from_spec(plan["compressor"], **plan["options"])
    optimizer = hvd.DistributedOptimizer(
        _OPTIMIZERS[plan.get("optimizer", "sgd")](model.parameters()),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    images, shown = map(torch.from_numpy, digits())
    phases = Phases(plan, hvd, compression)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while phases.go_on(state):
            if state.step == plan.get("decays_at"):
                optimizer.param_groups[0]["lr"] /= 2
            passes = compression.accumulation
            for part in range(passes):
                mine = batch_of(state.step, hvd.rank() * passes + part)
                loss = torch.nn.functional.cross_entropy(model(images[mine]), shown[mine])
                (loss / passes).backward()
            optimizer.step()
            optimizer.zero_grad()
            in_sync = getattr(optimizer, "in_sync", True)
            weights = [one.detach().double().sum().item() for one in model.parameters()] if in_sync else []
            phases.step_done(state, weights, loss.item(), commits=in_sync)

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression, step=0, phase=0, done=0))
    with torch.no_grad():
        phases.write(right=(model(images).argmax(1) == shown).float().mean().item())


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
