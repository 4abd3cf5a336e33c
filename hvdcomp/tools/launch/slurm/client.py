"""Calls Slurm's own commands to submit a job, read its state, and cancel it.

The state comes from the controller (`scontrol show job`). A few minutes after a job has ended, the controller no longer
has a record of it. The state then comes from accounting (`sacct`), if the cluster has accounting.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hvdcomp.tools.launch.scheduler import SchedulerError

_COMMAND_SECONDS = 120
# these variables determine which Slurm to use, and with which credentials
_CLUSTER = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
_NOT_NOW = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|Connection refused|"
    r"Transport endpoint|Resource temporarily unavailable|protocol authentication error",
    re.IGNORECASE,
)
_NO_CONFIGURATION = re.compile(r"Could not establish a configuration source|Unable to process configuration file")
_UNKNOWN = re.compile(r"Invalid job id specified", re.IGNORECASE)
_ACCOUNTED = "JobName,State,NodeList,ExitCode"
_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}


class SchedulerUnavailableError(SchedulerError):
    """Slurm's controller did not answer. The controller may answer later."""


class UnknownJobError(SchedulerError):
    """Slurm never had a record of the job, or has deleted the record."""


class RefusedError(SchedulerError):
    """A command of Slurm failed, and repeating it will not help.

    Attributes:
        message: the error message of the command, on one line.
    """

    def __init__(self, name: str, code: int, message: str) -> None:
        super().__init__(f"{name} failed with exit code {code}: {message or 'no error message'}")
        self.message = message


@dataclass(frozen=True)
class SlurmJobState:
    """The state of a job, as Slurm reports it.

    Attributes:
        state: Slurm's name for the state, such as PENDING, RUNNING or COMPLETED.
        reason: why the job is pending, or why it ended in this state; "None" if there is no reason.
        nodes: names of the nodes on which the job runs; empty before it starts.
        restarts: number of times that Slurm has requeued the job.
        code, signal: the exit code of the script, and the number of the signal that ended it.
        output: the file of the job's output; None if Slurm does not report the file.
    """

    job_id: int
    name: str
    state: str
    reason: str
    nodes: str
    restarts: int
    code: int
    signal: int
    output: Path | None

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    @property
    def exit_code(self) -> int:
        """The exit code for a shell: the exit code of the script, or 128 plus the number of the signal that ended the
        script. If Slurm ended the job without an exit code or a signal, it is 1."""
        if self.code:
            return self.code
        if self.signal:
            return 128 + self.signal
        return 0 if self.state == "COMPLETED" else 1


def submit(script: str) -> int:
    """Submits the script with sbatch, and returns the number of the job.

    Raises:
        RefusedError: if sbatch refused the script.
        SchedulerUnavailableError: if Slurm does not answer. The job may have been submitted anyway.
    """
    # SBATCH_ variables would override the options of the script. If this process itself runs in a job, the variables of
    # this job (its binding to cores, its memory) would override the settings of the ranks, because sbatch passes such
    # variables to srun.
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in _CLUSTER or not name.startswith(("SBATCH_", "SLURM_"))
    }
    try:
        output = _run(["sbatch", "--parsable"], text=script, variables=variables)
    except SchedulerUnavailableError as error:
        raise SchedulerUnavailableError(
            f"{error}: Slurm may have accepted the job anyway. If `squeue --me` does not list it, submit again"
        ) from None
    match = re.match(r"(\d+)(;|$)", output.strip().splitlines()[-1] if output.strip() else "")
    if match is None:
        raise SchedulerError(f"sbatch printed no job number, but {output!r}; `squeue --me` lists your jobs")
    return int(match[1])


def state_of(job_id: int) -> SlurmJobState:
    """The state of a job.

    Raises:
        UnknownJobError: if Slurm never had a record of the job, or has deleted the record.
        SchedulerUnavailableError: if Slurm does not answer.
    """
    try:
        return _parse_job(job_id, _run(["scontrol", "show", "job", str(job_id)]))
    except UnknownJobError:
        return _accounted(job_id)


