"""The `hvdcomp` command. Each subcommand is a module of `hvdcomp.tools.commands`, which is imported when the subcommand
runs."""

from __future__ import annotations

import click

from hvdcomp.tools.terminal import LazyGroup

_COMMANDS = {
    "advise": "Predict whether compression makes training faster, and with which compressor.",
    "bench": "Measure the cost of compression on this machine.",
    "build-horovod": "Build and install Horovod for the installed frameworks.",
    "calibrate": "Measure the network, a model and compressors, as input for advise.",
    "compressors": "List compressors, their parameters and payloads.",
    "demo": "Train with several compressors on two ranks, and compare the results.",
    "doctor": "Find problems in the installation, and print how to fix them.",
    "launch": "Run a training program on a cluster: Kubernetes or Slurm.",
    "profile": "Run some steps of your training program, and recommend a compressor.",
    "replay": "Repeat the policy decisions of a training run from its log.",
    "report": "Make a table and a web page from training runs.",
    "train": "Train a reference model with compressed gradients.",
}
_PLACES = {
    name: (f"hvdcomp.tools.commands.{name.replace('-', '_')}", "command", text) for name, text in _COMMANDS.items()
}
_MOVED = {"reproduce": "python -m benchmarks.reproduce"}


@click.group(cls=LazyGroup, lazy=_PLACES, moved=_MOVED, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hvdcomp")
def main() -> None:
    """Gradient compression for Horovod, in PyTorch and TensorFlow, and for PyTorch's DDP and FSDP."""
