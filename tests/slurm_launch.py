"""Runs `hvdcomp launch slurm` on the tests' Slurm cluster."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm_cluster import SlurmCluster, slurm_cluster, why_not

_BIN = Path(sys.executable).parent


def cluster_or_skip() -> Iterator[SlurmCluster]:
    """For a fixture: a running Slurm cluster; skips the test if none can be started."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with slurm_cluster() as running:
        yield running


class Launcher:
    """Runs `hvdcomp launch slurm` for the tests' cluster, from a folder of the test."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "SLURM_"))},
            **cluster.environment,
            "PATH": f"{_BIN}:{cluster.environment['PATH']}",
            "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "COLUMNS": "160",
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(_BIN / "hvdcomp"), "launch", "slurm", *arguments],
            env=self.variables,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            text = f"{errors}\n{output}\n{self.cluster.logs()}"
            raise AssertionError(f"the launch still ran after {timeout} s:\n{text}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def job(self, *arguments: str, ranks: int = 2, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.run(*submission(ranks), *arguments, **options)

    def detached(self, *arguments: str, ranks: int = 2) -> int:
        """Submits a job without waiting, and returns its number."""
        process = self.job("--detach", *arguments, ranks=ranks)
        assert process.returncode == 0, process.stderr
        return int(process.stdout)

    def wait_for_line(self, job: int, text: str, seconds: float = 100) -> None:
        """Waits until the job's output contains the text."""
        log = self.folder / f"test-{job}.log"
        deadline = time.monotonic() + seconds
        while not log.exists() or text not in log.read_text():
            assert time.monotonic() < deadline, f"no {text!r} of job {job}\n{self.cluster.logs()}"
            time.sleep(0.1)


def submission(ranks: int) -> list[str]:
    """The first arguments of a test's job."""
    return ["--name", "test", "--ranks", str(ranks), "--time", "10", "--poll-seconds", "0.5"]


def number_of(output: str) -> int:
    """The number of a job, from the output of its launch."""
    match = re.search(r"job (\d+): submitted", output)
    assert match is not None, output
    return int(match[1])
