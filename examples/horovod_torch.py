"""The same as examples/ddp.py, but with Horovod: `horovodrun -np 2 --gloo python examples/horovod_torch.py FOLDER`.

Every rank saves to its own file, because residuals differ between the ranks. If you start the program again with the
same folder, the ranks continue from the latest step that all of them have saved, bit for bit. They can also continue
from a step that examples/ddp.py saved.
"""

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits

import hvdcomp

hvd.init()
rank, size, folder = hvd.rank(), hvd.size(), Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
images, digits = (torch.from_numpy(array[rank::size]) for array in load_digits(return_X_y=True))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
compression = hvdcomp.Compression(hvdcomp.Int4())
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
parts = {"model": model, "optimizer": optimizer, "compression": compression}

saved = torch.tensor(max((int(file.stem.split("-")[1]) for file in folder.glob(f"rank{rank}-*.pt")), default=0))
saved = hvd.allreduce(saved, op=hvd.Min)  # the latest step that all ranks have
if saved:
    state = torch.load(folder / f"rank{rank}-{saved}.pt", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])

if saved == 100 and rank == 0:
    print(f"the training in {folder} is complete. To train again, pass another folder or delete this one.")
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(int(saved) + 1, 101):
    batch = torch.arange(32 * step, 32 * step + 32) % len(digits)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images[batch].float() / 16), digits[batch])
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()}, folder / f"rank{rank}.new")
        (folder / f"rank{rank}.new").rename(folder / f"rank{rank}-{step}.pt")
        if rank == 0:
            factor = compression.ledger.totals.compression_factor
            print(f"step {step}: loss {loss:.3f}, {factor:.1f} times fewer bytes than dense")
