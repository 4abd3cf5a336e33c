"""Determines the state of a job from its MPIJob and its pods, and collects messages from the scheduler and the
nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hvdcomp.tools.launch.k8s.cluster import is_role
from hvdcomp.tools.launch.promise import EXIT_SAVED

Phase = Literal["waiting", "suspended", "starting", "running", "stopped", "succeeded", "failed", "deleted"]

LAUNCHER = "launcher"
"""The name of the launcher's container."""


@dataclass(frozen=True)
class MPIJobState:
    """The state of an MPIJob.

    Attributes:
        phase: "waiting" (for workers), "starting" (the launcher), "running", "stopped" (the launcher has ended, but the
            job has not), or how the job ended.
        detail: the reason why the job waits, or why it failed. The text may be empty.
        exit_code: the exit code of the launcher, after the end of the job.
    """

    phase: Phase
    detail: str = ""
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        return self.phase in ("succeeded", "failed", "deleted")

    def __str__(self) -> str:
        code = f" with exit code {self.exit_code}" if self.exit_code else ""
        return f"{self.phase}{code}{': ' if self.detail else ''}{self.detail}"


def read_state(
    job: Mapping[str, Any] | None, pods: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]] = ()
) -> MPIJobState:
    """Determines the state of a job. `job` is None if the job was deleted.

    The MPIJob shows whether the job has ended. The pods show the exit code of the job, and why the job waits. The
    events of the operator show why pods are missing.
    """
    if job is None:
        return MPIJobState("deleted", "the MPIJob no longer exists")
    pods = list(pods)
    conditions = {condition["type"]: condition for condition in (job.get("status") or {}).get("conditions") or ()}
    true_conditions = {kind for kind, condition in conditions.items() if condition.get("status") == "True"}
    launcher = newest_launcher(pods)
    if "Succeeded" in true_conditions:
        return MPIJobState("succeeded", "", 0)
    if "Failed" in true_conditions:
        code = _exit_code(launcher)
        message = ": ".join(filter(None, (conditions["Failed"].get("reason"), conditions["Failed"].get("message"))))
        saved = "it has saved a checkpoint: submit the job again to continue from this checkpoint"
        trouble = "; ".join(_troubles([] if launcher is None else [launcher]))
        return MPIJobState(
            "failed",
            "; ".join(filter(None, (message.strip(": "), trouble, saved if code == EXIT_SAVED else ""))),
            code or 1,
        )
    if "Suspended" in true_conditions:
        return MPIJobState("suspended", "the job is suspended by its runPolicy, or waits in a full queue")
    workers = [pod for pod in pods if is_role(pod, "worker")]
    replicas = job["spec"]["mpiReplicaSpecs"].get("Worker", {}).get("replicas", 0)
    ready = sum(_is_ready(pod) for pod in workers)
    missing = "; ".join([f"{ready} of {replicas} workers ready", *_troubles(workers)])
    if launcher is not None:
        phase, troubles = launcher["status"].get("phase"), _troubles([launcher])
        if phase == "Running" and not troubles:
            return MPIJobState("running", "" if ready == replicas else missing)
        retries = (job["spec"].get("runPolicy") or {}).get("backoffLimit")
        # If a container has ended and is started again in its pod, the pod remains in the phase Running.
        again = ["the job restarts as long as retries are left"] if phase in ("Failed", "Running") and retries else []
        ended = phase in ("Succeeded", "Failed", "Running")
        return MPIJobState("stopped" if ended else "starting", "; ".join([*troubles, *again]))
    # The operator warns if it cannot create pods. When all pods exist, these warnings are obsolete, but they still
    # exist.
    warning = "" if ready < len(workers) == replicas else _warning(job, events)
    return MPIJobState("waiting", "; ".join(filter(None, (missing, warning))))


def _warning(job: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> str:
    """The last warning of the operator about the job; empty if there is none."""
    uid = job["metadata"]["uid"]
    about = [event for event in events if event["involvedObject"].get("uid") == uid]
    warnings = [event for event in about if event.get("type") == "Warning"]
    last = max(warnings, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "", default=None)
    return "" if last is None else f"mpi-operator: {last.get('reason')}: {last.get('message')}"


def newest_launcher(pods: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The pod of the launcher's last attempt."""
    launchers = [pod for pod in pods if is_role(pod, "launcher")]
    return max(launchers, key=lambda pod: pod["metadata"].get("creationTimestamp") or "", default=None)


def is_active(pod: Mapping[str, Any]) -> bool:
    """Whether the container of a pod is running, or may run later."""
    return pod["status"].get("phase") not in ("Succeeded", "Failed") and "terminated" not in _container(pod).get(
        "state", {}
    )


def remaining(pods: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of pods that still run although the job has ended. The result is empty if the launcher has ended.

    When the launcher ends, the operator deletes workers according to `cleanPodPolicy`. If workers are evicted, however,
    the operator marks the job as failed, and the other pods continue to run.
    """
    active = [pod for pod in pods if is_active(pod) and "deletionTimestamp" not in pod["metadata"]]
    return sorted(pod["metadata"]["name"] for pod in active) if newest_launcher(active) is not None else []


def attempt(launcher: Mapping[str, Any] | None) -> tuple[str, int] | None:
    """The pod whose log can be read, and the number of times that its container has restarted; None before the
    container has started."""
    if launcher is None:
        return None
    status = _container(launcher)
    if "running" in status.get("state", {}) or "terminated" in status.get("state", {}):
        return launcher["metadata"]["name"], status.get("restartCount", 0)
    return None


def _container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    statuses = pod["status"].get("containerStatuses") or [{}]
    return next((status for status in statuses if status.get("name") == LAUNCHER), statuses[0])


def _exit_code(launcher: Mapping[str, Any] | None) -> int | None:
    return None if launcher is None else _container(launcher).get("state", {}).get("terminated", {}).get("exitCode")


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _troubles(pods: Iterable[Mapping[str, Any]]) -> list[str]:
    """The problems of pods, or how pods have ended. Each text occurs only once, with the first pod and the number of
    other pods."""
    names: dict[str, list[str]] = {}
    for pod in pods:
        if trouble := _trouble(pod):
            names.setdefault(trouble, []).append(pod["metadata"]["name"])
    return [
        f"{pod_names[0]}{f' and {len(pod_names) - 1} more' if len(pod_names) > 1 else ''}{trouble}"
        for trouble, pod_names in names.items()
    ]


def _trouble(pod: Mapping[str, Any]) -> str:
    """A text to append to the name of a pod. It explains why the pod does not run, or how its container has ended. It
    is empty if neither is known."""
    status = pod["status"]
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f" cannot be placed: {condition.get('message') or condition.get('reason')}"
    container = _container(pod)
    state = container.get("state", {})
    waiting, terminated = state.get("waiting", {}), state.get("terminated", {})
    if waiting.get("reason") == "CrashLoopBackOff":  # the container waits for its restart
        terminated = container.get("lastState", {}).get("terminated", {})
    if waiting and not terminated and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return ": " + ": ".join(filter(None, (waiting["reason"], waiting.get("message"))))
    if terminated and terminated.get("exitCode"):
        ended = f" ended with exit code {terminated['exitCode']}"
        if terminated.get("reason") in (None, "Error"):
            return ended
        return f"{ended} ({': '.join(filter(None, (terminated['reason'], terminated.get('message'))))})"
    if status.get("phase") == "Failed":
        return ": " + (": ".join(filter(None, (status.get("reason"), status.get("message")))) or "failed")
    return ""
