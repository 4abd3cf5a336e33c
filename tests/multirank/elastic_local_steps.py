"""Local steps in elastic Horovod: `python -m tests.multirank.elastic_local_steps PLAN_FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import horovod.torch.elastic  # noqa: F401 - makes hvd.elastic
import torch

import hvdcomp
from tests.multirank.elastic_training import Phases, batch_of, digits


def main(plan: dict[str, Any]) -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())  # all ranks get the weights of rank 0
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    compression = hvdcomp.Compression.from_spec(plan["compressor"], **plan["options"])
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = hvdcomp.torch.LocalSteps(inner, compression=compression, **plan["local"])
    images, shown = map(torch.from_numpy, digits())
    phases = Phases(plan, hvd, compression)

    def values() -> torch.Tensor:
        return torch.cat([one.detach().reshape(-1) for one in model.parameters()])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while phases.go_on(state):
            with optimizer.outer_weights():
                outer = values()
            phases.write(begins=state.step, at_outer=torch.equal(values(), outer), moments=len(inner.state))
            mine = batch_of(state.step, hvd.rank())
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images[mine]), shown[mine])
            loss.backward()
            optimizer.step()
            with optimizer.outer_weights():
                outer = [one.detach().double().sum().item() for one in model.parameters()]
            phases.step_done(state, outer, loss.item())

    train(hvd.elastic.TorchState(optimizer=optimizer, step=0, phase=0, done=0))
    optimizer.exchange()
    with torch.no_grad():
        right = (model(images).argmax(1) == shown).float().mean().item()
    phases.write(right=right, ends=values().double().sum().item())


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
