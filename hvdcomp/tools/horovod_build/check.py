"""Checks an installed Horovod: its extensions must load, and two real ranks must run on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from hvdcomp.tools.horovod_build import BuildError
from hvdcomp.tools.horovod_build.environment import run_logged, scripts_first, tool_output

_TIMEOUT = 180.0  # seconds; a check takes 3 to 15 s


def load_extension(framework: str) -> None:
    """Imports Horovod for a framework, and resolves all symbols of its extension. This check does not need a GPU.

    Args:
        framework: name of the framework: "torch" or "tensorflow".

    Raises:
        BuildError: if the import failed. The message has the C++ name of a missing symbol.
    """
    command = [sys.executable, "-c", f"import horovod.{framework}"]
    # Without LD_BIND_NOW, a missing function would be noticed only in the middle of training.
    variables = {**scripts_first(), "TF_CPP_MIN_LOG_LEVEL": "3", "LD_BIND_NOW": "1"}
    try:
        process = run_logged(command, variables, _TIMEOUT)
    except subprocess.TimeoutExpired:
        raise BuildError(f"import horovod.{framework} did not end within {_TIMEOUT:.0f} s.") from None
    if process.returncode == 0:
        return
    missing = re.search(r"undefined symbol: (\w+)", process.stdout)
    if missing:
        symbol = (tool_output(["c++filt", missing.group(1)]) or missing.group(1)).strip()
        raise BuildError(
            f"Horovod's extension for {framework} cannot be loaded: no library has {symbol}\n"
            f"Horovod's source may not fit this version of {framework}: the versions in the project's constraints.txt "
            "are known to build together."
        )
    last_lines = "\n".join(process.stdout.strip().splitlines()[-5:])
    raise BuildError(f"Horovod's extension for {framework} cannot be loaded:\n\n{last_lines}")


def run_two_ranks(framework: str, controller: str) -> None:
    """Runs an allreduce and an all-gather on two ranks.

    Args:
        framework: name of the framework: "torch" or "tensorflow".
        controller: the library for Horovod's own messages: "mpi" or "gloo".

    Raises:
        BuildError: if the ranks failed, had different results, or did not end within three minutes.
    """
    horovodrun = Path(sys.prefix) / "bin" / "horovodrun"
    command = [str(horovodrun), "-np", "2", f"--{controller}"]
    command += [sys.executable, "-m", "hvdcomp.tools.horovod_build.check_worker", framework]
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
            f"Horovod was built, but two ranks of {framework} did not run under {controller}:\n\n"
            f"{last_lines}\n\nThe command was: {' '.join(command)}\nHorovod was uninstalled again. To find the cause "
            "with hvdcomp doctor, install Horovod without this check: hvdcomp build-horovod --no-check"
        )
