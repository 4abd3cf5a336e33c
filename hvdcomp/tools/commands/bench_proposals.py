"""`hvdcomp bench proposals`: the choices of the policy `auto`, beside measured step times."""

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
    help="Largest relative increase of the loss that a compressor may cause; repeatable.",
)
@click.option(
    "--optimizer",
    type=click.Choice((*OPTIMIZERS, "CompressedAdam", _UNKNOWN)),
    default=OPTIMIZERS[0],
    show_default=True,
    help="Optimizer of the training.",
)
def proposals(file: Path, losses: tuple[float, ...], optimizer: str) -> None:
    """Compare the choices of the policy auto with the fastest measured method, as CSV.

    FILE is a JSON file that hvdcomp bench steps wrote. This command runs no training and no measurement.
    """
    from hvdcomp.tools.bench.proposals import choices_of

    try:
        runs = parse_json(file.read_text(encoding="utf-8"))["runs"]
        judged_by = None if optimizer == _UNKNOWN else optimizer
        rows = [row for run in runs for row in choices_of(run, losses, judged_by)]
    except (OSError, ValueError, LookupError, TypeError, CalibrationError) as error:
        raise click.ClickException(f"{file} was not written by hvdcomp bench steps, or is damaged: {error!r}") from None
    if not rows:
        raise click.ClickException(f"{file} contains no measured steps; measure some with hvdcomp bench steps")
    click.echo(csv_of(rows).decode(), nl=False)
