"""Pods that are to end, or are killed, while real ranks train in them: the ranks save, and the job goes on when it is
started again."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdcomp.tools.launch.job import Job
from hvdcomp.tools.launch.k8s.settings import KubernetesSettings
from hvdcomp.tools.launch.promise import EXIT_SAVED
from tests.k8s_pods import NEEDED, Pods
from tests.tools.launch.test_launch_torch_rank import UNTIL_WARNED

pytestmark = NEEDED


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    """Two workers of torch.distributed."""
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(UNTIL_WARNED)
    job = Job("x", (sys.executable, "program.py"), 2, {"PYTHONPATH": ":".join(sys.path)}, "torch")
    with contextlib.ExitStack() as stack:
        running = Pods(tmp_path, stack, KubernetesSettings(job, "hvdcomp"), 2)
        for name in running.workers:
            running.start_worker(name)
        yield running


def wait_until_ranks_train(launcher: subprocess.Popen[str]) -> None:
    assert launcher.stdout is not None
    lines: list[str] = []
    while lines.count("trains\n") < 2:
        lines.append(launcher.stdout.readline())
        assert lines[-1], (lines, launcher.stderr and launcher.stderr.read())


def goes_on(launcher: subprocess.Popen[str]) -> None:
    """The launcher's end, after its ranks found what both had saved at one step."""
    output, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, errors
    steps = re.findall(r"^goes on after (\d+) (\d+)$", output, re.MULTILINE)
    assert len(steps) == 2, output
    assert len({*steps[0], *steps[1]}) == 1, output


def test_a_launcher_that_is_told_to_end_saves_and_the_next_one_goes_on(pods: Pods) -> None:
    launcher = pods.start_launcher()
    wait_until_ranks_train(launcher)
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == EXIT_SAVED, errors
    assert "the ranks have saved a checkpoint and stopped" in errors
    goes_on(pods.start_launcher())


def test_a_worker_that_is_told_to_end_saves_and_the_job_goes_on_with_the_next_one(pods: Pods) -> None:
    launcher = pods.start_launcher()
    wait_until_ranks_train(launcher)
    assert pods.before_stop("x-worker-1") == 0
    _, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == EXIT_SAVED, errors
    pods.signal_worker("x-worker-1", signal.SIGTERM)

    launcher = pods.start_launcher()
    assert launcher.stderr is not None
    assert launcher.stderr.readline().startswith("hvdcomp: waiting for worker x-worker-1.x.team.svc (")
    pods.start_worker("x-worker-1")
    goes_on(launcher)


def test_a_worker_that_is_killed_fails_the_launcher_and_the_next_one_trains_anew(pods: Pods) -> None:
    """As for memory; the kubelet starts the container again."""
    launcher = pods.start_launcher()
    wait_until_ranks_train(launcher)
    pods.signal_worker("x-worker-1", signal.SIGKILL)
    launcher.communicate(timeout=100)
    assert launcher.returncode not in (0, EXIT_SAVED)
    pods.start_worker("x-worker-1")
    wait_until_ranks_train(pods.start_launcher())


def test_a_worker_without_ranks_ends_at_once(pods: Pods) -> None:
    assert pods.before_stop("x-worker-0") == 0
