"""Follows a job until it ends, and reports its state and the log of the launcher. Lost connections are opened again.

Three threads watch the MPIJob, its pods, and the operator's events about it. Each thread first lists the objects, and
then watches for changes. Whenever a watch ends, the thread lists the objects again. A fourth thread reads the log. The
thread of the caller combines the updates.
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
"""The number of seconds for which the API server may be silent, or may deny a request that it granted before. Both may
happen while the server starts. After this time, `follow` raises an error; the job itself continues."""

STILL_WRITING = 10.0
"""If the launcher still runs although its job has failed, its log is read for this number of seconds."""

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
    """Follows a job to its end, and returns its last state.

    Args:
        cluster, name: the cluster and the name of the job.
        uid: uid of the MPIJob, with which the function notices if a different job with the same name has replaced the
            job.
        report: function that is called with each new state.
        lost: a function that is called with the reason when the server no longer answers. It may be called in another
            thread.
        write: function that is called with each line of the launcher's log, in another thread.
        remain: function that is called with the names of the running pods if the job has failed.
        patience: the longest time without an answer from the server, in seconds.

    Raises:
        KubernetesError: if the server refuses, or has not answered for `patience` seconds.
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
                # Errors are ignored here, because events only explain the state, and a user may lack the permission to
                # read them.
                if kind == "events":
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
    """The current pods, or the known pods if there is no answer. The pods are requested because the watch of pods may
    lag behind the watch of the MPIJob."""
    try:
        return cluster.list_pods(name)[1]
    except KubernetesError:
        return known_pods


def _still_writing(pods: Objects) -> float | None:
    """The seconds to wait for the end of the log after a job has ended; None if the launcher has ended, because its log
    then ends too."""
    launcher = newest_launcher(pods)
    if launcher is None or not is_active(launcher):
        return None
    # A launcher that is being deleted may write until the end of its grace period.
    return STILL_WRITING + (launcher["metadata"].get("deletionGracePeriodSeconds") or 0)


class _Watch(threading.Thread):
    """Puts all objects of a kind into a queue whenever one of them changes. Also puts errors of the watch into the
    queue.

    A request that is denied, although it was granted before, is repeated. The first watch is also repeated if the
    server granted the list but answers the watch with 401. The server may have restarted between these two requests.
    """

    def __init__(
        self,
        list_all: Callable[[], tuple[str, Objects]],
        watch: Callable[[str], Iterable[tuple[str, dict[str, Any]]]],
        updates: queue.Queue[tuple[str, Objects | KubernetesError]],
        kind: str,
    ) -> None:
        # a daemon thread, because it may still wait for an event when the job has ended
        super().__init__(daemon=True, name=f"watch {kind}")
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
                if error.status != 410:  # 410 means that the version is too old, and the objects must be listed again
                    self._updates.put((self.kind, error))
                if not error.transient:
                    return
                failures += 1
            except Exception as error:
                # This thread ends here. Without an error, the caller would wait forever for the end of the job.
                self._updates.put((self.kind, KubernetesError(f"{self.kind} cannot be watched: {error!r}")))
                return
            # Wait even after a watch that ended normally, because a server may end every watch immediately.
            self._stopped.wait(pause(failures))
