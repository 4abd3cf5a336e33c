"""A resumable loop with accelerate: `torchrun --nproc-per-node 2 examples/accelerate_ddp.py FOLDER EPOCHS`.

If you start it again with the same folder, all ranks continue after the latest epoch that they have saved, bit for bit.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from sklearn.datasets import load_digits

import hvdcomp

set_seed(0)
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
)
folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
images, digits = map(torch.from_numpy, load_digits(return_X_y=True))
data = torch.utils.data.TensorDataset(images.float() / 16, digits)
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # wraps the model in DistributedDataParallel
compression = hvdcomp.Compression(hvdcomp.Int4())
hvdcomp.accelerate.register(accelerator, model, compression, optimizer)

epochs_done = max((int(saved.name.split("-")[1]) for saved in folder.glob("epoch-*")), default=0)
if epochs_done:
    accelerator.load_state(str(folder / f"epoch-{epochs_done}"))

if epochs_done == epochs:
    accelerator.print(f"the training in {folder} is complete. To train again, pass another folder or delete this one.")
for epoch in range(epochs_done, epochs):
    loader.set_epoch(epoch)
    for inputs, classes in loader:
        with accelerator.accumulate(model):  # only every second backward pass exchanges gradients
            loss = torch.nn.functional.cross_entropy(model(inputs), classes)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(str(folder / "new"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:  # a folder with this name is complete
        (folder / "new").rename(folder / f"epoch-{epoch + 1}")
    factor = compression.ledger.totals.compression_factor
    accelerator.print(f"epoch {epoch + 1}: loss {loss:.3f}, {factor:.1f} times fewer bytes than dense")
accelerator.end_training()
