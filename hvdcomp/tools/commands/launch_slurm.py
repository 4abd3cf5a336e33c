"""`hvdcomp launch slurm`: a batch job, followed to its end. Its parts are in `hvdcomp.tools.launch.slurm`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdcomp.tools.commands.launch import (
    INTERRUPTED,
    PROGRAM,
    NotLaunchedError,
    ProgramGroup,
    backend_option,
    checked,
    environment_option,
    refusals,
)
from hvdcomp.tools.launch.job import check_name, read_settings
from hvdcomp.tools.launch.scheduler import SchedulerError
from hvdcomp.tools.launch.slurm import client
from hvdcomp.tools.launch.slurm.client import SlurmJobState
from hvdcomp.tools.launch.slurm.scheduler import BatchJob, Slurm
from hvdcomp.tools.launch.slurm.script import batch_script
from hvdcomp.tools.launch.slurm.settings import SlurmJob
from hvdcomp.tools.terminal import make_console, make_table, print_table

_CONTEXT = {"help_option_names": ["-h", "--help"]}


class _JobNumber(click.ParamType):
    """A job's number as Slurm prints it. Python also reads 12_3, a task of an array, as the number of another job."""

    name = "job id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if re.fullmatch(r"[0-9]+_[0-9]+", value):
            self.fail(f"{value!r} is a job of an array, and none is made here: take `squeue`, `scancel`", param, ctx)
        if not re.fullmatch(r"[1-9][0-9]{0,9}", value):
            self.fail(f"{value!r} is not the number of a job: take one that `squeue --me` lists", param, ctx)
        return int(value)


def _list(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...] | None:
    return values or None


