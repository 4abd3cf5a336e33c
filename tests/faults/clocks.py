"""A clock that jumps by hours, back and forth, whenever a rank waits for others, also while a policy times steps."""

from __future__ import annotations

import json

from hvdcomp.adaptation.decision_log import Decided, read_decisions
from tests.faults.preload import with_shim
from tests.faults.table import Fault
from tests.faults.world import STEPS, Planted, World

GROUP = "clocks"
_WITHIN = 120
_LONGEST_SECONDS = 3600
"""No step and no training of a row takes so long, and most of the jumps are longer."""
_TIMING_POLICY = ("--policy", "gravac:min=10,max=40,window=4,every=1,epsilon=0.1")


def _jumps(world: World, rank: int, *options: str) -> str:
    planted = Planted("clock-jumps", "step", rank, step=3)
    ended = world.train(*options, planted=planted, environment=with_shim(world))
    assert ended.code == 0, f"it ended with exit code {ended.code}: {ended.output[-3000:]}"
    summary = world.summary
    assert (summary["status"], summary["identical"], summary["steps"]) == ("finished", True, STEPS), summary
    lines = [json.loads(line) for line in (world.output / "steps.jsonl").read_text().splitlines()]
    times = [summary["seconds"], *(line["ms"] / 1000 for line in lines)]
    assert all(0 < seconds < _LONGEST_SECONDS for seconds in times), f"times that nothing took: {times}"
    world.weights()
    return f"it went on to step {STEPS}, and all times are those that steps took"


def _accordion(world: World) -> str:
    said = _jumps(world, 1)
    assert world.weights() == world.undisturbed.weights(), "the weights are not those of an undisturbed training"
    return f"{said}; the weights are those of an undisturbed training"


def _timing(world: World) -> str:
    said = _jumps(world, 0, *_TIMING_POLICY)  # it goes by rank 0's clock
    lines = [line for line in read_decisions(world.output / "decisions.jsonl") if isinstance(line, Decided)]
    told = [line.statistics.timing.seconds for line in lines if line.statistics.timing is not None]
    timed = told[1:]  # the first step after a start is not timed
    assert timed, "the policy was told of no times"
    assert all(0 < seconds < _LONGEST_SECONDS for seconds in timed), f"the policy was told of these times: {timed}"
    return f"{said}; so are the {len(timed)} that the policy was told of"


_DOCUMENTED = "Nothing happens, because hvdcomp measures durations only with clocks that do not jump."

FAULTS = [
    Fault("the clock of rank 1 jumps", GROUP, _DOCUMENTED, _WITHIN, _accordion, ("gloo", "ddp"), short=True),
    Fault("the clock of rank 0 jumps while a policy times steps", GROUP, _DOCUMENTED, _WITHIN, _timing, ("mpi", "ddp")),
]
