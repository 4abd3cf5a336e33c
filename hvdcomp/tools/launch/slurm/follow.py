"""Follows a job: reports changes of its state, its output while it is written, and the exit code at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from hvdcomp.tools.launch.slurm import client
from hvdcomp.tools.launch.slurm.client import SchedulerUnavailableError, SlurmJobState
from hvdcomp.tools.launch.slurm.errors import explain_reason

_LOG_SECONDS = 0.5  # seconds between two reads of the log
_PATIENCE_SECONDS = 900.0  # longest silence of Slurm's controller, for example during a restart


class Log:
    """Reads the log of a job while it grows. The file may not exist at first, and may be written on another node."""

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        self.path = path
        self._show = show
        self._file: BinaryIO | None = None
        self._partial = b""

    def read(self) -> None:
        """Shows the new lines."""
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:
                return
        *lines, self._partial = (self._partial + self._file.read()).split(b"\n")
        for line in lines:
            self._show(line.decode(errors="replace"))

    def close(self) -> None:
        """Shows the remaining lines, including a last line that has no line end."""
        self.read()
        if self._partial:
            self._show(self._partial.decode(errors="replace"))
            self._partial = b""
        if self._file is not None:
            self._file.close()
            self._file = None


class Follower:
    """Follows one job.

    Args:
        say: function that shows a line about the state.
        show: function that shows a line of the log.
        poll_seconds: seconds between two queries to Slurm's controller.
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
        self._last_line = ""

    def until_ended(self) -> SlurmJobState:
        """Follows the job until it has ended and will not be started again. Returns its last state.

        Raises:
            UnknownJobError: if Slurm no longer has a record of the job before its end was observed.
            SchedulerUnavailableError: if Slurm has not answered for a quarter of an hour.
        """
        try:
            while True:
                state = self._ask()
                self._show_state(state)
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
                self._say_once(f"job {self._job_id}: Slurm does not answer; asking again ({error})")
            self._read_log_for(self._poll_seconds)

    def _show_state(self, state: SlurmJobState) -> None:
        details = [] if state.reason in ("None", "") else [state.reason]
        if state.nodes:
            details.append(f"on {state.nodes}")
        if state.restarts:
            details.append(f"start {state.restarts + 1}")
        cause = explain_reason(state.reason) if state.state == "PENDING" else ""
        line = f"job {self._job_id}: {state.state}" + (f" ({', '.join(details)})" if details else "")
        self._say_once(
            f"{line}: {cause}. To end the job: `hvdcomp launch slurm delete {self._job_id}`" if cause else line
        )

    def _say_once(self, text: str) -> None:
        if text != self._last_line:
            self._last_line = text
            self._say(text)

    def _read_log_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            if self._log is not None:
                self._log.read()
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            time.sleep(min(_LOG_SECONDS, remaining))
