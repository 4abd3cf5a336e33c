"""A rank that gets no memory. What the kernel does to a process in need of memory is SIGKILL, in `processes`."""

from __future__ import annotations

from tests.faults.table import Fault
from tests.faults.world import WAIT, Planted, World

GROUP = "memory"
_WITHIN = WAIT + 55


def _row(act: str, name: str, point: str, step: int, after: int, transports: tuple[str, ...], short: bool) -> Fault:
    def run(world: World) -> str:
        ended = world.train(planted=Planted(act, point, rank=1, step=step)).failed()
        world.weights()
        return f"all ended, the launcher with exit code {ended.code}; {world.goes_on(after)}"

    return Fault(
        name,
        GROUP,
        "This rank ends, and the launcher stops all others. After a restart, training continues from the newest "
        "complete checkpoint.",
        _WITHIN,
        run,
        transports,
        short,
    )


FAULTS = [
    _row("out-of-memory", "MemoryError on rank 1 while it compresses", "encode", 6, 4, ("mpi", "ddp"), False),
    _row("out-of-memory", "MemoryError on rank 1 while it saves", "checkpoint", 8, 4, ("gloo",), True),
    _row("no-memory-left", "rank 1 gets no memory from step 6 on", "step", 6, 4, ("gloo", "mpi", "ddp"), False),
]
