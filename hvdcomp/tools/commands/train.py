"""`hvdcomp train`: the options of a training run, which `hvdcomp.tools.train` carries out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hvdcomp.communicators import rank_so_far
from hvdcomp.errors import ConfigurationError, RankMismatchError, SpecError
from hvdcomp.tools.commands.plugins import plugin_option
from hvdcomp.tools.launch.promise import EXIT_SAVED
from hvdcomp.tools.train import beforehand, environment
from hvdcomp.tools.train.backends import choose, reach
from hvdcomp.tools.train.options import (
    BACKENDS,
    DATA,
    FRAMEWORKS,
    MODELS,
    OPTIMIZERS,
    OVERLAP,
    RESIDUALS,
    SCHEDULES,
    SetupError,
    TrainingOptions,
)

_DEFAULTS = TrainingOptions()
_NEEDS = {
    "torch": "PyTorch and Horovod: pip install 'hvdcomp[torch,train,build]', then hvdcomp build-horovod; or PyTorch "
    "alone: torchrun --nproc-per-node 2 -m hvdcomp train ..., or hvdcomp train --simulate-ranks 2 ...",
    "tensorflow": "TensorFlow, tf_keras and Horovod: pip install 'hvdcomp[tensorflow,train,build]', then "
    "hvdcomp build-horovod",
}


def _number_list(expected: str) -> Callable[[click.Context, click.Parameter, str], tuple[float, ...]]:
    """A callback that parses an option's value as numbers, separated by commas."""

    def read(context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in value.split(",") if part.strip())
        except ValueError:
            raise click.BadParameter(f"{value!r}: expected {expected}") from None

    return read


def _option(name: str, help_text: str, **attributes: Any) -> Any:
    """An option with the default of `TrainingOptions`, where None means that it depends on model and data."""
    default = getattr(_DEFAULTS, name.lstrip("-").replace("-", "_"))
    shown: bool | str = "by model and data" if default is None else True
    return click.option(
        name, help=help_text, default=default, show_default=attributes.pop("shown", shown), **attributes
    )


def _steps_or_rule(context: click.Context, parameter: click.Parameter, value: int | str) -> int | str:
    """A number of steps, or the rule that decides it."""
    try:
        return int(value)
    except ValueError:
        return value


_START = (
    "Start it on several ranks with: horovodrun -np 2 hvdcomp train ...  "
    "or: torchrun --nproc-per-node 2 -m hvdcomp train ..."
)


