"""Training with your own policy: `torchrun --nproc-per-node 2 examples/own_policy.py`.

`Settle` sends many elements of a tensor until its gradient has become small, and few elements from then on. Rank 0
decides based on the norms that the policy requests, and all ranks apply the decision in the same step.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

import hvdcomp
from hvdcomp.policies.base import Policy
from hvdcomp.policies.decisions import Levels
from hvdcomp.policies.request import Period, Request, Statistic


@dataclass(frozen=True)
class SettleState:
    """By tensor name: the first norm of the tensor's gradient, and whether the tensor has settled."""

    first: dict[str, float]
    settled: dict[str, bool]


@dataclass(frozen=True, kw_only=True)
class Settle(Policy[SettleState]):
    """Uses the level `low` until the norm of a tensor's gradient is below `share` of its first norm, then `high`."""

    low: float
    high: float
    share: float = 0.5

    name = "settle"
    state_type = SettleState

    def initial_state(self, tensors):
        return SettleState(dict.fromkeys(tensors, 0.0), dict.fromkeys(tensors, False))

    def request(self, state):
        return Request(frozenset({Statistic.NORMS}), Period(steps=20))  # accumulates gradients over 20 steps

    def update(self, state, statistics):
        first = {name: state.first[name] or norm for name, norm in statistics.norms.items()}
        settled = {
            name: state.settled[name] or norm < self.share * first[name] for name, norm in statistics.norms.items()
        }
        return SettleState(first, settled)

    def decision(self, state):
        return Levels({name: self.high if settled else self.low for name, settled in state.settled.items()})


dist.init_process_group("gloo")  # "nccl" on GPUs
rank, size = dist.get_rank(), dist.get_world_size()
images, digits = (torch.from_numpy(array[rank::size]) for array in load_digits(return_X_y=True))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
compression = hvdcomp.Compression(
    hvdcomp.TopK(ratio=0.1),
    named_parameters=model.named_parameters(),
    policy=Settle(low=0.1, high=0.01),
)
ddp = DistributedDataParallel(model)
hvdcomp.ddp.register(ddp, compression, optimizer)
for step in range(1, 201):
    batch = torch.arange(32 * step, 32 * step + 32) % len(digits)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(ddp(images[batch].float() / 16), digits[batch])
    loss.backward()
    optimizer.step()
    if step % 50 == 0 and rank == 0:
        factor = compression.ledger.last.compression_factor
        print(f"step {step}: loss {loss:.3f}, this step {factor:.1f} times fewer bytes than dense")
dist.barrier()  # without it, a rank that ends before the others is sometimes killed by a signal
dist.destroy_process_group()
