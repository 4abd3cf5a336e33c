"""`hvdcomp launch slurm` submits a batch job and follows it to its end (`hvdcomp.tools.launch.slurm`)."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdcomp.tools.commands.declared import declared_flags
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


class _JobNumber(click.ParamType):
    """The number of a job, as Slurm prints it. `int` cannot be used, because it would read 12_3 (a task of an array) as
    123, which is a different job."""

    name = "job id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if re.fullmatch(r"[0-9]+_[0-9]+", value):
            self.fail(
                f"{value!r} is a task of a job array, and job arrays are not supported: use squeue and scancel",
                param,
                ctx,
            )
        if not re.fullmatch(r"[1-9][0-9]{0,9}", value):
            self.fail(f"{value!r} is not the number of a job: `squeue --me` lists the numbers", param, ctx)
        return int(value)


def _refuse_array(context: click.Context, _option: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(
            f"--array {value} is not supported, because this command follows only one job, and because each job needs "
            "its own output and checkpoint files. Submit each job separately, with --detach and with its own name and "
            "files: for seed in 1 2 3; do hvdcomp launch slurm --detach --name run-$seed ... -- ... "
            "--output runs/$seed; done",
            context,
        )


_SHOWN = ("ranks", "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "time")
"""Settings that are printed when a job is submitted, because the user may not have set all of them."""


_poll_option = click.option(
    "--poll-seconds",
    type=click.FloatRange(min=0.2),
    default=5.0,
    show_default=True,
    help="Seconds between two queries to Slurm's controller.",
)


@click.group(cls=ProgramGroup, invoke_without_command=True)
@click.option("--settings", "path", type=click.Path(path_type=Path), help="TOML file with tables [job] and [slurm].")
@click.option(
    "--name", callback=checked(check_name), help="Name of the job: letters, digits, underscores, hyphens, dots."
)
@click.option(
    "--ranks",
    type=int,
    help="Number of ranks (processes). [default: one rank for each task, or for each GPU, of the nodes]",
)
@environment_option
@backend_option
@declared_flags(SlurmJob)
@click.option("--array", hidden=True, expose_value=False, callback=_refuse_array)
@click.option("--dry-run", is_flag=True, help="Print the batch script, and submit nothing.")
@click.option("--detach", is_flag=True, help="Submit the job, print its number, and do not follow its output.")
@click.option("--cancel-on-interrupt", is_flag=True, help="Cancel the job on Ctrl-C. [default: the job continues]")
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

    The command submits a batch job, shows its state and its output, and returns its exit code. If a job saves a
    checkpoint before its time limit, it is requeued and continues from this checkpoint. Flags override the settings
    file. Exit code 125 means that the job could not be submitted or followed; 2 means wrong settings.
    """
    if context.invoked_subcommand is not None:
        before = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if before or context.meta[PROGRAM] is not None:
            raise click.UsageError(
                f"{context.invoked_subcommand} is a command that does not run a program. Leave the program out, and "
                f"write all options after the word {context.invoked_subcommand}"
            )
        return
    with refusals():
        overrides = {**flags, "command": context.meta[PROGRAM]}
        settings = read_settings(path, "slurm", SlurmJob, overrides, SlurmJob.ranks_of)
        if dry_run:
            click.echo(batch_script(settings), nl=False)
            return
        scheduler = Slurm(poll_seconds)
        job = scheduler.submit(settings)
        requested = settings.flags(_SHOWN)
        _say(f"job {job.number}: submitted as {settings.job.name} ({requested}); its output goes to {job.log}")
        if detach:
            click.echo(job.number)
            return
        context.exit(_follow(scheduler, job, cancel_on_interrupt))


@slurm.command()
@click.argument("job_id", type=_JobNumber(), required=False)
def status(job_id: int | None) -> None:
    """Show the state of a job, or of all your jobs."""
    with refusals():
        jobs = client.my_jobs() if job_id is None else [client.state_of(job_id)]
    if not jobs:
        click.echo("Slurm does not list any job of yours.")
        return
    table = make_table("job", "name", "state", "why", "nodes", "starts", "exit code")
    for job in jobs:
        table.add_row(*_row(job))
    print_table(make_console(), table)


@slurm.command()
@click.argument("job_id", type=_JobNumber())
@click.option("--follow", is_flag=True, help="Follow the output until the job ends, and return its exit code.")
@click.option(
    "--log-folder",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder of the output, for a job that Slurm no longer lists. [default: the current folder]",
)
@_poll_option
@click.pass_context
def logs(context: click.Context, job_id: int, follow: bool, log_folder: Path, poll_seconds: float) -> None:
    """Show the output of a job."""
    with refusals():
        scheduler = Slurm(poll_seconds, log_folder)
        job = scheduler.find(job_id)
        if follow:
            context.exit(_follow(scheduler, job, cancel_on_interrupt=False))
        for line in scheduler.log(job):
            click.echo(line)


@slurm.command()
@click.argument("job_id", type=_JobNumber())
def delete(job_id: int) -> None:
    """Cancel a job."""
    with refusals():
        client.cancel(job_id)
        state = client.state_of(job_id)
    click.echo(f"job {job_id}: {state.state}")


def _follow(scheduler: Slurm, job: BatchJob, cancel_on_interrupt: bool) -> int:
    """Follows the job to its end, and returns the exit code for the shell."""
    try:
        try:
            state = scheduler.follow(job, _say, click.echo)
        except KeyboardInterrupt:
            if not cancel_on_interrupt:
                _say(
                    f"job {job.number} continues. To follow it: hvdcomp launch slurm logs --follow {job.number}. To "
                    f"cancel it: hvdcomp launch slurm delete {job.number}"
                )
                return INTERRUPTED
            scheduler.cancel(job)
            _say(f"job {job.number}: cancelling. Press Ctrl-C again to stop waiting")
            scheduler.follow(job, _say, click.echo)
            return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SchedulerError as error:
        raise NotLaunchedError(
            f"{error}. It is unknown how job {job.number} ended. Its output is in {job.log}"
        ) from None
    if state.exit_code:
        _say(f"job {job.number}: ended as {state.state} with exit code {state.exit_code}; its output is in {job.log}")
    return state.exit_code


def _row(job: SlurmJobState) -> tuple[str, ...]:
    code = str(job.exit_code) if job.ended else ""
    reason = "" if job.reason == "None" else job.reason
    return (str(job.job_id), job.name, job.state, reason, job.nodes, str(job.restarts + 1), code)


def _say(text: str) -> None:
    """Prints a line about the launch to standard error. Standard output is only for the lines of the job."""
    print(text, file=sys.stderr, flush=True)
