"""Resumable training with Transformers: `torchrun --nproc-per-node 2 examples/transformers_ddp.py FOLDER EPOCHS`."""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import hvdcomp


class Digits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def forward(self, images, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.layers(images), labels)}


if __name__ == "__main__":
    folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
    images, digits = map(torch.from_numpy, load_digits(return_X_y=True))
    data = [{"images": image.float() / 16, "labels": digit} for image, digit in zip(images, digits, strict=True)]
    torch.manual_seed(0)
    model, compression = Digits(), hvdcomp.Compression(hvdcomp.Int4())
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,  # only every second backward pass exchanges gradients
        max_grad_norm=5.0,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        save_strategy="epoch",
        ddp_find_unused_parameters=False,  # otherwise nothing is sent before the backward pass ends
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data,
        optimizers=(optimizer, None),
        callbacks=[hvdcomp.transformers.CompressionCallback(compression)],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.exists() else None)
    if trainer.is_world_process_zero():
        factor = compression.ledger.totals.compression_factor
        print(f"{trainer.state.global_step} steps, {factor:.1f} times fewer bytes than dense")
