"""Following a job to its end: its state and its launcher's log, through dropped connections.

Three threads watch the MPIJob, its pods and what the operator says about it; each lists first, then watches from there,
and lists anew whenever a watch ends. A fourth reads the log. The caller's thread puts together what they see.
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
"""Seconds for which the API server may not answer, or deny what it granted before, until following is given up. It does
both while it starts. The job itself goes on."""

STILL_WRITING = 10.0
"""Seconds for which the log of a launcher is read on that runs although its job has failed."""

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
    """Wait for the end of a job, while passing on what happens.

    Arguments:
        uid: of the MPIJob, to notice that it was replaced by another of its name.
        report: is given each new state.
        lost: is told why, maybe in another thread, when answers cease; following goes on.
        write: is given each line of the launcher's log, without its end; from another thread.
        remain: is given the names of the pods that go on, if the job has failed and its launcher runs all the same.

    Raises:
        KubernetesError: the server refuses, or did not answer for `patience` seconds.
    """
    seen: queue.Queue[tuple[str, Objects | KubernetesError]] = queue.Queue()
    watches = [
        _Watch(lambda: cluster.list_jobs(name), lambda version: cluster.watch_jobs(name, version), seen, "jobs"),
        _Watch(lambda: cluster.list_pods(name), lambda version: cluster.watch_pods(name, version), seen, "pods"),
        _Watch(lambda: cluster.list_events(name), lambda version: cluster.watch_events(name, version), seen, "events"),
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
            kind, objects = seen.get()
            if isinstance(objects, KubernetesError):
                if kind == "events":  # they only explain, and not everybody may read them
                    continue
                if not objects.transient or time.monotonic() - answered[kind] > patience:
                    raise objects
                if not silent:
                    lost(objects.said)
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
                going_on = remaining(_pods(cluster, name, pods)) if now.phase == "failed" else []
                if going_on:
                    remain(going_on)
                return now
            if now != state:
                report(now)
            state = now
    finally:
        log.stop()
        for watch in watches:
            watch.stop()
        cluster.end([thread for thread in (*watches, log.thread) if thread is not None and thread.is_alive()])


def _pods(cluster: Cluster, name: str, known: Objects) -> Objects:
    """The pods as they are now, as their watch may be behind the MPIJob's; those that are known if nothing answers."""
    try:
        return cluster.list_pods(name)[1]
    except KubernetesError:
        return known


def _still_writing(pods: Objects) -> float | None:
    """Seconds to wait for the end of the log of a job that has ended; None if its launcher has ended, and its log so
    has an end."""
    launcher = newest_launcher(pods)
    if launcher is None or not is_active(launcher):
        return None
    # One that is being deleted may write until its grace is over.
    return STILL_WRITING + (launcher["metadata"].get("deletionGracePeriodSeconds") or 0)


class _Watch(threading.Thread):
    """Puts all objects of a kind into a queue whenever one changes, and what goes wrong.

    What is denied is worth asking for again if it was granted before.
    """

    def __init__(
        self,
        list_all: Callable[[], tuple[str, Objects]],
        watch: Callable[[str], Iterable[tuple[str, dict[str, Any]]]],
        seen: queue.Queue[tuple[str, Objects | KubernetesError]],
        kind: str,
    ) -> None:
        super().__init__(daemon=True, name=f"watch {kind}")  # it may be waiting for an event when the job has ended
        self._list, self._watch, self._seen, self.kind = list_all, watch, seen, kind
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        failures = 0
        granted: set[str] = set()
        while not self._stopped.is_set():
            asked = "list"
            try:
                version, listed = self._list()
                granted.add(asked)
                failures = 0
                objects = {item["metadata"]["uid"]: item for item in listed}
                self._seen.put((self.kind, list(objects.values())))
                asked = "watch"
                for change, changed in self._watch(version):
                    if self._stopped.is_set():
                        return
                    if change == OPENED:
                        granted.add(asked)
                        continue
                    if change == "DELETED":
                        objects.pop(changed["metadata"]["uid"], None)
                    elif change in ("ADDED", "MODIFIED"):
                        objects[changed["metadata"]["uid"]] = changed
                    self._seen.put((self.kind, list(objects.values())))
            except KubernetesError as error:
                error.transient |= error.denied and asked in granted
                if error.status != 410:  # too old a version is no trouble: list anew
                    self._seen.put((self.kind, error))
                if not error.transient:
                    return
                failures += 1
            except Exception as error:
                # Without this thread the job's end would not be noticed.
                self._seen.put((self.kind, KubernetesError(f"{self.kind} cannot be watched: {error!r}")))
                return
            # Also after a watch that ended in good order, so that a server that ends each at once is not flooded.
            self._stopped.wait(pause(failures))
