"""Staying with a job: its state when it changes, what it writes as it writes it, and its exit code at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from hvdcomp.tools.launch.slurm import client
from hvdcomp.tools.launch.slurm.client import SchedulerUnavailableError, SlurmJobState
from hvdcomp.tools.launch.slurm.errors import what_keeps

_LOG_SECONDS = 0.5  # between two looks at the log, on which nobody else waits
_PATIENCE_SECONDS = 900.0  # how long Slurm's controller may not answer, as while it is restarted


class Log:
    """Reads a job's log as it grows. The file may come later, or be written on another node."""

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        self.path = path
        self._show = show
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self) -> None:
        """Shows the lines that came since."""
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:
                return
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            self._show(line.decode(errors="replace"))

    def close(self) -> None:
        """Shows what is left, a last line without an end too."""
        self.read()
        if self._rest:
            self._show(self._rest.decode(errors="replace"))
            self._rest = b""
        if self._file is not None:
            self._file.close()
            self._file = None


class Follower:
    """Follows one job.

    Args:
        say: shows a line about the state.
        show: shows a line of the log.
        poll_seconds: between two questions to Slurm's controller.
    """

    def __init__(
        self,
        job_id: int,
        log: Path | None,
        say: Callable[[str], None],
        show: Callable[[str], None],
        poll_seconds: float,
    ) -> None:
        self._job_id = job_id
        self._say = say
        self._log = None if log is None else Log(log, show)
        self._poll_seconds = poll_seconds
        self._said = ""

    def until_ended(self) -> SlurmJobState:
        """Returns the state of the job when it has ended for good.

        Raises:
            UnknownJobError: Slurm forgot the job before it was seen to end.
            SchedulerUnavailableError: Slurm did not answer for a quarter of an hour.
        """
        try:
            while True:
                state = self._ask()
                self._tell(state)
                if state.ended:
                    return state
                self._read_log_for(self._poll_seconds)
        finally:
            if self._log is not None:
                self._log.close()

    def _ask(self) -> SlurmJobState:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return client.state_of(self._job_id)
            except SchedulerUnavailableError as error:
                if time.monotonic() > deadline:
                    raise
                self._say_once(f"job {self._job_id}: Slurm does not answer, asking again ({error})")
            self._read_log_for(self._poll_seconds)

    def _tell(self, state: SlurmJobState) -> None:
        details = [] if state.reason in ("None", "") else [state.reason]
        if state.nodes:
            details.append(f"on {state.nodes}")
        if state.restarts:
            details.append(f"start {state.restarts + 1}")
        keeps = what_keeps(state.reason) if state.state == "PENDING" else ""
        line = f"job {self._job_id}: {state.state}" + (f" ({', '.join(details)})" if details else "")
        self._say_once(f"{line}: {keeps}. `hvdcomp launch slurm delete {self._job_id}` ends it" if keeps else line)

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)

    def _read_log_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            if self._log is not None:
                self._log.read()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(_LOG_SECONDS, left))
