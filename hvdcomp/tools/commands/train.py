"""`hvdcomp train`: options in, a training run out. What a run is and does lives in `hvdcomp.tools.train`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hvdcomp.errors import ConfigurationError, RankMismatchError, SpecError
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
    "alone, started with torchrun",
    "tensorflow": "TensorFlow, tf_keras and Horovod: pip install 'hvdcomp[tensorflow,train,build]', then "
    "hvdcomp build-horovod",
}


def _number_list(of_what: str) -> Callable[[click.Context, click.Parameter, str], tuple[float, ...]]:
    """Makes numbers of an option's value, which are between commas."""

    def read(context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in value.split(",") if part.strip())
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a list of {of_what}") from None

    return read


def _option(name: str, help_text: str, **attributes: Any) -> Any:
    """An option with the default of `TrainingOptions`; None there means that it depends on the model and the data."""
    default = getattr(_DEFAULTS, name.lstrip("-").replace("-", "_"))
    shown: bool | str = "by model and data" if default is None else True
    return click.option(
        name, help=help_text, default=default, show_default=attributes.pop("shown", shown), **attributes
    )


def _steps_or_rule(context: click.Context, parameter: click.Parameter, value: int | str) -> int | str:
    """A number of steps, or the rule by which there is one."""
    try:
        return int(value)
    except ValueError:
        return value


_START = (
    "Start it on several ranks with: horovodrun -np 2 hvdcomp train ...  "
    "or: torchrun --nproc-per-node 2 -m hvdcomp train ..."
)


