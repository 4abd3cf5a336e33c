"""Training that goes on when workers come and go: Horovod's elastic mode, with compressed gradients.

After every change Horovod calls `train` again, on what was committed last. Model, optimizer and compression are made
anew each time, because they belong to the ranks that there were. Of the compression, levels, policy and warm starts go
on; what ranks had not sent yet (residuals) starts at zero.
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
COMMIT = 20  # steps between commits: what a change may cost at most

images, digits = load_digits(return_X_y=True)
images, digits = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits)


@hvd.elastic.run
def train(state):
    torch.manual_seed(1)
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    compression = hvdcomp.Compression(hvdcomp.TopK(ratio=0.01), named_parameters=model.named_parameters())
    if state.saved is not None:
        model.load_state_dict(state.saved["model"])
        optimizer.load_state_dict(state.saved["optimizer"])
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    if state.saved is not None and state.saved["compression"]:
        compression.load_state_dict(state.saved["compression"])
    if hvd.rank() == 0:
        print(f"step {state.step}: {hvd.size()} ranks", flush=True)

    while state.step < STEPS:
        # Every rank draws the same order and takes its own part, however many ranks there are.
        order = np.random.default_rng(state.step).permutation(len(digits))
        mine = order[hvd.rank() * BATCH : (hvd.rank() + 1) * BATCH]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[mine].to(device)), digits[mine].to(device))
        loss.backward()
        optimizer.step()
        state.step += 1
        if state.step % COMMIT == 0:
            state.saved = {
                "model": {name: value.cpu() for name, value in model.state_dict().items()},
                "optimizer": optimizer.state_dict(),
                "compression": compression.state_dict(),
            }
            state.commit()  # raises if workers came or went
        if hvd.rank() == 0 and state.step % 200 == 0:
            print(f"step {state.step}: loss {loss.item():.4f}", flush=True)

    with torch.no_grad():
        right = (model(images.to(device)).argmax(1).cpu() == digits).float().mean().item()
    if hvd.rank() == 0:
        print(f"step {state.step}: {right:.1%} of the training digits right", flush=True)


hvd.init()
train(hvd.elastic.TorchState(step=0, saved=None))
