"""The rows of the benchmark of best learning rates: its workloads, the methods for each workload, and a single training
run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from benchmarks.quality import convergence
from benchmarks.quality.equal_bytes import payload_bytes
from benchmarks.trainings import Run
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.tools.train.options import TrainingOptions


def _with(name: str, **changes: Any) -> dict[str, Any]:
    return {**convergence.WORKLOADS[name].options, "simulate_ranks": convergence.RANKS, **changes}


def _quick(model: str, data: str, optimizer: str, lr: float, steps: int, **changes: Any) -> dict[str, Any]:
    """The options of a training run that takes about ten seconds on one core."""
    words = {"model": model, "data": data, "optimizer": optimizer, "lr": lr, "schedule": "cosine", "steps": steps}
    return {**words, "evaluate_every": 100, "simulate_ranks": convergence.RANKS, **changes}


_SORTING = _quick("encoder", "sorting", "adamw", 8e-3, 300, warm_up=0.06)
_HEAVY_TAILS = _quick("mlp", "heavy-tails", "adamw", 1.6e-2, 400, warm_up=0.1, weight_decay=0.0)
_SHAPES = _quick("resnet8", "shapes", "sgd", 0.2, 300, warm_up=0.2, weight_decay=5e-4)
# For docs/convergence.md, the GPT warms up for half as long. With such a short warm-up, single seeds lost up to 30 % at
# the best learning rates.
_GPT = _with("gpt", warm_up=0.2)
WORKLOADS: dict[str, dict[str, Any]] = {
    "gpt": _GPT,
    "gpt-muon": {**_GPT, "optimizer": "muon"},
    "mnist1d": _with("mnist1d"),
    "lstm": _with("lstm"),
    "sorting": _SORTING,
    "sorting-muon": {**_SORTING, "optimizer": "muon"},
    "heavy-tails": _HEAVY_TAILS,
    "heavy-tails-muon": {**_HEAVY_TAILS, "optimizer": "muon"},
    "shapes": _SHAPES,
}
"""The options of `hvdcomp train` for each workload. The first search begins at the learning rate in these options."""

OTHER_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adafactor": {"optimizer": "torch.optim.Adafactor", "lr": 2.0},
    "adamw-8bit": {"optimizer": "bitsandbytes.optim.AdamW8bit", "lr": 1.0},
    "galore": {"optimizer": "benchmarks.best_rates.galore.galore", "lr": 1.0},
    "lion": {"optimizer": "pytorch_optimizer.Lion", "lr": 0.125},
    "schedule-free": {"optimizer": "pytorch_optimizer.ScheduleFreeAdamW", "lr": 1.0, "schedule": "step"},
    "soap": {"optimizer": "pytorch_optimizer.SOAP", "lr": 0.5},
}
"""Optimizers from other packages: for each, by name, the options that it changes in a workload with AdamW. The first
search begins at a multiple of the workload's learning rate."""


KINDS_OF_OTHERS = {
    "adafactor": "Adafactor",
    "adamw-8bit": "AdamW8bit",
    "galore": "GaLore",
    "lion": "Lion",
    "schedule-free": "schedule-free AdamW",
    "soap": "SOAP",
}
"""The names of these optimizers in `hvdcomp.compressors.evidence`."""


def _of_other_optimizers(task: str) -> dict[str, dict[str, Any]]:
    given = WORKLOADS[task]
    return {
        f"{task}-{name}": {**given, **changes, "lr": changes["lr"] * given["lr"]}
        for name, changes in OTHER_OPTIMIZERS.items()
    }


TASKS_OF_OTHERS = ("heavy-tails", "sorting")
"""The workloads that are also trained with other optimizers: the quick workloads with AdamW."""
WORKLOADS_OF_OTHERS = {name: one for task in TASKS_OF_OTHERS for name, one in _of_other_optimizers(task).items()}

DENSE = "none"
PAIRS = {"eden": ("terngrad", "powersgd"), "eden:bits=1": ("powersgd",)}
"""For each compressor, the rivals that it is compared with. PowerSGD has the lowest rank at which it sends at least as
many bytes as the compressor."""
BUDGETS = {"budget topk:ratio=0.01": "topk:ratio=0.01"}
"""Methods in which the policy `budget` chooses the level of each tensor. Each is compared with the compressor that
sends as many bytes at its fixed level."""
QUICK_RANKS = {"sorting": 2, "heavy-tails": 4, "shapes": 2}
"""For the data of each quick workload, the rank with which PowerSGD sends about as many bytes as `terngrad`."""
FROZEN: dict[str, dict[str, Any]] = {
    "compressed-adam none": {"optimizer": "compressed-adam", "compression": "none", "freeze_compression": "none"},
    "compressed-adam efsignsgd": {"optimizer": "compressed-adam", "compression": "efsignsgd"},
}
"""Methods that also replace AdamW. The new optimizer alone may improve the quality. One of these methods therefore does
not compress, and is the baseline for the others."""
_FREEZE_AFTER = {"gpt": 0.2}
"""The share of the steps after which the second moment is frozen, for workloads whose warm-up is longer than the
default share of 15 %."""

