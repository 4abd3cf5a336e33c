"""Implements the interface `Scheduler` for Slurm. Each job is a batch job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdcomp.tools.launch.scheduler import Scheduler, SchedulerError
from hvdcomp.tools.launch.slurm import client
from hvdcomp.tools.launch.slurm.client import RefusedError, SlurmJobState, UnknownJobError
from hvdcomp.tools.launch.slurm.errors import refusal
from hvdcomp.tools.launch.slurm.follow import Follower
from hvdcomp.tools.launch.slurm.script import batch_script, log_name
from hvdcomp.tools.launch.slurm.settings import SlurmJob


@dataclass(frozen=True)
class BatchJob:
    """The number of a job in Slurm, and the file of its output."""

    number: int
    log: Path


class Slurm(Scheduler[SlurmJob, BatchJob]):
    """The jobs of one cluster, accessed with the commands of this login node.

    Args:
        poll_seconds: seconds between two queries to Slurm's controller while a job is followed.
        log_folder: the folder of the output, which is used if Slurm no longer has a record of the job.
    """

    def __init__(self, poll_seconds: float = 5.0, log_folder: Path = Path()) -> None:
        self._poll_seconds = poll_seconds
        self._log_folder = log_folder

    def submit(self, settings: SlurmJob) -> BatchJob:
        script = batch_script(settings)
        folder = Path(settings.log_folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SchedulerError(str(error)) from None
        try:
            number = client.submit(script)
        except RefusedError as error:
            raise SchedulerError(refusal(error.message, settings) or str(error)) from None
        return BatchJob(number, folder / log_name(settings.job.name, number))

    def find(self, number: int) -> BatchJob:
        """A submitted job. Its output is the file that Slurm names or, otherwise, the file with the job's number in
        `log_folder`."""
        try:
            output = client.state_of(number).output
        except UnknownJobError:
            output = None
        if output is not None:
            return BatchJob(number, output)
        logs = sorted(self._log_folder.glob(log_name("*", number)))
        if not logs:
            raise UnknownJobError(
                f"Slurm has no record of where the output of job {number} is, and {self._log_folder.absolute()} "
                f"contains no {log_name('*', number)}. Pass the folder that contains the output as --log-folder"
            )
        return BatchJob(number, logs[0])

    def state(self, job: BatchJob) -> SlurmJobState:
        return client.state_of(job.number)

    def follow(self, job: BatchJob, say: Callable[[str], None], write: Callable[[str], None]) -> SlurmJobState:
        return Follower(job.number, job.log, say, write, self._poll_seconds).until_ended()

    def log(self, job: BatchJob) -> Iterator[str]:
        if not job.log.exists():
            raise SchedulerError(f"job {job.number} has not written to {job.log} yet; wait for it with --follow")
        with job.log.open("rb") as file:
            for line in file:
                yield line.decode(errors="replace").removesuffix("\n")

    def cancel(self, job: BatchJob) -> None:
        client.cancel(job.number)