@click.command(epilog=_START)
@_option("--framework", "Framework to train in.", type=click.Choice(FRAMEWORKS))
@_option(
    "--backend",
    "Library that averages gradients: Horovod, or PyTorch's DistributedDataParallel; auto: the latter under torchrun.",
    type=click.Choice(BACKENDS),
)
@_option(
    "--timeout",
    "With torchrun: seconds that a rank waits for another.",
    type=float,
    metavar="SECONDS",
    shown="PyTorch's: 1800",
)
@_option("--fsdp", "torchrun: shard a transformer over all ranks by FSDP's fully_shard.", is_flag=True, shown=False)
@_option(
    "--fsdp-weights",
    "FSDP: send changes of weights quantized, as int8 or int4.",
    metavar="SPEC",
    shown="weights as they are",
)
@_option("--model", "Model to train; vit and dlrm only in PyTorch.", type=click.Choice(MODELS))
@_option("--data", "Data to train on.", type=click.Choice(DATA))
@_option(
    "--data-dir",
    "Folder of the published files of CIFAR, Criteo, WikiText-2 or PTB.",
    type=click.Path(path_type=Path),
    shown=False,
)
@_option("--compression", "Compressor of the gradients, such as topk:ratio=0.01.", metavar="SPEC")
@_option(
    "--small-tensors",
    "Compressor of tensors with fewer than 1,024 elements or two dimensions, such as int8.",
    metavar="SPEC",
)
@_option(
    "--memory",
    "Memory for what is not sent: none, error_feedback, or error_feedback:dtype=bf16 of 2 bytes a parameter.",
    metavar="SPEC",
    shown="by compressor",
)
@_option(
    "--policy",
    "Policy that changes the level, such as warmup:levels=0.25|0.05,epochs=1.",
    metavar="SPEC",
    shown="constant",
)
@_option(
    "--overlap",
    "Whether to send gradients during the backward pass. PyTorch only; auto: for gradients on the CPU.",
    type=click.Choice(tuple(OVERLAP)),
)
@_option(
    "--bucket-bytes",
    "Smallest bucket of gradients that overlap sends, or size of DistributedDataParallel's buckets.",
    type=int,
    metavar="N",
    shown="the choice of the policy auto, or else 25 MiB",
)
@_option("--epochs", "Passes over the training data.", type=int)
@_option("--steps", "Optimizer steps, in place of --epochs.", type=int, shown="those of --epochs")
@_option(
    "--until",
    "Stop at this quality on the validation part: accuracy=0.93, loss=2.2 or perplexity=9.",
    metavar="METRIC=VALUE",
    shown=False,
)
@_option(
    "--evaluate-every",
    "Steps between evaluations on the validation part.",
    type=int,
    metavar="STEPS",
    shown="at the end of each epoch",
)
@_option("--batch-size", "Samples per rank and backward pass.", type=int)
@_option(
    "--optimizer",
    "Optimizer. muon (PyTorch only): Muon for hidden matrices, and AdamW for the head, embeddings, convolutions, norms "
    "and biases.",
    type=click.Choice(OPTIMIZERS),
    shown="adamw for gpt and vit, else sgd",
)
@_option("--lr", "Learning rate. It is not scaled by the number of ranks.", type=float)
@_option("--momentum", "Momentum of SGD.", type=float)
@_option("--nesterov", "Use Nesterov's momentum.", is_flag=True, shown=False)
@click.option(
    "--betas",
    help="Decay rates of AdamW's moments.",
    default=",".join(f"{beta:g}" for beta in _DEFAULTS.betas),
    show_default=True,
    metavar="B1,B2",
    callback=_number_list("numbers, such as 0.9,0.95"),
)
@_option(
    "--freeze-after",
    "compressed-adam: steps after which the second moment is frozen, and the momentum is sent.",
    type=int,
    metavar="STEPS",
    shown="15 % of the run",
)
@_option("--freeze-compression", "compressed-adam: compressor of the gradients before freezing.", metavar="SPEC")
@_option(
    "--local-steps",
    "PyTorch: number of steps that each rank makes by itself between two exchanges. An outer Nesterov step follows, as "
    "in DiLoCo. With compressed-adam local steps begin after freezing, without an outer step. auto: the number follows "
    "from the times of steps and exchanges and from the drift of the ranks.",
    type=str,
    metavar="K|auto",
    callback=_steps_or_rule,
)
@_option(
    "--fragments",
    "Local steps: groups of parameters that are exchanged at staggered steps, as in Streaming DiLoCo.",
    type=int,
    metavar="P",
)
@_option("--delay", "Local steps: steps that ranks go on while a group travels.", type=int, metavar="STEPS")
@_option("--local-share", "Local steps: share of its own weights that a rank then keeps.", type=float, metavar="SHARE")
@_option(
    "--outer-lr",
    "Learning rate of the outer step. With --outer-lr 1 --outer-momentum 0 and no --local-steps, the ranks exchange "
    "each step of the weights in place of its gradient.",
    type=float,
    metavar="LR",
    shown="0.7",
)
@_option("--outer-momentum", "Momentum of the outer step.", type=float, metavar="M", shown="0.9")
@_option(
    "--refreshes-per-gap",
    "compressed-adam: refreshes of the frozen second moment after which the gap between them doubles; 16 as in 0/1 "
    "Adam.",
    type=int,
    metavar="N",
    shown="no refresh",
)
@_option("--weight-decay", "Weight decay: of SGD for all parameters, of others for matrices.", type=float)
@_option("--schedule", "Learning-rate schedule: steps at --milestones, or a cosine.", type=click.Choice(SCHEDULES))
@click.option(
    "--milestones",
    help="Epochs after which the learning rate is multiplied by --gamma.",
    default="",
    metavar="E,E,...",
    callback=_number_list("epochs, such as 3,4"),
)
@_option("--gamma", "Factor of the learning rate at each milestone, or at the end of the cosine.", type=float)
@_option("--warm-up", "Epochs over which the learning rate grows from 0.", type=float)
@_option("--clip-norm", "Largest norm of the averaged gradient; 0: no limit.", type=float)
@_option("--backward-passes-per-step", "Backward passes per optimizer step.", type=int)
@_option(
    "--simulate-ranks",
    "Train N simulated ranks in this process, without a launcher; the weights equal those of real ranks.",
    type=int,
    metavar="N",
    shown=False,
)
@_option(
    "--link",
    "Link of each simulated rank, for predicted times: 100mbit, 1gbit or 10gbit. Several links, separated by commas, "
    "time the same run.",
    metavar="RATE,...",
    shown="exchanges take no time",
)
@_option("--seed", "Seed of all random numbers, except the split into training and test data.", type=int)
@_option(
    "--output",
    "Folder for steps.jsonl, epochs.jsonl and summary.json.",
    type=click.Path(path_type=Path),
    shown=False,
)
@_option("--overwrite", "Replace an earlier run in --output.", is_flag=True, shown=False)
@_option("--tensorboard", "Also write TensorBoard's files, in --output.", is_flag=True, shown=False)
@_option(
    "--metrics-port",
    "Port of rank 0 for Prometheus, with bytes, levels and times.",
    type=int,
    metavar="PORT",
    shown=False,
)
@_option(
    "--metrics-address",
    "Address on which rank 0 listens; 0.0.0.0 for access from other hosts.",
    metavar="ADDRESS",
)
@_option(
    "--checkpoint-folder",
    "Folder of checkpoints, shared by all hosts; the run resumes from the newest. SIGUSR1 and SIGTERM save and stop.",
    type=click.Path(path_type=Path),
    shown=False,
)
@_option(
    "--checkpoint-every",
    "Steps between checkpoints.",
    type=int,
    metavar="STEPS",
    shown="at the end of each epoch",
)
@_option(
    "--residuals",
    "Keep or drop the residuals of a checkpoint, on any number of ranks.",
    type=click.Choice(RESIDUALS),
)
@_option(
    "--elastic",
    "Resume from the checkpoint when ranks change; with horovodrun --host-discovery-script.",
    is_flag=True,
    shown=False,
)
@_option("--samples", "Train on the first N samples.", type=int, metavar="N", shown="all")
@_option(
    "--validation-samples",
    "Training samples to hold back for validation, if the data have no validation part.",
    type=int,
    metavar="N",
)
@_option("--label-noise", "Fraction of training labels to replace by random labels.", type=float)
@_option("--image-size", "Side of synthetic images, in pixels.", type=int)
@_option("--table-rows", "Rows of each of dlrm's tables; criteo's categories are hashed into them.", type=int)
@_option("--text-size", "Size of the training text: bytes of text, characters of stdlib-text.", type=int)
@_option("--text-unit", "Token of stdlib-text.", type=click.Choice(["char", "word"]))
@_option("--sequence-length", "Tokens in a sequence of text.", type=int)
@plugin_option
@click.option("--progress/--no-progress", default=True, help="Show the progress.")
@click.pass_context
def command(context: click.Context, **options: Any) -> None:
    """Train a reference model with compressed gradients.

    Without a launcher this is one process; under horovodrun, mpirun, srun or torchrun each process is a rank, and rank
    0 writes the output. Defaults such as the learning rate and the batch size depend on the model and the data.
    """
    environment.prepare_mpi()
    chosen = TrainingOptions(**options)
    if chosen.simulate_ranks is not None:
        context.exit(_simulate(context, chosen))
    try:
        backend = choose(chosen.backend, chosen.framework, elastic=chosen.elastic, timeout=chosen.timeout)
        beforehand.check(chosen)
    except (SetupError, SpecError, ConfigurationError) as error:
        beforehand.let_rank_0_speak()
        raise click.UsageError(str(error), context) from None
    try:
        from hvdcomp.tools.train.frameworks import learner_class
        from hvdcomp.tools.train.ranks import RunRefused
        from hvdcomp.tools.train.trainer import train

        learner_class(chosen.framework, backend, chosen.fsdp)
        ranks = reach(chosen.backend, chosen.framework, chosen.timeout)
    except SetupError as error:
        raise click.UsageError(str(error), context) from None
    except ImportError as error:
        raise click.ClickException(
            f"{error}; hvdcomp train --framework {chosen.framework} needs {_NEEDS[chosen.framework]}"
        ) from None
    try:
        if chosen.elastic:
            from hvdcomp.tools.train.elastic import train_elastic

            summary, ranks = train_elastic(chosen)
        else:
            summary = train(chosen, ranks)
    except RunRefused as refused:
        if rank_so_far() == 0:  # an elastic job's ranks may be others than those of `ranks`
            click.UsageError(str(refused), context).show()
        ranks.leave(2)
        context.exit(2)
    except (ConfigurationError, RankMismatchError) as error:
        raise click.ClickException(str(error)) from None
    code = _exit_code(summary, says=ranks.rank == 0)
    ranks.leave(code)
    context.exit(code)


def _simulate(context: click.Context, chosen: TrainingOptions) -> int:
    """Trains on simulated ranks; returns the exit code."""
    from hvdcomp.tools.train.ranks import RunRefused
    from hvdcomp.tools.train.simulation import on_simulated_ranks
    from hvdcomp.tools.train.trainer import train

    try:
        chosen.resolved()  # once, instead of on every rank
        return _exit_code(on_simulated_ranks(chosen, lambda ranks: train(chosen, ranks)), says=True)
    except (SetupError, RunRefused) as error:
        raise click.UsageError(str(error), context) from None
    except (ConfigurationError, RankMismatchError) as error:
        raise click.ClickException(str(error)) from None


def _exit_code(summary: dict[str, Any], says: bool) -> int:
    if summary["status"] == "diverged" and says:
        click.echo("Error: the loss is no longer a finite number; try a smaller --lr", err=True)
    return {"finished": 0, "stopped": EXIT_SAVED, "diverged": 1}[summary["status"]]
