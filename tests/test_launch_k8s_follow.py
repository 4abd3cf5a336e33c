"""`hvdcomp launch k8s` against a server that speaks the Kubernetes API over real sockets: submitted, followed to its
end through dropped connections, refused, cancelled."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("kubernetes", reason="the Kubernetes client is not installed: pip install 'hvdcomp[k8s]'")

from hvdcomp.cli import main
from hvdcomp.launch.k8s import follow as following
from hvdcomp.launch.k8s.cluster import Cluster, KubernetesError
from hvdcomp.launch.k8s.follow import NewLines, follow
from hvdcomp.launch.k8s.state import MPIJobState
from tests.k8s_api import KubernetesApi
from tests.k8s_job import LAUNCHER, READY, container, ended, started

SUBMIT = ["launch", "k8s", "--name", "mnist", "--image", "hvdcomp:cpu", "--ranks", "2"]
PROGRAM = ["--", "python3", "train.py"]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    monkeypatch.setattr(following, "_PAUSES", (0.01, 0.02, 0.05))
    with KubernetesApi().running() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        yield server


def succeeds(api: KubernetesApi, when: Callable[[], Any]) -> Callable[[], None]:
    """The cluster's part for a job that runs until something is so."""

    def cluster() -> None:
        started(api)
        api.wait_for(when)
        ended(api, 0)

    return cluster


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments], catch_exceptions=False)


def play(api: KubernetesApi, cluster_side: Callable[[], None], *arguments: str) -> Result:
    """Run a command while the cluster does its part."""
    with ThreadPoolExecutor(1) as other:
        done = other.submit(cluster_side)
        result = invoke(*(arguments or (*SUBMIT, *PROGRAM)))
        done.result(timeout=30)
    return result


@pytest.mark.parametrize("code", [0, 1, 3, 137])
def test_a_job_is_followed_to_its_end_and_its_exit_code_returned(api: KubernetesApi, code: int) -> None:
    def cluster() -> None:
        started(api)
        api.wait_for(lambda: api.asked("list", "/log$"))
        api.write_log(LAUNCHER, "last words")
        ended(api, code, reason="BackoffLimitExceeded", message="Job has reached the specified backoff limit")

    result = play(api, cluster)
    assert result.exit_code == code, result.stderr
    assert result.stdout == "epoch 1\nepoch 2\nlast words\n"
    assert "MPIJob team/mnist created" in result.stderr
    assert ("succeeded" if code == 0 else f"failed with exit code {code}: BackoffLimitExceeded") in result.stderr
    assert result.stderr.splitlines()[-1][9:].startswith("succeeded" if code == 0 else "failed")


def test_what_a_job_waits_for_is_said(api: KubernetesApi) -> None:
    full = {
        "type": "PodScheduled",
        "status": "False",
        "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
    }
    missing = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "hvdcomp:cpu"'}}
    told: list[MPIJobState] = []
    waiting = Cluster()
    api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": _spec(2)})

    def cluster() -> None:
        for expected, pod in (
            ("waiting: 0 of 2 workers ready", None),
            ("cannot be placed: 0/4 nodes are available: 4 Insufficient nvidia.com/gpu.", {"conditions": [full]}),
            ("ImagePullBackOff: Back-off pulling", {"containerStatuses": [container(**missing)]}),
            ("waiting: 1 of 2 workers ready", READY),
        ):
            if pod is not None:
                api.put_pod("mnist", "worker", "mnist-worker-0", **{"phase": "Pending", **pod})
            api.wait_for(lambda expected=expected: any(expected in f"{s.phase}: {s.detail}" for s in list(told)))
        api.set_condition("mnist", "Suspended")
        api.wait_for(lambda: told[-1].phase == "suspended")
        api.remove("mpijobs", "mnist")

    def report(state: MPIJobState) -> None:
        with api.changed:
            told.append(state)
            api.changed.notify_all()

    with ThreadPoolExecutor(1) as other:
        done = other.submit(cluster)
        last = follow(waiting, "mnist", report=report, lost=pytest.fail, write=print)
        done.result(timeout=30)
    assert last.phase == "deleted"
    assert last.exit_code is None