def my_jobs() -> list[SlurmJobState]:
    """The jobs of this user in the records of Slurm's controller, newest first. The list includes jobs that have
    ended."""
    output = _run(["squeue", "--me", "--states=all", "--noheader", "--format=%A"])
    jobs = []
    for number in sorted({int(line) for line in output.split()}, reverse=True):
        try:
            jobs.append(state_of(number))
        except UnknownJobError:
            continue  # Slurm no longer has a record of the job
    return jobs


def cancel(job_id: int) -> None:
    """Cancels a job. A job that has already ended does not change.

    Raises:
        SchedulerError: if Slurm refused, for example because the job belongs to a different user.
        UnknownJobError: if there is no such job.
    """
    _run(["scancel", str(job_id)])


def _parse_job(job_id: int, text: str) -> SlurmJobState:
    """Parses the output of `scontrol show job`."""

    def value(pattern: str) -> str:
        match = re.search(pattern, text, re.MULTILINE)
        return "" if match is None else match[1]

    code, _, signal = value(r"\sExitCode=(\d+:\d+)\s").partition(":")
    nodes = value(r"^ +NodeList=(\S*)")
    output = value(r"^ +StdOut=(.*)$")
    return SlurmJobState(
        job_id=job_id,
        name=value(r"^JobId=\d+ JobName=(\S+)"),
        state=value(r"^ +JobState=(\w+)"),
        reason=value(r"^ +JobState=\w+ Reason=(\S+)"),
        nodes="" if nodes == "(null)" else nodes,
        restarts=int(value(r"^ +Requeue=\d+ Restarts=(\d+)") or 0),
        code=int(code or 0),
        signal=int(signal or 0),
        output=Path(output) if output else None,
    )


def _accounted(job_id: int) -> SlurmJobState:
    """The state according to accounting, which has no record of the output file and the restarts."""
    forgotten = (
        f"Slurm has no record of job {job_id}: it does not exist, or Slurm deleted its record after the job ended"
    )
    try:
        output = _run(
            ["sacct", f"--jobs={job_id}", "--allocations", "--noheader", "--parsable2", f"--format={_ACCOUNTED}"]
        )
    except SchedulerUnavailableError:
        raise
    except SchedulerError as error:
        raise UnknownJobError(
            f"{forgotten}; this cluster has no accounting that keeps such records ({error})"
        ) from None
    if not output.strip():
        raise UnknownJobError(f"{forgotten}; `squeue --me` lists your jobs")
    name, state, nodes, codes = output.strip().splitlines()[-1].split("|")
    code, _, signal = codes.partition(":")
    word = state.split()[0]  # the text may be "CANCELLED by 1000"
    return SlurmJobState(job_id, name, word, "None", nodes, 0, int(code), int(signal or 0), None)


def _run(command: list[str], text: str | None = None, variables: dict[str, str] | None = None) -> str:
    """Runs a command of Slurm, and returns its output."""
    name = command[0]
    try:
        process = subprocess.run(
            command,
            input=text,
            env=variables,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
            # Ctrl-C must reach only this program, not the command.
            start_new_session=True,
        )
    except FileNotFoundError:
        raise SchedulerError(
            f"there is no {name} here: run this on a login node of the cluster, with Slurm's commands in PATH"
        ) from None
    except subprocess.TimeoutExpired:
        raise SchedulerUnavailableError(f"{name} did not answer in {_COMMAND_SECONDS} s") from None
    if process.returncode == 0:
        return process.stdout
    message = _one_line(name, process.stderr or process.stdout)
    if _NO_CONFIGURATION.search(message):
        raise SchedulerError(
            f"{name} finds no configuration of Slurm ({message}): run this on a login node of the cluster, or set "
            "SLURM_CONF to its slurm.conf"
        )
    if _UNKNOWN.search(message):
        raise UnknownJobError(f"{name}: {message}")
    if _NOT_NOW.search(message):
        raise SchedulerUnavailableError(f"{name}: {message}")
    raise RefusedError(name, process.returncode, message)


def _one_line(name: str, text: str) -> str:
    """The output of a command on one line. The command's name and the word "error" at the start of each line are
    removed."""
    lines = (re.sub(rf"^{name}: ((error|fatal): )?", "", line.strip()) for line in text.splitlines())
    return "; ".join(line for line in lines if line)
