"""What one training run is: every option of `hvdcomp train`, its default, and the checks that need no
framework.

Options left out get a value that suits the model and the data, so that `--model cnn --data digits` alone
trains well. The learning rate is used as given: whoever adds ranks, and so enlarges the global batch, scales
it by hand.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdcomp.policies import Policy, parse_policy

FRAMEWORKS = ("torch", "tensorflow")
BACKENDS = ("auto", "horovod", "ddp")  # what connects the ranks; auto: what the launcher is for
RESIDUALS = ("keep", "drop")  # of what the ranks of a checkpoint had left to send
OVERLAP: dict[str, bool | str] = {"auto": "auto", "on": True, "off": False}  # --overlap, and what `Compression` takes

DECISIONS = "decisions.jsonl"  # below --output; written by the compression, which puts full files aside

IMAGE_MODELS = ("mlp", "cnn", "resnet20", "resnet18", "vgg16", "vgg19_bn")
TEXT_MODELS = ("lstm",)
MODELS = IMAGE_MODELS + TEXT_MODELS

IMAGE_DATA = ("digits", "synthetic", "cifar10", "cifar100")
TEXT_DATA = ("stdlib-text", "wikitext2", "ptb")
DATA = IMAGE_DATA + TEXT_DATA
FOLDER_DATA = ("cifar10", "cifar100", "wikitext2", "ptb")  # read from --data-dir

_LEARNING_RATES = {
    "mlp": 0.05,
    "cnn": 0.03,
    "resnet20": 0.1,
    "resnet18": 0.1,
    "vgg16": 0.02,
    "vgg19_bn": 0.05,
    "lstm": 2.0,
}
_BATCH_SIZES = {"digits": 16, "synthetic": 32, "cifar10": 128, "cifar100": 128}  # per rank; text: 32


class SetupError(ValueError):
    """A run that cannot be started as asked; the message names the option, what is allowed and the way out."""


@dataclass(frozen=True)
class TrainingOptions:
    """The options of one run. None means "choose for me" until `resolved` has filled it in."""

    framework: str = "torch"
    backend: str = "auto"
    timeout: float | None = None  # seconds that ranks of torch.distributed wait for another
    model: str = "cnn"
    data: str = "digits"
    data_dir: Path | None = None
    compression: str = "none"
    memory: str | None = None
    policy: str | None = None
    overlap: str = "auto"
    bucket_bytes: int | None = None
    epochs: int = 10
    batch_size: int | None = None  # per rank and backward pass
    lr: float | None = None
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float | None = None
    milestones: tuple[float, ...] = ()  # epochs after which the learning rate is multiplied by gamma
    gamma: float = 0.1
    warm_up: float = 0.0  # epochs of linear growth of the learning rate
    clip_norm: float | None = None  # 0: no clipping
    backward_passes_per_step: int = 1
    seed: int = 0
    output: Path | None = None
    overwrite: bool = False
    tensorboard: bool = False
    metrics_port: int | None = None  # of rank 0
    metrics_address: str = "127.0.0.1"  # of that port
    checkpoint_folder: Path | None = None
    checkpoint_every: int | None = None  # steps; None: at the end of each epoch
    residuals: str = "keep"
    elastic: bool = False
    samples: int | None = None
    label_noise: float = 0.0
    image_size: int = 32  # synthetic
    text_size: int = 400_000  # stdlib-text, characters
    text_unit: str = "char"  # stdlib-text
    sequence_length: int | None = None  # text data
    progress: bool = True

    def resolved(self) -> TrainingOptions:
        """These options with every "choose for me" replaced by a value, checked.

        Raises:
            SetupError: a value, or a combination of values, that cannot be trained.
        """
        self._check_names()
        chosen = dataclasses.replace(
            self,
            batch_size=_either(self.batch_size, _BATCH_SIZES.get(self.data, 32)),
            lr=_either(self.lr, _LEARNING_RATES[self.model]),
            weight_decay=_either(self.weight_decay, 5e-4 if self.data in ("cifar10", "cifar100") else 0.0),
            clip_norm=_either(self.clip_norm, 0.25 if self.model in TEXT_MODELS else 0.0),
            sequence_length=_either(self.sequence_length, 64 if self.data == "stdlib-text" else 35),
        )
        chosen._check_values()
        return chosen

    def _check_names(self) -> None:
        for option, value, known in (
            ("--framework", self.framework, FRAMEWORKS),
            ("--backend", self.backend, BACKENDS),
            ("--model", self.model, MODELS),
            ("--data", self.data, DATA),
            ("--overlap", self.overlap, OVERLAP),
            ("--residuals", self.residuals, RESIDUALS),
        ):
            if value not in known:
                raise SetupError(f"{option} {value!r} is unknown; choose one of {', '.join(known)}")
        suitable = IMAGE_DATA if self.model in IMAGE_MODELS else TEXT_DATA
        if self.data not in suitable:
            raise SetupError(f"--model {self.model} cannot learn --data {self.data}; it takes {', '.join(suitable)}")
        if self.data in FOLDER_DATA and self.data_dir is None:
            raise SetupError(f"--data {self.data} is read from a folder: name it with --data-dir")
        if self.data not in FOLDER_DATA and self.data_dir is not None:
            raise SetupError(f"--data {self.data} needs no --data-dir; leave it out")

    def _check_values(self) -> None:
        assert self.lr is not None
        assert self.weight_decay is not None
        assert self.clip_norm is not None
        overlaps = self.framework == "torch"
        at_once = f"--framework {self.framework} hands over all gradients of a step at once"
        checks = (
            (
                overlaps or self.overlap != "on",
                f"--overlap on: {at_once}; leave it at auto, or take --framework torch",
            ),
            (
                self.bucket_bytes is None or self.bucket_bytes >= 1,
                f"--bucket-bytes {self.bucket_bytes}: at least 1 byte of gradients",
            ),
            (
                overlaps or self.bucket_bytes is None,
                f"--bucket-bytes {self.bucket_bytes}: {at_once}; leave it out, or take --framework torch",
            ),
            (self.epochs >= 1, f"--epochs {self.epochs}: at least 1"),
            ((self.batch_size or 0) >= 1, f"--batch-size {self.batch_size}: at least 1"),
            (_is_finite(self.lr) and self.lr > 0, f"--lr {self.lr}: a positive number"),
            (0 <= self.momentum < 1, f"--momentum {self.momentum}: from 0 up to, not including, 1"),
            (not self.nesterov or self.momentum > 0, "--nesterov needs a --momentum above 0"),
            (
                _is_finite(self.weight_decay) and self.weight_decay >= 0,
                f"--weight-decay {self.weight_decay}: 0 or more",
            ),
            (0 < self.gamma <= 1, f"--gamma {self.gamma}: above 0, at most 1"),
            (
                all(_is_finite(m) and m > 0 for m in self.milestones)
                and list(self.milestones) == sorted(set(self.milestones)),
                f"--milestones {_join(self.milestones)}: epochs above 0, each later than the one before",
            ),
            (
                all(m < self.epochs for m in self.milestones),
                f"--milestones {_join(self.milestones)}: all before the end, --epochs {self.epochs}",
            ),
            (_is_finite(self.warm_up) and self.warm_up >= 0, f"--warm-up {self.warm_up}: 0 epochs or more"),
            (
                not self.milestones or self.warm_up <= self.milestones[0],
                f"--warm-up {self.warm_up}: over before the first of --milestones {_join(self.milestones)}",
            ),
            (
                _is_finite(self.clip_norm) and self.clip_norm >= 0,
                f"--clip-norm {self.clip_norm}: 0 (none) or more",
            ),
            (
                self.backward_passes_per_step >= 1,
                f"--backward-passes-per-step {self.backward_passes_per_step}: at least 1",
            ),
            (0 <= self.seed < 2**31, f"--seed {self.seed}: from 0 to 2147483647"),
            (self.samples is None or self.samples >= 1, f"--samples {self.samples}: at least 1"),
            (0 <= self.label_noise <= 1, f"--label-noise {self.label_noise}: a fraction from 0 to 1"),
            (
                self.label_noise == 0 or self.data in IMAGE_DATA,
                f"--label-noise: --data {self.data} has no labels; {', '.join(IMAGE_DATA)} have",
            ),
            (self.image_size >= 4, f"--image-size {self.image_size}: at least 4 pixels"),
            (self.text_unit in ("char", "word"), f"--text-unit {self.text_unit!r}: char or word"),
            (self.text_size >= 10_000, f"--text-size {self.text_size}: at least 10000 characters"),
            ((self.sequence_length or 0) >= 1, f"--sequence-length {self.sequence_length}: at least 1"),
            (
                self.checkpoint_every is None or self.checkpoint_every >= 1,
                f"--checkpoint-every {self.checkpoint_every}: at least 1 step",
            ),
            (
                not self.elastic or self.checkpoint_folder is not None,
                "--elastic needs --checkpoint-folder, from where the run goes on when ranks come and go",
            ),
            (
                self.checkpoint_every is None or self.checkpoint_folder is not None,
                "--checkpoint-every writes to --checkpoint-folder DIR: give one",
            ),
            (
                self.metrics_port is None or 1 <= self.metrics_port <= 65535,
                f"--metrics-port {self.metrics_port}: from 1 to 65535, such as 9400",
            ),
            (bool(self.metrics_address), "--metrics-address '': an address of rank 0's host, or 0.0.0.0 for all"),
            (
                not self.tensorboard or self.output is not None,
                "--tensorboard writes below --output DIR: give one",
            ),
        )
        for right, message in checks:
            if not right:
                raise SetupError(message)

    def learning_rate(self, epochs_done: float) -> float:
        """The learning rate after `epochs_done` epochs (a fraction too): linear warm-up, then the milestones."""
        assert self.lr is not None
        if epochs_done < self.warm_up:
            return self.lr * epochs_done / self.warm_up
        return self.lr * self.gamma ** sum(epochs_done >= milestone for milestone in self.milestones)

    def of_compression(self) -> dict[str, Any]:
        """The arguments of `hvdcomp.Compression.from_spec`, but for those that the data or the framework say.

        Raises:
            SpecError: the policy is none.
        """
        decides = self.policy is not None and isinstance(parse_policy(self.policy), Policy)
        return {
            "spec": self.compression,
            "memory": self.memory,
            "policy": self.policy,
            "decision_log": self.output / DECISIONS if decides and self.output is not None else None,
            "seed": self.seed,
            "overlap": OVERLAP[self.overlap],
            "bucket_bytes": self.bucket_bytes,
        }

    def as_json(self) -> dict[str, object]:
        """Every option with its value, for JSON."""
        values = dataclasses.asdict(self)
        return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def _either(value, default):
    return default if value is None else value


def _is_finite(value: float) -> bool:
    return math.isfinite(value)


def _join(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)
