"""`hvdcomp launch`: training on a cluster. Each scheduler's commands are imported only when they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from hvdcomp.errors import ConfigurationError
from hvdcomp.tools.launch.job import MissingSettingsError
from hvdcomp.tools.launch.scheduler import SchedulerError
from hvdcomp.tools.terminal import Group, LazyGroup

_SCHEDULERS = {
    "k8s": ("hvdcomp.tools.commands.launch_k8s", "k8s", "On Kubernetes, as an MPIJob."),
    "slurm": ("hvdcomp.tools.commands.launch_slurm", "slurm", "On Slurm, as a batch job."),
}


class NotLaunchedError(click.ClickException):
    """What stops `hvdcomp launch` itself, with an exit code that a program is not likely to have.

    A wrong command line, or wrong settings, are click.UsageError, with 2.
    """

    exit_code = 125


INTERRUPTED = 130
"""The exit code after Ctrl-C, as a shell has it."""


@contextmanager
def refusals() -> Iterator[None]:
    """Around all that is asked of a scheduler: what it refuses stops the command, with its reason.

    Settings that are wrong are a wrong use of the command, wherever they are set.
    """
    try:
        yield
    except ConfigurationError as error:
        context = click.get_current_context()
        raise click.UsageError(_with_flag(error, context), context) from None
    except SchedulerError as error:
        raise NotLaunchedError(str(error)) from None


def _with_flag(error: ConfigurationError, context: click.Context) -> str:
    """What is wrong with a setting begins with the setting's name; its flag beside that, if the command has one."""
    flags = {param.name: param.opts[0] for param in context.command.params if isinstance(param, click.Option)}
    if isinstance(context.command, ProgramGroup):
        flags["command"] = "-- PROGRAM"

    def named(setting: str) -> str:
        return f"{setting} ({flags[setting]})" if setting in flags else setting

    if isinstance(error, MissingSettingsError):
        return f"{', '.join(map(named, error.names))}: not set: {error.way_out}"
    setting, colon, rest = str(error).partition(":")
    return f"{named(setting)}{colon}{rest}"


class ProgramGroup(Group):
    """A group that runs a program when called as `group [OPTIONS] -- PROGRAM [ARGUMENT]...`.

    What follows the first `--` is the program, whatever it looks like, and is found in `ctx.meta[PROGRAM]` as a tuple,
    or None if there is no `--`. Use it with `invoke_without_command=True`.
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
    """A callback for an option or argument: a wrong use of the command if `check` refuses its value."""

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
    help="A variable for the ranks; repeat it.",
)
"""Of every scheduler: a mapping, or None if it is not given."""

backend_option = click.option(
    "--backend",
    type=click.Choice(["horovod", "torch"]),
    help="What the ranks exchange through: Horovod, or torch.distributed. [default: horovod]",
)
"""Of every scheduler."""


@click.group(cls=LazyGroup, lazy=_SCHEDULERS, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Run a training program on a cluster."""
