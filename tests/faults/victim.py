"""The program on each rank: `hvdcomp train`, in which a fault may be planted.

    python -m tests.faults.victim --folder FOLDER [--act NAME --point POINT --rank R --step N] -- OPTIONS...

OPTIONS are those of `hvdcomp train`. The fault happens on rank R, the first time that it comes to the point in step N
or later, and once in a folder: ranks that are started again go on. The file `fault.json` in the folder then says when.
After each step every rank adds a line to its file `weights-R.txt`: the step, and a digest of its weights.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import click

from tests.faults.points import ACTS, POINTS, Place

FAULT = "fault.json"
WEIGHTS = "weights-{}.txt"
_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK")  # of horovodrun, mpirun and torchrun


def rank_of(environment: dict[str, str]) -> int:
    """This process's number, as its launcher says."""
    return next(int(environment[name]) for name in _RANK if name in environment)


class _Counter:
    """The step that is under way, or was the last."""

    step = 0


@click.command()
@click.option("--folder", type=click.Path(path_type=Path, exists=True), required=True, help="Of the row.")
@click.option("--act", type=click.Choice(list(ACTS)), help="What happens.")
@click.option("--point", type=click.Choice(list(POINTS)), help="Where.")
@click.option("--rank", type=int, help="On which rank.")
@click.option("--step", type=int, help="The first step in which it happens.")
@click.argument("options", nargs=-1)
def main(
    folder: Path,
    act: str | None,
    point: str | None,
    rank: int | None,
    step: int | None,
    options: tuple[str, ...],
) -> None:
    """Trains as OPTIONS say, with a fault."""
    from hvdcomp.tools.commands.train import command

    mine = rank_of(dict(os.environ))
    counter = _Counter()
    if act is not None:
        assert point is not None
        assert step is not None
        if rank == mine:
            _plant(act, point, mine, step, folder, counter)
    _count_and_trace(folder / WEIGHTS.format(mine), counter)
    command.main(list(options), "hvdcomp train")


def _plant(act: str, point: str, rank: int, step: int, folder: Path, counter: _Counter) -> None:
    def reached(**what: Any) -> None:
        now = counter.step
        if now >= step and claims(folder, {"act": act, "point": point, "rank": rank, "step": now}):
            ACTS[act](Place(rank, now, folder, what))

    POINTS[point](reached)


def claims(folder: Path, facts: dict[str, Any]) -> bool:
    """Whether the fault did not happen in this folder before; writes down that it does."""
    own = folder / f"{FAULT}.{os.getpid()}"
    if (folder / FAULT).exists():
        return False
    # The clock is that of all processes of this machine.
    own.write_text(json.dumps({**facts, "at": time.monotonic()}))
    own.replace(folder / FAULT)
    return True


def _count_and_trace(file: Path, counter: _Counter) -> None:
    from hvdcomp.tools.train import run

    real = run.Run._timed_step

    def timed_step(self: Any, *arguments: Any) -> None:
        counter.step = self._step + 1
        real(self, *arguments)
        with file.open("a") as trace:
            trace.write(f"{self._step} {run._digest(self._learner.parameters())}\n")

    run.Run._timed_step = timed_step  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    main()
