"""`hvdcomp launch k8s` as a process of its own, over TLS as with every real API server: its exit status and its words.

While the command ends, another of its requests still waits for an answer: a thread that Python ended there would abort
the process (status 134).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("kubernetes", reason="the Kubernetes client is not installed: pip install 'hvdcomp[k8s]'")

from tests.k8s_api import KubernetesApi, make_certificate
from tests.k8s_job import LAUNCHER, READY, container, ended, started

COMMAND = [sys.executable, "-c", "from hvdcomp.tools.cli import main; main()", "launch", "k8s", "--name", "mnist"]
SUBMIT = [*COMMAND, "--image", "hvdcomp:cpu", "--ranks", "2", "--", "python3", "train.py"]
TIMES = [1, pytest.param(50, marks=[pytest.mark.thorough, pytest.mark.timeout(1800)])]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("there is no command openssl, which makes the server's certificate")
    return make_certificate(tmp_path_factory.mktemp("tls"))


def run(
    api: KubernetesApi, kubeconfig: Path, meanwhile: Callable[[], None], command: list[str] = SUBMIT
) -> subprocess.CompletedProcess[str]:
    """The end of a command, by default of one that submits and follows a job, while the cluster does its part."""
    environment = {**os.environ, "KUBECONFIG": str(api.write_kubeconfig(kubeconfig))}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        meanwhile()
        output, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@pytest.mark.parametrize("times", TIMES)
def test_follows_that_end_in_an_error_over_tls(certificate: Path, tmp_path: Path, times: int) -> None:
    """The pods are forbidden while the MPIJob is being asked for."""
    seen: Counter[int] = Counter()
    for _ in range(times):
        api = KubernetesApi(certificate)
        api.stall = lambda verb, path: verb == "list" and path.endswith("mpijobs")

        def forbid(verb: str, path: str, query: dict[str, str], api: KubernetesApi = api) -> tuple[int, str] | None:
            if not path.endswith("pods"):
                return None
            api.wait_for(lambda: api.asked("list", "mpijobs$"))
            return 403, "pods is forbidden"

        api.fail = forbid
        with api.running():
            done = run(api, tmp_path / "kubeconfig", lambda: None)
        seen[done.returncode] += 1
    assert seen == {125: times}


@pytest.mark.parametrize("times", TIMES)
def test_follows_that_end_well_over_tls(certificate: Path, tmp_path: Path, times: int) -> None:
    """The MPIJob has succeeded, or failed with the program's exit code, while a watch of the pods is being begun."""
    seen: Counter[int] = Counter()
    for number in range(times):
        api = KubernetesApi(certificate)
        api.stall = lambda verb, path: verb == "watch" and path.endswith("pods")
        for index in range(2):
            api.put_pod("mnist", "worker", f"mnist-worker-{index}", **READY)
        api.put_pod("mnist", "launcher", LAUNCHER, phase="Running", containerStatuses=[container(running={})])
        api.write_log(LAUNCHER, "epoch 1")

        def end(api: KubernetesApi = api, code: int = 0 if number % 2 else 3) -> None:
            api.wait_for(lambda: api.asked("watch", "pods$") and api.asked("list", "/log$"))
            ended(api, code)

        with api.running():
            done = run(api, tmp_path / "kubeconfig", end)
        assert done.stdout == "epoch 1\n"
        seen[done.returncode] += 1
    assert seen == Counter({3: times - times // 2, 0: times // 2})


@pytest.mark.parametrize("status", [401, pytest.param(403, marks=pytest.mark.thorough)])
def test_a_server_that_is_restarted_is_waited_for_while_it_knows_no_rights(
    certificate: Path, tmp_path: Path, status: int
) -> None:
    api = KubernetesApi(certificate)
    program = (
        "from hvdcomp.tools.launch.k8s import log; log.PAUSES = (0.1, 0.2)\nfrom hvdcomp.tools.cli import main; main()"
    )

    def cluster() -> None:
        started(api)
        api.wait_for(
            lambda: api.asked("watch", "pods$") and api.asked("watch", "mpijobs$") and api.asked("list", "log")
        )
        api.restart([status] * 6)
        api.wait_for(lambda: not api.denials)
        api.write_log(LAUNCHER, "epoch 3")
        ended(api, 3)

    with api.running():
        done = run(api, tmp_path / "kubeconfig", cluster, [sys.executable, "-c", program, *SUBMIT[3:]])
    assert (done.returncode, done.stdout) == (3, "epoch 1\nepoch 2\nepoch 3\n")
    assert "; asking again" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("failed with exit code 3: mnist-launcher-abcde ended with exit code 3")


def test_a_failed_job_whose_launcher_goes_on_is_reported_and_its_pods_named(certificate: Path, tmp_path: Path) -> None:
    """As when a worker was evicted: the operator calls the job failed, and ends nothing."""
    api = KubernetesApi(certificate)
    program = (
        "from hvdcomp.tools.launch.k8s import follow; follow.STILL_WRITING = 1\n"
        "from hvdcomp.tools.cli import main; main()"
    )

    def cluster() -> None:
        started(api)
        stack.enter_context(api.endless_log(LAUNCHER))
        api.wait_for(lambda: api.asked("list", "/log$"))
        api.put_pod("mnist", "worker", "mnist-worker-1", phase="Failed", reason="Evicted")
        api.set_condition("mnist", "Failed", reason="MPIJobEvicted", message="1/2 workers are evicted")

    with api.running(), contextlib.ExitStack() as stack:
        done = run(api, tmp_path / "kubeconfig", cluster, [sys.executable, "-c", program, *SUBMIT[3:]])
    assert done.returncode == 1
    assert {"epoch 1", "epoch 2", "line 1"} < set(done.stdout.splitlines())
    failed, remaining = done.stderr.splitlines()[-2:]
    assert failed[9:] == "failed with exit code 1: MPIJobEvicted: 1/2 workers are evicted"
    assert remaining[9:] == (
        "these pods are still running, but their logs are no longer followed: mnist-launcher-abcde, mnist-worker-0; "
        "`hvdcomp launch k8s delete mnist --namespace team` ends the job"
    )