def _spec(workers: int) -> dict[str, Any]:
    return {"mpiReplicaSpecs": {"Launcher": {"replicas": 1}, "Worker": {"replicas": workers}}}


def test_dropped_watches_and_logs_lose_and_repeat_nothing(api: KubernetesApi) -> None:
    """Watches are cut after their first event and the log after ever three lines more, in the middle of what comes."""
    cuts = {"watch": 0, "log": 0}

    def drop(path: str, sent: int) -> bool:
        kind = "log" if "/log" in path else "watch"
        if cuts[kind] < 12 and sent >= (3 * cuts["log"] + 3 if kind == "log" else 1):
            cuts[kind] += 1
            return True
        return False

    api.drop = drop
    lines = [f"line {number}" for number in range(50)]

    def cluster() -> None:
        started(api)
        for line in lines:
            api.write_log(LAUNCHER, line)
        for number in range(4):
            api.wait_for(lambda number=number: api.asked("watch", "pods$") > number)
            api.put_pod("mnist", "worker", "mnist-worker-0", **READY)
        api.wait_for(lambda: cuts["log"] == 12 and cuts["watch"] > 3)
        ended(api, 5)

    result = play(api, cluster)
    assert result.exit_code == 5
    assert result.stdout.splitlines() == ["epoch 1", "epoch 2", *lines]
    assert result.stderr.count("no answer") >= 1


def test_watches_that_end_in_good_order_are_begun_again(api: KubernetesApi) -> None:
    api.end = lambda path, sent: "/log" not in path
    result = play(api, succeeds(api, lambda: api.asked("watch", "mpijobs") > 3))
    assert result.exit_code == 0
    assert "no answer" not in result.stderr


def test_a_version_too_old_to_watch_from_is_listed_anew_and_nothing_is_said(api: KubernetesApi) -> None:
    api.oldest = 10_000

    def cluster() -> None:
        started(api)
        api.wait_for(lambda: api.asked("watch", "pods") > 3)
        api.oldest = 0
        ended(api, 2)

    result = play(api, cluster)
    assert result.exit_code == 2
    assert api.asked("list", "pods$") > 3
    assert "old" not in result.stderr


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_in_trouble_is_asked_again(api: KubernetesApi, status: int) -> None:
    troubled = 3

    def fail(verb: str, path: str, query: dict[str, str]) -> tuple[int, str] | None:
        nonlocal troubled
        if verb == "list" and path.endswith("mpijobs") and troubled:
            troubled -= 1
            return status, "etcdserver: leader changed"
        return None

    api.fail = fail
    result = play(api, succeeds(api, lambda: not troubled))
    assert result.exit_code == 0
    assert "leader changed; asking again" in result.stderr


def test_a_server_that_stays_silent_is_given_up(api: KubernetesApi) -> None:
    api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": _spec(1)})
    api.fail = lambda verb, path, query: (503, "overloaded")
    told: list[str] = []
    with pytest.raises(KubernetesError, match="overloaded"):
        follow(Cluster(), "mnist", report=pytest.fail, lost=told.append, write=print, patience=0.3)
    assert len(told) == 1


def test_a_job_replaced_by_another_of_its_name_counts_as_gone(api: KubernetesApi) -> None:
    api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": _spec(1)})
    told: list[MPIJobState] = []
    last = follow(Cluster(), "mnist", uid="of-the-first", report=told.append, lost=pytest.fail, write=print)
    assert told == [last]
    assert (last.phase, last.exit_code) == ("deleted", None)


