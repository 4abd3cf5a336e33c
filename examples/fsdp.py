"""A resumable training loop with FSDP2: `HVDCOMP_RANKS_PER_NODE=1 torchrun --nproc-per-node 2 examples/fsdp.py FOLDER`.

With the variable, each rank counts as a node, so that you can try this on one machine; omit it on several machines.
FOLDER must be on a disk that all nodes share. If you start the program again with the same folder, the ranks continue
from the latest checkpoint, bit for bit. A different number of ranks can also continue, and keeps all residuals.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import hvdcomp

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, size, folder = dist.get_rank(), dist.get_world_size(), Path(sys.argv[1])
images, digits = (torch.from_numpy(array[rank::size]) for array in load_digits(return_X_y=True))
torch.manual_seed(0)  # all ranks begin with the same weights
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
compression = hvdcomp.Compression(hvdcomp.Int4(), memory=hvdcomp.ErrorFeedback())  # also if each rank is a node
hvdcomp.fsdp.register(model, compression)

saved = max((int(file.parent.name) for file in folder.glob("*/.metadata")), default=0)
if saved:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / str(saved))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    hvdcomp.dcp.load(compression, folder / str(saved))

if saved == 100 and rank == 0:
    print(f"the training in {folder} is complete. To train again, pass another folder or delete this one.")
for step in range(saved + 1, 101):
    batch = torch.arange(32 * step, 32 * step + 32) % len(digits)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images[batch].float() / 16), digits[batch])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 0:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "compression": hvdcomp.dcp.by_rank(compression)}
        dcp.save(state, checkpoint_id=folder / str(step))
        if rank == 0:
            factor = compression.ledger.totals.compression_factor
            print(f"step {step}: loss {loss:.3f}, {factor:.1f} times fewer bytes between nodes than dense")
dist.barrier()  # without it, a rank that ends before the others is sometimes killed by a signal
dist.destroy_process_group()
