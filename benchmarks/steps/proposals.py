"""Compares the choices that `auto` would have made by itself with the fastest measured method.

python -m benchmarks.steps.proposals docs/steps-measured.json > docs/auto-proposals.csv
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.steps.compare import Row, compare
from benchmarks.steps.places import place_of
from hvdcomp.compressors import OPTIMIZERS, Compressor, lost_with
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.files import csv_of, parse_json
from hvdcomp.perfmodel import STOCK_SPECS, CalibrationError, Criteria, propose

_UNKNOWN = "unknown"


def choices_of(run: dict[str, Any], losses: Sequence[float], optimizer: str | None) -> Iterator[dict[str, Any]]:
    """Yields a row for each allowed increase of the loss, from the results of one model on one cluster.

    Args:
        run: the run of one model on one cluster, as in the JSON of `python -m benchmarks.steps`.
        losses: values of the setting `loss` of the policy `auto`.
        optimizer: kind of optimizer, as in `hvdcomp.perfmodel.Criteria`.

    Yields:
        hosts, rate, model, loss: number of hosts, rate of a host's link, name of the model, and allowed increase of the
            loss.
        chosen: the method with which `auto` begins. Among dense, fp16 and the proposals, it has the fastest predicted
            step.
        chosen_ms: measured step time of `chosen`, in ms.
        fastest_allowed: the candidate of `auto` with the fastest measured step, which the trials of `auto` should find.
        fastest, fastest_ms: the method with the fastest measured step among all methods, and its step time in ms.
        behind_percent: how much longer a step takes with `chosen` than with `fastest`, in percent.
        fastest_lost_percent: the largest loss of quality of `fastest` in hvdcomp's own training runs, in percent; None
            if it was not measured.
    """
    rows = compare(run)
    fastest = min(rows, key=lambda row: row.measured_ms)
    lost = 0.0 if fastest.spec in STOCK_SPECS.values() else lost_with(parse_compressor(_spec_of(fastest)), optimizer)
    place = place_of(run)
    for loss in losses:
        offered = _offered(rows, Criteria(loss, optimizer))
        chosen = min(offered, key=lambda row: row.predicted_ms)
        yield {
            "hosts": str(place.cluster),
            "rate": place.rate,
            "model": place.model,
            "loss": loss,
            "chosen": chosen.method,
            "chosen_ms": round(chosen.measured_ms, 1),
            "fastest_allowed": min(offered, key=lambda row: row.measured_ms).method,
            "fastest": fastest.method,
            "fastest_ms": round(fastest.measured_ms, 1),
            "behind_percent": round(100 * (chosen.measured_ms / fastest.measured_ms - 1), 1),
            "fastest_lost_percent": None if lost is None else round(100 * lost, 1),
        }


def _offered(rows: Sequence[Row], criteria: Criteria) -> list[Row]:
    """The rows of the candidates of `auto` that were measured. Mixtures of methods were not measured."""
    free = [row for row in rows if row.spec in STOCK_SPECS.values()]
    seconds = {_spec_of(row): row.predicted_ms / 1000 for row in sorted(rows, key=lambda row: -row.predicted_ms)}

    def seconds_of(compressor: Compressor) -> float | None:
        return seconds.get(str(compressor))

    proposals = propose(criteria, [], seconds_of, min(seconds[row.spec] for row in free))
    return [*free, *(row for row in rows if _spec_of(row) in proposals.specs)]


def _spec_of(row: Row) -> str:
    """The spec of a row's compressor. If its exchange is "auto", the spec names the exchange that the ranks used."""
    return row.spec.replace("exchange=auto", f"exchange={row.way}") if row.way in ("gather", "scatter") else row.spec


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
def main(file: Path, losses: tuple[float, ...], optimizer: str) -> None:
    """Compare the choices of the policy auto with the fastest measured method, as CSV.

    FILE is a JSON file that `python -m benchmarks.steps` wrote. This command does not measure or train anything.
    """
    try:
        runs = parse_json(file.read_text(encoding="utf-8"))["runs"]
        judged_by = None if optimizer == _UNKNOWN else optimizer
        rows = [row for run in runs for row in choices_of(run, losses, judged_by)]
    except (OSError, ValueError, LookupError, TypeError, CalibrationError) as error:
        raise click.ClickException(
            f"{file} was not written by `python -m benchmarks.steps`, or is damaged: {error!r}"
        ) from None
    if not rows:
        raise click.ClickException(f"{file} contains no measured steps; measure some with `python -m benchmarks.steps`")
    click.echo(csv_of(rows).decode(), nl=False)


if __name__ == "__main__":
    main()
