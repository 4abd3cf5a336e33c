"""The options of a training run: every option of `hvdcomp train`, its default, and the checks that need no framework.

Missing options get a value that suits the model and the data, so that `--model cnn --data digits` alone trains well.
The learning rate is used as given: scale it by hand if you add ranks, and so enlarge the global batch.
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
from hvdcomp.tools.train.target import Target

FRAMEWORKS = ("torch", "tensorflow")
BACKENDS = ("auto", "horovod", "ddp")  # libraries that connect the ranks; auto: by the launcher
SIMULATED = "simulated"  # the backend of simulated ranks
NO_TIME = "none"  # a link on which an exchange takes no time
RESIDUALS = ("keep", "drop")  # what happens to the residuals of a checkpoint
OVERLAP: dict[str, bool | str] = {"auto": "auto", "on": True, "off": False}  # --overlap, for `Compression`

DECISIONS = "decisions.jsonl"  # in --output; written by the compression, which starts new files when one is full

IMAGE_MODELS = ("mlp", "cnn", "resnet8", "resnet20", "resnet18", "vgg16", "vgg19_bn", "vit")
SIGNAL_MODELS = ("cnn1d",)
CLICK_MODELS = ("dlrm",)
TABULAR_MODELS = ("mlp",)  # an image model, too
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
FOLDER_DATA = ("cifar10", "cifar100", "criteo", "wikitext2", "ptb")  # read from --data-dir
# With a validation part of their own.
VALIDATED_DATA = ("shapes", *SIGNAL_DATA, *CLICK_DATA, *TABULAR_DATA, *SORTING_DATA, "text", "wikitext2", "ptb")
FAMILIES = (  # models, and the data that they learn
    (IMAGE_MODELS, IMAGE_DATA),
    (SIGNAL_MODELS, SIGNAL_DATA),
    (CLICK_MODELS, CLICK_DATA),
    (TABULAR_MODELS, TABULAR_DATA),
    (SORTING_MODELS, SORTING_DATA),
    (TEXT_MODELS, TEXT_DATA),
)

OPTIMIZERS = ("sgd", "adamw", "compressed-adam", "muon")
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
FREEZE_AFTER = 0.15  # fraction of a run after which AdamW's second moment is frozen
# By model, or by data. Others: 1e-3; muon has the same rates.
_ADAMW_RATES = {"gpt": 2e-3, "gpt-small": 6e-4, "encoder": 8e-3, "heavy-tails": 8e-3}
# Others: 32.
_BATCH_SIZES = {
    **{"digits": 16, "synthetic": 32, "cifar10": 128, "cifar100": 128, "mnist1d": 25, "text": 8},
    **{"shapes": 16, "sorting": 16},
    **dict.fromkeys(CLICK_DATA, 128),
}
_SEQUENCES = {"text": 128, "stdlib-text": 64}  # tokens; others: 35
_TEXT_SIZES = {"text": 2_000_000}  # others: 400_000
_CLIP_NORMS = {"lstm": 0.25, **dict.fromkeys(TRANSFORMERS, 1.0)}  # others: none


class SetupError(ValueError):
    """A run cannot start; the message names the option, the allowed values and the way out."""


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a run. None means "choose a value", which `resolved` does."""

    framework: str = "torch"
    backend: str = "auto"
    timeout: float | None = None  # seconds that a rank of torch.distributed waits for another
    fsdp: bool = False  # whether each rank of torch.distributed has a shard of the model
    fsdp_weights: str | None = None  # quantizer of what a gather of weights sends; None: FSDP's own gather
    model: str = "cnn"
    data: str = "digits"
    data_dir: Path | None = None
    compression: str = "none"
    small_tensors: str = "none"  # compressor of tensors that are too small for `compression`
    memory: str | None = None
    policy: str | None = None
    overlap: str = "auto"
    bucket_bytes: int | None = None
    epochs: int = 10
    steps: int | None = None  # of the optimizer, in place of epochs
    until: str | None = None  # a target on the validation part that ends the run
    evaluate_every: int | None = None  # steps; None: at the end of each epoch
    batch_size: int | None = None  # per rank and backward pass
    optimizer: str | None = None
    lr: float | None = None
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.95)  # of adamw, also within muon
    freeze_after: int | None = None  # compressed-adam: steps; None: `FREEZE_AFTER` of the run
    freeze_compression: str = "int4"  # compressed-adam, before that
    local_steps: int | str = 1  # from one exchange to the next, or as `LocalSteps`; with compressed-adam after freezing
    fragments: int = 1  # of the parameters, as of `LocalSteps`
    delay: int = 0  # steps that a fragment travels
    local_share: float = 0.0  # of a rank's own weights after an exchange
    outer_lr: float | None = None  # of the step after local steps; None: that of `LocalSteps`
    outer_momentum: float | None = None
    refreshes_per_gap: int | None = None  # compressed-adam, of the frozen second moment; None for no refresh
    weight_decay: float | None = None
    schedule: str = "step"
    milestones: tuple[float, ...] = ()  # epochs after which the learning rate is multiplied by gamma
    gamma: float = 0.1
    warm_up: float = 0.0  # epochs of linear growth of the learning rate
    clip_norm: float | None = None  # 0: no clipping
    backward_passes_per_step: int = 1
    simulate_ranks: int | None = None  # threads of this process that are ranks
    link: str | None = None  # of simulated ranks, or several, separated by commas; None: exchanges take no time
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
    validation_samples: int = 0  # of the training data, if the data set has no validation part
    label_noise: float = 0.0
    image_size: int = 32  # synthetic
    table_rows: int = 20_000  # clicks and criteo: of each table
    text_size: int | None = None  # text: bytes to train on; stdlib-text: characters
    text_unit: str = "char"  # stdlib-text
    sequence_length: int | None = None  # text data
    progress: bool = True

    def resolved(self) -> TrainingOptions:
        """These options with a value for every None, checked.

        Raises:
            SetupError: a value, or a combination of values, is not allowed.
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
        chosen.check_values()
        chosen.check_target()
        return chosen

    def _check_names(self) -> None:
        for option, value, choices in (
            ("--framework", self.framework, FRAMEWORKS),
            ("--backend", self.backend, BACKENDS if self.simulate_ranks is None else ("auto", SIMULATED)),
            ("--model", self.model, MODELS),
            ("--data", self.data, DATA),
            ("--optimizer", self.optimizer or "sgd", OPTIMIZERS),
            ("--schedule", self.schedule, SCHEDULES),
            ("--overlap", self.overlap, OVERLAP),
            ("--residuals", self.residuals, RESIDUALS),
        ):
            if value not in choices:
                raise SetupError(f"{option} {value!r} is unknown; choose one of {', '.join(choices)}")
        suitable = [name for models, data in FAMILIES if self.model in models for name in data]
        if self.data not in suitable:
            raise SetupError(
                f"--model {self.model} cannot learn --data {self.data}; choose one of {', '.join(suitable)}"
            )
        if self.data in FOLDER_DATA and self.data_dir is None:
            raise SetupError(f"--data {self.data} is read from a folder: name it with --data-dir")
        if self.data not in FOLDER_DATA and self.data_dir is not None:
            raise SetupError(f"--data {self.data} needs no --data-dir; leave it out")

    def check_values(self) -> None:
        """Refuses values that are out of range or do not fit together."""
        assert self.lr is not None
        assert self.weight_decay is not None
        assert self.clip_norm is not None
        overlaps = self.framework == "torch"
        at_once = f"--framework {self.framework} sends all gradients of a step at once"
        checks = (
            (
                overlaps or self.overlap != "on",
                f"--overlap on is not possible, because {at_once}; use --overlap auto, or use --framework torch",
            ),
            (
                self.bucket_bytes is None or self.bucket_bytes >= 1,
                f"--bucket-bytes {self.bucket_bytes} must be at least 1",
            ),
            (
                overlaps or self.bucket_bytes is None,
                f"--bucket-bytes {self.bucket_bytes} is not possible, because {at_once}; leave it out, or use "
                "--framework torch",
            ),
            (self.epochs >= 1, f"--epochs {self.epochs} must be at least 1"),
            (self.steps is None or self.steps >= 1, f"--steps {self.steps} must be at least 1"),
            (
                self.evaluate_every is None or self.evaluate_every >= 1,
                f"--evaluate-every {self.evaluate_every} must be at least 1",
            ),
            (
                self.until is None or self.has_validation,
                f"--until {self.until} needs a validation part, and --data {self.data} has none of its own; hold some "
                "of the training samples back with --validation-samples N",
            ),
            (
                self.evaluate_every is None or self.has_validation,
                f"--evaluate-every {self.evaluate_every} needs a validation part, and --data {self.data} has none of "
                "its own; hold some of the training samples back with --validation-samples N",
            ),
            (self.validation_samples >= 0, f"--validation-samples {self.validation_samples} must be 0 or more"),
            (
                self.validation_samples == 0 or self.data not in VALIDATED_DATA,
                f"--validation-samples {self.validation_samples} cannot be used, because --data {self.data} has a "
                "validation part of its own; leave it out",
            ),
            ((self.batch_size or 0) >= 1, f"--batch-size {self.batch_size} must be at least 1"),
            (_is_finite(self.lr) and self.lr > 0, f"--lr {self.lr} must be a positive number"),
            (0 <= self.momentum < 1, f"--momentum {self.momentum} must be at least 0 and less than 1"),
            (not self.nesterov or self.momentum > 0, "--nesterov needs a --momentum above 0"),
            (
                not self.nesterov or self.optimizer == "sgd",
                f"--nesterov is a form of SGD's momentum; leave it out with --optimizer {self.optimizer}",
            ),
            (
                len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
                f"--betas {_join(self.betas)} must be two numbers, each at least 0 and less than 1, such as 0.9,0.95",
            ),
            (
                self.freeze_after is None or self.freeze_after >= 1,
                f"--freeze-after {self.freeze_after} must be at least 1",
            ),
            (
                self.freeze_after is None or self.optimizer == "compressed-adam",
                f"--freeze-after {self.freeze_after} works only with --optimizer compressed-adam; leave it out with "
                f"--optimizer {self.optimizer}",
            ),
            (
                self.model not in TORCH_MODELS or self.framework == "torch",
                f"--model {self.model} works only with --framework torch",
            ),
            (
                self.optimizer != "muon" or self.framework == "torch",
                "--optimizer muon works only with --framework torch; use --optimizer adamw with --framework "
                f"{self.framework}",
            ),
            (
                self.optimizer != "compressed-adam" or self.model not in CLICK_MODELS,
                "--optimizer compressed-adam sends the momenta of all parameters, but of the tables of --model "
                f"{self.model} only some rows are sent; use --optimizer sgd or adamw",
            ),
            (
                self.optimizer != "muon" or self.model in MUON_MODELS,
                f"--optimizer muon is for hidden matrices, and --model {self.model} has none; use --optimizer sgd or "
                f"adamw, or one of the models {', '.join(MUON_MODELS)}",
            ),
            (
                self.schedule == "step" or not self.milestones,
                f"--milestones {_join(self.milestones)} work only with --schedule step; leave them out with "
                f"--schedule {self.schedule}",
            ),
            (
                _is_finite(self.weight_decay) and self.weight_decay >= 0,
                f"--weight-decay {self.weight_decay} must be 0 or more",
            ),
            (0 < self.gamma <= 1, f"--gamma {self.gamma} must be above 0 and at most 1"),
            (
                all(_is_finite(m) and m > 0 for m in self.milestones)
                and list(self.milestones) == sorted(set(self.milestones)),
                f"--milestones {_join(self.milestones)} must be epochs above 0, each later than the one before",
            ),
            (
                self.steps is not None or all(m < self.epochs for m in self.milestones),
                f"--milestones {_join(self.milestones)} must all be before the end of the run, --epochs {self.epochs}",
            ),
            (_is_finite(self.warm_up) and self.warm_up >= 0, f"--warm-up {self.warm_up} must be 0 epochs or more"),
            (
                not self.milestones or self.warm_up <= self.milestones[0],
                f"--warm-up {self.warm_up} must end before the first of --milestones {_join(self.milestones)}",
            ),
            (
                _is_finite(self.clip_norm) and self.clip_norm >= 0,
                f"--clip-norm {self.clip_norm} must be 0 (no clipping) or more",
            ),
            (
                self.backward_passes_per_step >= 1,
                f"--backward-passes-per-step {self.backward_passes_per_step} must be at least 1",
            ),
            *self._checks_of_local_steps(),
            *self._checks_of_streaming(),
            *self._checks_of_outer_step(),
            *self._checks_of_refreshes(),
            *self._checks_of_simulation(),
            *self._checks_of_fsdp(),
            (0 <= self.seed < 2**31, f"--seed {self.seed} must be from 0 to 2147483647"),
            (self.samples is None or self.samples >= 1, f"--samples {self.samples} must be at least 1"),
            (0 <= self.label_noise <= 1, f"--label-noise {self.label_noise} must be a fraction from 0 to 1"),
            (
                self.label_noise == 0 or self.data in LABELLED_DATA,
                f"--label-noise needs labels, and --data {self.data} has none; use one of {', '.join(LABELLED_DATA)}",
            ),
            (self.image_size >= 4, f"--image-size {self.image_size} must be at least 4 pixels"),
            (
                2 <= self.table_rows <= 2**24,
                f"--table-rows {self.table_rows} must be from 2 to 16777216, because larger ids are not exact in "
                "float32",
            ),
            (self.text_unit in ("char", "word"), f"--text-unit {self.text_unit!r} must be char or word"),
            ((self.text_size or 0) >= 10_000, f"--text-size {self.text_size} must be at least 10000 characters"),
            ((self.sequence_length or 0) >= 1, f"--sequence-length {self.sequence_length} must be at least 1"),
            (
                self.checkpoint_every is None or self.checkpoint_every >= 1,
                f"--checkpoint-every {self.checkpoint_every} must be at least 1",
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
                self.metrics_port is None or 1 <= self.metrics_port <= 65535,
                f"--metrics-port {self.metrics_port} must be from 1 to 65535, such as 9400",
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
        """Whether each rank makes steps by itself. With one local step it does if an outer step follows."""
        has_outer = self.optimizer != "compressed-adam" and (self.outer_lr, self.outer_momentum) != (None, None)
        return not isinstance(self.local_steps, int) or self.local_steps > 1 or has_outer

    @property
    def common_every(self) -> int | None:
        """Number of steps after which all ranks have the same weights; None if the run is evaluated with the outer
        weights, and ends with one more exchange."""
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
            yield self.steps is not None, f"{shown} also needs --steps N, after which the ranks exchange once more"
        else:
            yield (
                every == 1 or (self.steps is not None and self.steps % every == 0),
                f"{shown} also needs --steps N, a multiple of {every}, after which all ranks have the same weights",
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
        takes = self.steps_alone and self.optimizer != "compressed-adam"
        for name in ("fragments", "delay", "local_share"):
            value = getattr(self, name)
            yield (
                (takes and isinstance(every, int)) or value == getattr(TrainingOptions, name),
                f"--{name.replace('_', '-')} {value} needs --local-steps N with a number above 1, and does not work "
                "with compressed-adam",
            )
        if takes and isinstance(every, int):
            yield 1 <= self.fragments <= every, f"--fragments {self.fragments} must be from 1 to --local-steps {every}"
            yield (
                0 <= self.delay * self.fragments < every,
                f"--delay {self.delay} must be from 0 to {(every - 1) // max(1, self.fragments)} steps, because a "
                "fragment is applied before the next one is sent",
            )
            yield 0 <= self.local_share < 1, f"--local-share {self.local_share} must be at least 0 and less than 1"

    def _checks_of_outer_step(self) -> Iterator[tuple[bool, str]]:
        for name, value in (("--outer-lr", self.outer_lr), ("--outer-momentum", self.outer_momentum)):
            shown = f"{name} {value}"
            yield (
                value is None or self.optimizer != "compressed-adam",
                f"{shown} does not work with compressed-adam, which has no outer step",
            )
            yield value is None or 0 <= value <= 1, f"{shown} must be from 0 to 1"

    def _checks_of_refreshes(self) -> list[tuple[bool, str]]:
        refreshes, shown = self.refreshes_per_gap, f"--refreshes-per-gap {self.refreshes_per_gap}"
        return [
            (refreshes is None or refreshes >= 1, f"{shown} must be at least 1"),
            (
                refreshes is None or self.optimizer == "compressed-adam",
                f"{shown} works only with --optimizer compressed-adam; leave it out with --optimizer {self.optimizer}",
            ),
            (
                refreshes is None or not self.steps_alone,
                f"{shown} does not work with --local-steps {self.local_steps}, because local steps exchange no "
                "gradient of all ranks; leave one of the two out",
            ),
        ]

    def _checks_of_simulation(self) -> list[tuple[bool, str]]:
        ranks, simulated = self.simulate_ranks, self.simulate_ranks is not None
        shown, links = f"--simulate-ranks {ranks}", links_of(self.link)
        return [
            (ranks is None or ranks >= 1, f"{shown} must be at least 1"),
            (
                self.link is None or simulated,
                f"--link {self.link} needs simulated ranks; give --simulate-ranks N too, or leave it out",
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
        if not self.fsdp:
            weights = f"--fsdp-weights {self.fsdp_weights} works only with --fsdp: add --fsdp, or leave it out"
            return [(self.fsdp_weights is None, weights)]
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
                self.bucket_bytes is None and self.overlap != "on",
                "--fsdp lets FSDP decide when gradients are sent; leave out --bucket-bytes and --overlap",
            ),
            (
                self.policy is None,
                f"--fsdp does not work with --policy {self.policy}, because gradients arrive module by module; leave "
                "the policy out",
            ),
        ]

    def check_target(self) -> None:
        """Refuses a target of a metric that is not measured."""
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
        """The one of `target.METRICS` that the data are measured by."""
        return "perplexity" if self.data in TEXT_DATA else "rmse" if self.data in TABULAR_DATA else "accuracy"

    @property
    def has_validation(self) -> bool:
        """Whether there are samples for validation."""
        return self.data in VALIDATED_DATA or self.validation_samples > 0

    def learning_rate(self, epochs_done: float, epochs: float) -> float:
        """The learning rate at a point of a run.

        It grows from 0 to `lr` in the epochs of the warm-up. Then it is multiplied by `gamma` at each milestone, or it
        falls to `gamma` times `lr` along half a period of a cosine.

        Args:
            epochs_done: before this step; may be fractional.
            epochs: of the run; may be fractional.

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
        """These resolved options, with the values that depend on the length of the run.

        Raises:
            SetupError: an epoch ends while the weights of the ranks differ.
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
        return dataclasses.replace(self, freeze_after=max(1, round(FREEZE_AFTER * steps)))

    def of_compression(self) -> dict[str, Any]:
        """The arguments of `hvdcomp.Compression.from_spec`, without those of the data and the framework.

        Raises:
            SpecError: for an invalid policy, or with `small_tensors` for an invalid compressor.
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
    """The links of `--link`."""
    return () if text is None else tuple(link.strip() for link in text.split(","))


def _either(value, default):
    return default if value is None else value


def _is_rate(text: str) -> bool:
    try:
        return parse_rate(text) > 0
    except ValueError:
        return False


def _is_finite(value: float) -> bool:
    return math.isfinite(value)


def _join(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)
