"""Implements the interface `Scheduler` for Kubernetes, with an MPIJob for each job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hvdcomp.tools.launch.k8s.cluster import Cluster
from hvdcomp.tools.launch.k8s.errors import KubernetesError
from hvdcomp.tools.launch.k8s.follow import follow
from hvdcomp.tools.launch.k8s.manifest import JOB_LABEL, render
from hvdcomp.tools.launch.k8s.settings import KubernetesSettings
from hvdcomp.tools.launch.k8s.state import LAUNCHER, MPIJobState, attempt, newest_launcher, read_state
from hvdcomp.tools.launch.scheduler import Scheduler


@dataclass(frozen=True)
class MPIJob:
    """The name of a job, and its uid, which distinguishes it from other jobs with the same name."""

    name: str
    uid: str | None = None


class Kubernetes(Scheduler[KubernetesSettings, MPIJob]):
    """Submits, follows and ends the jobs in one namespace of a Kubernetes cluster.

    Args:
        namespace, context: the namespace and the kubeconfig's context, as in `Cluster`.
    """

    def __init__(self, namespace: str | None = None, context: str | None = None) -> None:
        self._cluster = Cluster(namespace, context)
        self.namespace = self._cluster.namespace

    def submit(self, settings: KubernetesSettings) -> MPIJob:
        created = self._cluster.create(render(settings))
        return MPIJob(settings.job.name, created["metadata"]["uid"])

    def state(self, job: MPIJob) -> MPIJobState:
        return self.look(job)[0]

    def look(self, job: MPIJob) -> tuple[MPIJobState, list[dict[str, Any]]]:
        """The state of a job, and its pods."""
        _, jobs = self._cluster.list_jobs(job.name)
        _, pods = self._cluster.list_pods(job.name)
        if not jobs:
            place = f"{self.namespace}/{job.name}"
            raise KubernetesError(
                f"there is no MPIJob {place}: see `hvdcomp launch k8s list --namespace {self.namespace}`", 404
            )
        events: list[dict[str, Any]] = []
        # Errors are ignored here, because events only explain the state, and a user may lack the permission to read
        # them.
        with contextlib.suppress(KubernetesError):
            _, events = self._cluster.list_events(job.name)
        return read_state(jobs[0], pods, events), pods

    def all(self) -> list[tuple[dict[str, Any], MPIJobState]]:
        """The MPIJobs of the namespace, each with its state, newest first."""
        _, jobs = self._cluster.list_jobs()
        pods: dict[str, list[dict[str, Any]]] = {}
        for pod in self._cluster.list_pods()[1]:
            pods.setdefault(pod["metadata"]["labels"][JOB_LABEL], []).append(pod)
        jobs.sort(key=lambda job: job["metadata"]["creationTimestamp"], reverse=True)
        return [(job, read_state(job, pods.get(job["metadata"]["name"], []))) for job in jobs]

    def follow(self, job: MPIJob, say: Callable[[str], None], write: Callable[[str], None]) -> MPIJobState:
        delete = f"hvdcomp launch k8s delete {job.name} --namespace {self.namespace}"
        return follow(
            self._cluster,
            job.name,
            uid=job.uid,
            report=lambda state: say(str(state)),
            lost=lambda why: say(f"{why}; asking again"),
            write=write,
            remain=lambda pods: say(
                f"these pods are still running, but their logs are no longer followed: {', '.join(pods)}; `{delete}` "
                "ends the job"
            ),
        )

    def log(self, job: MPIJob) -> Iterator[str]:
        launcher = attempt(newest_launcher(self._cluster.list_pods(job.name)[1]))
        if launcher is None:
            raise KubernetesError(f"{job.name} has no output yet: see `hvdcomp launch k8s status {job.name}`")
        for line in self._cluster.log(launcher[0], LAUNCHER, follow=False):
            yield line.partition(b" ")[2].decode(errors="replace")

    def cancel(self, job: MPIJob) -> None:
        self._cluster.delete(job.name, job.uid)
