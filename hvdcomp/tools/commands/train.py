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
            raise click.BadParameter(f"{value!r} is not a list of {expected}") from None

    return read


def _option(name: str, help_text: str, **attributes: Any) -> Any:
    """An option with the default of `TrainingOptions`, where None means that it depends on model and data."""
    default = getattr(_DEFAULTS, name.lstrip("-").replace("-", "_"))
    shown: bool | str = "depends on model and data" if default is None else True
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
    "Library that averages gradients: Horovod, or PyTorch's DistributedDataParallel. auto: DistributedDataParallel "
    "under torchrun, or else Horovod.",
    type=click.Choice(BACKENDS),
)
@_option(
    "--timeout",
    "With torchrun: how long a rank waits for another rank.",
    type=float,
    metavar="SECONDS",
    shown="PyTorch's: 1800",
)
@_option(
    "--fsdp", "With torchrun: shard a transformer over all ranks with FSDP's fully_shard.", is_flag=True, shown=False
)
@_option(
    "--fsdp-weights",
    "With --fsdp: quantize the changes of the weights that ranks send, with int8 or int4.",
    metavar="SPEC",
    shown="weights are sent as they are",
)
@_option("--model", "Model to train; vit, dlrm and encoder only in PyTorch.", type=click.Choice(MODELS))
@_option("--data", "Data to train on.", type=click.Choice(DATA))
@_option(
    "--data-dir",
    "Folder with the published files of CIFAR, Criteo, WikiText-2 or PTB.",
    type=click.Path(path_type=Path),
    shown=False,
)
@_option("--compression", "Compressor of the gradients, such as topk:ratio=0.01.", metavar="SPEC")
@_option(
    "--small-tensors",
    "Compressor of tensors with fewer than 1,024 elements or fewer than two dimensions, such as int8.",
    metavar="SPEC",
)
@_option(
    "--memory",
    "Memory for the part of a gradient that is not sent: none, error_feedback, or error_feedback:dtype=bf16, which "
    "needs only 2 bytes per parameter.",
    metavar="SPEC",
    shown="depends on the compressor",
)
@_option(
    "--policy",
    "Policy that changes the level of compression, such as warmup:levels=0.25|0.05,epochs=1.",
    metavar="SPEC",
    shown="constant",
)
@_option(
    "--overlap",
    "Whether to send gradients during the backward pass; only in PyTorch. auto: on if the gradients are on the CPU.",
    type=click.Choice(tuple(OVERLAP)),
)
@_option(
    "--bucket-bytes",
    "Size in bytes of the smallest bucket of gradients that is sent during the backward pass, or of "
    "DistributedDataParallel's buckets.",
    type=int,
    metavar="N",
    shown="the choice of the policy auto, or else 25 MiB",
)
@_option("--epochs", "Number of passes over the training data.", type=int)
@_option("--steps", "Number of optimizer steps, instead of --epochs.", type=int, shown="the steps of --epochs")
@_option(
    "--until",
    "Stop as soon as the validation part reaches this quality: accuracy=0.93, loss=2.2, perplexity=9 or rmse=0.4.",
    metavar="METRIC=VALUE",
    shown=False,
)
@_option(
    "--evaluate-every",
    "Number of steps between evaluations on the validation part.",
    type=int,
    metavar="STEPS",
    shown="at the end of each epoch",
)
@_option("--batch-size", "Samples per rank and backward pass.", type=int)
@_option(
    "--optimizer",
    "Optimizer. muon (only in PyTorch) uses Muon for hidden matrices, and AdamW for the head, embeddings, "
    "convolutions, norms and biases.",
    type=click.Choice(OPTIMIZERS),
    shown="adamw for gpt, vit, encoder and heavy-tails, else sgd",
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
    "With compressed-adam: number of steps after which the second moment is frozen, and ranks send the momentum.",
    type=int,
    metavar="STEPS",
    shown="15 % of the run",
)
@_option("--freeze-compression", "With compressed-adam: compressor of the gradients before freezing.", metavar="SPEC")
@_option(
    "--local-steps",
    "Number of steps that each rank makes on its own between two exchanges; only in PyTorch. An outer Nesterov step "
    "follows each exchange, as in DiLoCo. With compressed-adam, local steps begin after freezing, and there is no "
    "outer step. auto: the number is chosen from the times of steps and exchanges, and from how far the ranks drift "
    "apart.",
    type=str,
    metavar="K|auto",
    callback=_steps_or_rule,
)
@_option(
    "--fragments",
    "With local steps: number of groups of parameters, which are exchanged at staggered steps, as in Streaming DiLoCo.",
    type=int,
    metavar="P",
)
@_option(
    "--delay",
    "With local steps: number of steps that ranks continue to train while a group is exchanged.",
    type=int,
    metavar="STEPS",
)
@_option(
    "--local-share",
    "With local steps: share of its own weights that a rank keeps after an exchange.",
    type=float,
    metavar="SHARE",
)
@_option(
    "--outer-lr",
    "Learning rate of the outer step. With --outer-lr 1 --outer-momentum 0 and no --local-steps, the ranks exchange "
    "the change of the weights in each step instead of the gradient.",
    type=float,
    metavar="LR",
    shown="0.7",
)
@_option("--outer-momentum", "Momentum of the outer step.", type=float, metavar="M", shown="0.9")
@_option(
    "--refreshes-per-gap",
    "With compressed-adam: number of refreshes of the frozen second moment after which the gap between refreshes "
    "doubles. 0/1 Adam uses 16.",
    type=int,
    metavar="N",
    shown="no refresh",
)
@_option(
    "--weight-decay", "Weight decay. SGD applies it to all parameters, other optimizers only to matrices.", type=float
)
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
@_option("--backward-passes-per-step", "Number of backward passes per optimizer step.", type=int)
@_option(
    "--simulate-ranks",
    "Train N simulated ranks in this process, without a launcher. The weights equal the weights of real ranks.",
    type=int,
    metavar="N",
    shown=False,
)
@_option(
    "--link",
    "Rate of each simulated rank's link, for predicted times: 100mbit, 1gbit or 10gbit. If you give several rates, "
    "separated by commas, the same run is timed for each of them.",
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
    "Port on which rank 0 gives bytes, levels and times to Prometheus.",
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
    "Folder for checkpoints, shared by all hosts. The run resumes from the newest checkpoint. On SIGUSR1 or SIGTERM, "
    "it saves a checkpoint and stops.",
    type=click.Path(path_type=Path),
    shown=False,
)
@_option(
    "--checkpoint-every",
    "Number of steps between checkpoints.",
    type=int,
    metavar="STEPS",
    shown="at the end of each epoch",
)
@_option(
    "--residuals",
    "When the run resumes, on any number of ranks: keep or drop the checkpoint's residuals.",
    type=click.Choice(RESIDUALS),
)
@_option(
    "--elastic",
    "Resume from the checkpoint when ranks are lost or added; needs horovodrun --host-discovery-script.",
    is_flag=True,
    shown=False,
)
@_option("--samples", "Train on the first N samples.", type=int, metavar="N", shown="all")
@_option(
    "--validation-samples",
    "Number of training samples to use for validation instead, if the data have no validation part.",
    type=int,
    metavar="N",
)
@_option("--label-noise", "Fraction of training labels to replace by random labels.", type=float)
@_option("--image-size", "Side of synthetic images, in pixels.", type=int)
@_option(
    "--table-rows", "Number of rows in each of dlrm's tables. Criteo's categories are hashed into these rows.", type=int
)
@_option(
    "--text-size", "Size of the training text: in bytes for the data text, in characters for stdlib-text.", type=int
)
@_option("--text-unit", "What a token of stdlib-text is.", type=click.Choice(["char", "word"]))
@_option("--sequence-length", "Number of tokens in a sequence of text.", type=int)
@plugin_option
@click.option("--progress/--no-progress", default=True, help="Show the progress.")
@click.pass_context
def command(context: click.Context, **options: Any) -> None:
    """Train a reference model with compressed gradients.

    Without a launcher, the command trains in one process. Under horovodrun, mpirun, srun or torchrun, each process is a
    rank, and rank 0 writes the output. Defaults such as the learning rate and the batch size depend on the model and
    the data.
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
