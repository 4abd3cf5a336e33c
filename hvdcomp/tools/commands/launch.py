"""`hvdcomp launch` runs a training program on a cluster. The commands of a scheduler are imported only when they
run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from hvdcomp.errors import ConfigurationError
from hvdcomp.tools.launch.job import MissingSettingsError
from hvdcomp.tools.launch.scheduler import SchedulerError
from hvdcomp.tools.terminal import Group, LazyGroup

_SCHEDULERS = {
    "k8s": ("hvdcomp.tools.commands.launch_k8s", "k8s", "Run a program on Kubernetes, as an MPIJob."),
    "slurm": ("hvdcomp.tools.commands.launch_slurm", "slurm", "Run a program on Slurm, as a batch job."),
}


class NotLaunchedError(click.ClickException):
    """A failure of `hvdcomp launch` itself. Programs rarely return the exit code of this error.

    If the command line or the settings are wrong, the command raises click.UsageError instead, with exit code 2.
    """

    exit_code = 125


INTERRUPTED = 130
"""The exit code after Ctrl-C, as in a shell."""


@contextmanager
def refusals() -> Iterator[None]:
    """A context manager that turns errors of a scheduler into errors of click, with the reason.

    Errors about settings, in flags or in the settings file, become click.UsageError.
    """
    try:
        yield
    except ConfigurationError as error:
        context = click.get_current_context()
        raise click.UsageError(_with_flag(error, context), context) from None
    except SchedulerError as error:
        raise NotLaunchedError(str(error)) from None


def _with_flag(error: ConfigurationError, context: click.Context) -> str:
    """Adds the command's flag for a setting to the message of an error. The message begins with the name of the
    setting."""
    flags = {param.name: param.opts[0] for param in context.command.params if isinstance(param, click.Option)}
    if isinstance(context.command, ProgramGroup):
        flags["command"] = "-- PROGRAM"

    def named(setting: str) -> str:
        return f"{setting} ({flags[setting]})" if setting in flags else setting

    if isinstance(error, MissingSettingsError):
        return f"{', '.join(map(named, error.names))} must be set: {error.way_out}"
    setting, colon, reason = str(error).partition(":")
    return f"{named(setting)}{colon}{reason}"


class ProgramGroup(Group):
    """A group of commands that runs a program if it is called as `group [OPTIONS] -- PROGRAM [ARGUMENT]...`.

    All words after the first `--` are the program and its arguments. These words are stored as a tuple in
    `ctx.meta[PROGRAM]`. The value is None if there is no `--`. The group must be created with
    `invoke_without_command=True`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        program = None
        if "--" in args:
            cut = args.index("--")
            args, program = args[:cut], tuple(args[cut + 1 :])
        ctx.meta[PROGRAM] = program
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[OPTIONS] -- PROGRAM [ARGUMENT]...")
        formatter.write_usage(ctx.command_path, "COMMAND [OPTIONS]...")


PROGRAM = f"{__name__}.program"


def checked(check: Callable[[str], None]) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    """A callback for an option or argument that raises click.UsageError if `check` refuses the value."""

    def callback(context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None:
            try:
                check(value)
            except ConfigurationError as error:
                raise click.UsageError(_with_flag(error, context), context) from None
        return value

    return callback


def _variables(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
    pairs = [value.partition("=") for value in values]
    for (name, sign, _), value in zip(pairs, values, strict=True):
        if not sign or not name:
            raise click.BadParameter(f"{value!r} is not of the form NAME=VALUE")
    return {name: text for name, _, text in pairs} or None


environment_option = click.option(
    "--env",
    "environment",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_variables,
    help="Environment variable of the ranks; repeatable.",
)
"""The option --env for environment variables, which the commands of every scheduler have. Its value is a mapping, or
None if the option is not given."""

backend_option = click.option(
    "--backend",
    type=click.Choice(["horovod", "torch"]),
    help="Library that averages gradients: Horovod or torch.distributed. [default: horovod]",
)
"""The option --backend, which the commands of every scheduler have."""


@click.group(cls=LazyGroup, lazy=_SCHEDULERS)
def command() -> None:
    """Run a training program on a cluster."""
