"""Ranks that are killed, told to end or stopped in any phase of a training; a launcher that is; and Ctrl-C."""

from __future__ import annotations

from tests.faults.table import Fault
from tests.faults.world import Planted, World

GROUP = "processes"


def _killed(planted: Planted, after: int | None) -> Fault:
    """SIGKILL of a rank; `after` is the step of the checkpoint that is there then."""

    def run(world: World) -> str:
        ended = world.train(planted=planted)
        assert ended.code != 0, "the launcher's exit code is 0"
        world.weights()
        return f"all ended with exit code {ended.code}; {world.goes_on(after)}"

    return Fault(
        f"SIGKILL of rank {planted.rank}, {_PHASES[planted.point]}",
        GROUP,
        "The launcher ends all ranks; started again, the training goes on from the newest complete checkpoint.",
        60,
        run,
        short=planted.point == "collective",
    )


_PHASES = {
    "step": "before the first step",
    "encode": "while it compresses",
    "collective": "in a collective",
    "checkpoint": "while it writes a checkpoint",
    "decision": "when a policy decides",
}

FAULTS = [
    _killed(Planted("SIGKILL", "collective", rank=1, step=6), after=4),
]
