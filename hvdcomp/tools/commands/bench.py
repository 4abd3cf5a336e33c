"""`hvdcomp bench` runs benchmarks of the package on this machine (`hvdcomp.tools.bench`)."""

from __future__ import annotations

import click

from hvdcomp.tools.terminal import LazyGroup

_MEASUREMENTS = {
    "encode": ("hvdcomp.tools.commands.bench_encode", "encode", "Measure the encode time and memory of each method."),
}
_MOVED = {"proposals": "python -m benchmarks.steps.proposals", "steps": "python -m benchmarks.steps"}


@click.group(cls=LazyGroup, lazy=_MEASUREMENTS, moved=_MOVED)
def command() -> None:
    """Measure the cost of compression on this machine."""
