"""What the launcher's container starts: it waits for workers, warns what it started, and ends with its exit code."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hvdcomp.tools.launch.k8s import launcher
from hvdcomp.tools.launch.promise import EXIT_SAVED

# As a training program: says that it is ready, and at SIGUSR1 ends as saved.
SAVES = f"""
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit({EXIT_SAVED}))
print("ready", flush=True)
while True:
    signal.pause()
"""


def start(folder: Path, *command: str, port: int = 2222, hosts: str = "") -> subprocess.Popen[str]:
    (folder / "hostfile").write_text(hosts)
    return subprocess.Popen(
        [sys.executable, "-m", "hvdcomp.tools.launch.k8s.launcher", str(port), *command],
        env={**os.environ, launcher.HOSTS: str(folder / "hostfile")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 41", 41), ("kill -9 $$", 137)])
def test_it_ends_as_what_it_started(tmp_path: Path, script: str, code: int) -> None:
    with start(tmp_path, "sh", "-c", script) as process:
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, "")


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with start(tmp_path, "no-such-mpirun") as process:
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (127, "hvdcomp: no-such-mpirun cannot be run: No such file or directory\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_what_it_started_is_warned_and_saves(tmp_path: Path, number: int) -> None:
    with start(tmp_path, sys.executable, "-c", SAVES) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_SAVED
    assert (
        errors
        == "hvdcomp: the ranks have saved a checkpoint and stopped; the next start continues from this checkpoint\n"
    )


def test_the_warning_is_repeated() -> None:
    """A program that is only just starting takes no notice of the first."""
    twice = "import signal, sys\nseen = []\n" + SAVES.replace(
        f"lambda *_: sys.exit({EXIT_SAVED})", f"lambda *_: sys.exit({EXIT_SAVED}) if seen else seen.append(1)"
    )
    program = "from hvdcomp.tools.launch.k8s import launcher; launcher.WARN_EVERY = 1; launcher._main()"
    command = [sys.executable, "-c", program, "2222", sys.executable, "-c", twice]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == EXIT_SAVED


def test_workers_that_come_late_are_waited_for(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        with start(tmp_path, "echo", "runs", port=port, hosts="127.0.0.1 slots=2\n\n") as process:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("hvdcomp: waiting for worker 127.0.0.1 (")
            server.listen()
            output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "runs\n")


def test_it_can_be_ended_while_it_waits(tmp_path: Path) -> None:
    with start(tmp_path, "echo", "runs", hosts="nowhere.invalid slots=1\n") as process:
        assert process.stderr is not None
        assert "nowhere.invalid" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (143, "")


def test_a_worker_that_never_comes_is_given_up() -> None:
    with pytest.raises(TimeoutError, match=r"no answer from worker nowhere\.invalid in 0 seconds"):
        launcher.wait_for("nowhere.invalid", 2222, seconds=0)
