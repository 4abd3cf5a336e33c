"""Two of the faults in trainings without hvdcomp, to be shown beside."""

from __future__ import annotations

from tests.faults.table import Fault
from tests.faults.world import WAIT, World

GROUP = "without hvdcomp"
FINISHED = "finished-{}"
"""In a row's folder: there if a rank has trained to the end."""


def _run(world: World, act: str, waits: bool = False, finishes: bool = False) -> str:
    words = ["-m", "tests.faults.stock_victim", "--folder", str(world.folder), "--group-timeout", str(WAIT)]
    backend = "--ddp" if world.transport == "ddp" else "--horovod"
    ended = world.run([*words, "--act", act, "--rank", "1", backend], faulty=True, waits=waits).failed()
    finished = [rank for rank in range(world.ranks) if (world.folder / FINISHED.format(rank)).exists()]
    assert len(finished) == (world.ranks if finishes else 0), f"of the ranks, {finished} have trained to the end"
    if finishes:
        return f"the ranks trained to the end; the launcher's exit code was {ended.code}"
    waited = "it waited until the launcher was told to end, by SIGTERM; " if waits else ""
    return f"{waited}all ended, the launcher with exit code {ended.code}"


def _stopped(transport: str, documented: str, within: float, waits: bool = False) -> Fault:
    return Fault(
        "SIGSTOP of rank 1, in a collective, without hvdcomp",
        GROUP,
        documented,
        within,
        lambda world: _run(world, "SIGSTOP", waits),
        (transport,),
        short=transport == "gloo",
    )


def _left_alone(documented: str, transports: tuple[str, ...], finishes: bool) -> Fault:
    return Fault(
        "SIGKILL of the launcher, without hvdcomp",
        GROUP,
        documented,
        120 if finishes else 60,
        lambda world: _run(world, "launcher-SIGKILL", finishes=finishes),
        transports,
    )


FAULTS = [
    _stopped("gloo", "The other rank gives up after HOROVOD_GLOO_TIMEOUT_SECONDS.", WAIT + 30),
    _stopped("mpi", "The other rank waits, because MPI has no timeout.", WAIT, waits=True),
    _stopped("ddp", "The other rank gives up after the timeout of torch.distributed.", WAIT + 55),
    _left_alone("All ranks end.", ("gloo", "mpi"), finishes=False),
    _left_alone("torchrun ends without notifying the ranks, and the ranks train to the end.", ("ddp",), finishes=True),
]
