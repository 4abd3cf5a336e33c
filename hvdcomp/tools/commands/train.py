"""`hvdcomp train` reads the options of a training run, which `hvdcomp.tools.train` then carries out."""

from __future__ import annotations

from typing import Any

import click

from hvdcomp.communicators import rank_so_far
from hvdcomp.errors import ConfigurationError, RankMismatchError, SpecError
from hvdcomp.tools.commands.declared import declared_options
from hvdcomp.tools.commands.plugins import plugin_option
from hvdcomp.tools.launch.promise import EXIT_SAVED
from hvdcomp.tools.train import beforehand, environment
from hvdcomp.tools.train.backends import choose, reach
from hvdcomp.tools.train.options import SetupError, TrainingOptions

_NEEDS = {
    "torch": "PyTorch and Horovod: pip install 'hvdcomp[torch,train,build]', then hvdcomp build-horovod; or PyTorch "
    "alone: torchrun --nproc-per-node 2 -m hvdcomp train ..., or hvdcomp train --simulate-ranks 2 ...",
    "tensorflow": "TensorFlow, tf_keras and Horovod: pip install 'hvdcomp[tensorflow,train,build]', then "
    "hvdcomp build-horovod",
}


_START = (
    "Start it on several ranks with: horovodrun -np 2 hvdcomp train ...  "
    "or: torchrun --nproc-per-node 2 -m hvdcomp train ..."
)


@click.command(epilog=_START)
@declared_options(TrainingOptions, unset="depends on the model and the data")
@plugin_option
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
        if rank_so_far() == 0:  # in an elastic job, this rank's number may have changed since then
            click.UsageError(str(refused), context).show()
        ranks.leave(2)
        context.exit(2)
    except (ConfigurationError, RankMismatchError) as error:
        raise click.ClickException(str(error)) from None
    code = _exit_code(summary, is_first=ranks.rank == 0)
    ranks.leave(code)
    context.exit(code)


def _simulate(context: click.Context, chosen: TrainingOptions) -> int:
    """Trains on simulated ranks, and returns the exit code."""
    from hvdcomp.tools.train.ranks import RunRefused
    from hvdcomp.tools.train.simulation import on_simulated_ranks
    from hvdcomp.tools.train.trainer import train

    try:
        chosen.resolved()  # checks the options once here, instead of on every rank
        return _exit_code(on_simulated_ranks(chosen, lambda ranks: train(chosen, ranks)), is_first=True)
    except (SetupError, RunRefused) as error:
        raise click.UsageError(str(error), context) from None
    except (ConfigurationError, RankMismatchError) as error:
        raise click.ClickException(str(error)) from None


def _exit_code(summary: dict[str, Any], is_first: bool) -> int:
    """The exit code of a run. If the run failed, rank 0 (`is_first`) prints the reason."""
    if summary["status"] == "diverged" and is_first:
        click.echo("Error: the loss is no longer a finite number; try a smaller --lr", err=True)
    return {"finished": 0, "stopped": EXIT_SAVED, "diverged": 1}[summary["status"]]
