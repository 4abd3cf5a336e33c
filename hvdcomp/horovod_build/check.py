"""Checks an installed Horovod by running two real ranks on this machine, per framework and controller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from hvdcomp.horovod_build import BuildError
from hvdcomp.horovod_build.environment import scripts_first

_TIMEOUT = 180.0  # seconds; a check takes 3 to 15


def run_two_ranks(framework: str, controller: str) -> None:
    """Run an allreduce and an allgather on two ranks.

    Args:
        framework: "torch" or "tensorflow".
        controller: "mpi" or "gloo".

    Raises:
        BuildError: the ranks failed, disagreed, or did not end within three minutes.
    """
    horovodrun = Path(sys.prefix) / "bin" / "horovodrun"
    command = [str(horovodrun), "-np", "2", f"--{controller}"]
    command += [sys.executable, "-m", "hvdcomp.horovod_build.check_worker", framework]
    variables = {**scripts_first(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=variables,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = f"no result within {_TIMEOUT:.0f} s\n" + process.communicate()[0]
    if process.returncode != 0:
        last_lines = "\n".join(output.strip().splitlines()[-15:])
        raise BuildError(
            f"Horovod is installed, but two ranks of {framework} did not run under {controller}:\n\n"
            f"{last_lines}\n\nThe command was: {' '.join(command)}\nSee also: hvdcomp doctor"
        )
