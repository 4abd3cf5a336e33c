"""Runs several training runs one after the other, on ranks that are started only once.

    torchrun --nproc-per-node 2 -m hvdcomp.tools.train.in_turn \\
        '{"compression": "none", "output": "dense"}' '{"compression": "int4", "output": "int4"}'

Each argument has the options of a training run (`hvdcomp train`) as JSON, including the folder of the output. This
saves time, because starting the ranks takes longer than a small training run.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from hvdcomp.tools.train.backends import reach
from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.trainer import train


@click.command()
@click.argument("runs", nargs=-1, required=True)
def main(runs: tuple[str, ...]) -> None:
    """Train with the options of each RUN, all in one framework. If a training run does not finish, no further runs are
    started, and the exit status is 1."""
    chosen = [TrainingOptions(**{**given, "output": Path(given["output"])}) for given in map(json.loads, runs)]
    ranks = reach("auto", chosen[0].framework)
    for options in chosen:
        if ranks.rank == 0:
            click.echo(f"Training with --compression {options.compression}")
        if train(options, ranks)["status"] != "finished":
            ranks.leave(1)
    ranks.leave(0)


if __name__ == "__main__":
    main()
