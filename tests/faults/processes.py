"""Ranks that are killed, told to end or stopped in any phase of a training; a launcher that is; and Ctrl-C."""

from __future__ import annotations

from functools import partial

from tests.faults.table import ALL, Fault
from tests.faults.world import EVERY, STEPS_OF_EPOCH, WAIT, Ended, Planted, World

GROUP = "processes"

# By point: how it is called, the step in which the fault happens, and the checkpoint that is there then.
_PHASES: dict[str, tuple[str, int, int | None]] = {
    "step": ("before the first step", 1, None),
    "encode": ("while it compresses", 6, 4),
    "collective": ("in a collective", 6, 4),
    "checkpoint": ("while it writes a checkpoint", 8, 4),
    "decision": ("when a policy decides", 11, 8),  # of the first epoch, which ends with step 10
}
_GRACE = 5 + 25
"""Seconds that horovodrun gives ranks to end, and those in which a busy machine ends processes."""
_GRACE_OF_TORCHRUN = 30 + 25
_LONG = 60
"""Epochs of a training that is not over before a launcher has ended."""


def _planted(act: str, point: str, rank: int) -> Planted:
    return Planted(act, point, rank, _PHASES[point][1])


def _said(ended: Ended) -> str:
    return f"all ended, the launcher with exit code {ended.code}"


def _ends_all(world: World, act: str, point: str, rank: int) -> str:
    ended = world.train(planted=_planted(act, point, rank)).failed()
    world.weights()
    return f"{_said(ended)}; {world.goes_on(_PHASES[point][2])}"


def _killed(point: str, rank: int) -> Fault:
    return Fault(
        f"SIGKILL of rank {rank}, {_PHASES[point][0]}",
        GROUP,
        "The launcher ends all ranks. After a restart, training continues from the newest complete checkpoint.",
        60,
        partial(_ends_all, act="SIGKILL", point=point, rank=rank),
        short=(point, rank) == ("collective", 1),
    )


def _told(point: str, rank: int) -> Fault:
    where, step, _ = _PHASES[point]

    def run(world: World) -> str:
        ended = world.train(planted=_planted("SIGTERM", point, rank)).failed()
        summary = world.summary
        assert (summary["status"], summary["identical"]) == ("stopped", True), summary
        stopped = summary["steps"]
        assert step <= stopped <= step + EVERY, f"it was told in step {step}, and stopped after step {stopped}"
        assert world.saved[-1] == stopped, world.saved
        return f"saved after step {stopped}; {_said(ended)}; {world.goes_on(stopped)}"

    return Fault(
        f"SIGTERM to rank {rank}, {where}",
        GROUP,
        "All ranks save after the same step and end with code 213. After a restart, training continues from this step.",
        60,
        run,
    )


def _stopped(point: str, rank: int) -> list[Fault]:
    where, _, after = _PHASES[point]

    def waits(world: World) -> str:
        ended = world.train(planted=_planted("SIGSTOP", point, rank), waits=True)
        world.weights()
        newest = max(world.saved, default=None)  # mpirun wakes a stopped rank before it ends it: it may save once more
        assert (newest or 0) >= (after or 0), world.saved
        return f"it waited until mpirun was told to end, by SIGTERM; {_said(ended)}; {world.goes_on(newest)}"

    run = partial(_ends_all, act="SIGSTOP", point=point, rank=rank)
    name = f"SIGSTOP of rank {rank}, {where}"
    gives_up = "The other rank gives up after {}. The launcher ends all ranks. After a restart, training continues."
    return [
        Fault(
            name,
            GROUP,
            gives_up.format("HOROVOD_GLOO_TIMEOUT_SECONDS"),
            WAIT + _GRACE,
            run,
            ("gloo",),
        ),
        Fault(
            name,
            GROUP,
            gives_up.format("the timeout of torch.distributed"),
            WAIT + _GRACE_OF_TORCHRUN,
            run,
            ("ddp",),
        ),
        Fault(
            name,
            GROUP,
            "The other rank waits, as in Horovod without hvdcomp, because MPI has no timeout. End mpirun yourself. "
            "After a restart, training continues.",
            WAIT,
            waits,
            ("mpi",),
        ),
    ]


def _launcher(act: str, name: str, documented: str, transports: tuple[str, ...], ends: str) -> Fault:
    """A launcher that is struck while a collective is under way, in a training that is far from its end.

    Args:
        ends: how the ranks end: "saved", "killed", or "finished" where they train to the end.
    """

    def run(world: World) -> str:
        ended = world.train("--epochs", str(_LONG), planted=_planted(act, "collective", rank=1)).failed()
        world.weights()
        newest = world.saved[-1]
        last = _LONG * STEPS_OF_EPOCH
        if ends == "finished":
            assert (world.summary["status"], newest) == ("finished", last), world.summary
            return f"the ranks trained to the end, step {last}; the launcher's exit code was {ended.code}"
        assert newest < last, f"the ranks trained to the end, step {newest}"
        if ends == "saved":
            assert (world.summary["status"], world.summary["steps"]) == ("stopped", newest), world.summary
        saved = f"saved after step {newest}; " if ends == "saved" else ""
        return f"{saved}{_said(ended)}; {world.goes_on(newest, epochs=newest // STEPS_OF_EPOCH + 1)}"

    return Fault(name, GROUP, documented, 180 if ends == "finished" else 60, run, transports)


_SAVE = (
    "The ranks get a signal to end, and all save after the same step. After a restart, training "
    "continues from this step."
)
_END = "All ranks end. After a restart, training continues from the newest complete checkpoint."
_GO_ON = (
    "torchrun ends without notifying the ranks. As they would without hvdcomp, the ranks train to the end. Do not "
    "restart training before they have ended."
)
_KILLED = "mpirun kills all ranks. After a restart, training continues from the newest complete checkpoint."

FAULTS = [
    *(_killed(point, rank) for point in _PHASES for rank in (0, 1)),
    *(_told(point, number % 2) for number, point in enumerate(_PHASES)),
    *(fault for number, point in enumerate(_PHASES) for fault in _stopped(point, (number + 1) % 2)),
    _launcher("launcher-SIGKILL", "SIGKILL of the launcher", _END, ("gloo", "mpi"), "killed"),
    _launcher("launcher-SIGKILL", "SIGKILL of the launcher", _GO_ON, ("ddp",), "finished"),
    _launcher("launcher-SIGTERM", "SIGTERM to the launcher", _SAVE, ("gloo", "ddp"), "saved"),
    _launcher("launcher-SIGTERM", "SIGTERM to the launcher", _KILLED, ("mpi",), "killed"),
    _launcher("interrupt", "Ctrl-C once", _SAVE, ("gloo",), "saved"),
    _launcher("interrupt", "Ctrl-C once", _END, ("mpi", "ddp"), "killed"),
    _launcher("interrupt-twice", "Ctrl-C twice, half a second apart", _END, ALL, "killed"),
]
