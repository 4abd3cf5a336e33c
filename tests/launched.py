"""Starts real ranks: a command under `horovodrun` (Gloo), `mpirun` (MPI) or `torchrun`, with this interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests import forked

_BIN = Path(sys.executable).parent
# `horovodrun`, but for its question whether Horovod was built with Gloo: to answer it, it imports TensorFlow each time.
_HOROVODRUN = """
if __name__ == "__main__":
    from horovod.runner import launch
    launch.gloo_built = lambda verbose=False: True
    launch.run_commandline()
"""


def available(controller: str) -> bool:
    """Whether this controller can start ranks here."""
    program = {"gloo": "horovodrun", "mpi": "mpirun", "torchrun": "torchrun"}[controller]
    return shutil.which(program, path=_search_path()) is not None


def launcher_command(
    count: int,
    controller: str,
    arguments: Sequence[str],
    horovodrun: Sequence[str] = (sys.executable, "-c", _HOROVODRUN),
    python: str | Path = sys.executable,
    hosts: Path | None = None,
) -> list[str]:
    """The command that runs `python arguments...` on `count` ranks of this machine; arguments as of `run_ranks`."""
    if controller == "gloo" and hosts is not None:
        launcher = [*horovodrun, "-np", str(count), "--min-np", "1", "--max-np", "4", "--gloo"]
        launcher += ["--host-discovery-script", str(hosts), "--network-interface", "lo"]
    elif controller == "gloo":
        launcher = [*horovodrun, "-np", str(count), "-H", f"localhost:{count}", "--gloo"]
    elif controller == "torchrun":
        launcher = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    else:
        launcher = ["mpirun", "-np", str(count), "--oversubscribe", "--bind-to", "none"]
    return [*launcher, *([] if controller == "torchrun" else [str(python)]), *arguments]


def launcher_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a launcher: this process's, overridden by the tests' settings, and these by `variables`."""
    return os.environ | {
        "PATH": _search_path(),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_USE_LEGACY_KERAS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # more ranks than cores
        # A rank that waits for ranks that will never come ends with an error instead of hanging.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "40",
        **(environment or {}),
    }


def run_ranks(
    count: int,
    controller: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
    horovodrun: Sequence[str] = (sys.executable, "-c", _HOROVODRUN),
    python: str | Path = sys.executable,
    hosts: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs `python arguments...` on `count` ranks of this machine and waits.

    Args:
        controller: "gloo" or "mpi", of Horovod; "torchrun" without Horovod.
        timeout: seconds, after which all ranks are killed and TimeoutExpired is raised.
        horovodrun: the program that starts ranks with Gloo.
        python: the interpreter.
        hosts: a program that prints the hosts there are, for an elastic job of Gloo, of 1 to 4 ranks; None for a job
            whose ranks never change.

    Returns:
        The finished launcher with its output; the exit code is not checked.
    """
    if not available(controller):
        pytest.skip(f"no launcher for {controller} ranks is installed")
    process = subprocess.Popen(
        launcher_command(count, controller, arguments, horovodrun, python, hosts),
        env={"PYTHON_EXEC": str(python), **launcher_variables(environment)},  # which torchrun gives its ranks
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # Ranks of an elastic job are in sessions of their own.
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        raise AssertionError(f"ranks still ran after {timeout} s:\n{output[-4000:]}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def run_forked_ranks(
    count: int,
    controller: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """`run_ranks`, of PyTorch, without the seconds that its imports take on each rank (`tests.forked`)."""
    return run_ranks(count, controller, arguments, environment, timeout, python=forked.python())


def _search_path() -> str:
    return f"{_BIN}{os.pathsep}{os.environ.get('PATH', '')}"
