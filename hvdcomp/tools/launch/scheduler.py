"""The protocol of a cluster's scheduler, which Slurm and Kubernetes implement.

A new scheduler is a package beside theirs: its settings, which `job.read_settings` reads from the table of its name, a
`Scheduler`, and its commands.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

Settings = TypeVar("Settings", contravariant=True)
Job = TypeVar("Job")


class SchedulerError(RuntimeError):
    """The scheduler refused a request, does not answer, or does not exist on this machine. The message says what to
    do."""


class JobState(Protocol):
    """The state of a job; each scheduler adds details of its own."""

    @property
    def ended(self) -> bool:
        """Whether the job has ended for good: it will not be queued or started again."""

    @property
    def exit_code(self) -> int | None:
        """The exit code of a job that has ended, as in a shell. Before the job's end, the value has no meaning."""


class Scheduler(Protocol[Settings, Job]):
    """A scheduler, generic in the settings of a job and in the reference to a submitted job.

    Every method may raise SchedulerError.
    """

    @abstractmethod
    def submit(self, settings: Settings) -> Job:
        """Submit a job; returns as soon as the scheduler has it.

        Raises:
            ConfigurationError: the settings cannot be submitted.
        """

    @abstractmethod
    def state(self, job: Job) -> JobState:
        """The state of the job."""

    @abstractmethod
    def follow(self, job: Job, say: Callable[[str], None], write: Callable[[str], None]) -> JobState:
        """Follow the job until it has ended; returns its last state.

        Meanwhile the scheduler may be unreachable for some minutes, and the job may be requeued.

        Args:
            job: the submitted job.
            say: function that is called with a line about the job when its state changes.
            write: function that is called with each line of the job's output, perhaps in another thread.
        """

    @abstractmethod
    def log(self, job: Job) -> Iterator[str]:
        """The lines of the job's output so far, without their ends."""

    @abstractmethod
    def cancel(self, job: Job) -> None:
        """End the job, running or not. This may take the scheduler some time."""
