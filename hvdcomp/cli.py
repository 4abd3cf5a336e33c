"""The `hvdcomp` command: each subcommand lives in `hvdcomp.commands` and is imported only when it is run."""

from __future__ import annotations

import importlib

import click

_COMMANDS = {
    "advise": ("advise", "Say whether compression would pay, and which."),
    "bench": ("bench", "Measure what compression costs here."),
    "build-horovod": ("build_horovod", "Build and install Horovod for the frameworks found here."),
    "calibrate": ("calibrate", "Measure network, passes and compressors, for advise."),
    "compressors": ("compressors", "List the compressors, their parameters and what they send."),
    "doctor": ("doctor", "Say what is installed, what fits together and what does not."),
    "launch": ("launch", "Run a training program on a cluster: Kubernetes or Slurm."),
    "replay": ("replay", "Make the decisions of a training run again, from its decision log."),
    "report": ("report", "Make a table and a web page from training runs."),
    "train": ("train", "Train a reference model with compressed gradients."),
}


class _LazyGroup(click.Group):
    """Lists commands without importing them, so that `hvdcomp --help` needs no framework."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"hvdcomp.commands.{_COMMANDS[cmd_name][0]}")
        return module.command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hvdcomp")
def main() -> None:
    """Adaptive gradient compression for Horovod, in PyTorch and TensorFlow."""
