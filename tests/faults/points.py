"""Where a fault can be planted in `hvdcomp train`, and what can happen there.

The ranks do it to themselves when they come to the point, so that nothing depends on timing. The product has no hooks
for this: its methods are wrapped from outside, in the process of the rank alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import links, mishaps

LAUNCHER = "launcher.pid"
"""In a row's folder: the number of the launcher's process."""

SECONDS_BETWEEN_INTERRUPTS = 0.5
"""Of somebody who presses Ctrl-C twice."""


@dataclass(frozen=True)
class Place:
    """Where a rank is when its fault happens.

    Attributes:
        rank: its number.
        step: that is under way, or was the last, from 1.
        folder: of the row.
        what: that the point hands over, by name.
    """

    rank: int
    step: int
    folder: Path
    what: dict[str, Any]


Reached = Callable[..., None]
"""To be called at a point, with what it hands over by name."""


def _at_step(reached: Reached) -> None:
    """Before a step begins; hands over the `run`, whose learner has the model."""
    from hvdcomp.tools.train.run import Run

    real = Run._timed_step

    def timed_step(self: Any, *arguments: Any) -> None:
        reached(run=self)
        real(self, *arguments)

    Run._timed_step = timed_step  # type: ignore[assignment,method-assign]


def _in_encode(reached: Reached) -> None:
    """When gradients of a step have been compressed, and nothing of them was sent."""
    from hvdcomp.exchange.engine_bucket import EngineBucket
    from hvdcomp.exchange.tensor_group import TensorGroup

    def wrap(kind: Any) -> None:
        real = kind.advance

        def advance(self: Any, answers: Any) -> Any:
            requests = real(self, answers)
            if not answers:  # the first turn
                reached()
            return requests

        kind.advance = advance

    wrap(EngineBucket)
    wrap(TensorGroup)


def _in_collective(reached: Reached) -> None:
    """When collectives of a step were started, before this rank waits for them."""
    from hvdcomp.exchange.fusion import Round

    real = Round.wait

    def wait(self: Any) -> list[Any]:
        reached()
        return real(self)

    Round.wait = wait  # type: ignore[method-assign]


def _in_checkpoint(reached: Reached) -> None:
    """When half of a file of a checkpoint has been written; hands over its `path`."""
    from hvdcomp.tools.train import checkpoints, torch_learner

    real = checkpoints.write_file

    def write_file(path: Path, content: bytes | memoryview) -> None:
        real(path, memoryview(content)[: len(content) // 2])
        reached(path=path)
        real(path, content)

    checkpoints.write_file = torch_learner.write_file = write_file


def _in_decision(reached: Reached) -> None:
    """When rank 0 has made a decision of the policy, before this rank takes part in sending it."""
    from hvdcomp.adaptation.channel import DecisionChannel

    real = DecisionChannel.send

    def send(self: Any) -> None:
        reached()
        real(self)

    DecisionChannel.send = send  # type: ignore[method-assign]


def _in_write(name: str) -> Callable[[Reached], None]:
    """Before something is written to a file with this in its name; hands over the `file`, and a list `afterwards` of
    what to call after it."""

    def wrap(reached: Reached) -> None:
        from hvdcomp import files

        real = files._write_all

        def write_all(file: Any, content: Any) -> None:
            afterwards: list[Callable[[], None]] = []
            if name in Path(file.name).name:
                reached(file=file, afterwards=afterwards)
            try:
                real(file, content)
            finally:
                for call in afterwards:
                    call()

        files._write_all = write_all

    return wrap


def _at_start(reached: Reached) -> None:
    """Before the training, in step 0."""
    reached()


FILES = (
    *("model.pt", "rank-", "run-", "SHA256SUMS", "steps.jsonl", "epochs.jsonl", "decisions.jsonl", "summary.json"),
    *("events.out",),
)
"""What a training writes, by a part of the name."""

POINTS: dict[str, Callable[[Reached], None]] = {
    "start": _at_start,
    "step": _at_step,
    "encode": _in_encode,
    "collective": _in_collective,
    "checkpoint": _in_checkpoint,
    "decision": _in_decision,
    **{f"write-{name}": _in_write(name) for name in FILES},
}
"""Each wraps the methods by which a rank comes to that point."""


def _signal(number: signal.Signals) -> Callable[[Place], None]:
    return lambda place: os.kill(os.getpid(), number)


def _signal_to_launcher(number: signal.Signals) -> Callable[[Place], None]:
    return lambda place: os.kill(launcher_of(place.folder), number)


def _interrupt(times: int) -> Callable[[Place], None]:
    """Ctrl-C: a terminal sends it to the group of processes in the foreground, which is the launcher's."""

    def act(place: Place) -> None:
        launcher = launcher_of(place.folder)
        os.killpg(launcher, signal.SIGINT)
        for _ in range(times - 1):
            time.sleep(SECONDS_BETWEEN_INTERRUPTS)
            with contextlib.suppress(ProcessLookupError):  # the first was enough
                os.killpg(launcher, signal.SIGINT)

    return act


def launcher_of(folder: Path) -> int:
    """The number of the launcher's process, which leads a group of its own."""
    return int((folder / LAUNCHER).read_text())


ACTS: dict[str, Callable[[Place], None]] = {
    **{name: _signal(signal.Signals[name]) for name in ("SIGKILL", "SIGTERM", "SIGSTOP")},
    **{f"launcher-{name}": _signal_to_launcher(signal.Signals[name]) for name in ("SIGKILL", "SIGTERM")},
    "interrupt": _interrupt(1),
    "interrupt-twice": _interrupt(2),
    "cut": lambda place: links.cut(),
    "stall": lambda place: links.stall(),
    "lose-packets": lambda place: links.lose_packets(),
    **mishaps.ACTS,
}
"""What can happen at a point, by name."""
