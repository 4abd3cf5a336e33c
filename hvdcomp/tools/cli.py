"""The `hvdcomp` command: each subcommand is a module of `hvdcomp.tools.commands`, imported when it is run."""

from __future__ import annotations

import click

from hvdcomp.tools.terminal import LazyGroup

_COMMANDS = {
    "advise": "Say whether compression would pay, and which.",
    "bench": "Measure what compression costs here.",
    "build-horovod": "Build and install Horovod for the frameworks found here.",
    "calibrate": "Measure network, passes and compressors, for advise.",
    "compressors": "List the compressors, their parameters and what they send.",
    "doctor": "Say what is installed, what fits together and what does not.",
    "launch": "Run a training program on a cluster: Kubernetes or Slurm.",
    "profile": "Run a training program for some steps, and say which compression would pay there.",
    "replay": "Make the decisions of a training run again, from its decision log.",
    "report": "Make a table and a web page from training runs.",
    "reproduce": "Print a table or figure of the papers beside ours.",
    "train": "Train a reference model with compressed gradients.",
}
_PLACES = {
    name: (f"hvdcomp.tools.commands.{name.replace('-', '_')}", "command", text) for name, text in _COMMANDS.items()
}


@click.group(cls=LazyGroup, lazy=_PLACES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hvdcomp")
def main() -> None:
    """Gradient compression for Horovod, in PyTorch and TensorFlow."""
