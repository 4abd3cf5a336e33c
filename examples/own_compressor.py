"""Training with your own compressor: `torchrun --nproc-per-node 2 examples/own_compressor.py`.

`Turns` divides each gradient into 16 parts, and sends one part per step, in turn. All ranks send the same part, so one
allreduce adds it up. Error feedback keeps the other parts until it is their turn.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

import hvdcomp
from hvdcomp.compressors.base import Compressor, require_count
from hvdcomp.compressors.packing import pad
from hvdcomp.compressors.protocol import AllReduce, Outcome


@dataclass(frozen=True)
class Turns(Compressor):
    """Sends each part of a gradient once every `turns` steps."""

    turns: int

    name = "turns"
    examples = ("turns:turns=16",)
    sends = "one part of the elements, a different one in each step"
    biased = True  # so error feedback adds the unsent parts to the next gradient

    def __post_init__(self):
        require_count(self.name, turns=self.turns)

    def aggregate(self, xp, x, state, context):
        """Computes with one tensor, and uses `yield` when it needs data from the other ranks."""
        vector = pad(xp, xp.flatten(x), self.turns)
        length = vector.shape[0] // self.turns
        start = context.step % self.turns * length
        shard = vector[start : start + length]

        def spread(part):
            before, after = (xp.zeros((count,), like=x) for count in (start, vector.shape[0] - start - length))
            elements = xp.concatenate([before, part, after])
            return xp.reshape(elements[: xp.flatten(x).shape[0]], x.shape)

        mean = yield AllReduce(shard)
        return Outcome(mean=spread(mean), sent=spread(shard))


dist.init_process_group("gloo")  # "nccl" on GPUs
rank, size = dist.get_rank(), dist.get_world_size()
images, digits = (torch.from_numpy(array[rank::size]) for array in load_digits(return_X_y=True))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
compression = hvdcomp.Compression(Turns(turns=16))
ddp = DistributedDataParallel(model)
hvdcomp.ddp.register(ddp, compression, optimizer)
for step in range(1, 401):
    batch = torch.arange(32 * step, 32 * step + 32) % len(digits)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(ddp(images[batch].float() / 16), digits[batch])
    loss.backward()
    optimizer.step()
    if step % 100 == 0 and rank == 0:
        factor = compression.ledger.totals.compression_factor
        print(f"step {step}: loss {loss:.3f}, {factor:.1f} times fewer bytes than dense")
dist.barrier()  # without it, a rank that ends before the others is sometimes killed by a signal
dist.destroy_process_group()
