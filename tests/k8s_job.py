"""What operator and nodes do with the job `mnist` of two workers, on the server of `tests.k8s_api`."""

from __future__ import annotations

from typing import Any

from tests.k8s_api import KubernetesApi

READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
LAUNCHER = "mnist-launcher-abcde"


def started(api: KubernetesApi) -> None:
    """What operator and nodes do with a job of two workers, until its launcher runs."""
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
