"""The interface of a scheduler (a Protocol class), which Slurm and Kubernetes implement.

To add a scheduler, write a package next to the existing ones. It needs three parts: settings, which `job.read_settings`
reads from the table with the scheduler's name; a `Scheduler`; and commands.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

Settings = TypeVar("Settings", contravariant=True)
Job = TypeVar("Job")


class SchedulerError(RuntimeError):
    """The scheduler refused a request, does not answer, or is not installed on this machine. The message names the
    remedy."""


class JobState(Protocol):
    """The state of a job. Each scheduler adds its own details."""

    @property
    def ended(self) -> bool:
        """Whether the job has ended and will not be queued or started again."""

    @property
    def exit_code(self) -> int | None:
        """The exit code of a job that has ended, as in a shell. The value is meaningless before the job ends."""


class Scheduler(Protocol[Settings, Job]):
    """A scheduler. The type parameters are the type of the settings, and the type of a reference to a submitted job.

    Every method may raise SchedulerError.
    """

    @abstractmethod
    def submit(self, settings: Settings) -> Job:
        """Submits a job. Returns as soon as the scheduler has accepted the job.

        Raises:
            ConfigurationError: if a job with these settings cannot be submitted.
        """

    @abstractmethod
    def state(self, job: Job) -> JobState:
        """The state of the job."""

    @abstractmethod
    def follow(self, job: Job, say: Callable[[str], None], write: Callable[[str], None]) -> JobState:
        """Follows the job until it has ended, and returns its last state.

        During this time, the scheduler may be unreachable for some minutes, and the job may be requeued.

        Args:
            job: the submitted job.
            say: function that is called with a line about the job when its state changes.
            write: function that is called with each line of the job's output, perhaps in another thread.
        """

    @abstractmethod
    def log(self, job: Job) -> Iterator[str]:
        """The lines of the job's output so far, without line ends."""

    @abstractmethod
    def cancel(self, job: Job) -> None:
        """Ends the job, even if it is not yet running. The scheduler may need some time for this."""
