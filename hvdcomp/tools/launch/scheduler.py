"""What `hvdcomp launch` asks of a cluster's scheduler. Slurm and Kubernetes are two; another is one more such class.

A new scheduler has a package beside theirs: the settings that a user may give, which `job.read_settings` reads from the
table of its name, a `Scheduler`, and the commands that show it to the user.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

Settings = TypeVar("Settings", contravariant=True)
Job = TypeVar("Job")


class SchedulerError(RuntimeError):
    """The scheduler refused, does not answer, or is not here; the message says which, and the way out."""


class JobState(Protocol):
    """Where a job is; each scheduler adds its own words."""

    @property
    def ended(self) -> bool:
        """Whether it has ended for good: it will not be queued or started again."""

    @property
    def exit_code(self) -> int | None:
        """Of an ended job, what a shell would say: 0 if all went well. Before, it means nothing."""


class Scheduler(Protocol[Settings, Job]):
    """One scheduler, by the settings that describe a job to it and by what it calls a job that it has.

    Every method raises SchedulerError.
    """

    @abstractmethod
    def submit(self, settings: Settings) -> Job:
        """Hand the job over; returns as soon as the scheduler has it.

        Raises:
            ConfigurationError: the settings cannot be handed over.
        """

    @abstractmethod
    def state(self, job: Job) -> JobState:
        """Ask where the job is."""

    @abstractmethod
    def follow(self, job: Job, say: Callable[[str], None], write: Callable[[str], None]) -> JobState:
        """Stay with the job until it has ended; returns its last state.

        The scheduler may be out of reach for some minutes meanwhile, and a job may be queued again.

        Args:
            say: is given a line about the job when its state changes.
            write: is given each line that the job writes, without its end; maybe in another thread.
        """

    @abstractmethod
    def log(self, job: Job) -> Iterator[str]:
        """The lines that the job has written so far, without their ends."""

    @abstractmethod
    def cancel(self, job: Job) -> None:
        """End the job, running or not. The scheduler may take some time for it."""
