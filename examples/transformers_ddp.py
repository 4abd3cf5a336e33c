"""A training by Transformers, resumable: `torchrun --nproc-per-node 2 examples/transformers_ddp.py FOLDER EPOCHS`.

`Compressed` is all that a training of yours needs of this file.
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import hvdcomp


class Compressed(TrainerCallback):
    """Lets a Trainer exchange its gradients compressed, and go on from its checkpoints.

    The Trainer saves on one rank what all ranks have alike. Residuals differ between the ranks, so each rank saves its
    own to a file in the folder of the checkpoint, which is removed with the folder.

    Args:
        trainer: to which the callback adds itself.
        compression: a `hvdcomp.Compression`, for one call of `Trainer.train`.
    """

    def __init__(self, trainer, compression):
        self.trainer, self.compression = trainer, compression
        trainer.add_callback(self)

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step:
            self.compression.load_state_dict(torch.load(self._own(args, state), weights_only=True))
        hvdcomp.ddp.register(self.trainer.model_wrapped, self.compression, self.trainer.optimizer.optimizer)

    def on_save(self, args, state, control, **kwargs):
        file = self._own(args, state)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.compression.state_dict(), file)

    def _own(self, args, state):
        return Path(args.output_dir, f"checkpoint-{state.global_step}", f"compression{args.process_index}.pt")


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
    model, compression = Digits(), hvdcomp.Compression(hvdcomp.TopK(ratio=0.01))
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
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    Compressed(trainer, compression)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.exists() else None)
    if trainer.is_world_process_zero():
        factor = compression.ledger.totals.compression_factor
        print(f"{trainer.state.global_step} steps, {factor:.1f} times fewer bytes than dense")
