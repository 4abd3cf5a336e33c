"""A training that continues when workers come and go: Horovod's elastic mode, with compressed gradients.

After every change Horovod calls `train` again, with the last committed state. The compression is part of the state:
levels, policy and warm starts are kept, and so is each rank's residual.
"""

import os

import horovod.torch as hvd
import horovod.torch.elastic  # noqa: F401 - makes hvd.elastic
import numpy as np
import torch
from sklearn.datasets import load_digits

import hvdcomp

STEPS = int(os.environ.get("STEPS", "2000"))
BATCH = 32  # of one rank
COMMIT = 20  # steps between commits, which a change loses at most

images, digits = load_digits(return_X_y=True)
images, digits = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits)

hvd.init()
torch.manual_seed(1)
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).to(device)
compression = hvdcomp.Compression(hvdcomp.Int4())
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=compression,
)


@hvd.elastic.run
def train(state):
    if hvd.rank() == 0:
        print(f"step {state.step}: {hvd.size()} ranks", flush=True)
    while state.step < STEPS:
        # Every rank draws the same order and takes its own part, with any number of ranks.
        order = np.random.default_rng(state.step).permutation(len(digits))
        batch = order[hvd.rank() * BATCH : (hvd.rank() + 1) * BATCH]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[batch].to(device)), digits[batch].to(device))
        loss.backward()
        optimizer.step()
        state.step += 1
        if hvd.rank() == 0 and state.step % 200 == 0:
            print(f"step {state.step}: loss {loss.item():.4f}", flush=True)
        if state.step % COMMIT == 0:
            state.commit()  # raises if workers came or went


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression, step=0))
with torch.no_grad():
    accuracy = (model(images.to(device)).argmax(1).cpu() == digits).float().mean().item()
if hvd.rank() == 0:
    print(f"step {STEPS}: {accuracy:.1%} of the training digits right", flush=True)
