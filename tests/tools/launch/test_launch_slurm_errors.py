"""What `hvdcomp launch slurm` says when Slurm refuses a job, or keeps it waiting for good.

A stand-in for sbatch says what Slurm's own does: the texts are those of src/common/slurm_errno.c in Slurm's source.
Those that a Slurm without accounting can be made to say are also seen on a real one
(tests/tools/launch/test_launch_slurm_cluster_refused.py).
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hvdcomp.tools.cli import main
from hvdcomp.tools.launch.slurm.errors import explain_reason

_JOB = ["--name", "a", "--ranks", "4", "--nodes", "2", "--partition", "gpu", "--time", "9-0"]
_PROGRAM = ["--", "true"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def _sbatch(folder: Path, script: str) -> None:
    program = folder / "sbatch"
    program.write_text(f"#!/bin/sh\ncat > script\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def _launch(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["launch", "slurm", *arguments])


_REFUSED = {
    "Invalid partition name specified": ("(--partition gpu): use another", "sinfo --summarize"),
    "Invalid account or account/partition combination specified": (
        "(no --account, --partition gpu): use an account",
        "sacctmgr show associations",
    ),
    "Requested time limit is invalid (missing or exceeds some limit)": (
        "(--time 9-0, --partition gpu): use a shorter time limit",
        "sinfo --format='%P %l'",
    ),
    "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)": (
        "(no --account, --time 9-0, --nodes 2, --tasks-per-node 2, --cpus-per-task 1): ask for fewer resources",
        "sacctmgr show qos",
    ),
    "Invalid qos specification": ("(no --qos, --partition gpu): use a QOS", "sacctmgr show associations"),
    "User's group not permitted to use this partition": (
        "(--partition gpu): use a partition whose",
        "scontrol show partition",
    ),
    "Required partition not available (inactive or drain)": (
        "(--partition gpu): this partition accepts no jobs now",
        "sinfo",
    ),
    "Access denied to requested reservation": (
        "(no --reservation): use a reservation that you may use",
        "scontrol show res",
    ),
    "Memory required by task is not available": ("(no --memory, --partition gpu): ask for less", "sinfo"),
    "More processors requested than permitted": ("(--partition gpu, --nodes 2,", "scontrol show partition"),
    "Node count specification invalid": ("(--nodes 2, --partition gpu): use a number", "scontrol show partition"),
}


@pytest.mark.parametrize(("text", "said"), _REFUSED.items(), ids=_REFUSED)
def test_what_slurm_refuses_is_one_line_with_the_flags_and_the_way_out(
    folder: Path, text: str, said: tuple[str, str]
) -> None:
    first = "sbatch: error: something more of it"
    _sbatch(folder, f'printf "%s\\n" "{first}" "sbatch: error: Batch job submission failed: {text}" >&2; exit 1')
    done = _launch(*_JOB, *_PROGRAM)
    assert done.exit_code == 125
    (line,) = done.stderr.splitlines()
    begin = f"Error: Slurm refuses the job: something more of it; Batch job submission failed: {text} "
    assert line.startswith(begin)
    assert all(part in line.removeprefix(begin) for part in said), line


def test_what_is_not_known_is_told_as_slurm_says_it(folder: Path) -> None:
    """As of a cluster's own plugin, whose lines come before Slurm's."""
    lines = '"sbatch: error: name a project" "sbatch: error: Batch job submission failed: Unspecified error"'
    _sbatch(folder, f"printf '%s\\n' {lines} >&2; exit 1")
    done = _launch(*_JOB, *_PROGRAM)
    said = "name a project; Batch job submission failed: Unspecified error"
    assert (done.exit_code, done.stderr) == (125, f"Error: sbatch failed with exit code 1: {said}\n")


def test_a_controller_that_does_not_answer_may_have_the_job(folder: Path) -> None:
    text = "Unable to contact slurm controller (connect failure)"
    _sbatch(folder, f'echo "sbatch: error: Batch job submission failed: {text}" >&2; exit 1')
    done = _launch(*_JOB, *_PROGRAM)
    assert done.exit_code == 125
    (line,) = done.stderr.splitlines()
    assert f"{text}: Slurm may have accepted the job anyway. If `squeue --me`" in line


def test_a_job_has_nothing_of_another_one_that_it_is_submitted_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor options that would win over its own. What says which Slurm is asked stays."""
    dropped = ("SLURM_ARRAY_TASK_ID", "SLURM_CPU_BIND", "SLURM_MEM_PER_CPU", "SBATCH_ARRAY_INX")
    for name in (*dropped, "SLURM_CONF", "SLURM_CLUSTERS"):
        monkeypatch.setenv(name, "1")
    _sbatch(folder, "env > variables; echo 7")
    assert _launch("--detach", *_JOB, *_PROGRAM).stdout == "7\n"
    names = re.findall(r"^(S[A-Z]+_[A-Z_]+)=", (folder / "variables").read_text(), re.MULTILINE)
    assert {name for name in names if name.startswith(("SLURM_", "SBATCH_"))} == {"SLURM_CONF", "SLURM_CLUSTERS"}


def test_what_is_asked_of_slurm_is_said_also_where_nobody_gave_it(folder: Path) -> None:
    """As the time limit, after which the job ends."""
    _sbatch(folder, "echo 7")
    done = _launch("--detach", "--name", "a", "--nodes", "4", "--gpus-per-node", "8", *_PROGRAM)
    asked = "--ranks 32, --nodes 4, --tasks-per-node 8, --gpus-per-node 8, --cpus-per-task 1, --time 01:00:00"
    assert (done.stdout, done.stderr) == ("7\n", f"job 7: submitted as a ({asked}); its output goes to a-7.log\n")


@pytest.mark.parametrize(
    "reason",
    [
        "PartitionTimeLimit",
        "PartitionNodeLimit",
        "QOSMaxWallDurationPerJobLimit",
        "AssocMaxCpuMinutesPerJobLimit",
        "QOSMaxGRESPerNode",
        "AccountNotAllowed",
        "Job's_account_not_permitted_to_use_this_partition_(gpu_allows_physics_not_art)",
        "Job's_QOS_not_permitted_to_use_this_partition_(gpu_allows_long_not_normal)",
        "InvalidQOS",
        "BadConstraints",
    ],
)
def test_a_job_that_can_never_start_is_said_so(reason: str) -> None:
    assert explain_reason(reason).startswith("it will never start: ")


@pytest.mark.parametrize("reason", ["Priority", "Resources", "None", "QOSMaxJobsPerUserLimit", "AssocGrpCpuLimit"])
def test_of_a_job_that_waits_for_its_turn_nothing_is_said(reason: str) -> None:
    assert explain_reason(reason) == ""


def test_other_things_that_keep_a_job_are_said() -> None:
    assert "scontrol release" in explain_reason("JobHeldUser")
    assert "scontrol release" in explain_reason("launch_failed_requeued_held")
    assert "until its partition accepts jobs again" in explain_reason("PartitionDown")
    assert "down or reserved" in explain_reason("ReqNodeNotAvail,_UnavailableNodes:node3")
