"""The commands of `hvdcomp launch k8s` against a server that speaks the Kubernetes API over real sockets: submitted,
refused, looked at, interrupted, deleted."""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("kubernetes", reason="the Kubernetes client is not installed: pip install 'hvdcomp[k8s]'")

from tests.k8s_api import QUOTA, KubernetesApi, cannot, make_certificate
from tests.k8s_job import PROGRAM, SUBMIT, ended, invoke, spec, started


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    with KubernetesApi().running() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("there is no command openssl, which makes the servers' certificates")
    return make_certificate(tmp_path_factory.mktemp("a")), make_certificate(tmp_path_factory.mktemp("b"))


@pytest.mark.parametrize(
    ("status", "message", "said"),
    [
        (403, cannot("create", "mpijobs"), "ask for this right in namespace team"),
        (403, QUOTA, "ask for a larger quota"),
        (401, "Unauthorized", "the cluster does not accept your login"),
        (404, "the server could not find the requested resource", "the cluster has no mpi-operator"),
        (500, "etcd is full", "etcd is full"),
    ],
)
def test_refusals_to_create_are_explained(api: KubernetesApi, status: int, message: str, said: str) -> None:
    api.fail = lambda verb, path, query: (status, message) if verb == "create" else None
    result = invoke(*SUBMIT, *PROGRAM)
    assert result.exit_code == 125
    assert message in result.stderr
    assert said in result.stderr
    assert ("ask for this right" in result.stderr) is ("cannot" in message)
    assert len(result.stderr.splitlines()) == 1


def test_a_name_that_is_taken_is_refused_and_the_job_there_left_alone(api: KubernetesApi) -> None:
    there = api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": spec(7)})
    result = invoke(*SUBMIT, *PROGRAM)
    assert result.exit_code == 125
    assert "hvdcomp launch k8s delete mnist --namespace team" in result.stderr
    assert api.objects["mpijobs", "mnist"] == there


def test_an_answer_that_does_not_come_leaves_it_open_whether_the_job_exists(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdcomp.tools.launch.k8s.cluster.ANSWER_WITHIN", (5.0, 0.3))

    def fail(verb: str, path: str, query: dict[str, str]) -> None:
        with api.changed:
            api.changed.wait_for(lambda: api.stopping, 3)

    api.fail = fail
    result = invoke(*SUBMIT, *PROGRAM)
    assert result.exit_code == 125
    assert "no answer from http://127.0.0.1" in result.stderr
    assert "may have been created anyway: see `hvdcomp launch k8s status mnist`" in result.stderr


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("server", "Connection refused"),
        ("proxy", "Unable to connect to proxy"),
        ("certificate", "certificate verify failed"),
    ],
)
def test_a_connection_that_does_not_come_about_has_created_nothing(
    certificates: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, said: str
) -> None:
    """As when a tunnel to the cluster is down: nothing was asked of it."""
    ours, other = certificates
    with socket.socket() as gone, KubernetesApi(ours).running() as api:
        gone.bind(("127.0.0.1", 0))  # so that nobody else takes the port, on which it does not listen
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
        fields = {
            "server": {"server": url},
            "proxy": {"proxy-url": url},
            "certificate": {"certificate-authority-data": base64.b64encode(other.read_bytes()).decode()},
        }
        monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "kubeconfig", **fields[broken])))
        result = invoke(*SUBMIT, *PROGRAM)
    assert result.exit_code == 125
    assert "MPIJob team/mnist cannot be created: no answer from http" in result.stderr
    assert said in result.stderr
    assert "may have been created" not in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not api.requests


