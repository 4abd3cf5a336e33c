"""The rows of the table: each fault, what is documented to come of it, and what has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.faults.world import CONTROLLERS, World

ALL = tuple(CONTROLLERS)
HOROVOD = ("gloo", "mpi")


@dataclass(frozen=True)
class Fault:
    """A fault, and what is documented to come of it.

    Attributes:
        name: in a few words; no two faults of the table have the same over one transport.
        group: of faults, by what they strike.
        documented: what is to happen, in a sentence.
        within: seconds from the fault to the end of the last process.
        run: makes it happen in a world and looks at what comes of it. Returns what happened, in a few words.
            AssertionError says what went wrong, `world.NotHere` why it cannot be tried on this machine.
        transports: over which it is tried.
        short: whether it is in the short form of the table, over the first of its transports.
        world: makes the world of a row, as `World` does.
    """

    name: str
    group: str
    documented: str
    within: float
    run: Callable[[World], str]
    transports: tuple[str, ...] = ALL
    short: bool = False
    world: Callable[[str, Path, float], World] = World


@dataclass(frozen=True)
class Row:
    """A fault over one transport, and what came of it.

    Attributes:
        happened: in a few words; of a row that failed, what went wrong.
        seconds: from the fault to the end of the last process; None if it was not measured.
    """

    fault: str
    group: str
    transport: str
    documented: str
    happened: str
    seconds: float | None
    within: float
    passed: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_row(fault: Fault, transport: str, folder: Path) -> Row:
    """Makes a fault happen over a transport. Nothing of it runs on afterwards.

    Args:
        folder: new, for all that it writes.

    Raises:
        NotHere: it cannot be tried on this machine.
    """
    folder.mkdir(parents=True)
    world = fault.world(transport, folder, fault.within)
    try:
        happened, passed = fault.run(world), True
    except AssertionError as error:
        happened, passed = str(error), False
    finally:
        world.end()
    seconds = None if world.seconds is None else round(world.seconds, 1)
    return Row(fault.name, fault.group, transport, fault.documented, happened, seconds, fault.within, passed)


def all_faults() -> list[Fault]:
    """The faults of all groups, in the order of the table.

    Raises:
        ValueError: two have the same name over one transport.
    """
    from tests.faults import checkpoints, clocks, disagreement, files, memory, network, numbers, processes, stock

    groups = (processes, network, stock, numbers, files, checkpoints, clocks, disagreement, memory)
    found = [fault for group in groups for fault in group.FAULTS]
    places = [(fault.name, over) for fault in found for over in fault.transports]
    for name, over in places:
        if places.count((name, over)) > 1:
            raise ValueError(f"two faults over {over} have the name {name!r}; give one of them another")
    return found
