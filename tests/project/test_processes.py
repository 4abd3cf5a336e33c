"""The environment of a process, by which tests find those that are left."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes import variables


def test_a_process_between_two_programs_has_its_variables(tmp_path: Path) -> None:
    script = tmp_path / "again"
    script.write_text('[ "$1" = 0 ] || exec sh "$0" $(($1 - 1))\n')
    read: list[bool] = []
    with subprocess.Popen(["sh", str(script), "300"], env={**os.environ, "A_MARK": "1"}) as process:
        while process.poll() is None:
            with suppress(OSError):  # it has just ended
                read.append(b"A_MARK=1" in variables(Path(f"/proc/{process.pid}")))
    assert len(read) > 10
    assert all(read)


def test_an_empty_environment_is_read_in_the_end() -> None:
    with subprocess.Popen(["sleep", "1000"], env={}) as process:
        assert variables(Path(f"/proc/{process.pid}")) == [b""]
        process.kill()


def test_what_has_ended_is_refused() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(OSError, match=f"/proc/{process.pid}/"):
            variables(Path(f"/proc/{process.pid}"))