@pytest.mark.parametrize("through", ["proxy", "TLS"])
def test_a_connection_that_breaks_after_the_request_leaves_it_open_too(
    certificates: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    """Though urllib3 says that the proxy could not be connected to, or calls it an error of TLS as a wrong certificate
    is."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as other:
        listener.settimeout(20)
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def answer_wrongly() -> None:
            connection, _ = listener.accept()
            if through == "TLS":
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(certificates[0])
                connection = context.wrap_socket(connection, server_side=True)
            with connection, connection.makefile("rb") as request:
                headers = http.client.parse_headers(request) if request.readline() else {}
                request.read(int(headers["Content-Length"]))
                if through == "TLS":
                    socket.socket.sendall(connection, bytes(100))  # beside the encryption

        wrong = other.submit(answer_wrongly)
        fields = {"server": f"https://{address}"} if through == "TLS" else {"proxy-url": f"http://{address}"}
        api = KubernetesApi(certificates[0] if through == "TLS" else None)
        api.server.server_close()
        monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "kubeconfig", **fields)))
        result = invoke(*SUBMIT, *PROGRAM)
        wrong.result(timeout=30)
    assert result.exit_code == 125
    assert ("[SSL" if through == "TLS" else "Unable to connect to proxy") in result.stderr
    assert "may have been created anyway: see `hvdcomp launch k8s status mnist`" in result.stderr


def test_a_missing_client_says_what_to_install(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    result = invoke(*SUBMIT, *PROGRAM)
    assert result.exit_code == 125
    assert "pip install 'hvdcomp[k8s]'" in result.stderr
    assert not api.requests


def test_nothing_is_sent_by_a_dry_run_or_for_settings_that_are_wrong(api: KubernetesApi) -> None:
    assert invoke(*SUBMIT, "--dry-run", *PROGRAM).exit_code == 0
    assert invoke(*SUBMIT, "--worker-memory", "4GB", *PROGRAM).exit_code == 2
    nothing = invoke("launch", "k8s")
    assert nothing.exit_code == 2
    missing = "name (--name), command (-- PROGRAM), ranks (--ranks), image (--image) must be set"
    assert missing in nothing.stderr
    assert not api.requests


def test_detached_status_logs_and_delete(api: KubernetesApi) -> None:
    result = invoke(*SUBMIT, "--detach", *PROGRAM)
    assert result.exit_code == 0
    assert api.objects["mpijobs", "mnist"]["spec"]["slotsPerWorker"] == 1
    assert "has no output yet" in invoke("launch", "k8s", "logs", "mnist").stderr

    started(api)
    assert "team/mnist: running" in invoke("launch", "k8s", "status", "mnist").stdout
    report = json.loads(invoke("launch", "k8s", "status", "mnist", "--json").stdout)
    assert (report["phase"], report["exit_code"]) == ("running", None)
    assert [pod["role"] for pod in report["pods"]] == ["launcher", "worker", "worker"]
    assert invoke("launch", "k8s", "logs", "mnist").stdout == "epoch 1\nepoch 2\n"

    rows = [line.split() for line in invoke("launch", "k8s", "list").stdout.splitlines()]
    assert ["mnist", "running", "2", "1"] in [row[:4] for row in rows]
    (listed,) = json.loads(invoke("launch", "k8s", "list", "--json").stdout)
    assert listed["created"] == api.objects["mpijobs", "mnist"]["metadata"]["creationTimestamp"]

    ended(api, 6)
    followed = invoke("launch", "k8s", "logs", "mnist", "--follow")
    assert (followed.exit_code, followed.stdout) == (6, "epoch 1\nepoch 2\n")

    assert "team/mnist deleted" in invoke("launch", "k8s", "delete", "mnist").stdout
    assert ("mpijobs", "mnist") not in api.objects
    assert invoke("launch", "k8s", "list").stdout == "There is no MPIJob in namespace team.\n"
    for command in (["delete", "mnist"], ["status", "mnist"]):
        result = invoke("launch", "k8s", *command)
        assert result.exit_code == 125
        assert "mnist" in result.stderr


@pytest.mark.parametrize("cancel", [False, True])
def test_an_interrupt_leaves_the_job_unless_told_otherwise(api: KubernetesApi, cancel: bool) -> None:
    options = ["--cancel-on-interrupt"] if cancel else []
    command = [sys.executable, "-m", "hvdcomp", *SUBMIT, *options, *PROGRAM]
    command[1:3] = ["-c", "from hvdcomp.tools.cli import main; main()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        started(api)
        assert process.stdout is not None
        assert process.stdout.readline() == "epoch 1\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (("mpijobs", "mnist") in api.objects) is not cancel
    assert ("deleted" if cancel else "hvdcomp launch k8s delete mnist --namespace team") in errors
    assert "Traceback" not in errors
