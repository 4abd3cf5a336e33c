"""Resumable training with PyTorch Lightning: `torchrun --nproc-per-node 2 examples/lightning_ddp.py FOLDER EPOCHS`."""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits

import hvdcomp


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch, number):
        inputs, classes = batch
        return torch.nn.functional.cross_entropy(self.layers(inputs), classes)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
    lightning.seed_everything(0)
    images, digits = map(torch.from_numpy, load_digits(return_X_y=True))
    data = torch.utils.data.TensorDataset(images.float() / 16, digits)
    model, compression = Digits(), hvdcomp.Compression(hvdcomp.Int4())
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=hvdcomp.lightning.CompressedStrategy(compression),
        max_epochs=epochs,
        accumulate_grad_batches=2,  # only every second backward pass exchanges gradients
        gradient_clip_val=5.0,
        callbacks=[ModelCheckpoint(folder)],
        logger=False,
        enable_progress_bar=False,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    newest = max(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime, default=None)
    trainer.fit(model, loader, ckpt_path=newest)
    if trainer.is_global_zero:
        factor = compression.ledger.totals.compression_factor
        print(f"{trainer.global_step} steps, {factor:.1f} times fewer bytes than dense")
