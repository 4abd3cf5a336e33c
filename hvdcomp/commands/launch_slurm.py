"""`hvdcomp launch slurm`: a batch job, followed to its end. What it is made of lives in `hvdcomp.launch.slurm`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdcomp.commands.launch import PROGRAM, NotLaunchedError, ProgramGroup, checked, environment_option
from hvdcomp.errors import ConfigurationError
from hvdcomp.launch.job import check_name, read_settings
from hvdcomp.launch.slurm import client
from hvdcomp.launch.slurm.client import JobState, SchedulerError, UnknownJobError
from hvdcomp.launch.slurm.follow import Follower
from hvdcomp.launch.slurm.script import batch_script, log_name
from hvdcomp.launch.slurm.settings import SlurmJob
from hvdcomp.terminal import make_console, make_table, print_table

_INTERRUPTED = 130  # what a shell says of Ctrl-C
_CONTEXT = {"help_option_names": ["-h", "--help"]}


class _JobNumber(click.ParamType):
    """A job's number as Slurm prints it. Python also reads 12_3, a task of an array, as the number of another job."""

    name = "job id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if not re.fullmatch(r"[1-9][0-9]{0,9}", value):
            self.fail(f"{value!r} is not the number of a job: take one that `squeue --me` lists", param, ctx)
        return int(value)


def _list(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...] | None:
    return values or None


def _setting(flag: str, help_text: str, kind: Any = str, **attributes: Any) -> Callable[[Any], Any]:
    """An option that wins over the settings file; its default is the file's, and then that of `SlurmJob`."""
    return click.option(flag, help=help_text, type=kind, default=None, **attributes)


_SETTINGS = (
    _setting("--name", "Name of the job: small letters, digits, hyphens.", callback=checked(check_name)),
    _setting("--ranks", "Processes of the job.", int),
    environment_option,
    _setting("--nodes", "Nodes.", int),
    _setting("--tasks-per-node", "Ranks on each node.", int),
    _setting("--cpus-per-task", "Cores of each rank.", int),
    _setting("--gpus-per-node", "GPUs of each node.", int),
    _setting("--memory", "Memory of each node, such as 64G."),
    _setting("--time", "Time limit, such as 04:00:00."),
    _setting("--warning-seconds", "How long before the limit the ranks are told to save.", int),
    _setting("--requeue/--no-requeue", "Queue a job again that saved and stopped.", bool),
    _setting("--max-requeues", "How often at most.", int),
    _setting("--launcher", "What starts the ranks.", click.Choice(["srun", "mpirun"])),
    _setting("--mpi", "Plugin of srun (see srun --mpi=list).", metavar="PLUGIN"),
    _setting("--partition", "As for sbatch."),
    _setting("--account", "As for sbatch."),
    _setting("--qos", "As for sbatch."),
    _setting("--constraint", "As for sbatch."),
    _setting("--reservation", "As for sbatch."),
    click.option("--module", "modules", multiple=True, callback=_list, help="Environment module; repeat it."),
    _setting("--container", "What runs --image.", click.Choice(["none", "apptainer", "enroot"])),
    _setting("--image", "Image of the container."),
    click.option("--mount", "mounts", multiple=True, callback=_list, help="/outside:/inside; repeat it."),
    _setting("--log-folder", "Folder for the output of the job."),
)


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
    125: the job could not be submitted or followed.
    """
    if context.invoked_subcommand is not None:
        given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given or context.meta[PROGRAM] is not None:
            raise click.UsageError(f"{context.invoked_subcommand} takes no program, and its options come after it")
        return
    try:
        settings = read_settings(path, "slurm", SlurmJob, {**flags, "command": context.meta[PROGRAM]})
        script = batch_script(settings)
        if dry_run:
            click.echo(script, nl=False)
            return
        Path(settings.log_folder).mkdir(parents=True, exist_ok=True)
        job_id = client.submit(script)
    except (ConfigurationError, SchedulerError, OSError) as error:
        raise NotLaunchedError(str(error)) from None
    if detach:
        click.echo(job_id)
        return
    log = client.log_file(settings, job_id)
    _say(f"job {job_id}: submitted as {settings.job.name}; its output goes to {log}")
    context.exit(_follow(job_id, log, poll_seconds, cancel_on_interrupt))


@slurm.command(context_settings=_CONTEXT)
@click.argument("job_id", type=_JobNumber(), required=False)
def status(job_id: int | None) -> None:
    """Say what a job is doing, or all of yours that Slurm knows."""
    try:
        jobs = client.my_jobs() if job_id is None else [client.state_of(job_id)]
    except SchedulerError as error:
        raise NotLaunchedError(str(error)) from None
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
    try:
        log = _log_of(job_id, log_folder)
    except SchedulerError as error:
        raise NotLaunchedError(str(error)) from None
    if follow:
        context.exit(_follow(job_id, log, poll_seconds, cancel_on_interrupt=False))
    if not log.exists():
        raise NotLaunchedError(f"job {job_id} has written nothing yet to {log}; wait for it with --follow")
    with log.open("rb") as file:
        for line in file:
            click.echo(line.decode(errors="replace"), nl=False)


@slurm.command(context_settings=_CONTEXT)
@click.argument("job_id", type=_JobNumber())
def delete(job_id: int) -> None:
    """Cancel a job."""
    try:
        client.cancel(job_id)
        state = client.state_of(job_id)
    except SchedulerError as error:
        raise NotLaunchedError(str(error)) from None
    click.echo(f"job {job_id}: {state.state}")


def _follow(job_id: int, log: Path, poll_seconds: float, cancel_on_interrupt: bool) -> int:
    """Follows the job to its end; the exit code for the shell."""
    follower = Follower(job_id, log, _say, click.echo, poll_seconds)
    try:
        try:
            state = follower.until_ended()
        except KeyboardInterrupt:
            if not cancel_on_interrupt:
                _say(
                    f"job {job_id} goes on. Look: hvdcomp launch slurm logs --follow {job_id}; "
                    f"cancel: hvdcomp launch slurm delete {job_id}"
                )
                return _INTERRUPTED
            client.cancel(job_id)
            _say(f"job {job_id}: cancelling; Ctrl-C again to leave it to Slurm")
            follower.until_ended()
            return _INTERRUPTED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SchedulerError as error:
        raise NotLaunchedError(f"{error}; how job {job_id} ends is not known, its output is in {log}") from None
    if state.exit_code:
        _say(f"job {job_id}: ended as {state.state} with exit code {state.exit_code}; its output is in {log}")
    return state.exit_code


def _log_of(job_id: int, folder: Path) -> Path:
    """Where a job writes to, as Slurm says, or as it is named in a folder."""
    try:
        output = client.state_of(job_id).output
    except UnknownJobError:
        output = None
    if output is not None:
        return output
    found = sorted(folder.glob(log_name("*", job_id)))
    if not found:
        raise UnknownJobError(
            f"Slurm knows no output of job {job_id}, and {folder.absolute()} holds no {log_name('*', job_id)}: "
            "name its folder with --log-folder"
        )
    return found[0]


def _row(job: JobState) -> tuple[str, ...]:
    code = str(job.exit_code) if job.ended else ""
    reason = "" if job.reason == "None" else job.reason
    return (str(job.job_id), job.name, job.state, reason, job.nodes, str(job.restarts + 1), code)


def _say(text: str) -> None:
    """Of the launch, not of the job: to standard error, so that standard output holds the job's lines alone."""
    print(text, file=sys.stderr, flush=True)
