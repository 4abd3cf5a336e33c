"""The job `mnist` of two workers: its commands, and the actions of operator and nodes, on the server of
`tests.k8s_api`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from click.testing import CliRunner, Result

from hvdcomp.tools.cli import main
from tests.k8s_api import KubernetesApi

READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
LAUNCHER = "mnist-launcher-abcde"
SUBMIT = ["launch", "k8s", "--name", "mnist", "--image", "hvdcomp:cpu", "--ranks", "2"]
PROGRAM = ["--", "python3", "train.py"]


def started(api: KubernetesApi) -> None:
    """Makes the changes of operator and nodes to a job of two workers, until its launcher runs."""
    api.wait_for(lambda: ("mpijobs", "mnist") in api.objects)
    for index in range(2):
        api.put_pod("mnist", "worker", f"mnist-worker-{index}", **READY)
    api.put_pod("mnist", "launcher", LAUNCHER, phase="Running", containerStatuses=[container(running={})])
    api.write_log(LAUNCHER, "epoch 1", "epoch 2")


def container(restarts: int = 0, **state: Any) -> dict[str, Any]:
    return {"name": "launcher", "restartCount": restarts, "state": state}


def ended(api: KubernetesApi, code: int, **condition: str) -> None:
    api.end_log(LAUNCHER)
    phase, kind = ("Failed", "Failed") if code else ("Succeeded", "Succeeded")
    api.put_pod(
        "mnist", "launcher", LAUNCHER, phase=phase, containerStatuses=[container(terminated={"exitCode": code})]
    )
    api.set_condition("mnist", kind, **condition)


def succeeds(api: KubernetesApi, when: Callable[[], Any]) -> Callable[[], None]:
    """The cluster's part for a job that succeeds after a condition."""

    def cluster() -> None:
        started(api)
        api.wait_for(when)
        ended(api, 0)

    return cluster


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments], catch_exceptions=False)


def play(api: KubernetesApi, cluster_side: Callable[[], None], *arguments: str) -> Result:
    """Runs a command while the cluster does its part."""
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(cluster_side)
        result = invoke(*(arguments or (*SUBMIT, *PROGRAM)))
        future.result(timeout=30)
    return result


def spec(workers: int) -> dict[str, Any]:
    return {"mpiReplicaSpecs": {"Launcher": {"replicas": 1}, "Worker": {"replicas": workers}}}
