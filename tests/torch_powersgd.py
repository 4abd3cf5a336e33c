"""Trains a small model on two processes with torch's PowerSGD hook, and records the hook's inputs and outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

WORLD_SIZE = 2
STEPS = 21  # with PowerSGD; the first one sets torch's start, the others are compared
_START = 2  # torch's least number of steps before PowerSGD


def record(rank: int, folder: str, cases: list[tuple[int, str]]) -> None:
    """Writes `rank{rank}.pt` in each process: for each case (rank, dtype) names, gradients, results, state."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE)
    torch.set_num_threads(1)
    recorded = {case: _train(rank, *case) for case in cases}
    torch.save(recorded, Path(folder, f"rank{rank}.pt"))
    dist.destroy_process_group()


def _train(rank: int, matrix_rank: int, dtype: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 10, bias=False))
    model = DistributedDataParallel(model.to(getattr(torch, dtype)))
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=matrix_rank,
        start_powerSGD_iter=_START,
        min_compression_rate=1,
        use_error_feedback=True,
        warm_start=True,
    )
    local: list[dict[str, torch.Tensor]] = []

    def hook(state, bucket):  # without annotations, because torch compares them with types, not their names
        assert bucket.is_last()
        assert bucket.index() == 0  # all in one bucket
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        local.append({names[parameter]: gradient.clone() for parameter, gradient in pairs})
        return powerSGD_hook.powerSGD_hook(state, bucket)

    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    generator = torch.Generator().manual_seed(rank + 1)
    results, start = [], {}
    for step in range(_START + STEPS):
        data = torch.randn(8, 16, generator=generator, dtype=model.module[0].weight.dtype)
        optimizer.zero_grad()
        (model(data) - data[:, :10].sin()).square().mean().backward()
        results.append({name: parameter.grad.clone() for name, parameter in model.module.named_parameters()})
        optimizer.step()
        if step == _START:
            start = {"q": state.q_memory_dict[0].clone(), "error": state.error_dict[0].clone()}
    return {
        "order": list(local[-1]),  # of the tensors in torch's flat state
        "gradients": local[_START + 1 :],
        "results": results[_START + 1 :],
        "error": state.error_dict[0].clone(),
        "start": start,
    }