def test_the_end_waits_for_a_log_that_comes_late(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    noticed = threading.Event()
    finish = following._Log.finish

    def finished(log: Any) -> None:
        if api.asked("list", "/log$"):
            threading.Timer(0.2, noticed.set).start()
        finish(log)

    def fail(verb: str, path: str, query: dict[str, str]) -> None:
        if path.endswith("/log"):
            noticed.wait(20)

    monkeypatch.setattr(following._Log, "finish", finished)
    api.fail = fail
    result = play(api, succeeds(api, lambda: api.asked("list", "/log$")))
    assert result.stdout == "epoch 1\nepoch 2\n"
    assert result.stderr.splitlines()[-1].endswith("succeeded")


def test_another_attempt_of_the_launcher_is_followed(api: KubernetesApi) -> None:
    second = "mnist-launcher-fghij"

    def cluster() -> None:
        started(api)
        api.wait_for(lambda: api.asked("list", "/log$"))
        api.end_log(LAUNCHER)
        api.put_pod(
            "mnist", "launcher", LAUNCHER, phase="Failed", containerStatuses=[container(terminated={"exitCode": 9})]
        )
        api.put_pod("mnist", "launcher", second, phase="Running", containerStatuses=[container(running={})])
        api.write_log(second, "again")
        api.wait_for(lambda: api.asked("list", f"{second}/log$"))
        api.end_log(second)
        done = [container(terminated={"exitCode": 4})]
        api.put_pod("mnist", "launcher", second, phase="Failed", containerStatuses=done)
        api.set_condition("mnist", "Failed")

    result = play(api, cluster)
    assert result.stdout == "epoch 1\nepoch 2\nagain\n"
    assert result.exit_code == 4


@pytest.mark.parametrize(
    ("status", "message", "said"),
    [
        (403, 'mpijobs is forbidden: User "ann" cannot create', "ask for that right in namespace team"),
        (401, "Unauthorized", "the cluster does not know you"),
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
    assert len(result.stderr.splitlines()) == 1


def test_a_name_that_is_taken_is_refused_and_the_job_there_left_alone(api: KubernetesApi) -> None:
    there = api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": _spec(7)})
    result = invoke(*SUBMIT, *PROGRAM)
    assert result.exit_code == 125
    assert "hvdcomp launch k8s delete mnist --namespace team" in result.stderr
    assert api.objects["mpijobs", "mnist"] == there


def test_a_forbidden_watch_ends_the_following_at_once(api: KubernetesApi) -> None:
    api.fail = lambda verb, path, query: (403, "pods is forbidden") if path.endswith("pods") else None
    result = invoke(*SUBMIT, *PROGRAM)
    assert result.exit_code == 125
    assert "pods cannot be listed: pods is forbidden" in result.stderr
    assert ("mpijobs", "mnist") in api.objects


def test_an_answer_that_does_not_come_leaves_it_open_whether_the_job_exists(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdcomp.launch.k8s.cluster.ANSWER_WITHIN", (5.0, 0.3))

    def fail(verb: str, path: str, query: dict[str, str]) -> None:
        with api.changed:
            api.changed.wait_for(lambda: api.stopping, 3)

    api.fail = fail
    result = invoke(*SUBMIT, *PROGRAM)
    assert result.exit_code == 125
    assert "no answer from http://127.0.0.1" in result.stderr
    assert "may have been created all the same: see `hvdcomp launch k8s status mnist`" in result.stderr


def test_no_server_at_all(api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads(Path(os.environ["KUBECONFIG"]).read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    file = tmp_path / "other"
    file.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(file))
    result = invoke(*SUBMIT, *PROGRAM)
    assert result.exit_code == 125
    assert "no answer from http://127.0.0.1:9" in result.stderr
    assert "refused" in result.stderr


def test_no_kubeconfig_and_unknown_contexts_are_named(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no 'there'; it has: here, bare" in invoke(*SUBMIT, "--context", "there", *PROGRAM).stderr
    assert Cluster(context="bare").namespace == "default"
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    result = invoke(*SUBMIT, *PROGRAM)
    assert result.exit_code == 125
    assert "set KUBECONFIG" in result.stderr


def test_a_missing_client_says_what_to_install(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    result = invoke(*SUBMIT, *PROGRAM)
    assert result.exit_code == 125
    assert "pip install 'hvdcomp[k8s]'" in result.stderr
    assert not api.requests


def test_nothing_is_sent_by_a_dry_run_or_for_settings_that_are_wrong(api: KubernetesApi) -> None:
    assert invoke(*SUBMIT, "--dry-run", *PROGRAM).exit_code == 0
    assert invoke(*SUBMIT, "--worker-memory", "4GB", *PROGRAM).exit_code == 125
    assert not api.requests


def test_detached_status_logs_and_delete(api: KubernetesApi) -> None:
    result = invoke(*SUBMIT, "--detach", *PROGRAM)
    assert result.exit_code == 0
    assert api.objects["mpijobs", "mnist"]["spec"]["slotsPerWorker"] == 1
    assert "has written nothing yet" in invoke("launch", "k8s", "logs", "mnist").stderr

    started(api)
    assert "team/mnist: running" in invoke("launch", "k8s", "status", "mnist").stdout
    report = json.loads(invoke("launch", "k8s", "status", "mnist", "--json").stdout)
    assert (report["phase"], report["exit_code"]) == ("running", None)
    assert [pod["role"] for pod in report["pods"]] == ["launcher", "worker", "worker"]
    assert invoke("launch", "k8s", "logs", "mnist").stdout == "epoch 1\nepoch 2\n"

    ended(api, 6)
    followed = invoke("launch", "k8s", "logs", "mnist", "--follow")
    assert (followed.exit_code, followed.stdout) == (6, "epoch 1\nepoch 2\n")

    assert "team/mnist deleted" in invoke("launch", "k8s", "delete", "mnist").stdout
    assert ("mpijobs", "mnist") not in api.objects
    for command in (["delete", "mnist"], ["status", "mnist"]):
        result = invoke("launch", "k8s", *command)
        assert result.exit_code == 125
        assert "mnist" in result.stderr


@pytest.mark.parametrize("cancel", [False, True])
def test_an_interrupt_leaves_the_job_unless_told_otherwise(api: KubernetesApi, cancel: bool) -> None:
    options = ["--cancel-on-interrupt"] if cancel else []
    command = [sys.executable, "-m", "hvdcomp", *SUBMIT, *options, *PROGRAM]
    command[1:3] = ["-c", "from hvdcomp.cli import main; main()"]
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


@pytest.mark.parametrize("ends", [True, False])
def test_no_thread_is_left_however_following_ends(api: KubernetesApi, ends: bool) -> None:
    """Also not one that waits for the first byte of an answer, or whose log would go on for ever."""
    api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": _spec(2)})
    started(api)
    written: queue.Queue[str] = queue.Queue()
    refused = threading.Event()
    api.stall = lambda verb, path: verb == "watch" and path.endswith("pods") and not refused.is_set()
    api.fail = lambda verb, path, query: (403, "forbidden") if path.endswith("pods") and refused.is_set() else None

    def cluster() -> None:
        assert [written.get(timeout=20), written.get(timeout=20)] == ["epoch 1", "epoch 2"]
        api.wait_for(lambda: api.asked("watch", "pods$") and api.asked("watch", "mpijobs$"))
        if ends:
            api.end_log(LAUNCHER)
            api.set_condition("mnist", "Succeeded")
        else:
            refused.set()

    with ThreadPoolExecutor(1) as other:
        done = other.submit(cluster)
        with contextlib.nullcontext() if ends else pytest.raises(KubernetesError, match="forbidden"):
            follow(Cluster(), "mnist", report=lambda state: None, lost=pytest.fail, write=written.put)
        assert not {"watch jobs", "watch pods", "log"} & {thread.name for thread in threading.enumerate()}
        done.result(timeout=30)


def test_lines_of_one_moment_are_counted() -> None:
    lines = NewLines()
    log = [
        b"2026-01-01T00:00:01Z a",
        b"2026-01-01T00:00:01.5Z b",
        b"2026-01-01T00:00:01.50Z c",
        b"2026-01-01T00:00:02Z d",
    ]
    assert lines.seconds() is None
    assert list(lines.of(log[:2])) == ["a", "b"]
    assert list(lines.of(log[1:])) == ["c", "d"]
    assert list(lines.of(log)) == []
    assert list(lines.of([*log, b"2026-01-01T00:00:02Z "])) == [""]
    assert lines.seconds() is not None
