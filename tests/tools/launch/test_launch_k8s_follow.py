"""`hvdcomp launch k8s` against a server that speaks the Kubernetes API over real sockets: a job is followed to its end,
through dropped connections and a server in trouble."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the Kubernetes client is not installed: pip install 'hvdcomp[k8s]'")

from hvdcomp.tools.launch.k8s import log as logs
from hvdcomp.tools.launch.k8s.cluster import Cluster
from hvdcomp.tools.launch.k8s.errors import KubernetesError
from hvdcomp.tools.launch.k8s.follow import follow
from hvdcomp.tools.launch.k8s.log import NewLines
from hvdcomp.tools.launch.k8s.state import MPIJobState
from tests.k8s_api import KubernetesApi, cannot
from tests.k8s_job import LAUNCHER, PROGRAM, READY, SUBMIT, container, ended, invoke, play, spec, started, succeeds


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    monkeypatch.setattr(logs, "PAUSES", (0.01, 0.02, 0.05))
    with KubernetesApi().running() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        yield server


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
    denied = {"exitCode": 128, "reason": "StartError", "message": "operation not permitted"}
    crash_loop = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
    crashed = {"containerStatuses": [{**container(**crash_loop), "lastState": {"terminated": denied}}]}
    told: list[MPIJobState] = []
    waiting = Cluster()
    api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": spec(2)})

    def cluster() -> None:
        for expected, pod in (
            ("waiting: 0 of 2 workers ready", None),
            ("cannot be placed: 0/4 nodes are available: 4 Insufficient nvidia.com/gpu.", {"conditions": [full]}),
            ("ImagePullBackOff: Back-off pulling", {"containerStatuses": [container(**missing)]}),
            ("mnist-worker-0 ended with exit code 128 (StartError: operation not permitted)", crashed),
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
        last = follow(waiting, "mnist", report=report, lost=pytest.fail, write=print, remain=pytest.fail)
        done.result(timeout=30)
    assert last.phase == "deleted"
    assert last.exit_code is None


def test_the_operator_s_warnings_are_shown_while_a_job_waits(api: KubernetesApi) -> None:
    """As when its pods exceed a quota, until there are all of them; events stay for an hour."""
    told: list[str] = []
    api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": spec(1)})
    forbidden = 'worker pod created failed: pods "mnist-worker-0" is forbidden: exceeded quota: cpu'
    expected = [
        "waiting: 0 of 1 workers ready",
        f"waiting: 0 of 1 workers ready; mpi-operator: MPIJobFailed: {forbidden}",
        "waiting: 0 of 1 workers ready",
        "deleted: the MPIJob no longer exists",
    ]

    def cluster() -> None:
        api.wait_for(lambda: api.asked("watch", "events$") and len(told) == 1)
        api.put_event("mnist", "Normal", "MPIJobCreated", "MPIJob team/mnist is created.")
        api.put_event("mnist", "Warning", "MPIJobFailed", "worker pod created failed: etcd is busy")
        api.put_event("mnist", "Warning", "MPIJobFailed", forbidden)
        api.wait_for(lambda: told[-1] == expected[1])
        assert forbidden in invoke("launch", "k8s", "status", "mnist").stdout
        api.put_pod("mnist", "worker", "mnist-worker-0", phase="Pending")
        api.wait_for(lambda: told[-1] == expected[2])
        api.remove("mpijobs", "mnist")

    def report(state: MPIJobState) -> None:
        with api.changed:
            told.append(str(state))
            api.changed.notify_all()

    with ThreadPoolExecutor(1) as other:
        done = other.submit(cluster)
        follow(Cluster(), "mnist", report=report, lost=pytest.fail, write=print, remain=pytest.fail)
        done.result(timeout=30)
    assert [one for one in told if "etcd is busy" not in one] == expected


def test_events_that_may_not_be_read_are_done_without(api: KubernetesApi) -> None:
    denied = cannot("list", "events")
    api.fail = lambda verb, path, query: (403, denied) if path.endswith("events") else None
    result = play(api, succeeds(api, lambda: api.asked("list", "/log$")))
    assert result.exit_code == 0
    assert "events" not in result.stderr
    assert invoke("launch", "k8s", "status", "mnist").exit_code == 0


def test_what_several_workers_lack_is_said_once(api: KubernetesApi) -> None:
    """In a large job the reason is the same for all of them, and long."""
    api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": spec(4)})
    full = {"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available: 4 Insufficient gpu."}
    for index in range(3):
        api.put_pod("mnist", "worker", f"mnist-worker-{index}", phase="Pending", conditions=[full])
    pulling = container(waiting={"reason": "ImagePullBackOff"})
    api.put_pod("mnist", "worker", "mnist-worker-3", phase="Pending", containerStatuses=[pulling])
    assert json.loads(invoke("launch", "k8s", "status", "mnist", "--json").stdout)["detail"] == (
        f"0 of 4 workers ready; mnist-worker-0 and 2 more cannot be placed: {full['message']}; "
        "mnist-worker-3: ImagePullBackOff"
    )


@pytest.mark.parametrize(
    ("retries", "phase", "code", "said"),
    [
        (0, "Failed", 3, f"stopped: {LAUNCHER} ended with exit code 3\n"),
        (2, "Failed", 3, f"stopped: {LAUNCHER} ended with exit code 3; the job restarts as long as retries are left\n"),
        (
            2,
            "Running",
            3,
            f"stopped: {LAUNCHER} ended with exit code 3; the job restarts as long as retries are left\n",
        ),
        (2, "Succeeded", 0, "stopped\n"),
    ],
)
def test_a_launcher_that_has_ended_is_neither_starting_nor_running(
    api: KubernetesApi, retries: int, phase: str, code: int, said: str
) -> None:
    """The operator says only a while later whether the job has ended. With `restart_policy = "OnFailure"` the pod stays
    in the phase Running while its container waits to be started again."""
    api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": {**spec(2), "runPolicy": {"backoffLimit": retries}}})
    started(api)
    ended = {"terminated": {"exitCode": code}}
    waits = {**container(1, waiting={"reason": "CrashLoopBackOff"}), "lastState": ended}
    status = waits if phase == "Running" else container(**ended)
    api.put_pod("mnist", "launcher", LAUNCHER, phase=phase, containerStatuses=[status])
    assert f"MPIJob team/mnist: {said}" in invoke("launch", "k8s", "status", "mnist").stdout


def test_what_a_running_job_lacks_is_said(api: KubernetesApi) -> None:
    """As when a worker was killed for memory: its container is started again."""
    killed = {"exitCode": 137, "reason": "OOMKilled"}
    waiting = {**container(waiting={"reason": "CrashLoopBackOff"}), "lastState": {"terminated": killed}}
    said = "running: 1 of 2 workers ready; mnist-worker-0 ended with exit code 137 (OOMKilled)"

    def cluster() -> None:
        started(api)
        api.wait_for(lambda: api.asked("watch", "pods$") and api.asked("list", "/log$"))
        api.put_pod("mnist", "worker", "mnist-worker-0", phase="Running", containerStatuses=[waiting])
        ended(api, 213)

    result = play(api, cluster)
    assert result.exit_code == 213
    assert said in result.stderr
    assert result.stderr.splitlines()[-1].endswith(
        "; it has saved a checkpoint: submit the job again to continue from this checkpoint"
    )


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


def test_a_watch_that_a_restart_of_the_server_breaks_at_its_begin_is_begun_again(api: KubernetesApi) -> None:
    """The server has taken the request, answers it when it has restarted, and then denies what it is asked for."""
    api.stall = lambda verb, path: verb == "watch" and path.endswith("pods") and api.generation == 0

    def cluster() -> None:
        started(api)
        api.wait_for(lambda: api.asked("watch", "pods$") and api.asked("watch", "mpijobs$"))
        api.restart([401] * 6)
        api.wait_for(lambda: not api.denials)
        ended(api, 3)

    result = play(api, cluster)
    assert (result.exit_code, result.stdout) == (3, "epoch 1\nepoch 2\n"), result.stderr
    assert api.asked("watch", "pods$") > 1


def test_a_first_watch_is_asked_for_again_if_the_server_does_not_know_whom_it_let_list(api: KubernetesApi) -> None:
    troubled = 3

    def fail(verb: str, path: str, query: dict[str, str]) -> tuple[int, str] | None:
        nonlocal troubled
        if verb == "watch" and path.endswith("mpijobs") and troubled:
            troubled -= 1
            return 401, "Unauthorized"
        return None

    api.fail = fail
    result = play(api, succeeds(api, lambda: not troubled))
    assert result.exit_code == 0, result.stderr


def test_a_first_watch_that_is_forbidden_is_given_up(api: KubernetesApi) -> None:
    """The right to watch is not the right to list."""
    api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": spec(1)})
    denied = cannot("watch", "mpijobs")
    api.fail = lambda verb, path, query: (403, denied) if verb == "watch" and path.endswith("mpijobs") else None
    with pytest.raises(KubernetesError, match="ask for this right in namespace team"):
        follow(Cluster(), "mnist", report=lambda state: None, lost=pytest.fail, write=print, remain=pytest.fail)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For `lost`. By the clock that `follow` reads, a second passes when something is told, and only then: a machine
    that is slow to answer uses up no patience."""
    told: list[str] = []
    clock = SimpleNamespace(monotonic=lambda: float(len(told)))
    monkeypatch.setattr("hvdcomp.tools.launch.k8s.follow.time", clock)
    return told