def _refuse_array(context: click.Context, _option: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(
            f"--array {value}: arrays of jobs are not submitted, as one job is followed, and saves and goes on in "
            "files of its own. Submit each job by itself, with --detach, another --name and other files: for seed in "
            "1 2 3; do hvdcomp launch slurm --detach --name run-$seed ... -- ... --output runs/$seed; done",
            context,
        )


def _setting(flag: str, help_text: str, kind: Any = str, **attributes: Any) -> Callable[[Any], Any]:
    """An option that wins over the settings file; its default is the file's, and then that of `SlurmJob`."""
    return click.option(flag, help=help_text, type=kind, default=None, **attributes)


_SETTINGS = (
    _setting("--name", "Name of the job: small letters, digits, hyphens.", callback=checked(check_name)),
    _setting("--ranks", "Processes of the job; by default one for each task, or each GPU, of its nodes.", int),
    environment_option,
    backend_option,
    _setting("--nodes", "Nodes; by default what --tasks-per-node makes of the ranks, or 1.", int),
    _setting("--tasks-per-node", "Ranks on each node; by default all of them, shared out over the nodes.", int),
    _setting("--cpus-per-task", "Cores of each rank. [default: 1]", int),
    _setting("--gpus-per-node", "GPUs of each node; each rank sees all of them, and takes one.", int),
    click.option("--gres", multiple=True, callback=_list, help="Other resource of each node, as nic:1; repeat it."),
    _setting("--memory", "Memory of each node, such as 64G."),
    _setting("--time", "Limit of each start, such as 04:00:00. [default: 01:00:00]"),
    _setting("--warning-seconds", "How long before the limit the ranks are told to save.", int),
    _setting("--requeue/--no-requeue", "Queue a job again that saved and stopped.", bool),
    _setting("--max-requeues", "How often at most.", int),
    _setting("--launcher", "What starts the ranks.", click.Choice(["srun", "mpirun"])),
    _setting("--mpi", "Plugin of srun (see srun --mpi=list); for torch none is needed.", metavar="PLUGIN"),
    _setting("--partition", "As for sbatch."),
    _setting("--account", "As for sbatch."),
    _setting("--qos", "As for sbatch."),
    _setting("--constraint", "As for sbatch."),
    _setting("--reservation", "As for sbatch."),
    click.option("--modules", "--module", multiple=True, callback=_list, help="Environment module; repeat it."),
    _setting("--container", "What runs --image.", click.Choice(["none", "apptainer", "enroot"])),
    _setting("--image", "Image of the container."),
    click.option("--mounts", "--mount", multiple=True, callback=_list, help="/outside:/inside; repeat it."),
    _setting("--log-folder", "Folder for the output of the job."),
    click.option("--array", hidden=True, expose_value=False, callback=_refuse_array),
)


_ASKED = ("ranks", "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "time")
"""What is said of each job when it is submitted, as not all of it need be given."""


def _settings_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_SETTINGS):
        function = option(function)
    return function


_poll_option = click.option(
    "--poll-seconds",
    type=click.FloatRange(min=0.2),
    default=5.0,
    show_default=True,
    help="Between two questions to Slurm's controller.",
)


@click.group(cls=ProgramGroup, invoke_without_command=True, context_settings=_CONTEXT)
@click.option("--settings", "path", type=click.Path(path_type=Path), help="TOML file with tables [job] and [slurm].")
@_settings_options
@click.option("--dry-run", is_flag=True, help="Print the batch script; submit nothing.")
@click.option("--detach", is_flag=True, help="Submit, print the job's number, and do not wait.")
@click.option("--cancel-on-interrupt", is_flag=True, help="Ctrl-C cancels the job; else it goes on alone.")
@_poll_option
@click.pass_context
def slurm(
    context: click.Context,
    path: Path | None,
    dry_run: bool,
    detach: bool,
    cancel_on_interrupt: bool,
    poll_seconds: float,
    **flags: Any,
) -> None:
    """Run a training program under Slurm.

    Submits a batch job, shows its state and its output, and ends with its exit code. A job that saves a
    checkpoint before its time limit is queued again and goes on. Flags win over the settings file. Exit code
    125: the job could not be submitted or followed; 2: wrong settings.
    """
    if context.invoked_subcommand is not None:
        before = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if before or context.meta[PROGRAM] is not None:
            raise click.UsageError(f"{context.invoked_subcommand} takes no program, and its options come after it")
        return
    with refusals():
        given = {**flags, "command": context.meta[PROGRAM]}
        settings = read_settings(path, "slurm", SlurmJob, given, SlurmJob.ranks_of)
        if dry_run:
            click.echo(batch_script(settings), nl=False)
            return
        scheduler = Slurm(poll_seconds)
        job = scheduler.submit(settings)
        asked = settings.flags(_ASKED)
        _say(f"job {job.number}: submitted as {settings.job.name} ({asked}); its output goes to {job.log}")
        if detach:
            click.echo(job.number)
            return
        context.exit(_follow(scheduler, job, cancel_on_interrupt))


@slurm.command(context_settings=_CONTEXT)
@click.argument("job_id", type=_JobNumber(), required=False)
def status(job_id: int | None) -> None:
    """Say what a job is doing, or all of yours that Slurm knows."""
    with refusals():
        jobs = client.my_jobs() if job_id is None else [client.state_of(job_id)]
    if not jobs:
        click.echo("Slurm knows no job of yours.")
        return
    table = make_table("job", "name", "state", "why", "nodes", "starts", "exit code")
    for job in jobs:
        table.add_row(*_row(job))
    print_table(make_console(), table)


@slurm.command(context_settings=_CONTEXT)
@click.argument("job_id", type=_JobNumber())
@click.option("--follow", is_flag=True, help="Stay to the end of the job, and end with its exit code.")
@click.option("--log-folder", type=click.Path(path_type=Path), default=Path(), help="Where to look if Slurm forgot.")
@_poll_option
@click.pass_context
def logs(context: click.Context, job_id: int, follow: bool, log_folder: Path, poll_seconds: float) -> None:
    """Show what a job wrote."""
    with refusals():
        scheduler = Slurm(poll_seconds, log_folder)
        job = scheduler.find(job_id)
        if follow:
            context.exit(_follow(scheduler, job, cancel_on_interrupt=False))
        for line in scheduler.log(job):
            click.echo(line)


@slurm.command(context_settings=_CONTEXT)
@click.argument("job_id", type=_JobNumber())
def delete(job_id: int) -> None:
    """Cancel a job."""
    with refusals():
        client.cancel(job_id)
        state = client.state_of(job_id)
    click.echo(f"job {job_id}: {state.state}")


def _follow(scheduler: Slurm, job: BatchJob, cancel_on_interrupt: bool) -> int:
    """Follows the job to its end; the exit code for the shell."""
    try:
        try:
            state = scheduler.follow(job, _say, click.echo)
        except KeyboardInterrupt:
            if not cancel_on_interrupt:
                _say(
                    f"job {job.number} goes on. Look: hvdcomp launch slurm logs --follow {job.number}; "
                    f"cancel: hvdcomp launch slurm delete {job.number}"
                )
                return INTERRUPTED
            scheduler.cancel(job)
            _say(f"job {job.number}: cancelling; Ctrl-C again to leave it to Slurm")
            scheduler.follow(job, _say, click.echo)
            return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SchedulerError as error:
        raise NotLaunchedError(
            f"{error}; how job {job.number} ends is not known, its output is in {job.log}"
        ) from None
    if state.exit_code:
        _say(f"job {job.number}: ended as {state.state} with exit code {state.exit_code}; its output is in {job.log}")
    return state.exit_code


def _row(job: SlurmJobState) -> tuple[str, ...]:
    code = str(job.exit_code) if job.ended else ""
    reason = "" if job.reason == "None" else job.reason
    return (str(job.job_id), job.name, job.state, reason, job.nodes, str(job.restarts + 1), code)


def _say(text: str) -> None:
    """Of the launch, not of the job: to standard error, so that standard output holds the job's lines alone."""
    print(text, file=sys.stderr, flush=True)
