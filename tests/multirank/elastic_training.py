"""What trainings in elastic Horovod of both frameworks share: phases, and what each rank writes down.

The plan is JSON: what is compressed and how, how many steps are between commits, and `phases`. In each phase the ranks
train until they are as many as it says, then `steps` steps more, and then do what it says: rank 0 writes a new list of
hosts, or, if they are as many as it says first, ranks kill themselves. They save what they have before, unless it says
not to.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

BATCH = 32


def digits() -> tuple[np.ndarray, np.ndarray]:
    """All images (n, 64), from 0 to 1, and what they show (n,)."""
    images, shown = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), shown.astype(np.int64)


def batch_of(step: int, rank: int) -> np.ndarray:
    """The numbers of the images of a batch: every rank draws the same order, and takes its own part."""
    return np.random.default_rng(step).permutation(len(digits()[1]))[rank * BATCH :][:BATCH]


class Phases:
    """Follows the plan on one rank.

    Args:
        plan: as in the module's docstring.
        hvd: Horovod's module.
        compression: whose state is written down.
    """

    def __init__(self, plan: dict[str, Any], hvd: Any, compression: Any) -> None:
        self._plan = plan
        self._hvd = hvd
        self._compression = compression
        self._log = (Path(plan["folder"]) / f"{os.getpid()}.jsonl").open("w")

    def go_on(self, state: Any) -> bool:
        """Whether there is another step to be made."""
        return state.phase < len(self._plan["phases"])

    def step_done(self, state: Any, weights: list[float], loss: float, commits: bool = True) -> None:
        """Writes down a step, and acts and, unless somebody else does so, commits if it is time."""
        plan, hvd = self._plan, self._hvd
        phase = plan["phases"][state.phase]
        state.step += 1
        state.done += hvd.size() in phase["sizes"]
        engine = self._compression._binding.engine
        residuals = [np.asarray(one.memory[-1], np.float64) for one in engine.states.values() if one.memory]
        self.write(
            step=state.step,
            size=hvd.size(),
            rank=hvd.rank(),
            engine_step=engine.step_number if commits else None,  # that of a new rank follows with its first exchange
            weights=weights,
            residual=float(sum(one.sum() for one in residuals)),
            levels=sorted(map(str, self._compression.levels.values())),
            accumulation=self._compression.accumulation,
            loss=loss,
        )
        every = plan.get("commit", 1)
        if state.done >= phase["steps"]:
            state.phase, state.done = state.phase + 1, 0
            if every:
                state.save()
            self._act(phase)
        if commits and every and state.step % every == 0:
            state.commit()

    def write(self, **known: Any) -> None:
        """Writes a line down, at once: this rank may be killed."""
        self._log.write(json.dumps(known) + "\n")
        self._log.flush()

    def _act(self, phase: dict[str, Any]) -> None:
        if self._hvd.rank() == 0 and "hosts" in phase:
            new = Path(f"{self._plan['hosts']}.new")
            new.write_text(phase["hosts"])
            new.rename(self._plan["hosts"])
        if self._hvd.rank() in phase.get("kill", ()) and self._hvd.size() == phase["sizes"][0]:
            os.kill(os.getpid(), signal.SIGKILL)
