"""`hvdcomp bench`: benchmarks of the package on this machine, by `hvdcomp.tools.bench`."""

from __future__ import annotations

import click

from hvdcomp.tools.terminal import LazyGroup

_MEASUREMENTS = {
    "encode": ("hvdcomp.tools.commands.bench_encode", "encode", "Measure the encode time and memory of each method."),
    "proposals": (
        "hvdcomp.tools.commands.bench_proposals",
        "proposals",
        "Compare the choices of the policy auto with measurements.",
    ),
    "steps": ("hvdcomp.tools.commands.bench_steps", "steps", "Compare predicted with measured step times."),
}


@click.group(cls=LazyGroup, lazy=_MEASUREMENTS)
def command() -> None:
    """Measure the cost of compression on this machine."""
