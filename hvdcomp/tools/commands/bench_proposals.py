"""`hvdcomp bench proposals`: what `auto` would have chosen by itself where steps were measured."""

from __future__ import annotations

from pathlib import Path

import click

from hvdcomp.compressors import OPTIMIZERS
from hvdcomp.files import csv_of, parse_json
from hvdcomp.perfmodel import CalibrationError

_UNKNOWN = "unknown"


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--loss",
    "losses",
    type=click.FloatRange(0, 1, max_open=True),
    multiple=True,
    default=(0.02, 0.2),
    show_default=True,
    help="What a compressor may raise the loss by, as a share; repeat.",
)
@click.option(
    "--optimizer",
    type=click.Choice((*OPTIMIZERS, "CompressedAdam", _UNKNOWN)),
    default=OPTIMIZERS[0],
    show_default=True,
    help="By whose trainings compressors are judged.",
)
def proposals(file: Path, losses: tuple[float, ...], optimizer: str) -> None:
    """Say what auto would have chosen by itself, as CSV, beside the fastest that was measured.

    FILE is the JSON of hvdcomp bench steps. Nothing is measured or run.
    """
    from hvdcomp.tools.bench.proposals import choices_of

    try:
        runs = parse_json(file.read_text(encoding="utf-8"))["runs"]
        known = None if optimizer == _UNKNOWN else optimizer
        rows = [row for run in runs for row in choices_of(run, losses, known)]
    except (OSError, ValueError, LookupError, TypeError, CalibrationError) as error:
        raise click.ClickException(f"{file} is no JSON of hvdcomp bench steps, or damaged: {error!r}") from None
    if not rows:
        raise click.ClickException(f"{file} holds no measured steps; measure some with hvdcomp bench steps")
    click.echo(csv_of(rows).decode(), nl=False)
