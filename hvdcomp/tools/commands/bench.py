"""`hvdcomp bench`: measurements of the package on this machine. What is measured lives in `hvdcomp.tools.bench`."""

from __future__ import annotations

import click

from hvdcomp.tools.terminal import LazyGroup

_MEASUREMENTS = {
    "encode": ("hvdcomp.tools.commands.bench_encode", "encode", "What each method costs in time and memory."),
    "proposals": (
        "hvdcomp.tools.commands.bench_proposals", "proposals", "What auto would have proposed for measured steps."
    ),
    "steps": ("hvdcomp.tools.commands.bench_steps", "steps", "Predicted beside measured times of steps."),
}


@click.group(cls=LazyGroup, lazy=_MEASUREMENTS)
def command() -> None:
    """Measure what compression costs here."""
