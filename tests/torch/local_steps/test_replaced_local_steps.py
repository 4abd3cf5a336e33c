"""Processes of `LocalSteps` that start torch.distributed again: without a killed one, and then with a new one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import launcher_variables

pytest.importorskip("torch")


@pytest.mark.alone
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_others_continue_in_the_same_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.multirank.replaced_local_steps", str(tmp_path)]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": launcher_variables()}
    processes = [subprocess.Popen([*command, str(number)], **how) for number in range(4)]  # type: ignore[call-overload]
    try:
        told = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, -9, 0, 0], told
    for rank, number in enumerate((0, 2, 3)):
        assert f"process {number} ended as rank {rank} of 3" in told[number]
