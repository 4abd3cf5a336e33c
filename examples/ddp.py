"""A resumable training loop with DistributedDataParallel: `torchrun --nproc-per-node 2 examples/ddp.py FOLDER`.

Every rank saves to its own file, because residuals differ between the ranks. If you start the program again with the
same folder, the ranks continue from the latest step that all of them have saved, bit for bit.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

import hvdcomp

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, size, folder = dist.get_rank(), dist.get_world_size(), Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
images, digits = (torch.from_numpy(array[rank::size]) for array in load_digits(return_X_y=True))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
compression = hvdcomp.Compression(hvdcomp.Int4())
parts = {"model": model, "optimizer": optimizer, "compression": compression}

saved = torch.tensor(max((int(file.stem.split("-")[1]) for file in folder.glob(f"rank{rank}-*.pt")), default=0))
dist.all_reduce(saved, op=dist.ReduceOp.MIN)  # the latest step that all ranks have
if saved:
    state = torch.load(folder / f"rank{rank}-{saved}.pt", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])

ddp = DistributedDataParallel(model)
hvdcomp.ddp.register(ddp, compression, optimizer)
if saved == 100 and rank == 0:
    print(f"the training in {folder} is complete. To train again, pass another folder or delete this one.")
for step in range(int(saved) + 1, 101):
    batch = torch.arange(32 * step, 32 * step + 32) % len(digits)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(ddp(images[batch].float() / 16), digits[batch])
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()}, folder / f"rank{rank}.new")
        (folder / f"rank{rank}.new").rename(folder / f"rank{rank}-{step}.pt")
        if rank == 0:
            factor = compression.ledger.totals.compression_factor
            print(f"step {step}: loss {loss:.3f}, {factor:.1f} times fewer bytes than dense")
dist.barrier()  # without it, a rank that ends before the others is sometimes killed by a signal
dist.destroy_process_group()
