"""Measures the time of a training step with several compression methods, on every rank of a run.

    python -m hvdcomp.tools.bench.cluster run --hosts 4 --rate 100mbit -- \\
        python -m benchmarks.steps.worker --model mlp --method none --method topk:ratio=0.01 \\
        --output steps.json

Each method trains a separate model, and one more model trains without communication. The models take turns in blocks of
a few steps, in a rotating order. Other programs on the machine therefore affect all methods equally, and blocks of the
same round can be compared. The time of a step is the time of the slowest rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.perfmodel import STOCK
from hvdcomp.tools.bench.models import TIMED
from hvdcomp.tools.bench.trainings import COMPUTE, Training, trainings_of
from hvdcomp.tools.train.backends import choose, reach
from hvdcomp.tools.train.options import BACKENDS, SetupError

if TYPE_CHECKING:
    from hvdcomp.tools.bench.carrier import Carrier

_METHODS = ("topk:ratio=0.01", "powersgd:rank=4")  # in addition to the library's own methods


def measure(
    carrier: Carrier,
    model: str,
    methods: list[str],
    *,
    overlaps: Sequence[int],
    batch_size: int,
    rounds: int,
    steps: int,
    seed: int,
    show: Any,
) -> list[Training]:
    """Trains with all methods, which take turns, and returns the training runs with their times.

    Args:
        carrier: the library that exchanges the gradients.
        overlaps: values of `Times.overlap_bytes`. Each compressor is measured with each value. If there are no values,
            it is measured with hvdcomp's default.
        rounds: number of measured blocks of each method. One more block before them is a warm-up.
        steps: number of measured steps in a block.
        show: function that is called on every rank with the number of the round. The warm-up is round 0.
    """
    from hvdcomp.tools.bench.workload import in_turn

    trainings = trainings_of(carrier, model, methods, overlaps, batch_size, seed)
    for number in range(rounds + 1):
        show(number)
        for training in in_turn(trainings, number):
            if number == 0:
                training.block(steps, settling=carrier.warm_up)
                training.forget()
            else:
                training.block(steps)
    return trainings


def check_method(method: str, backend: str) -> None:
    """Checks that a method can be measured.

    Args:
        backend: name of the library, a key of `STOCK`.

    Raises:
        SpecError: if the method is neither one of the library's own nor the spec of a compressor.
    """
    if method in STOCK[backend]:
        return
    try:
        parse_compressor(method)
    except SpecError as error:
        raise SpecError(f"{error}; or give a method of the library: {', '.join(STOCK[backend])}") from None


@click.command()
@click.option("--model", type=click.Choice(TIMED), default="mlp", show_default=True)
@click.option(
    "--method",
    "methods",
    multiple=True,
    metavar="SPEC",
    help="Method to measure: a compressor's spec, or a method of the library: 'none', and 'hvd.fp16' (Horovod) or "
    f"'ddp.fp16' (DistributedDataParallel). Repeatable.  [default: the library's own, {', '.join(_METHODS)}]",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    show_default=True,
    help="Library that exchanges gradients; 'auto': the library that fits the launcher.",
)
@click.option(
    "--overlap",
    "overlaps",
    type=click.IntRange(0),
    multiple=True,
    metavar="BYTES",
    help="Size in bytes of the smallest bucket of gradients that hvdcomp sends during the backward pass. With 0, "
    "hvdcomp sends all gradients after the backward pass. You can repeat the option.  [default: hvdcomp's own choice]",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Number of blocks (groups of consecutive steps) of each method.",
)
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Number of steps in each block.")
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True, help="Batch size of each rank.")
@click.option("--seed", default=0, show_default=True, help="Seed of weights and data.")
@click.option("--rate", help="Bandwidth of the links between the hosts. It is only recorded in the file.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="JSON file that rank 0 writes.")
def main(methods: tuple[str, ...], backend: str, rate: str | None, output: Path, **options: Any) -> None:
    """Measures the time of a training step with several methods. Start it with horovodrun or torchrun."""
    try:
        backend = choose(backend, "torch")
        methods = methods or (*STOCK[backend], *_METHODS)
        for method in methods:
            check_method(method, backend)
    except (SetupError, SpecError) as error:
        raise click.UsageError(str(error)) from None
    if len(set(methods)) < len(methods):
        raise click.UsageError("a --method is given twice; give each method once")

    from rich.console import Console
    from rich.progress import Progress

    from hvdcomp.tools.bench.carriers import carrier_on
    from hvdcomp.tools.train import environment

    environment.prepare_mpi()
    ranks = reach(backend, "torch")
    environment.use_threads(ranks.local_size)
    if ranks.size < 2:
        raise click.UsageError(
            "measuring steps needs at least two ranks; start this program with horovodrun or torchrun"
        )
    carrier = carrier_on(ranks)
    console = Console(highlight=False, soft_wrap=True, quiet=ranks.rank != 0)
    with Progress(console=console, disable=ranks.rank != 0, transient=True) as progress:
        task = progress.add_task(f"{options['model']}, {len(methods)} methods", total=options["rounds"] + 1)
        try:
            trainings = measure(
                carrier,
                methods=list(methods),
                show=lambda number: progress.update(task, completed=number),
                **options,
            )
        except (SetupError, SpecError, ConfigurationError) as error:
            raise click.ClickException(str(error)) from None
    if ranks.rank == 0:
        _write(output, console, trainings, carrier, {**options, "rate": rate})
    ranks.leave(0)


def _write(
    output: Path, console: Any, trainings: Sequence[Training], carrier: Carrier, options: dict[str, Any]
) -> None:
    """Writes the results file, and shows the medians."""
    from hvdcomp.tools.train import environment

    ranks = carrier.ranks
    compute, *methods = (training.times.as_json() for training in trainings)
    result = {
        **options,
        "ranks": ranks.size,
        "ranks_per_host": ranks.local_size,
        "backend": ranks.backend,
        "controller": ranks.controller,
        "parameters": trainings[0].numel,
        "versions": environment.versions(backend=ranks.backend),
        COMPUTE: {key: compute[key] for key in ("step_ms", "median_ms", "quartiles_ms")},
        "methods": methods,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"{'compute only':40} {compute['median_ms']:9.1f} ms")
    for training, method in zip(trainings[1:], methods, strict=True):
        console.print(f"{training.times.name:40} {method['median_ms']:9.1f} ms {method['bytes_per_step']:12,.0f} bytes")
    console.print(f"written to {output}")


if __name__ == "__main__":
    main()
