"""The options of a training run (`hvdcomp train`), with their defaults and all checks that do not need a framework.

An option that is not given gets a value that suits the model and the data. `--model cnn --data digits` alone therefore
trains well. The learning rate is not adapted to the number of ranks. If you add ranks, the global batch becomes larger,
so scale the learning rate yourself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdcomp.compressors import with_small
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel import parse_rate
from hvdcomp.policies import Policy, parse_policy
from hvdcomp.specs.described import SHARE, Rule
from hvdcomp.tools.options import at_least, below, between, check, flag_of, option, text_of
from hvdcomp.tools.train.target import Target

FRAMEWORKS = ("torch", "tensorflow")
# Libraries that connect the ranks. "auto" chooses the library that fits the launcher.
BACKENDS = ("auto", "horovod", "ddp")
SIMULATED = "simulated"  # the backend of simulated ranks
NO_TIME = "none"  # the name of a link on which an exchange takes no time
RESIDUALS = ("keep", "drop")  # what happens to the residuals of a checkpoint
# The values of --overlap, with the arguments that `Compression` gets.
OVERLAP: dict[str, bool | str] = {"auto": "auto", "on": True, "off": False}

DECISIONS = "decisions.jsonl"  # file in --output that the compression writes; a new file is started when it is full

IMAGE_MODELS = ("mlp", "cnn", "resnet8", "resnet20", "resnet18", "vgg16", "vgg19_bn", "vit")
SIGNAL_MODELS = ("cnn1d",)
CLICK_MODELS = ("dlrm",)
TABULAR_MODELS = ("mlp",)  # mlp is also an image model
SORTING_MODELS = ("encoder",)
GPT_MODELS = ("gpt", "gpt-mini", "gpt-small")
TEXT_MODELS = ("lstm", *GPT_MODELS)
MODELS = IMAGE_MODELS + SIGNAL_MODELS + CLICK_MODELS + SORTING_MODELS + TEXT_MODELS
TRANSFORMERS = (*GPT_MODELS, *SORTING_MODELS, "vit")
TORCH_MODELS = ("vit", *CLICK_MODELS, *SORTING_MODELS)  # not in TensorFlow

IMAGE_DATA = ("digits", "synthetic", "shapes", "cifar10", "cifar100")
SIGNAL_DATA = ("mnist1d",)
CLICK_DATA = ("clicks", "criteo")
TABULAR_DATA = ("heavy-tails",)
SORTING_DATA = ("sorting",)
TEXT_DATA = ("text", "stdlib-text", "wikitext2", "ptb")
LABELLED_DATA = IMAGE_DATA + SIGNAL_DATA + CLICK_DATA
DATA = LABELLED_DATA + TABULAR_DATA + SORTING_DATA + TEXT_DATA
FOLDER_DATA = ("cifar10", "cifar100", "criteo", "wikitext2", "ptb")  # data sets that are read from --data-dir
# Data sets that have their own validation part.
VALIDATED_DATA = ("shapes", *SIGNAL_DATA, *CLICK_DATA, *TABULAR_DATA, *SORTING_DATA, "text", "wikitext2", "ptb")
FAMILIES = (  # pairs of models, and of the data on which they can be trained
    (IMAGE_MODELS, IMAGE_DATA),
    (SIGNAL_MODELS, SIGNAL_DATA),
    (CLICK_MODELS, CLICK_DATA),
    (TABULAR_MODELS, TABULAR_DATA),
    (SORTING_MODELS, SORTING_DATA),
    (TEXT_MODELS, TEXT_DATA),
)

OPTIMIZERS = ("sgd", "adamw", "compressed-adam", "muon")
ADAMS = tuple(name for name in OPTIMIZERS if name != "sgd")
"""The optimizers that update all parameters, or the parameters that are no hidden matrices, as AdamW does."""


def is_dotted(optimizer: str) -> bool:
    """Whether the name refers to a class or a function in a module, such as torch.optim.Adafactor."""
    return all(part.isidentifier() for part in optimizer.split(".")) and "." in optimizer


MUON_MODELS = ("mlp", "cnn", "cnn1d", "vit", "dlrm", "encoder", *TEXT_MODELS)  # models with hidden matrices
SCHEDULES = ("step", "cosine")

_SGD_RATES = {
    "mlp": 0.05,
    "cnn": 0.03,
    "resnet8": 0.1,
    "resnet20": 0.1,
    "resnet18": 0.1,
    "vgg16": 0.02,
    "vgg19_bn": 0.05,
    "vit": 0.05,
    "cnn1d": 0.05,
    "dlrm": 0.05,
    "encoder": 0.1,
    "lstm": 2.0,
    "gpt": 0.1,
    "gpt-mini": 0.1,
    "gpt-small": 0.1,
}
FREEZE_AFTER = 0.15  # fraction of a run after which AdamW's second moment is frozen, if the warm-up has ended by then
# Default learning rates of AdamW and muon, by model or by data. All others have the rate 1e-3.
_ADAMW_RATES = {"gpt": 2e-3, "gpt-small": 6e-4, "encoder": 8e-3, "heavy-tails": 8e-3}
# Default batch sizes. All others have the batch size 32.
_BATCH_SIZES = {
    **{"digits": 16, "synthetic": 32, "cifar10": 128, "cifar100": 128, "mnist1d": 25, "text": 8},
    **{"shapes": 16, "sorting": 16},
    **dict.fromkeys(CLICK_DATA, 128),
}
# Default numbers of tokens of a sequence. All other data sets have 35 tokens.
_SEQUENCES = {"text": 128, "stdlib-text": 64}
_TEXT_SIZES = {"text": 2_000_000}  # Default sizes of the training text. All others have the size 400_000.
# Default limits for the norm of the gradient, by model. All others have no limit.
_CLIP_NORMS = {"lstm": 0.25, **dict.fromkeys(TRANSFORMERS, 1.0)}


_POSITIVE = Rule(lambda rate: math.isfinite(rate) and rate > 0, "a positive number")
_TWO_RATES = Rule(
    lambda rates: len(rates) == 2 and all(0 <= rate < 1 for rate in rates),
    "two numbers, each at least 0 and less than 1, such as 0.9,0.95",
)
_GROWING = Rule(
    lambda epochs: all(math.isfinite(one) and one > 0 for one in epochs) and list(epochs) == sorted(set(epochs)),
    "epochs above 0, each later than the one before",
)


class SetupError(ValueError):
    """A run cannot start. The message names the option and the allowed values, and explains what to do."""


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a run. None means "choose a value", which `resolved` does."""

    # fmt: off
    framework: str = option("torch", "Framework to train in.", choices=FRAMEWORKS)
    backend: str = option(
        "auto", "Library that averages gradients: Horovod, or PyTorch's DistributedDataParallel. auto: "
        "DistributedDataParallel under torchrun, or else Horovod.",
        choices=BACKENDS, before="horovod",
    )
    timeout: float | None = option(
        None, "With torchrun: how long a rank waits for other ranks before it fails.",
        metavar="SECONDS", shown="the default of PyTorch, 1800", may_change=True,
    )
    fsdp: bool = option(False, "With torchrun: shard a transformer over all ranks with FSDP's fully_shard.")
    fsdp_weights: str | None = option(
        None, "With --fsdp: ranks send compressed changes of the weights. Compressor of these changes: int8 or int4.",
        metavar="SPEC", shown="the weights are sent uncompressed",
    )
    shard_ranks: int | None = option(
        None, "With --fsdp: number of ranks that share one replica of the model. There are then several replicas, and "
        "--compression compresses the gradients that they exchange.",
        at_least(2, "at least 2 ranks; if each rank has a whole replica, leave out --fsdp"),
        metavar="N", shown="all ranks, without replicas",
    )
    shard_compression: str = option(
        "none", "With --shard-ranks: compressor of the reduce-scatter within a replica, such as int8, if each replica "
        "is on several nodes.",
        metavar="SPEC",
    )
    model: str = option("cnn", "Model to train; vit, dlrm and encoder only in PyTorch.", choices=MODELS)
    data: str = option("digits", "Data to train on.", choices=DATA)
    data_dir: Path | None = option(None, "Folder with the published files of CIFAR, Criteo, WikiText-2 or PTB.")
    compression: str = option("none", "Compressor of the gradients, such as topk:ratio=0.01.", metavar="SPEC")
    small_tensors: str = option(
        "none", "Compressor of small tensors (fewer than 1,024 elements or fewer than two dimensions), such as int8.",
        metavar="SPEC",
    )
    memory: str | None = option(
        None, "Memory for the part of a gradient that is not sent: none, error_feedback, or "
        "error_feedback:dtype=bf16, which needs only 2 bytes per parameter.",
        metavar="SPEC", shown="depends on the compressor",
    )
    policy: str | None = option(
        None, "Policy that changes the level of compression, such as warmup:levels=0.25|0.05,epochs=1.",
        metavar="SPEC", shown="constant",
    )
    overlap: str = option(
        "auto", "Whether to send gradients during the backward pass; only in PyTorch. auto: on if the gradients are on "
        "the CPU.",
        choices=tuple(OVERLAP), may_change=True,
    )
    bucket_bytes: int | None = option(
        None, "Size in bytes of the smallest bucket of gradients that is sent during the backward pass, or of "
        "DistributedDataParallel's buckets.",
        at_least(1), metavar="N", shown="the choice of the policy auto, or else 25 MiB", may_change=True,
    )
    epochs: int = option(10, "Number of passes over the training data.", at_least(1), may_change=True)
    steps: int | None = option(
        None, "Number of optimizer steps, instead of --epochs.",
        at_least(1), shown="the steps of --epochs", may_change=True,
    )
    until: str | None = option(
        None, "Stop as soon as the validation part reaches this quality: accuracy=0.93, loss=2.2, perplexity=9 or "
        "rmse=0.4.",
        metavar="METRIC=VALUE", shown=False, may_change=True,
    )
    evaluate_every: int | None = option(
        None, "Number of steps between evaluations on the validation part.",
        at_least(1), metavar="STEPS", shown="at the end of each epoch", may_change=True,
    )
    batch_size: int | None = option(None, "Samples per rank and backward pass.", at_least(1))
    optimizer: str | None = option(
        None, f"Optimizer: {', '.join(OPTIMIZERS)}, or a class of an installed package, such as torch.optim.Adafactor "
        "(only in PyTorch). muon (only in PyTorch) uses Muon for hidden matrices, and AdamW for the head, embeddings, "
        "convolutions, norms and biases. A class from a package receives the parameters, the weight decay and --lr, "
        "and keeps its own defaults for everything else. For other values, name a function in your own module that "
        "takes parameter groups and lr=, and returns an optimizer.",
        metavar="NAME", shown="adamw for gpt, vit, encoder and heavy-tails, else sgd", before="sgd",
    )
    lr: float | None = option(None, "Learning rate. It is not scaled by the number of ranks.", _POSITIVE)
    momentum: float = option(0.9, "Momentum of SGD.", below(0, 1))
    nesterov: bool = option(False, "Use Nesterov's momentum.")
    betas: tuple[float, float] = option(
        (0.9, 0.95), "Decay rates of AdamW's moments.", _TWO_RATES, metavar="B1,B2", items="numbers, such as 0.9,0.95"
    )
    freeze_after: int | None = option(
        None, "With compressed-adam: number of steps after which the second moment is frozen, and ranks send the "
        "momentum.",
        at_least(1), metavar="STEPS", shown="15 % of the run, but not before the end of --warm-up",
    )
    freeze_compression: str = option(
        "int4", "With compressed-adam: compressor of the gradients before freezing.", metavar="SPEC"
    )
    local_steps: int | str = option(
        1, "Number of steps that each rank makes on its own between two exchanges; only in PyTorch. An outer Nesterov "
        "step follows each exchange, as in DiLoCo. With compressed-adam, local steps begin after freezing, and there "
        "is no outer step. auto: the number is chosen from the times of steps and exchanges, and from how far the "
        "ranks drift apart.",
        metavar="K|auto",
    )
    fragments: int = option(
        1, "With local steps: number of groups into which the parameters are divided. The groups are exchanged in "
           "different steps, as in Streaming DiLoCo.",
        metavar="P",
    )
    delay: int = option(
        0, "With local steps: number of steps for which ranks continue training while a group is exchanged.",
        metavar="STEPS",
    )
    local_share: float = option(
        0.0, "With local steps: share of its own weights that a rank keeps after an exchange.",
        below(0, 1), metavar="SHARE",
    )
    outer_lr: float | None = option(
        None, "Learning rate of the outer step. With --outer-lr 1 --outer-momentum 0 and no --local-steps, the ranks "
        "exchange the change of the weights in each step instead of the gradient.",
        between(0, 1), metavar="LR", shown="0.7",
    )
    outer_momentum: float | None = option(None, "Momentum of the outer step.", between(0, 1), metavar="M", shown="0.9")
    refreshes_per_gap: int | None = option(
        None, "With compressed-adam: number of refreshes of the frozen second moment after which the gap between "
        "refreshes doubles. 0/1 Adam uses 16.",
        at_least(1), metavar="N", shown="no refresh",
    )
    weight_decay: float | None = option(
        None, "Weight decay. SGD applies it to all parameters, other optimizers only to matrices.",
        at_least(0, "0 or more"),
    )
    schedule: str = option("step", "Learning-rate schedule: steps at --milestones, or a cosine.", choices=SCHEDULES)
    milestones: tuple[float, ...] = option(
        (), "Epochs after which the learning rate is multiplied by --gamma.",
        _GROWING, metavar="E,E,...", items="epochs, such as 3,4",
    )
    gamma: float = option(0.1, "Factor of the learning rate at each milestone, or at the end of the cosine.", SHARE)
    warm_up: float = option(0.0, "Epochs over which the learning rate grows from 0.", at_least(0, "0 epochs or more"))
    clip_norm: float | None = option(
        None, "Largest norm of the averaged gradient; 0: no limit.", at_least(0, "0 (no clipping) or more")
    )
    backward_passes_per_step: int = option(1, "Number of backward passes per optimizer step.", at_least(1))
    simulate_ranks: int | None = option(
        None, "Train N simulated ranks in this process, without a launcher. The trained weights are the same as with "
              "real ranks.",
        at_least(1), metavar="N", shown=False, may_change=True,
    )
    link: str | None = option(
        None, "Rate of each simulated rank's link, for predicted times: 100mbit, 1gbit or 10gbit. If you give several "
        "rates, separated by commas, the same run is timed for each of them.",
        metavar="RATE,...", shown="exchanges take no time", may_change=True,
    )
    seed: int = option(
        0, "Seed of all random numbers, except the split into training and test data.", between(0, 2**31 - 1)
    )
    output: Path | None = option(None, "Folder for steps.jsonl, epochs.jsonl and summary.json.")
    overwrite: bool = option(False, "Replace an earlier run in --output.", may_change=True)
    tensorboard: bool = option(False, "Also write TensorBoard's files, in --output.", may_change=True)
    metrics_port: int | None = option(
        None, "Port on which rank 0 serves metrics (bytes, levels and times) to Prometheus.",
        between(1, 65535, "from 1 to 65535, such as 9400"), metavar="PORT", shown=False, may_change=True,
    )
    metrics_address: str = option(
        "127.0.0.1", "Address on which rank 0 listens; 0.0.0.0 for access from other hosts.",
        metavar="ADDRESS", may_change=True,
    )
    checkpoint_folder: Path | None = option(
        None, "Folder for checkpoints, shared by all hosts. The run resumes from the newest checkpoint. On SIGUSR1 or "
              "SIGTERM, the run saves a checkpoint and stops.",
    )
    checkpoint_every: int | None = option(
        None, "Number of steps between checkpoints.",
        at_least(1), metavar="STEPS", shown="at the end of each epoch", may_change=True,
    )
    residuals: str = option(
        "keep", "Whether a resumed run keeps or drops the residuals of the checkpoint. The number of ranks may differ.",
        choices=RESIDUALS, may_change=True,
    )
    elastic: bool = option(
        False, "Resume from the checkpoint when ranks are lost or added; needs horovodrun --host-discovery-script.",
        may_change=True,
    )
    samples: int | None = option(None, "Train on the first N samples.", at_least(1), metavar="N", shown="all")
    validation_samples: int = option(
        0, "Number of training samples to use for validation, if the data have no validation part.",
        at_least(0, "0 or more"), metavar="N",
    )
    label_noise: float = option(
        0.0, "Fraction of training labels to replace by random labels.", between(0, 1, "a fraction from 0 to 1")
    )
    image_size: int = option(32, "Side of synthetic images, in pixels.", at_least(4, "at least 4 pixels"))
    table_rows: int = option(
        20_000, "Number of rows in each of dlrm's tables. Criteo's categories are hashed into these rows.",
        between(2, 2**24, "from 2 to 16777216, because larger ids are not exact in float32"),
    )
    text_size: int | None = option(
        None, "Size of the training text: in bytes for the data text, in characters for stdlib-text.",
        at_least(10_000, "at least 10000 characters"),
    )
    text_unit: str = option("char", "Unit of text that is one token of stdlib-text.", choices=("char", "word"))
    sequence_length: int | None = option(None, "Number of tokens in a sequence of text.", at_least(1))
    progress: bool = option(True, "Show the progress.", flags=("--progress/--no-progress",), may_change=True)
    # fmt: on

    def resolved(self) -> TrainingOptions:
        """Checks these options, and returns them with a value instead of every None.

        Raises:
            SetupError: if a value, or a combination of values, is not allowed.
        """
        self._check_names()
        adaptive = self.model in TRANSFORMERS or self.data in TABULAR_DATA
        optimizer = _either(self.optimizer, "adamw" if adaptive else "sgd")
        adamw_rate = _ADAMW_RATES.get(self.data) or _ADAMW_RATES.get(self.model, 1e-3)
        rate = _SGD_RATES[self.model] if optimizer == "sgd" else adamw_rate
        decay = 0.1 if optimizer != "sgd" else 5e-4 if self.data in ("cifar10", "cifar100") else 0.0
        chosen = dataclasses.replace(
            self,
            optimizer=optimizer,
            batch_size=_either(self.batch_size, _BATCH_SIZES.get(self.data, 32)),
            lr=_either(self.lr, rate),
            weight_decay=_either(self.weight_decay, decay),
            clip_norm=_either(self.clip_norm, _CLIP_NORMS.get(self.model, 0.0)),
            sequence_length=_either(self.sequence_length, _SEQUENCES.get(self.data, 35)),
            text_size=_either(self.text_size, _TEXT_SIZES.get(self.data, 400_000)),
        )
        chosen.check_together()
        chosen.check_target()
        return chosen

    def _check_names(self) -> None:
        backends = BACKENDS if self.simulate_ranks is None else ("auto", SIMULATED)
        check(self, SetupError, {"backend": backends})
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS and not is_dotted(self.optimizer):
            raise SetupError(
                f"--optimizer {self.optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}, or name a class "
                "with its module, such as torch.optim.Adafactor"
            )
        suitable = [name for models, data in FAMILIES if self.model in models for name in data]
        if self.data not in suitable:
            raise SetupError(
                f"--model {self.model} does not work with --data {self.data}; choose one of {', '.join(suitable)}"
            )
        if self.data in FOLDER_DATA and self.data_dir is None:
            raise SetupError(f"--data {self.data} is read from a folder: name it with --data-dir")
        if self.data not in FOLDER_DATA and self.data_dir is not None:
            raise SetupError(f"--data {self.data} needs no --data-dir; leave --data-dir out")

    def check_together(self) -> None:
        """Raises an error if values are not compatible."""
        overlaps = self.framework == "torch"
        at_once = f"--framework {self.framework} sends all gradients of a step at once"
        checks = (
            (
                overlaps or self.overlap != "on",
                f"--overlap on is not possible, because {at_once}; use --overlap auto, or use --framework torch",
            ),
            (
                overlaps or self.bucket_bytes is None,
                f"--bucket-bytes {self.bucket_bytes} is not possible, because {at_once}; leave --bucket-bytes out, or "
                "use --framework torch",
            ),
            (
                self.until is None or self.has_validation,
                f"--until {self.until} needs validation data, but --data {self.data} has no validation part; use some "
                "training samples for validation with --validation-samples N",
            ),
            (
                self.evaluate_every is None or self.has_validation,
                f"--evaluate-every {self.evaluate_every} needs validation data, but --data {self.data} has no "
                "validation part; use some training samples for validation with --validation-samples N",
            ),
            (
                self.validation_samples == 0 or self.data not in VALIDATED_DATA,
                f"--validation-samples {self.validation_samples} cannot be used, because --data {self.data} has a "
                "validation part of its own; leave --validation-samples out",
            ),
            (not self.nesterov or self.momentum > 0, "--nesterov needs a --momentum above 0"),
            (
                not self.nesterov or self.optimizer == "sgd",
                f"--nesterov is a form of SGD's momentum; leave --nesterov out with --optimizer {self.optimizer}",
            ),
            (
                self.momentum == type(self).momentum or self.optimizer == "sgd",
                f"--momentum {self.momentum} is SGD's momentum; leave --momentum out with --optimizer {self.optimizer}",
            ),
            (
                self.betas == type(self).betas or self.optimizer in ADAMS,
                f"--betas {text_of(self.betas)} are decay rates of AdamW's moments, which only the optimizers "
                f"{', '.join(ADAMS)} have; leave --betas out with --optimizer {self.optimizer}",
            ),
            (
                self.freeze_after is None or self.optimizer == "compressed-adam",
                f"--freeze-after {self.freeze_after} works only with --optimizer compressed-adam; leave --freeze-after "
                f"out with --optimizer {self.optimizer}",
            ),
            (
                self.model not in TORCH_MODELS or self.framework == "torch",
                f"--model {self.model} works only with --framework torch",
            ),
            (
                self.framework == "torch" or not is_dotted(self.optimizer or ""),
                f"--optimizer {self.optimizer} works only with --framework torch; use --optimizer adamw with "
                f"--framework {self.framework}",
            ),
            (
                self.optimizer != "muon" or self.framework == "torch",
                "--optimizer muon works only with --framework torch; use --optimizer adamw with --framework "
                f"{self.framework}",
            ),
            (
                self.optimizer != "compressed-adam" or self.model not in CLICK_MODELS,
                f"--optimizer compressed-adam does not work with --model {self.model}: it sends the momenta of all "
                "parameters, but the embedding tables of this model send only some rows in each step. Use --optimizer "
                "sgd or adamw",
            ),
            (
                self.optimizer != "muon" or self.model in MUON_MODELS,
                f"--optimizer muon is for hidden matrices, and --model {self.model} has none; use --optimizer sgd or "
                f"adamw, or one of the models {', '.join(MUON_MODELS)}",
            ),
            (
                self.schedule == "step" or not self.milestones,
                f"--milestones {text_of(self.milestones)} work only with --schedule step; leave --milestones out with "
                f"--schedule {self.schedule}",
            ),
            (
                self.steps is not None or all(m < self.epochs for m in self.milestones),
                f"--milestones {text_of(self.milestones)} must all be before the end of the run, --epochs "
                f"{self.epochs}",
            ),
            (
                not self.milestones or self.warm_up <= self.milestones[0],
                f"--warm-up {self.warm_up} must end before the first of --milestones {text_of(self.milestones)}",
            ),
            *self._checks_of_local_steps(),
            *self._checks_of_streaming(),
            *self._checks_of_outer_step(),
            *self._checks_of_refreshes(),
            *self._checks_of_simulation(),
            *self._checks_of_fsdp(),
            (
                self.label_noise == 0 or self.data in LABELLED_DATA,
                f"--label-noise needs labels, and --data {self.data} has none; use one of {', '.join(LABELLED_DATA)}",
            ),
            (
                not self.elastic or self.checkpoint_folder is not None,
                "--elastic needs --checkpoint-folder, from which the run resumes when the ranks change",
            ),
            (
                self.checkpoint_every is None or self.checkpoint_folder is not None,
                "--checkpoint-every needs --checkpoint-folder DIR",
            ),
            (
                bool(self.metrics_address),
                "--metrics-address is empty; give an address of rank 0's host, or 0.0.0.0 for all addresses",
            ),
            (
                not self.tensorboard or self.output is not None,
                "--tensorboard needs --output DIR",
            ),
        )
        for right, message in checks:
            if not right:
                raise SetupError(message)

    @property
    def steps_alone(self) -> bool:
        """Whether each rank takes local steps. With a single local step, this is true only if an outer step follows."""
        has_outer = self.optimizer != "compressed-adam" and (self.outer_lr, self.outer_momentum) != (None, None)
        return not isinstance(self.local_steps, int) or self.local_steps > 1 or has_outer

    @property
    def common_every(self) -> int | None:
        """The number of steps after which all ranks have the same weights; None if the run is evaluated with the outer
        weights. Such a run ends with one more exchange."""
        return self.local_steps if isinstance(self.local_steps, int) and not self._streams else None

    @property
    def _streams(self) -> bool:
        return (self.fragments, self.delay, self.local_share) != (1, 0, 0.0)

    def _checks_of_local_steps(self) -> Iterator[tuple[bool, str]]:
        shown, every = f"--local-steps {self.local_steps}", self.common_every
        if isinstance(self.local_steps, int):
            yield self.local_steps >= 1, f"{shown} must be at least 1"
        else:
            yield (
                self.local_steps.partition(":")[0] == "auto",
                f"{shown} must be a number, auto, or a rule such as auto:share=0.05",
            )
            yield (
                self.optimizer != "compressed-adam",
                f"{shown} does not work with --optimizer compressed-adam; give a number",
            )
        if not self.steps_alone:
            return
        yield self.framework == "torch", f"{shown} works only with --framework torch"
        if every is None:
            yield (
                self.steps is not None,
                (f"{shown} also needs --steps N: after step N, the ranks exchange their weights one last time"),
            )
        else:
            yield (
                every == 1 or (self.steps is not None and self.steps % every == 0),
                f"{shown} also needs --steps N, where N is a multiple of {every}, so that all ranks have the same "
                "weights at the end",
            )
            yield (
                (self.evaluate_every or 0) % every == 0,
                f"{shown}: --evaluate-every {self.evaluate_every} must be a multiple of {every}",
            )
        yield (
            self.optimizer != "compressed-adam" or self.checkpoint_folder is None,
            f"{shown} with compressed-adam cannot save checkpoints; leave out --checkpoint-folder "
            f"{self.checkpoint_folder}",
        )

    def _checks_of_streaming(self) -> Iterator[tuple[bool, str]]:
        every = self.local_steps
        has_outer = self.steps_alone and self.optimizer != "compressed-adam"
        for name in ("fragments", "delay", "local_share"):
            value = getattr(self, name)
            yield (
                (has_outer and isinstance(every, int)) or value == getattr(TrainingOptions, name),
                f"{flag_of(name)} {value} needs --local-steps N with a number above 1, and does not work "
                "with compressed-adam",
            )
        if has_outer and isinstance(every, int):
            yield 1 <= self.fragments <= every, f"--fragments {self.fragments} must be from 1 to --local-steps {every}"
            yield (
                0 <= self.delay * self.fragments < every,
                f"--delay {self.delay} must be from 0 to {(every - 1) // max(1, self.fragments)} steps, because a "
                "fragment is applied before the next one is sent",
            )

    def _checks_of_outer_step(self) -> Iterator[tuple[bool, str]]:
        for name, value in (("--outer-lr", self.outer_lr), ("--outer-momentum", self.outer_momentum)):
            yield (
                value is None or self.optimizer != "compressed-adam",
                f"{name} {value} does not work with compressed-adam, which has no outer step",
            )

    def _checks_of_refreshes(self) -> list[tuple[bool, str]]:
        refreshes, shown = self.refreshes_per_gap, f"--refreshes-per-gap {self.refreshes_per_gap}"
        return [
            (
                refreshes is None or self.optimizer == "compressed-adam",
                f"{shown} works only with --optimizer compressed-adam; leave it out with --optimizer {self.optimizer}",
            ),
            (
                refreshes is None or not self.steps_alone,
                f"{shown} does not work with --local-steps {self.local_steps}, because ranks do not average gradients "
                "in local steps; leave out one of these two options",
            ),
        ]

    def _checks_of_simulation(self) -> list[tuple[bool, str]]:
        simulated = self.simulate_ranks is not None
        shown, links = f"--simulate-ranks {self.simulate_ranks}", links_of(self.link)
        return [
            (
                self.link is None or simulated,
                f"--link {self.link} needs simulated ranks; add --simulate-ranks N, or leave --link out",
            ),
            *(
                (
                    link == NO_TIME or _is_rate(link),
                    f"--link {link!r} is not a rate: give 100mbit, 1gbit, 10gbit, or {NO_TIME} for a link that takes "
                    "no time; separate several links by commas",
                )
                for link in links
            ),
            (len(set(links)) == len(links), f"--link {self.link} contains a rate twice; give each rate once"),
            (
                not simulated or self.checkpoint_folder is None,
                f"{shown} cannot save checkpoints; leave out --checkpoint-folder {self.checkpoint_folder}",
            ),
            (
                not simulated or self.overlap != "on",
                f"--overlap on does not work with {shown}, which sends compressed gradients after the backward pass; "
                "use --overlap auto",
            ),
        ]

    def _checks_of_fsdp(self) -> list[tuple[bool, str]]:
        replicas = self.shard_ranks is not None
        if not self.fsdp:
            return [
                (
                    getattr(self, name) == getattr(TrainingOptions, name),
                    f"{flag_of(name)} {getattr(self, name)} works only with --fsdp: add --fsdp, or leave "
                    f"{flag_of(name)} out",
                )
                for name in ("fsdp_weights", "shard_ranks", "shard_compression")
            ]
        return [
            (
                self.framework == "torch" and self.backend in ("auto", "ddp") and self.simulate_ranks is None,
                "--fsdp needs PyTorch's torch.distributed: start it with torchrun, and leave out --framework, "
                "--backend and --simulate-ranks",
            ),
            (
                self.model in TRANSFORMERS,
                f"--fsdp shards the blocks of transformers, and --model {self.model} is not a transformer; use one of "
                f"{', '.join(TRANSFORMERS)}",
            ),
            (
                self.optimizer in ("sgd", "adamw") and not self.steps_alone,
                f"--fsdp does not work with --optimizer {self.optimizer} and --local-steps {self.local_steps}, "
                "because each rank has only shards; use --optimizer sgd or adamw, and no local steps",
            ),
            (
                replicas or (self.bucket_bytes is None and self.overlap != "on"),
                "--fsdp without replicas lets FSDP decide when gradients are sent; leave out --bucket-bytes and "
                "--overlap, or make replicas with --shard-ranks N",
            ),
            (
                replicas or self.policy is None,
                f"--fsdp without replicas does not work with --policy {self.policy}, because FSDP averages gradients "
                "module by module; leave --policy out, or make replicas with --shard-ranks N",
            ),
            (
                replicas or self.shard_compression == TrainingOptions.shard_compression,
                f"--shard-compression {self.shard_compression} needs --shard-ranks N; to quantize the reduce-scatter "
                f"over all ranks, use --compression {self.shard_compression}",
            ),
            (
                not replicas or self.fsdp_weights is None,
                f"--fsdp-weights {self.fsdp_weights} works only without replicas; leave out --fsdp-weights, or leave "
                f"out --shard-ranks {self.shard_ranks}",
            ),
        ]

    def check_target(self) -> None:
        """Raises an error if the target names a metric that is not measured."""
        if self.until is None:
            return
        try:
            target = Target.parse(self.until)
        except ValueError as error:
            raise SetupError(f"--until {error}") from None
        if target.metric not in ("loss", self.metric):
            raise SetupError(
                f"--until {self.until} cannot be used: the metrics of --data {self.data} are loss, {self.metric}"
            )

    @property
    def metric(self) -> str:
        """The metric for the run's data, one of `target.METRICS`."""
        return "perplexity" if self.data in TEXT_DATA else "rmse" if self.data in TABULAR_DATA else "accuracy"

    @property
    def has_validation(self) -> bool:
        """Whether there are validation samples."""
        return self.data in VALIDATED_DATA or self.validation_samples > 0

    def learning_rate(self, epochs_done: float, epochs: float) -> float:
        """The learning rate at a given time of a run.

        During the epochs of the warm-up, the learning rate grows from 0 to `lr`. After the warm-up, it is multiplied by
        `gamma` at each milestone, or falls to `gamma` times `lr` along half a period of a cosine.

        Args:
            epochs_done: the number of epochs before this step. The number may be fractional.
            epochs: the number of epochs of the run. The number may be fractional.

        References: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017, equation 5.
        """
        assert self.lr is not None
        if epochs_done < self.warm_up:
            return self.lr * epochs_done / self.warm_up
        if self.schedule == "cosine":
            progress = min(1.0, (epochs_done - self.warm_up) / max(epochs - self.warm_up, 1e-9))
            return self.lr * (self.gamma + (1 - self.gamma) * (1 + math.cos(math.pi * progress)) / 2)
        return self.lr * self.gamma ** sum(epochs_done >= milestone for milestone in self.milestones)

    def for_steps(self, steps_per_epoch: int) -> TrainingOptions:
        """Completes these resolved options with values that depend on the length of the run.

        Raises:
            SetupError: if an epoch would end while weights differ between ranks.
        """
        every, has_outer = self.common_every or 1, self.optimizer != "compressed-adam"
        within = (self.steps or 0) <= steps_per_epoch or (has_outer and self.evaluate_every is not None)
        if not within and steps_per_epoch % every:
            way = (
                "--evaluate-every N, a multiple"
                if has_outer
                else "--samples N, so that the steps of an epoch are a multiple"
            )
            raise SetupError(
                f"--local-steps {self.local_steps}: an epoch of {steps_per_epoch} steps would end while the ranks have "
                f"different weights; give {way} of {every}"
            )
        if self.optimizer != "compressed-adam" or self.freeze_after is not None:
            return self
        steps = self.steps or self.epochs * steps_per_epoch
        warm_up = math.ceil(self.warm_up * steps_per_epoch)
        return dataclasses.replace(self, freeze_after=max(1, round(FREEZE_AFTER * steps), warm_up))

    def of_compression(self) -> dict[str, Any]:
        """The arguments of `hvdcomp.Compression.from_spec`. Arguments that depend on the data and the framework are
        left out.

        Raises:
            SpecError: if the policy is invalid, or if, with `small_tensors`, the compressor is invalid.
        """
        decides = self.policy is not None and isinstance(parse_policy(self.policy), Policy)
        spec, routed = self.compression, {}
        if self.small_tensors != TrainingOptions.small_tensors:
            spec = str(with_small(parse_compressor(spec), parse_compressor(self.small_tensors)))
            routed = {"min_numel": 0, "min_ndim": 0}
        return {
            **routed,
            "spec": spec,
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


def links_of(text: str | None) -> tuple[str, ...]:
    """The links that `--link` names."""
    return () if text is None else tuple(link.strip() for link in text.split(","))


def _either(value, default):
    return default if value is None else value


def _is_rate(text: str) -> bool:
    try:
        return parse_rate(text) > 0
    except ValueError:
        return False
