"""The exit status of `hvdcomp launch k8s` as a process of its own, over TLS as with every real API server.

While the command ends, another of its requests still waits for an answer: a thread that Python ended there would abort
the process (status 134).
"""

from __future__ import annotations

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
from tests.k8s_job import LAUNCHER, READY, container, ended

COMMAND = [sys.executable, "-c", "from hvdcomp.cli import main; main()", "launch", "k8s", "--name", "mnist"]
SUBMIT = [*COMMAND, "--image", "hvdcomp:cpu", "--ranks", "2", "--", "python3", "train.py"]
TIMES = [2, pytest.param(50, marks=[pytest.mark.thorough, pytest.mark.timeout(1800)])]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("there is no command openssl, which makes the server's certificate")
    return make_certificate(tmp_path_factory.mktemp("tls"))


def run(api: KubernetesApi, kubeconfig: Path, meanwhile: Callable[[], None]) -> tuple[int, str]:
    """The exit status of a job that is submitted and followed, and its standard output."""
    environment = {**os.environ, "KUBECONFIG": str(api.write_kubeconfig(kubeconfig))}
    with subprocess.Popen(SUBMIT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        meanwhile()
        output, _ = process.communicate(timeout=60)
    return process.returncode, output


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
            status, _ = run(api, tmp_path / "kubeconfig", lambda: None)
        seen[status] += 1
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

        def end(api: KubernetesApi = api, code: int = 3 * (number % 2)) -> None:
            api.wait_for(lambda: api.asked("watch", "pods$") and api.asked("list", "/log$"))
            ended(api, code)

        with api.running():
            status, output = run(api, tmp_path / "kubeconfig", end)
        assert output == "epoch 1\n"
        seen[status] += 1
    assert seen == {0: times - times // 2, 3: times // 2}
