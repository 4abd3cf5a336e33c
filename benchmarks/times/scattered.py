"""Measures the time of encoding and decoding with an all-gather and with a scattered exchange, for several numbers of
ranks.

    python -m benchmarks.times.scattered --output scattered.json

The program measures one of the ranks, in one thread and without a network. The payloads of the other ranks are copies
of its own. The unit is the time of one copy of all gradients, so that the results hardly depend on the machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch

from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors import TensorInfo
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange import Engine

SHAPES = {f"layer{place}": (512, 512) for place in range(40)}


def median_ms(work: Callable[[], object], repetitions: int) -> float:
    """The median milliseconds of a call. The first call does not count."""
    work()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


@click.command(help=__doc__)
@click.option("--method", "methods", multiple=True, default=("qsgd:bits=4", "natural", "efsignsgd"))
@click.option("--ranks", default="2,4,8,16,32", show_default=True, help="Numbers of ranks.")
@click.option("--repetitions", default=15, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file.")
def main(methods: tuple[str, ...], ranks: str, repetitions: int, output: Path | None) -> None:
    torch.set_num_threads(1)
    gradients = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
    target = torch.empty_like(flat)
    rows = []
    for method in methods:
        for size in map(int, ranks.split(",")):
            row: dict[str, str | int | float] = {"method": method, "ranks": size}
            for exchange in ("gather", "scatter"):
                spec = f"{method}{',' if ':' in method else ':'}exchange={exchange}"
                engine = Engine(
                    LoopbackCommunicator(size),
                    [TensorInfo(name, shape) for name, shape in SHAPES.items()],
                    parse_compressor(spec),
                )
                step = median_ms(lambda engine=engine: engine.step(dict(gradients)), repetitions)  # type: ignore[misc]
                row[exchange] = step / median_ms(lambda: target.copy_(flat), repetitions)
            rows.append(row)
            click.echo(
                f"{method:12} {size:3} ranks: gather {row['gather']:5.1f} copies, scatter {row['scatter']:5.1f} copies"
            )
    if output is not None:
        output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
