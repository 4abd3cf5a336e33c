"""Follows a job to its end: its state and its launcher's log. A dropped connection is opened again.

Three threads watch the MPIJob, its pods and the operator's events about it; each lists first, then watches from there,
and lists again whenever a watch ends. A fourth reads the log. The caller's thread combines their updates.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from hvdcomp.tools.launch.k8s.cluster import OPENED, Cluster
from hvdcomp.tools.launch.k8s.errors import KubernetesError
from hvdcomp.tools.launch.k8s.log import Log, pause
from hvdcomp.tools.launch.k8s.state import MPIJobState, attempt, is_active, newest_launcher, read_state, remaining

PATIENCE = 300.0
"""Seconds for which the API server may be silent, or may deny a request that it granted before, as it does while it
starts. After that, following ends; the job itself continues."""

STILL_WRITING = 10.0
"""Seconds for which the log is still read if the launcher runs although its job has failed."""

Objects = list[dict[str, Any]]


def follow(
    cluster: Cluster,
    name: str,
    *,
    uid: str | None = None,
    report: Callable[[MPIJobState], None],
    lost: Callable[[str], None],
    write: Callable[[str], None],
    remain: Callable[[list[str]], None],
    patience: float = PATIENCE,
) -> MPIJobState:
    """Follow a job to its end; returns its last state.

    Arguments:
        cluster, name: the cluster and the name of the job.
        uid: uid of the MPIJob, to notice if another job of the same name has replaced it.
        report: function that is called with each new state.
        lost: function that is called with the reason, perhaps in another thread, when answers cease.
        write: function that is called with each line of the launcher's log, in another thread.
        remain: function that is called with the names of the running pods if the job has failed.
        patience: seconds for which the server may be silent.

    Raises:
        KubernetesError: the server refuses, or did not answer for `patience` seconds.
    """
    updates: queue.Queue[tuple[str, Objects | KubernetesError]] = queue.Queue()
    watches = [
        _Watch(lambda: cluster.list_jobs(name), lambda version: cluster.watch_jobs(name, version), updates, "jobs"),
        _Watch(lambda: cluster.list_pods(name), lambda version: cluster.watch_pods(name, version), updates, "pods"),
        _Watch(
            lambda: cluster.list_events(name), lambda version: cluster.watch_events(name, version), updates, "events"
        ),
    ]
    log = Log(cluster, write, lost, patience)
    latest: dict[str, Objects] = {"events": []}
    state: MPIJobState | None = None
    answered = {watch.kind: time.monotonic() for watch in watches}
    silent: set[str] = set()
    try:
        for watch in watches:
            watch.start()
        while True:
            kind, objects = updates.get()
            if isinstance(objects, KubernetesError):
                if kind == "events":  # events only explain, and reading them needs a right
                    continue
                if not objects.transient or time.monotonic() - answered[kind] > patience:
                    raise objects
                if not silent:
                    lost(objects.reason)
                silent.add(kind)
                continue
            answered[kind] = time.monotonic()
            silent.discard(kind)
            latest[kind] = objects
            if len(latest) < len(watches):
                continue
            job = next((job for job in latest["jobs"] if uid in (None, job["metadata"]["uid"])), None)
            now = read_state(job, latest["pods"], latest["events"])
            log.read(attempt(newest_launcher(latest["pods"])))
            if now.ended:
                pods = _pods(cluster, name, latest["pods"])
                now = read_state(job, pods)
                report(now)
                log.finish(_still_writing(pods))
                active = remaining(_pods(cluster, name, pods)) if now.phase == "failed" else []
                if active:
                    remain(active)
                return now
            if now != state:
                report(now)
            state = now
    finally:
        log.stop()
        for watch in watches:
            watch.stop()
        cluster.end([thread for thread in (*watches, log.thread) if thread is not None and thread.is_alive()])


def _pods(cluster: Cluster, name: str, known_pods: Objects) -> Objects:
    """The current pods, as their watch may lag behind the MPIJob's; the known pods if there is no answer."""
    try:
        return cluster.list_pods(name)[1]
    except KubernetesError:
        return known_pods


def _still_writing(pods: Objects) -> float | None:
    """Seconds to wait for the end of an ended job's log; None if its launcher has ended, so that its log ends."""
    launcher = newest_launcher(pods)
    if launcher is None or not is_active(launcher):
        return None
    # A launcher that is being deleted may write until its grace period is over.
    return STILL_WRITING + (launcher["metadata"].get("deletionGracePeriodSeconds") or 0)


class _Watch(threading.Thread):
    """Puts all objects of a kind into a queue whenever one changes, and its errors.

    A denied request is repeated if it was granted before. The first watch is also repeated if the server refuses it
    with 401 although it knew the user when it listed the objects: the server may have restarted in between.
    """

    def __init__(
        self,
        list_all: Callable[[], tuple[str, Objects]],
        watch: Callable[[str], Iterable[tuple[str, dict[str, Any]]]],
        updates: queue.Queue[tuple[str, Objects | KubernetesError]],
        kind: str,
    ) -> None:
        super().__init__(daemon=True, name=f"watch {kind}")  # it may wait for an event when the job has ended
        self._list, self._watch, self._updates, self.kind = list_all, watch, updates, kind
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        failures = 0
        granted: set[str] = set()
        while not self._stopped.is_set():
            request = "list"
            try:
                version, listed = self._list()
                granted.add(request)
                failures = 0
                objects = {item["metadata"]["uid"]: item for item in listed}
                self._updates.put((self.kind, list(objects.values())))
                request = "watch"
                for change, changed in self._watch(version):
                    if self._stopped.is_set():
                        return
                    if change == OPENED:
                        granted.add(request)
                        continue
                    if change == "DELETED":
                        objects.pop(changed["metadata"]["uid"], None)
                    elif change in ("ADDED", "MODIFIED"):
                        objects[changed["metadata"]["uid"]] = changed
                    self._updates.put((self.kind, list(objects.values())))
            except KubernetesError as error:
                error.transient |= error.denied and (request in granted or (error.status == 401 and bool(granted)))
                if error.status != 410:  # the version is too old: list again
                    self._updates.put((self.kind, error))
                if not error.transient:
                    return
                failures += 1
            except Exception as error:
                # Without this thread the job's end would go unnoticed.
                self._updates.put((self.kind, KubernetesError(f"{self.kind} cannot be watched: {error!r}")))
                return
            # Also after a watch that ended normally, so that a server that ends each at once is not flooded.
            self._stopped.wait(pause(failures))