@click.command(epilog=_START)
@_option("--framework", "What to train in.", type=click.Choice(FRAMEWORKS))
@_option(
    "--backend",
    "What connects the ranks: Horovod, or PyTorch's DistributedDataParallel; auto: the latter under torchrun.",
    type=click.Choice(BACKENDS),
)
@_option(
    "--timeout",
    "Under torchrun: seconds after which a rank that waits for another gives up.",
    type=float,
    metavar="SECONDS",
    shown="PyTorch's: 1800",
)
@_option(
    "--fsdp", "Under torchrun: shard a transformer over all ranks by FSDP's fully_shard.", is_flag=True, shown=False
)
@_option("--model", "What to train. vit and dlrm are PyTorch's alone.", type=click.Choice(MODELS))
@_option("--data", "What to train it on.", type=click.Choice(DATA))
@_option(
    "--data-dir",
    "Folder of CIFAR, WikiText-2 or PTB, as published.",
    type=click.Path(path_type=Path),
    shown=False,
)
@_option("--compression", "How gradients are sent, such as topk:ratio=0.01.", metavar="SPEC")
@_option("--memory", "What happens to what is not sent: error_feedback or none.", metavar="SPEC", shown="by compressor")
@_option(
    "--policy",
    "How the level changes, such as warmup:levels=0.25|0.05,epochs=1.",
    metavar="SPEC",
    shown="constant",
)
@_option(
    "--overlap",
    "Whether gradients are sent while the backward pass makes others. PyTorch only; auto: if they are on the CPU.",
    type=click.Choice(tuple(OVERLAP)),
)
@_option(
    "--bucket-bytes",
    "Of gradients, the least that is sent by itself, with overlap; of DistributedDataParallel, a bucket.",
    type=int,
    metavar="N",
    shown="what the policy auto finds best, or else 25 MiB",
)
@_option("--epochs", "Passes over the training data.", type=int)
@_option("--steps", "Steps of the optimizer, in place of --epochs.", type=int, shown="as many as --epochs has")
@_option(
    "--until",
    "End at this quality on the validation part: accuracy=0.93, loss=2.2 or perplexity=9.",
    metavar="METRIC=VALUE",
    shown=False,
)
@_option(
    "--evaluate-every",
    "Steps from one evaluation on the validation part to the next.",
    type=int,
    metavar="STEPS",
    shown="at the end of each epoch",
)
@_option("--batch-size", "Samples per rank and backward pass.", type=int)
@_option(
    "--optimizer",
    "What makes steps of gradients. muon, in PyTorch: Muon for hidden matrices, and AdamW for the head, embeddings, "
    "convolutions, norms and biases.",
    type=click.Choice(OPTIMIZERS),
    shown="adamw for gpt and vit, else sgd",
)
@_option("--lr", "Learning rate. It is used as given: scale it yourself when you add ranks.", type=float)
@_option("--momentum", "Momentum of SGD.", type=float)
@_option("--nesterov", "Nesterov's form of momentum.", is_flag=True, shown=False)
@click.option(
    "--betas",
    help="Decay of AdamW's moments.",
    default=",".join(f"{beta:g}" for beta in _DEFAULTS.betas),
    show_default=True,
    metavar="B1,B2",
    callback=_number_list("numbers, such as 0.9,0.95"),
)
@_option(
    "--freeze-after",
    "Of compressed-adam: steps after which the second moment is frozen, and the momentum sent.",
    type=int,
    metavar="STEPS",
    shown="15 % of the run",
)
@_option("--freeze-compression", "Of compressed-adam: how gradients are sent before that.", metavar="SPEC")
@_option(
    "--local-steps",
    "In PyTorch: steps of each rank by itself from one exchange to the next, with an outer Nesterov step as in DiLoCo; "
    "with compressed-adam after freezing, and without. auto: as many as the times of steps and exchanges ask for, and "
    "the drift of the ranks allows.",
    type=str,
    metavar="K|auto",
    callback=_steps_or_rule,
)
@_option(
    "--fragments",
    "With local steps: groups of parameters that are exchanged at staggered steps, as in Streaming DiLoCo.",
    type=int,
    metavar="P",
)
@_option("--delay", "With local steps: steps that a group travels while the ranks go on.", type=int, metavar="STEPS")
@_option("--local-share", "With local steps: what a rank keeps of its own weights then.", type=float, metavar="SHARE")
@_option("--outer-lr", "Of the outer step after local steps.", type=float, metavar="LR", shown="0.7")
@_option("--outer-momentum", "Of the outer step after local steps.", type=float, metavar="M", shown="0.9")
@_option(
    "--refreshes-per-gap",
    "Of compressed-adam: refreshes of the frozen second moment before the gap between two of them doubles, 16 as in "
    "0/1 Adam.",
    type=int,
    metavar="N",
    shown="no refresh",
)
@_option("--weight-decay", "Of SGD an L2 penalty on all parameters; else the decay of all matrices.", type=float)
@_option("--schedule", "How the learning rate falls: at --milestones, or along a cosine.", type=click.Choice(SCHEDULES))
@click.option(
    "--milestones",
    help="Epochs after which the learning rate is multiplied by --gamma.",
    default="",
    metavar="E,E,...",
    callback=_number_list("epochs, such as 3,4"),
)
@_option("--gamma", "Factor of the learning rate at each milestone, or at the end of the cosine.", type=float)
@_option("--warm-up", "Epochs over which the learning rate grows from 0.", type=float)
@_option("--clip-norm", "Largest norm of the averaged gradient; 0 for no limit.", type=float)
@_option("--backward-passes-per-step", "Backward passes whose gradients make one step.", type=int)
@_option(
    "--simulate-ranks",
    "Train on so many ranks in this process: no launcher, and the weights of real ranks.",
    type=int,
    metavar="N",
    shown=False,
)
@_option(
    "--link",
    "The link of each simulated rank, whose time is predicted: 100mbit, 1gbit, 10gbit. After commas, others on which "
    "the same run is timed.",
    metavar="RATE,...",
    shown="takes no time",
)
@_option("--seed", "Start of all random choices; the train/test split does not depend on it.", type=int)
@_option(
    "--output",
    "Folder for steps.jsonl, epochs.jsonl and summary.json.",
    type=click.Path(path_type=Path),
    shown=False,
)
@_option("--overwrite", "Replace the run that --output holds.", is_flag=True, shown=False)
@_option("--tensorboard", "Write TensorBoard's files too, below --output.", is_flag=True, shown=False)
@_option(
    "--metrics-port",
    "Let Prometheus scrape bytes, levels and times from this port of rank 0.",
    type=int,
    metavar="PORT",
    shown=False,
)
@_option(
    "--metrics-address",
    "Where rank 0 listens on that port: 0.0.0.0 lets other hosts scrape.",
    metavar="ADDRESS",
)
@_option(
    "--checkpoint-folder",
    "Folder, shared by all hosts, for checkpoints: go on from the newest. SIGUSR1 and SIGTERM then save and stop.",
    type=click.Path(path_type=Path),
    shown=False,
)
@_option(
    "--checkpoint-every",
    "Steps from one checkpoint to the next.",
    type=int,
    metavar="STEPS",
    shown="at the end of each epoch",
)
@_option(
    "--residuals",
    "Going on from a checkpoint: keep what its ranks had left to send, on any number of ranks, or drop it.",
    type=click.Choice(RESIDUALS),
)
@_option(
    "--elastic",
    "Go on from the checkpoint when ranks come and go: under horovodrun --host-discovery-script.",
    is_flag=True,
    shown=False,
)
@_option("--samples", "Train on the first N samples only.", type=int, metavar="N", shown="all")
@_option(
    "--validation-samples",
    "Training samples that are held back as the validation part, where the data have none of their own.",
    type=int,
    metavar="N",
)
@_option("--label-noise", "Fraction of training labels drawn at random.", type=float)
@_option("--image-size", "Pixels on a side of synthetic images.", type=int)
@_option("--text-size", "Bytes of text to train on; characters of stdlib-text.", type=int)
@_option("--text-unit", "What a token of stdlib-text is.", type=click.Choice(["char", "word"]))
@_option("--sequence-length", "Tokens of a sequence of text.", type=int)
@click.option("--progress/--no-progress", default=True, help="Show how the run goes.")
@click.pass_context
def command(context: click.Context, **options: Any) -> None:
    """Train a reference model with compressed gradients.

    Alone it is one process; under horovodrun, mpirun, srun or torchrun each process is a rank, and rank 0
    writes and reports. A learning rate, a batch size and the like that are not given are chosen to suit the model and
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
        if ranks.rank == 0:
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
        chosen.resolved()  # once, and not on every rank
        return _exit_code(on_simulated_ranks(chosen, lambda ranks: train(chosen, ranks)), says=True)
    except (SetupError, RunRefused) as error:
        raise click.UsageError(str(error), context) from None
    except (ConfigurationError, RankMismatchError) as error:
        raise click.ClickException(str(error)) from None


def _exit_code(summary: dict[str, Any], says: bool) -> int:
    if summary["status"] == "diverged" and says:
        click.echo("Error: the loss is no longer a finite number; try a smaller --lr", err=True)
    return {"finished": 0, "stopped": EXIT_SAVED, "diverged": 1}[summary["status"]]