def test_a_server_that_stays_silent_is_given_up(api: KubernetesApi, told: list[str]) -> None:
    api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": spec(1)})
    api.fail = lambda verb, path, query: (503, "overloaded")
    with pytest.raises(KubernetesError, match="overloaded"):
        follow(Cluster(), "mnist", report=pytest.fail, lost=told.append, write=print, remain=pytest.fail, patience=0.3)
    assert len(told) == 1


def test_what_was_granted_and_stays_denied_is_given_up(api: KubernetesApi, told: list[str]) -> None:
    api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": spec(1)})
    api.end = lambda path, sent: "/pods" in path
    denied = cannot("list", "pods")
    api.fail = lambda verb, path, query: (403, denied) if api.asked("list", "pods$") > 1 and "pods" in path else None
    with pytest.raises(KubernetesError, match="ask for this right in namespace team"):
        follow(
            Cluster(),
            "mnist",
            report=lambda state: None,
            lost=told.append,
            write=print,
            remain=pytest.fail,
            patience=0.3,
        )
    assert told == [f"pods cannot be listed: {denied}"]


def test_a_log_that_is_denied_is_told_and_asked_for_again(api: KubernetesApi) -> None:
    denied = cannot("get", "pods/log")
    api.fail = lambda verb, path, query: (
        (403, denied) if path.endswith("/log") and api.asked("list", "/log") < 4 else None
    )
    result = play(api, succeeds(api, lambda: api.asked("list", "/log$") >= 4))
    assert (result.exit_code, result.stdout) == (0, "epoch 1\nepoch 2\n")
    assert (
        result.stderr.count("ask for this right in namespace team, or use a different --namespace; asking again") == 1
    )


