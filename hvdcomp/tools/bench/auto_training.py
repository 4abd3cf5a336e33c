"""A training run with the policy `auto`. The steps of this run alternate with the steps of training runs with fixed
methods."""

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

_FEWEST = 150  # `auto` trains for at least this many steps before the comparison, to try its best candidates
_BLOCK = 5


class AutoTraining(Training):
    """A training run with the policy `auto`. The policy's clock stops while other training runs run their steps.

    Args:
        carrier: the library that exchanges the gradients.
        compressor: the spec of a compressor that the policy may choose, in addition to dense and fp16.
        calibration: a file that rank 0 can read.
        log: the file to which rank 0 writes its decisions.
        model_name, batch_size, seed: the arguments of `Training`.
        more_compressors: specs of further compressors that the policy may choose.
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
        more_compressors: Sequence[str] = (),
    ) -> None:
        from hvdcomp import Auto

        self._settings: dict[str, Any] = {
            "policy": Auto(calibration=str(calibration), model=model_name, compressors=tuple(more_compressors)),
            "decision_log": log,
        }
        self._compressor = compressor
        self._pause = ExitStack()  # while the policy's clock is stopped, it holds the context that stops the clock
        super().__init__(carrier, AUTO, model_name, batch_size, seed)

    def begin(self, seconds: float) -> None:
        """Trains for `seconds`, but for at least `_FEWEST` steps, without steps of other training runs in between."""
        start, steps = time.perf_counter(), 0
        going = True
        while going:
            self.block(_BLOCK, settling=0)
            steps += _BLOCK
            unfinished = steps < _FEWEST or time.perf_counter() - start < seconds
            going = self._carrier.ranks.broadcast(unfinished, "auto")
        self.forget()

    def choice(self) -> dict[str, Any]:
        """The method that the policy chose last, all candidates, and all changes of the method. Call this method on
        rank 0."""
        from hvdcomp.adaptation.decision_log import Decided, read_decisions

        decided = [line for line in read_decisions(self._settings["decision_log"]) if isinstance(line, Decided)]
        last = decided[-1].state
        chosen = last["rival"] or last["chosen"]  # if training ended during a trial, the method before the trial counts
        stretches = groupby(decided, key=lambda line: line.state["chosen"])
        changes = [(next(lines).from_step, name) for name, lines in stretches]
        return {
            "compressor": self._compressor,
            "chosen": chosen,
            "why": last["why"],
            "predicted_ms": 1000 * last["candidates"][chosen]["seconds"],
            "candidates_ms": {name: 1000 * entry["seconds"] for name, entry in last["candidates"].items()},
            "found_ms": {name: (1000 * entry["seconds"], entry["steps"]) for name, entry in last["measured"].items()},
            "changes": changes,
        }

    def _compressed(self, name: str, **options: Any) -> Distributed:
        return self._carrier.compressed(self._workload, self._compressor, name, **options, **self._settings)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._pause.close()
        try:
            yield
        finally:
            assert self.compression is not None
            self._pause.enter_context(self.compression.paused())
