"""The ranks of a row: started, watched to the end of the last of their processes, and what they leave looked at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.faults.points import LAUNCHER
from tests.faults.victim import FAULT, WEIGHTS
from tests.launched import available, launcher_command, launcher_variables
from tests.processes import with_variable

ROOT = Path(__file__).parents[2]
CONTROLLERS = {"gloo": "gloo", "mpi": "mpi", "ddp": "torchrun"}
"""What starts the ranks of each transport: Horovod with Gloo and with MPI, and torch.distributed."""

MARK = "HVDCOMP_FAULTS_ROW"
"""In the environment of every process of a row: by it those that are left are found, wherever they hang."""

# An epoch of two ranks is 10 steps. The policy decides in step 11, by the end of the first epoch.
TRAINING = (
    *("--model", "mlp", "--data", "synthetic", "--image-size", "8", "--samples", "320", "--batch-size", "16"),
    "--no-progress",
    *("--compression", "topk:ratio=0.02", "--policy", "accordion:low=0.1,high=0.02,interval=1"),
)
STEPS_OF_EPOCH = 10
_EPOCHS = 2
STEPS = _EPOCHS * STEPS_OF_EPOCH
EVERY = 4
"""Steps from one checkpoint to the next."""

WAIT = 20
"""Seconds that Gloo waits for a rank, in Horovod and in torch.distributed, where the default is 30 s and 30 minutes."""

_ENVIRONMENT = {
    "COLUMNS": "200",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "3",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "6",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": str(WAIT),
}
_START_SECONDS = 180  # for the ranks to come to the fault, and for a run without one
_LET_GO_SECONDS = 45  # for what is asked to end


class NotHere(Exception):  # noqa: N818 - nothing is wrong with the product
    """What a row needs is not on this machine; the message says what."""


@dataclass(frozen=True)
class Planted:
    """A fault: `act` of `points.ACTS` at `point` of `points.POINTS`, on a rank, in a step or at the next such point."""

    act: str
    point: str
    rank: int
    step: int = 1


@dataclass(frozen=True)
class Ended:
    """How ranks ended.

    Attributes:
        code: the launcher's exit code, 128 + N after signal N.
        output: of the launcher and all ranks.
        waited: whether they still ran when the time was over, and were told to end.
    """

    code: int
    output: str
    waited: bool = False

    def failed(self) -> Ended:
        """Sees that the launcher's exit code is that of a failure.

        Raises:
            AssertionError: it is 0.
        """
        assert self.code != 0, "the launcher's exit code is 0"
        return self

    def expect(self, *messages: str) -> None:
        """Sees that all of this was said.

        Raises:
            AssertionError: it was not.
        """
        said = " ".join(self.output.split())
        for message in messages:
            assert message in said, f"nobody said {message!r}: {self.output[-3000:]}"


class World:
    """The ranks of one row, in a folder of its own.

    Args:
        transport: one of `CONTROLLERS`.
        folder: new, for all that the row writes.
        within: seconds from the fault to the end of the last process.
        ranks: how many.

    Attributes:
        seconds: from the fault to the end of the last process; None before.
    """

    def __init__(self, transport: str, folder: Path, within: float, ranks: int = 2) -> None:
        self.transport = transport
        self.folder = folder
        self.within = within
        self.ranks = ranks
        self.seconds: float | None = None
        self.output = folder / "run"
        self.checkpoints = folder / "saved"
        self._mark = f"{MARK}={uuid.uuid4()}"
        self._runs = 0

    # Running.

    def train(
        self,
        *options: str,
        planted: Planted | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float = WAIT,
        waits: bool = False,
        from_start: bool = False,
    ) -> Ended:
        """Trains until the last process has ended, with a fault or without.

        Args:
            options: of `hvdcomp train`, after those of `TRAINING` and the row's own folders, which they overrule.
            planted: the fault; None for none.
            environment: variables, which overrule those that make waiting short.
            timeout: seconds that torch.distributed waits for a rank.
            waits: whether the ranks are expected to wait for ever. When the time is over, the launcher is then told to
                end, by SIGTERM.
            from_start: whether there is a fault already, such as a damaged file. Its time begins now.

        Raises:
            AssertionError: they did not end in time, or left a process, or the fault did not happen.
        """
        if from_start:
            (self.folder / FAULT).write_text(json.dumps({"at": time.monotonic()}))
        places = ["--output", str(self.output), "--overwrite", "--checkpoint-folder", str(self.checkpoints)]
        words = ["--folder", str(self.folder)]
        if planted is not None:
            words += ["--act", planted.act, "--point", planted.point]
            words += ["--rank", str(planted.rank), "--step", str(planted.step)]
        words += ["--", *TRAINING, *places, "--epochs", str(_EPOCHS), "--checkpoint-every", str(EVERY)]
        if self.transport == "ddp":
            words += ["--timeout", str(timeout)]
        words += options
        return self.run(["-m", "tests.faults.victim", *words], from_start or planted is not None, environment, waits)

    def run(
        self,
        arguments: Sequence[str],
        faulty: bool,
        environment: Mapping[str, str] | None = None,
        waits: bool = False,
    ) -> Ended:
        """Runs `python arguments...` on all ranks, as `train` does.

        Args:
            faulty: whether a fault is to happen, which the file `victim.FAULT` in the folder then tells.
        """
        self._runs += 1
        log = self.folder / f"output-{self._runs}.txt"
        name, value = self._mark.split("=")
        # Its own number, which is the launcher's after exec, stands there before any rank can look for it.
        wrapped = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(self.folder / LAUNCHER), *self.command(arguments)]
        with log.open("w") as output:
            process = subprocess.Popen(
                wrapped,
                cwd=ROOT,
                env={**launcher_variables({**_ENVIRONMENT, **(environment or {})}), name: value},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            waited = self._watch(process, faulty, waits)
        except AssertionError as error:
            self.end()
            process.wait()
            raise AssertionError(f"{error}\n{log.read_text()[-3000:]}") from None
        code = process.wait()
        return Ended(code if code >= 0 else 128 - code, log.read_text(), waited)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The launcher's command.

        Raises:
            NotHere: no such ranks can be started.
        """
        controller = CONTROLLERS[self.transport]
        if not available(controller):
            raise NotHere(f"no launcher for {controller} ranks is installed")
        return launcher_command(self.ranks, controller, arguments)

    def _watch(self, process: subprocess.Popen[bytes], faulty: bool, waits: bool) -> bool:
        """Waits for the end of all processes; whether they had to be told."""
        started, told = time.monotonic(), 0.0
        while True:
            over = process.poll() is not None and not self.left()
            now = time.monotonic()
            happened = self._fault_at() if faulty else None
            if over:
                assert not faulty or happened is not None, "the fault did not happen"
                assert told or not waits, "the ranks ended by themselves, and were expected to wait"
                self.seconds = now - happened if happened is not None else self.seconds
                return bool(told)
            limit = started + _START_SECONDS if happened is None else happened + self.within
            if told:
                limit = told + _LET_GO_SECONDS
            elif now > limit and waits and happened is not None:
                process.terminate()
                told, limit = now, now + _LET_GO_SECONDS
            if now > limit:
                self.seconds = now - happened if happened is not None else None
                if process.poll() is None:
                    raise AssertionError(f"the ranks still ran after {now - (happened or started):.0f} s")
                raise AssertionError(f"processes were left {now - (happened or started):.0f} s later: {self.left()}")
            time.sleep(0.1)

    def _fault_at(self) -> float | None:
        file = self.folder / FAULT
        return json.loads(file.read_text())["at"] if file.exists() else None

    def left(self) -> dict[int, str]:
        """The processes of this row that run, by number: their commands."""
        found = {}
        for place in with_variable(self._mark):
            with suppress(OSError):  # it has just ended
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
        return found

    def end(self) -> None:
        """Kills what is left of the row."""
        while left := self.left():
            for number in left:
                try:
                    os.kill(number, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    # What is left.

    @property
    def summary(self) -> dict[str, Any]:
        """What the last run wrote about itself."""
        return json.loads((self.output / "summary.json").read_text())

    @property
    def saved(self) -> list[int]:
        """The steps after which there is a complete checkpoint."""
        return sorted(int(place.name.removeprefix("step-")) for place in self.checkpoints.glob("step-????????"))

    def weights(self) -> dict[int, str]:
        """A digest of the weights after each step, which all ranks had, each time that they made the step.

        Raises:
            AssertionError: they differ.
        """
        found: dict[int, set[str]] = defaultdict(set)
        for rank in range(self.ranks):
            file = self.folder / WEIGHTS.format(rank)
            for line in file.read_text().splitlines() if file.exists() else ():
                step, _, digest = line.partition(" ")
                if len(digest) == 64:  # of a rank that was killed, the last line may be cut off
                    found[int(step)].add(digest)
        apart = sorted(step for step, digests in found.items() if len(digests) > 1)
        assert not apart, f"the weights differ after step {apart[0]}"
        return {step: digests.pop() for step, digests in found.items()}

    def forget(self, after: int | None) -> None:
        """Drops the digests of weights after a step (None: all): those of a training that went wrong, and is to make
        these steps again with others."""
        for rank in range(self.ranks):
            file = self.folder / WEIGHTS.format(rank)
            lines = file.read_text().splitlines(keepends=True)
            file.write_text("".join(line for line in lines if int(line.split()[0]) <= (after or 0)))

    def goes_on(
        self,
        after: int | None,
        *options: str,
        epochs: int = _EPOCHS,
        says: Sequence[str] = (),
        from_start: bool = False,
    ) -> str:
        """Starts the same training again, and sees that it goes on and ends as if there had been no fault.

        Args:
            after: the step of the checkpoint that it is to go on from; None for a start anew.
            options: of `hvdcomp train`, as the training had them, by which its weights may be others than those of an
                undisturbed training.
            epochs: of the whole training.
            says: what it is to say.
            from_start: as of `train`.

        Returns:
            What it did, for the table.

        Raises:
            AssertionError: it did something else.
        """
        ended = self.train("--epochs", str(epochs), *options, from_start=from_start)
        assert ended.code == 0, f"started again, it ends with {ended.code}: {ended.output[-3000:]}"
        ended.expect(*says)
        summary = self.summary
        assert (summary["status"], summary["identical"]) == ("finished", True), summary
        found = summary["resumed_at"][-1] if summary["resumed_at"] else None
        assert found == after, f"started again, it goes on after step {found}, and not after step {after}"
        weights = self.weights()
        assert sorted(weights) == list(range(1, epochs * STEPS_OF_EPOCH + 1)), sorted(weights)
        if not options:
            expected = self.undisturbed.weights()
            apart = [step for step in expected if weights.get(step, expected[step]) != expected[step]]
            assert not apart, f"its weights after step {apart[0]} are not those of an undisturbed training"
        began = "anew" if after is None else f"after step {after}"
        return f"started again, it went on {began} to the same weights"

    @cached_property
    def undisturbed(self) -> World:
        """The same training without a fault, by torch.distributed: it has the same weights over every transport. It is
        made once for all rows whose folders lie in one."""
        folder = self.folder.parent / "undisturbed"
        world = World("ddp", folder, self.within)
        if not folder.exists():
            folder.mkdir()
            ended = world.train()
            assert ended.code == 0, ended.output[-3000:]
        return world
