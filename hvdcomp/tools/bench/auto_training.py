"""A training in which the policy `auto` chooses, measured in turns with those that do not change what they send."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdcomp.tools.bench.trainings import Training

if TYPE_CHECKING:
    from hvdcomp.tools.bench.carrier import Carrier, Distributed

AUTO = "auto"

_FEWEST = 150  # steps in a row before the turns: what is near the best is tried then
_BLOCK = 5


class AutoTraining(Training):
    """A training with `auto`, whose clock stands still while others have their turn.

    Args:
        carrier: of the gradients.
        compressor: spec of what the policy may choose beside dense and fp16.
        others: specs of more such compressors.
        calibration: a file that rank 0 can read.
        log: where rank 0 writes the decisions.
        model_name, batch_size, seed: as for `Training`.
    """

    def __init__(
        self,
        carrier: Carrier,
        compressor: str,
        calibration: Path,
        log: Path,
        model_name: str,
        batch_size: int,
        seed: int,
        others: Sequence[str] = (),
    ) -> None:
        from hvdcomp import Auto

        self._settings: dict[str, Any] = {
            "policy": Auto(calibration=str(calibration), model=model_name, compressors=tuple(others)),
            "decision_log": log,
        }
        self._compressor = compressor
        self._others = ExitStack()  # the policy's clock stands still in it
        super().__init__(carrier, AUTO, model_name, batch_size, seed)

    def begin(self, seconds: float) -> None:
        """Trains for `seconds` without turns of others, and at least `_FEWEST` steps."""
        start, made = time.perf_counter(), 0
        going = True
        while going:
            self.block(_BLOCK, settling=0)
            made += _BLOCK
            mine = made < _FEWEST or time.perf_counter() - start < seconds
            going = self._carrier.ranks.broadcast(mine, "auto")
        self.forget()

    def choice(self) -> dict[str, Any]:
        """What was chosen in the end, of what, and when another; on rank 0."""
        from hvdcomp.adaptation.decision_log import Decided, read_decisions

        decided = [line for line in read_decisions(self._settings["decision_log"]) if isinstance(line, Decided)]
        last = decided[-1].state
        chosen = last["rival"] or last["chosen"]  # a trial that the end interrupts is no choice
        stretches = groupby(decided, key=lambda line: line.state["chosen"])
        changes = [(next(lines).from_step, name) for name, lines in stretches]
        return {
            "compressor": self._compressor,
            "chosen": chosen,
            "why": last["why"],
            "predicted_ms": 1000 * last["candidates"][chosen]["seconds"],
            "candidates_ms": {name: 1000 * one["seconds"] for name, one in last["candidates"].items()},
            "found_ms": {name: (1000 * one["seconds"], one["steps"]) for name, one in last["measured"].items()},
            "changes": changes,
        }

    def _compressed(self, name: str, **options: Any) -> Distributed:
        return self._carrier.compressed(self._workload, self._compressor, name, **options, **self._settings)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._others.close()
        try:
            yield
        finally:
            assert self.compression is not None
            self._others.enter_context(self.compression.paused())
