"""The same faults in trainings without hvdcomp, to be shown beside."""

from __future__ import annotations

from tests.faults.table import Fault
from tests.faults.world import WAIT, Planted, World

GROUP = "without hvdcomp"
_STEP = 6


def _run(world: World, act: str, waits: bool) -> str:
    planted = Planted(act, "collective", rank=1, step=_STEP)
    ended = world.run(
        [
            *("-m", "tests.faults.stock_victim", "--folder", str(world.folder), "--group-timeout", str(WAIT)),
            *("--act", planted.act, "--rank", str(planted.rank), "--step", str(planted.step)),
            *("--horovod" if world.transport != "ddp" else "--ddp",),
        ],
        faulty=True,
        waits=waits,
    )
    assert ended.code != 0, "the launcher's exit code is 0"
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


FAULTS = [
    _stopped("gloo", "The other rank gives up after HOROVOD_GLOO_TIMEOUT_SECONDS.", WAIT + 30),
    _stopped("mpi", "The other rank waits, because MPI knows no timeout.", WAIT, waits=True),
    _stopped("ddp", "The other rank gives up after the timeout of torch.distributed.", WAIT + 55),
    Fault(
        "SIGKILL of the launcher, without hvdcomp",
        GROUP,
        "All ranks end.",
        60,
        lambda world: _run(world, "launcher-SIGKILL", False),
    ),
]