PRESET_OF_STEPS = {"outer_lr": 1.0, "outer_momentum": 0.0, "small_tensors": "int8", "memory": "error_feedback"}
"""The options that train as `hvdcomp.torch.LocalSteps.compressed` does."""
STEPS: dict[str, dict[str, Any]] = {
    "local-steps=4 chunkedtopk:chunk=8,k=1,values=sign": {
        **PRESET_OF_STEPS, "local_steps": 4, "compression": "chunkedtopk:chunk=8,k=1,values=sign",
    },
    # SparseLoCo and DiLoCo, with settings at which they send about as many bytes as signs.
    "sparseloco": {
        **PRESET_OF_STEPS, "memory": "error_feedback:decay=0.95", "local_steps": 4,
        "compression": "chunkedtopk:k=256",
    },
    "local-steps=4 efsignsgd": {**PRESET_OF_STEPS, "local_steps": 4, "compression": "efsignsgd"},
    "diloco int8": {
        "outer_lr": 0.7, "outer_momentum": 0.9, "small_tensors": "int8", "local_steps": 30, "compression": "int8",
    },
    "local-steps=1 chunkedtopk:chunk=32,k=1,values=sign": {
        **PRESET_OF_STEPS, "local_steps": 1, "compression": "chunkedtopk:chunk=32,k=1,values=sign",
    },
    "local-steps=1 efsignsgd": {**PRESET_OF_STEPS, "local_steps": 1, "compression": "efsignsgd"},
}  # fmt: skip
"""Methods in which ranks take steps with their own gradients, and exchange the changes of their weights. They are
sorted from the fewest bytes to the most."""

RAISED = tuple(name for name, changes in STEPS.items() if changes["outer_momentum"] == 0)
"""The names in `STEPS` whose best learning rates may be higher than the best rate of dense training
(docs/compressed-steps.md)."""

NAMED = {**FROZEN, **STEPS, **{name: {"compression": spec} for name, spec in BUDGETS.items()}}
CANDIDATES = {
    "sgd": ("topk:ratio=0.01", "eden:bits=1", "terngrad", "eden", "int4"),
    "adamw": (
        "eden:bits=1,scaled=True",
        "eden:bits=1",
        "terngrad",
        "eden:scaled=True",
        "eden",
        "eden:bits=3,scaled=True",
        "eden:bits=3",
        "int4",
        "int8",
    ),
    "muon": ("eden:bits=1", "terngrad", "eden", "eden:bits=3", "int4"),
}
"""For each optimizer, the compressors that README's table may name, from the fewest bytes to the most."""

SCATTERED = {
    "sgd": ("eden:bits=1,exchange=scatter",),
    "adamw": ("eden:scaled=True,exchange=scatter", "int4:exchange=scatter"),
    "muon": (),
}
"""For each optimizer, the methods that README's programs use with `exchange="auto"`. With four or more ranks, "auto"
means "scatter", which rounds each element twice. So these methods are trained with "scatter", too."""

METHODS_OF_OTHERS = ("topk:ratio=0.01", "eden:bits=1", "eden", "int4")
"""The compressors that are trained with other optimizers, from the fewest bytes to the most."""

LONGER = 3
"""A long training has this many times the steps of the workload."""
LONG, MANY_RANKS = "-long", "-16"
"""The names of variants end in one of these: "-long" for a workload with more steps, and "-16" for a workload with 16
ranks. No learning rate is searched for a variant: it uses the best learning rates of its workload. A variant has only
two seeds. They show the trend, but are too few for a confidence interval."""
SEEDS_OF_VARIANTS = (101, 102)
METHODS_OF_MANY_RANKS = (DENSE, *PAIRS, "terngrad")
VARIANTS: dict[str, dict[str, Any]] = {
    **{
        name + LONG: {**options, **{key: LONGER * options[key] for key in ("steps", "evaluate_every")}}
        for name, options in WORKLOADS.items()
    },
    **{name + MANY_RANKS: {**WORKLOADS[name], "simulate_ranks": 16} for name in ("mnist1d", "lstm", "gpt", "gpt-muon")},
}
TRAINED = {**WORKLOADS, **WORKLOADS_OF_OTHERS, **VARIANTS}


@cache
def is_accuracy(workload: str) -> bool:
    return TrainingOptions(data=TRAINED[workload]["data"]).metric == "accuracy"


def rate_of(workload: str, doublings: int) -> float:
    rate: float = TRAINED[workload]["lr"] * 2.0**doublings
    return rate