def test_a_log_that_stays_denied_does_not_keep_the_end_from_being_told(api: KubernetesApi) -> None:
    denied = cannot("get", "pods/log")
    api.fail = lambda verb, path, query: (403, denied) if path.endswith("/log") else None
    result = play(api, succeeds(api, lambda: api.asked("list", "/log$")))
    assert result.exit_code == 0
    assert result.stdout.startswith(f"hvdcomp: the log of {LAUNCHER} cannot be read: {denied}")
    assert result.stdout.endswith("the end of the log is missing\n")


def test_a_job_replaced_by_another_of_its_name_counts_as_gone(api: KubernetesApi) -> None:
    api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": spec(1)})
    told: list[MPIJobState] = []
    last = follow(
        Cluster(), "mnist", uid="of-the-first", report=told.append, lost=pytest.fail, write=print, remain=pytest.fail
    )
    assert told == [last]
    assert (last.phase, last.exit_code) == ("deleted", None)


def test_the_end_waits_for_a_log_that_comes_late(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    noticed = threading.Event()
    finish = logs.Log.finish

    def finished(log: Any, seconds: float | None = None) -> None:
        if api.asked("list", "/log$"):
            threading.Timer(0.2, noticed.set).start()
        finish(log, seconds)

    def fail(verb: str, path: str, query: dict[str, str]) -> None:
        if path.endswith("/log"):
            noticed.wait(20)

    monkeypatch.setattr(logs.Log, "finish", finished)
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


def test_a_forbidden_watch_ends_the_following_at_once(api: KubernetesApi) -> None:
    api.fail = lambda verb, path, query: (403, "pods is forbidden") if path.endswith("pods") else None
    result = invoke(*SUBMIT, *PROGRAM)
    assert result.exit_code == 125
    assert "pods cannot be listed: pods is forbidden" in result.stderr
    assert ("mpijobs", "mnist") in api.objects


@pytest.mark.parametrize("ends", [True, False])
def test_no_thread_is_left_however_following_ends(api: KubernetesApi, ends: bool) -> None:
    """Also not one that waits for the first byte of an answer, or whose log would go on for ever."""
    api.put("mpijobs", {"metadata": {"name": "mnist"}, "spec": spec(2)})
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
            follow(
                Cluster(), "mnist", report=lambda state: None, lost=pytest.fail, write=written.put, remain=pytest.fail
            )
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
