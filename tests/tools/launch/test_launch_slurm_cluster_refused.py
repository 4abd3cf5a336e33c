"""What a real Slurm refuses, or keeps waiting for good, and what `hvdcomp launch slurm` makes of it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm_cluster import SlurmCluster
from tests.slurm_launch import Launcher, cluster_or_skip, number_of, submission

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    yield from cluster_or_skip()


@pytest.fixture(scope="module")
def strict(cluster: SlurmCluster) -> Iterator[None]:
    """A cluster that refuses at once what a partition does not allow; by default such jobs wait."""
    with cluster.configured("EnforcePartLimits=ALL"):
        yield


@pytest.fixture
def launch(cluster: SlurmCluster, tmp_path: Path) -> Launcher:
    return Launcher(cluster, tmp_path)


def _waits(launch: Launcher, reason: str, *arguments: str) -> str:
    """What is said of a job that waits for this reason; the job is cancelled."""
    process = launch.start(*submission(2), *arguments, "--", "true")
    assert process.stderr is not None
    job = number_of(process.stderr.readline())
    try:
        said = ""
        while f"PENDING ({reason}" not in said:
            said = process.stderr.readline()
            assert said, f"nothing of {reason}\n{launch.cluster.logs()}"
    finally:
        launch.cluster.command("scancel", str(job))
        process.communicate(timeout=100)
    assert f"To end the job: `hvdcomp launch slurm delete {job}`" in said
    return said


def test_a_time_limit_that_the_partition_does_not_allow_is_said(launch: Launcher) -> None:
    said = _waits(launch, "PartitionTimeLimit", "--time", "2:00:00")
    assert "it will never start: the time limit (--time) is longer than the partition" in said


def test_an_account_that_the_partition_does_not_allow_is_said(launch: Launcher) -> None:
    said = _waits(launch, "Job's_account_not", "--partition", "physics", "--account", "art")
    assert "it will never start: the account (--account) may not use the partition (--partition)" in said


def test_more_nodes_than_the_cluster_has_is_said(launch: Launcher) -> None:
    said = _waits(launch, "PartitionConfig", "--ranks", "4", "--nodes", "4")
    assert "the job asks for more nodes (--nodes) than the partition has" in said


def test_more_nodes_than_the_partition_allows_is_said(launch: Launcher) -> None:
    launch.cluster.command("scontrol", "update", "PartitionName=tests", "MaxNodes=1")
    try:
        said = _waits(launch, "PartitionNodeLimit", "--nodes", "2")
    finally:
        launch.cluster.command("scontrol", "update", "PartitionName=tests", "MaxNodes=UNLIMITED")
    assert "it will never start: the partition does not allow this number of nodes (--nodes)" in said


_REFUSED = {
    "partition": (["--partition", "none"], "Invalid partition name specified", "(--partition none): use another"),
    "GPUs": (["--gpus-per-node", "3"], "Requested node configuration is not available", "--gpus-per-node 3"),
    "memory": (["--memory", "1T"], "is not available", "--memory 1T"),
    "constraint": (["--constraint", "v100"], "Invalid feature specification", "(--constraint v100): use features"),
    "resource": (["--gres", "fpga:1"], "Invalid generic resource (gres) specification", "--gres fpga:1"),
    "reservation": (
        ["--reservation", "mine"],
        "Requested reservation is invalid",
        "(--reservation mine): use a reservation that `scontrol show reservation` lists",
    ),
}


@pytest.mark.parametrize("what", _REFUSED)
def test_what_no_cluster_like_this_takes_is_refused_in_one_line(launch: Launcher, what: str) -> None:
    arguments, text, flags = _REFUSED[what]
    _check_refused(launch, arguments, text, flags)


_REFUSED_AT_ONCE = {
    "time": (
        ["--time", "2:00:00"],
        "Requested time limit is invalid (missing or exceeds some limit)",
        "(--time 2:00:00): use a shorter time limit, or another partition",
    ),
    "account": (
        ["--partition", "physics", "--account", "art"],
        "Invalid account or account/partition combination specified",
        "(--account art, --partition physics): use an account",
    ),
}


@pytest.mark.parametrize("what", _REFUSED_AT_ONCE)
def test_limits_of_a_strict_partition_are_refused_in_one_line(launch: Launcher, strict: None, what: str) -> None:
    arguments, text, flags = _REFUSED_AT_ONCE[what]
    _check_refused(launch, arguments, text, flags)


def _check_refused(launch: Launcher, arguments: list[str], text: str, flags: str) -> None:
    done = launch.job(*arguments, "--", "true")
    assert done.returncode == 125, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: Slurm refuses the job: ")
    assert text in line
    assert flags in line


def test_commands_without_a_configuration_say_where_to_run(launch: Launcher) -> None:
    if Path("/etc/slurm/slurm.conf").exists():
        pytest.skip("this machine has a Slurm of its own")
    del launch.variables["SLURM_CONF"]
    for arguments in ([*submission(1), "--", "true"], ["status"], ["logs", "1"], ["delete", "1"]):
        done = launch.run(*arguments)
        assert done.returncode == 125
        (line,) = done.stderr.splitlines()
        assert "run this on a login node of the cluster, or set SLURM_CONF to its slurm.conf" in line


def test_a_script_that_is_submitted_as_an_array_ends_with_the_reason(launch: Launcher) -> None:
    script = launch.run(*submission(1), "--dry-run", "--", "touch", "ran").stdout
    (launch.folder / "script").write_text(script)
    done = subprocess.run(
        ["sbatch", "--parsable", "--wait", "--array=1-2", "script"],
        cwd=launch.folder, env=launch.variables, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    logs = [path.read_text() for path in launch.folder.glob("test-*.log")]
    assert len(logs) == 2
    assert all("this script is one job, not an array" in log for log in logs)
    assert not (launch.folder / "ran").exists()
