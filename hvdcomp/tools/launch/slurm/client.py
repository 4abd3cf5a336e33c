"""Slurm's own commands: submitting, asking for the state, cancelling.

What a job is doing is asked of the controller (`scontrol show job`), which forgets a job some minutes after its end;
then the accounting (`sacct`) is asked, where the cluster keeps one.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hvdcomp.tools.launch.scheduler import SchedulerError

_COMMAND_SECONDS = 120
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
    """Slurm's controller did not answer; it may in a minute."""


class UnknownJobError(SchedulerError):
    """Slurm knows no such job, or no longer."""


class RefusedError(SchedulerError):
    """A command of Slurm's failed for good.

    Attributes:
        said: what it wrote, on one line.
    """

    def __init__(self, name: str, code: int, said: str) -> None:
        super().__init__(f"{name} failed with exit code {code}: {said or 'it says nothing'}")
        self.said = said


@dataclass(frozen=True)
class SlurmJobState:
    """What Slurm says of a job.

    Attributes:
        state: Slurm's word, such as PENDING, RUNNING, COMPLETED.
        reason: why it is pending or ended so; "None" if there is nothing to say.
        nodes: on which it runs or ran; "" before.
        restarts: how often it was queued again.
        code, signal: with which its script ended.
        output: the file it writes to; None where Slurm does not say.
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
        """For a shell: that of the job's script, 128 and the number of the signal that ended it, or 1 for a job that
        Slurm ended and that had none of its own."""
        if self.code:
            return self.code
        if self.signal:
            return 128 + self.signal
        return 0 if self.state == "COMPLETED" else 1


def submit(script: str) -> int:
    """Hands the script to sbatch and returns the job's number.

    Raises:
        RefusedError: sbatch refused it.
        SchedulerUnavailableError: Slurm does not answer now; it may have the job all the same.
    """
    # The first would win over the script's own options, unseen; the second are of a job that this runs in, if any.
    others = ("SBATCH_", "SLURM_ARRAY_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    try:
        output = _run(["sbatch", "--parsable"], text=script, variables=variables)
    except SchedulerUnavailableError as error:
        raise SchedulerUnavailableError(
            f"{error}: see with `squeue --me` whether it has the job all the same, and submit again if not"
        ) from None
    match = re.match(r"(\d+)(;|$)", output.strip().splitlines()[-1] if output.strip() else "")
    if match is None:
        raise SchedulerError(f"sbatch did not say which job it made, but {output!r}; `squeue --me` lists yours")
    return int(match[1])


def state_of(job_id: int) -> SlurmJobState:
    """What a job is doing.

    Raises:
        UnknownJobError: Slurm does not know it, or forgot it.
        SchedulerUnavailableError: Slurm does not answer now.
    """
    try:
        return _parse_job(job_id, _run(["scontrol", "show", "job", str(job_id)]))
    except UnknownJobError:
        return _accounted(job_id)


def my_jobs() -> list[SlurmJobState]:
    """This user's jobs that Slurm's controller knows, ended ones too, the newest first."""
    output = _run(["squeue", "--me", "--states=all", "--noheader", "--format=%A"])
    jobs = []
    for number in sorted({int(line) for line in output.split()}, reverse=True):
        try:
            jobs.append(state_of(number))
        except UnknownJobError:
            continue  # forgotten since
    return jobs


def cancel(job_id: int) -> None:
    """Cancels a job; one that has ended stays as it is.

    Raises:
        SchedulerError: Slurm refused, such as for another user's job.
        UnknownJobError: there is no such job.
    """
    _run(["scancel", str(job_id)])


def _parse_job(job_id: int, text: str) -> SlurmJobState:
    """Of `scontrol show job`, in which the values looked at here stand at known places of their lines."""

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
    """The same from the accounting, which has no file of the output and no restarts."""
    forgotten = f"Slurm knows no job {job_id}, or forgot it after its end"
    try:
        output = _run(
            ["sacct", f"--jobs={job_id}", "--allocations", "--noheader", "--parsable2", f"--format={_ACCOUNTED}"]
        )
    except SchedulerUnavailableError:
        raise
    except SchedulerError as error:
        raise UnknownJobError(f"{forgotten}, and this cluster keeps no accounting ({error})") from None
    if not output.strip():
        raise UnknownJobError(f"{forgotten}; `squeue --me` lists yours")
    name, state, nodes, codes = output.strip().splitlines()[-1].split("|")
    code, _, signal = codes.partition(":")
    word = state.split()[0]  # "CANCELLED by 1000"
    return SlurmJobState(job_id, name, word, "None", nodes, 0, int(code), int(signal or 0), None)


def _run(command: list[str], text: str | None = None, variables: dict[str, str] | None = None) -> str:
    """What a command of Slurm's writes."""
    name = command[0]
    try:
        done = subprocess.run(
            command,
            input=text,
            env=variables,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
            # Ctrl-C is for this program to answer, not for a question in flight.
            start_new_session=True,
        )
    except FileNotFoundError:
        raise SchedulerError(
            f"there is no {name} here: run this on a login node of the cluster, with Slurm's commands in PATH"
        ) from None
    except subprocess.TimeoutExpired:
        raise SchedulerUnavailableError(f"{name} did not answer in {_COMMAND_SECONDS} s") from None
    if done.returncode == 0:
        return done.stdout
    said = _one_line(name, done.stderr or done.stdout)
    if _NO_CONFIGURATION.search(said):
        raise SchedulerError(
            f"{name} finds no configuration of Slurm ({said}): run this on a login node of the cluster, or name its "
            "slurm.conf in SLURM_CONF"
        )
    if _UNKNOWN.search(said):
        raise UnknownJobError(f"{name}: {said}")
    if _NOT_NOW.search(said):
        raise SchedulerUnavailableError(f"{name}: {said}")
    raise RefusedError(name, done.returncode, said)


def _one_line(name: str, text: str) -> str:
    """What a command wrote, without its name and the word error at the start of each line."""
    lines = (re.sub(rf"^{name}: ((error|fatal): )?", "", line.strip()) for line in text.splitlines())
    return "; ".join(line for line in lines if line)
