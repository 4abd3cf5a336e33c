"""A training in PyTorch Lightning, resumable: `torchrun --nproc-per-node 2 examples/lightning_ddp.py FOLDER EPOCHS`.

`CompressedDDPStrategy` is all that a training of yours needs of this file.
"""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from sklearn.datasets import load_digits

import hvdcomp


class CompressedDDPStrategy(DDPStrategy):
    """DistributedDataParallel whose gradients go through hvdcomp.

    Lightning saves checkpoints on rank 0 only. Residuals differ between the ranks, so each rank saves its own to a file
    beside the checkpoint: `NAME.ckpt.rank0`, `NAME.ckpt.rank1`, ...

    Args:
        compression: a `hvdcomp.Compression`, for one call of `Trainer.fit`.
        options: of DDPStrategy.
    """

    def __init__(self, compression, **options):
        super().__init__(**options)
        self.compression = compression

    def setup(self, trainer):
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:  # otherwise there is no DistributedDataParallel
            hvdcomp.ddp.register(self.model, self.compression, self.optimizers[0])

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        if "optimizer_states" in checkpoint:  # otherwise it has weights only
            self._own(filepath).parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.compression.state_dict(), self._own(filepath))
            self.barrier()  # where there is a checkpoint, all these files are there too
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path, weights_only=None):
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self.compression.load_state_dict(torch.load(self._own(checkpoint_path), weights_only=True))
        return super().load_checkpoint(checkpoint_path, weights_only)

    def remove_checkpoint(self, filepath):
        self._own(filepath).unlink(missing_ok=True)
        super().remove_checkpoint(filepath)

    def _own(self, filepath):
        return Path(f"{Path(filepath).resolve()}.rank{self.global_rank}")  # resolved: a checkpoint may be a link


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
    model, compression = Digits(), hvdcomp.Compression(hvdcomp.TopK(ratio=0.01))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CompressedDDPStrategy(compression),
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
