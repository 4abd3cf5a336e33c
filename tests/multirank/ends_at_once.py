"""A training that ends right after its last step, while rank 0 is still deciding: `ends_at_once.py horovod|ddp LAST`.

`LAST` is what ranks do after their last step: nothing, or "shutdown" of what carries the gradients.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import hvdcomp
from hvdcomp.policies.request import Statistics

STEPS = 4


@dataclass(frozen=True)
class SlowInTheEnd(hvdcomp.GraVAC):
    """Takes so long over its last decision that the other rank would have ended."""

    name = "slow_in_the_end"

    def decide(self, state: Any, statistics: Statistics) -> Any:
        if statistics.step == STEPS:
            time.sleep(2)
            if "mpi4py.MPI" in sys.modules:
                from mpi4py import MPI

                # Not after the step: when the decision has left, the other rank may end, and with it MPI.
                print(f"MPI has {'' if MPI.Is_finalized() else 'not '}ended\n", end="", flush=True)
        return super().decide(state, statistics)


def main() -> None:
    carrier, last = sys.argv[1:]
    torch.manual_seed(1)
    model = torch.nn.Linear(60, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compression = hvdcomp.Compression(hvdcomp.TopK(ratio=0.05), policy=SlowInTheEnd(every=1))
    forward: torch.nn.Module = model
    if carrier == "horovod":
        import horovod.torch as hvd

        hvd.init()
        rank, shut_down = hvd.rank(), hvd.shutdown
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    else:
        dist.init_process_group("gloo")
        rank, shut_down = dist.get_rank(), dist.destroy_process_group
        forward = torch.nn.parallel.DistributedDataParallel(model)
        hvdcomp.ddp.register(forward, compression, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        forward(torch.randn(8, 60)).square().mean().backward()
        optimizer.step()
    if last == "shutdown":
        shut_down()
    print(f"rank {rank} has ended\n", end="", flush=True)


if __name__ == "__main__":
    main()
