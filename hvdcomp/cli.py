"""The `hvdcomp` command: each subcommand lives in `hvdcomp.commands` and is imported only when it is run."""

from __future__ import annotations

import click

from hvdcomp.commands.groups import LazyGroup

_COMMANDS = {
    "advise": ("advise", "command", "Say whether compression would pay, and which."),
    "bench": ("bench", "command", "Measure what compression costs here."),
    "build-horovod": ("build_horovod", "command", "Build and install Horovod for the frameworks found here."),
    "calibrate": ("calibrate", "command", "Measure network, passes and compressors, for advise."),
    "compressors": ("compressors", "command", "List the compressors, their parameters and what they send."),
    "doctor": ("doctor", "command", "Say what is installed, what fits together and what does not."),
    "launch": ("launch", "command", "Run a training program on a cluster: Kubernetes or Slurm."),
    "replay": ("replay", "command", "Make the decisions of a training run again, from its decision log."),
    "report": ("report", "command", "Make a table and a web page from training runs."),
    "train": ("train", "command", "Train a reference model with compressed gradients."),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hvdcomp")
def main() -> None:
    """Adaptive gradient compression for Horovod, in PyTorch and TensorFlow."""