def rivals_of(workload: str, spec: str) -> list[str]:
    """The rivals of a method, each as a spec; an empty list if it has none."""
    if spec in BUDGETS:
        return [BUDGETS[spec]]
    return [_of_equal_bytes(workload, spec) if name == "powersgd" else name for name in PAIRS.get(spec, ())]


def _of_equal_bytes(workload: str, spec: str) -> str:
    options = TRAINED[workload]
    sent = payload_bytes(options, spec)
    return next(
        rival for rank in range(1, 65) if payload_bytes(options, rival := f"powersgd:rank={rank}") >= sent or rank == 64
    )


def methods_of(workload: str) -> list[str]:
    """The methods with which a workload is trained: specs, and names in `NAMED`. Dense training comes first."""
    if workload in WORKLOADS_OF_OTHERS:
        return [DENSE, *METHODS_OF_OTHERS]
    options = TRAINED[workload]
    optimizer = options["optimizer"]
    if options["data"] in QUICK_RANKS:
        powersgd = f"powersgd:rank={QUICK_RANKS[options['data']]}"
        specs = [DENSE, "int8", "int4", *PAIRS, "terngrad", powersgd, "topk:ratio=0.01"]
    else:
        specs = [DENSE, *(one for spec in PAIRS for one in (spec, *rivals_of(workload, spec)))]
    named = {"adamw": FROZEN, "muon": STEPS}.get(optimizer, {})
    specs += [*CANDIDATES[optimizer], *SCATTERED[optimizer], *named]
    if options["data"] in QUICK_RANKS and optimizer != "muon":
        specs += BUDGETS
    return list(dict.fromkeys(specs))


def name_of(spec: str) -> str:
    """The name of a method for `--only`: the name of its compressor, or the first word of a name in `NAMED`."""
    return spec.partition(" ")[0].partition("=")[0] if spec in NAMED else parse_compressor(spec).name


def changes_of(workload: str, spec: str) -> dict[str, Any]:
    """The options that a method changes in the options of the workload."""
    changes = NAMED.get(spec, {"compression": spec})
    if spec in BUDGETS:
        dense, sent = (payload_bytes(TRAINED[workload], compressor) for compressor in (DENSE, BUDGETS[spec]))
        return {**changes, "policy": f"budget:factor={dense / sent:.4g}"}
    steps = TRAINED[workload]["steps"]
    share = _FREEZE_AFTER.get(workload.removesuffix(LONG).removesuffix(MANY_RANKS))
    if spec in FROZEN and share is not None:
        return {**changes, "freeze_after": round(share * steps)}
    if spec not in STEPS:
        return changes
    # Ranks have equal weights only after an exchange. The last step of the training must therefore end with an
    # exchange, and the model is evaluated only after this step.
    every = max(length for length in range(1, changes["local_steps"] + 1) if steps % length == 0)
    return {**changes, "local_steps": every, "evaluate_every": steps}


@dataclass(frozen=True)
class RateRun(Run):
    """One training run: a workload, a method and a learning rate.

    Attributes:
        spec: spec of the compressor, or a name in `NAMED`.
        doublings: the learning rate, as the number of times that the workload's own learning rate is doubled; negative
            if it is halved.
    """

    spec: str
    doublings: int

    @property
    def rate(self) -> float:
        return rate_of(self.workload, self.doublings)

    @property
    def label(self) -> str:
        return f"{self.spec} lr={self.rate:g}"

    @cached_property
    def options(self) -> dict[str, Any]:
        return {**TRAINED[self.workload], "lr": self.rate, **changes_of(self.workload, self.spec), "seed": self.seed}

    @property
    def settings(self) -> str:
        return _settings_of(self)

    def figures(self) -> dict[str, Any]:
        """The compression factor, the bytes that a rank sent, and the loss and accuracy on the validation data at the
        end; None if the training diverged."""
        assert self.summary is not None
        last = self.records("evaluations.jsonl")[-1] if self.summary["status"] == "finished" else {}
        return {
            "factor": self.summary["compression_factor"],
            "bytes_sent": self.summary["bytes_sent"],
            "loss": last.get("loss"),
            "accuracy": last.get("accuracy"),
        }

    @property
    def quality(self) -> float | None:
        """The accuracy in percent, or the loss; None if the training run does not exist, and NaN if it diverged."""
        record = self.record
        if record is None:
            return None
        value = record["accuracy" if is_accuracy(self.workload) else "loss"]
        return math.nan if value is None else value * (100 if is_accuracy(self.workload) else 1)


@cache  # a plan asks for the same runs many times
def _settings_of(run: RateRun) -> str:
    return super(RateRun, run).settings


def lost_beside(workload: str, quality: float, reference: float) -> float:
    """How much worse a quality is than a reference quality: in points of accuracy, or in percent of the loss."""
    return reference - quality if is_accuracy(workload) else 100 * (quality / reference - 1)
