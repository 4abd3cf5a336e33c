"""Following a job to its end: its state and its launcher's log, through dropped connections.

Two threads watch the MPIJob and its pods; each lists first, then watches from there, and lists anew whenever a watch
ends. A third reads the log. The caller's thread puts together what they see.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hvdcomp.launch.k8s.cluster import Cluster, KubernetesError
from hvdcomp.launch.k8s.state import LAUNCHER, MPIJobState, attempt, newest_launcher, read_state

PATIENCE = 300.0
"""Seconds without any answer of the API server after which following is given up. The job itself goes on."""

_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds before asking again, growing while there is no answer."""

Objects = list[dict[str, Any]]


def follow(
    cluster: Cluster,
    name: str,
    *,
    uid: str | None = None,
    report: Callable[[MPIJobState], None],
    lost: Callable[[str], None],
    write: Callable[[str], None],
    patience: float = PATIENCE,
) -> MPIJobState:
    """Wait for the end of a job, while passing on what happens.

    Arguments:
        uid: of the MPIJob, to notice that it was replaced by another of its name.
        report: is given each new state.
        lost: is told why, when answers cease; following goes on.
        write: is given each line of the launcher's log, without its end; from another thread.

    Raises:
        KubernetesError: the server refuses, or did not answer for `patience` seconds.
    """
    seen: queue.Queue[tuple[str, Objects | KubernetesError]] = queue.Queue()
    watches = [
        _Watch(lambda: cluster.list_jobs(name), lambda version: cluster.watch_jobs(name, version), seen, "jobs"),
        _Watch(lambda: cluster.list_pods(name), lambda version: cluster.watch_pods(name, version), seen, "pods"),
    ]
    log = _Log(cluster, write)
    latest: dict[str, Objects] = {}
    state: MPIJobState | None = None
    answered, silent = time.monotonic(), False
    try:
        for watch in watches:
            watch.start()
        while True:
            kind, objects = seen.get()
            if isinstance(objects, KubernetesError):
                if not objects.transient or time.monotonic() - answered > patience:
                    raise objects
                if not silent:
                    lost(str(objects))
                silent = True
                continue
            answered, silent = time.monotonic(), False
            latest[kind] = objects
            if len(latest) < len(watches):
                continue
            job = next((one for one in latest["jobs"] if uid in (None, one["metadata"]["uid"])), None)
            now = read_state(job, latest["pods"])
            log.read(attempt(newest_launcher(latest["pods"])))
            if now.ended:
                log.finish()
                return _end(cluster, name, job, now, report)
            if now != state:
                report(now)
            state = now
    finally:
        log.stop()
        for watch in watches:
            watch.stop()
        cluster.end([one for one in (*watches, log.thread) if one is not None and one.is_alive()])


def _end(
    cluster: Cluster, name: str, job: dict[str, Any] | None, state: MPIJobState, report: Callable[[MPIJobState], None]
) -> MPIJobState:
    """The last state, with the pods as they are now: their watch may be behind the MPIJob's."""
    if state.phase == "failed":
        with contextlib.suppress(KubernetesError):  # the state is known; only the exit code may be an earlier attempt's
            state = read_state(job, cluster.list_pods(name)[1])
    report(state)
    return state


class _Watch(threading.Thread):
    """Puts all objects into a queue whenever one changes, and what goes wrong."""

    def __init__(
        self,
        list_all: Callable[[], tuple[str, Objects]],
        watch: Callable[[str], Iterable[tuple[str, dict[str, Any]]]],
        seen: queue.Queue[tuple[str, Objects | KubernetesError]],
        kind: str,
    ) -> None:
        super().__init__(daemon=True, name=f"watch {kind}")  # it may be waiting for an event when the job has ended
        self._list, self._watch, self._seen, self._kind = list_all, watch, seen, kind
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                version, listed = self._list()
                failures = 0
                objects = {one["metadata"]["uid"]: one for one in listed}
                self._seen.put((self._kind, list(objects.values())))
                for change, one in self._watch(version):
                    if self._stopped.is_set():
                        return
                    if change == "DELETED":
                        objects.pop(one["metadata"]["uid"], None)
                    elif change in ("ADDED", "MODIFIED"):
                        objects[one["metadata"]["uid"]] = one
                    self._seen.put((self._kind, list(objects.values())))
            except KubernetesError as error:
                if error.status != 410:  # too old a version is no trouble: list anew
                    self._seen.put((self._kind, error))
                if not error.transient:
                    return
                failures += 1
            except Exception as error:
                # Without this thread the job's end would not be noticed.
                self._seen.put((self._kind, KubernetesError(f"{self._kind} cannot be watched: {error!r}")))
                return
            # Also after a watch that ended in good order, so that a server that ends each at once is not flooded.
            self._stopped.wait(_PAUSES[min(failures, len(_PAUSES) - 1)])


class _Log:
    """Reads the log of one attempt after the other, each to its end.

    Attributes:
        thread: which reads; None while there is nothing to read.
    """

    def __init__(self, cluster: Cluster, write: Callable[[str], None]) -> None:
        self._cluster, self._write = cluster, write
        self._attempt: tuple[str, int] | None = None
        self.thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._stopped = threading.Event()
        self._lines = NewLines()

    def read(self, attempt: tuple[str, int] | None) -> None:
        """Read this attempt, if it is not the one that is read already."""
        if attempt is None or attempt == self._attempt:
            return
        self.finish()
        if self._attempt is None or self._attempt[0] != attempt[0]:
            self._lines = NewLines()  # a container that restarts in its pod goes on by the same clock
        self._attempt, self._ended = attempt, threading.Event()
        self.thread = threading.Thread(target=self._run, args=(attempt[0], self._ended), daemon=True, name="log")
        self.thread.start()

    def finish(self) -> None:
        """After the end of the attempt: return when everything that it wrote has been passed on."""
        self._ended.set()
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def stop(self) -> None:
        """Pass on no line after the one that is being passed on, if any, and try nothing again."""
        self._stopped.set()
        self._ended.set()

    def _run(self, pod: str, ended: threading.Event) -> None:
        failures = 0
        while not self._stopped.is_set():
            last = ended.is_set()  # asked before reading: a reading that begins after the end is complete
            try:
                log = self._cluster.log(pod, LAUNCHER, follow=not last, since=self._lines.seconds())
                for line in self._lines.of(log):
                    if self._stopped.is_set():
                        return
                    failures = 0
                    self._write(line)
                if last:
                    return
            except KubernetesError as error:
                if self._stopped.is_set():
                    return
                # 400: the node of the pod does not answer
                given_up = last and failures >= len(_PAUSES)
                if given_up or (not error.transient and error.status != 400):
                    self._write(f"hvdcomp: {error}; the end of the log is missing")
                    return
                failures += 1
            (self._stopped if last else ended).wait(_PAUSES[min(failures, len(_PAUSES) - 1)])


class NewLines:
    """Of a log that is read several times, the lines that were not seen before.

    Each line begins with its time. Several may have the same, so those of the last time seen are counted.
    """

    def __init__(self) -> None:
        self._time = ""
        self._count = 0
        self._received: float | None = None

    def seconds(self) -> int | None:
        """How many last seconds of the log hold everything new, by a margin; None before the first line."""
        return None if self._received is None else int(time.monotonic() - self._received) + 30

    def of(self, lines: Iterable[bytes]) -> Iterator[str]:
        """The new ones of these lines, without their times."""
        border, known, repeated = self._time, self._count, 0
        for line in lines:
            stamp, _, text = line.decode(errors="replace").partition(" ")
            moment = _sortable(stamp)
            if moment < border:
                continue
            if moment == border:
                repeated += 1
                if repeated <= known:
                    continue
            if moment > self._time:
                self._time, self._count = moment, 0
            if moment == self._time:
                self._count += 1
            self._received = time.monotonic()
            yield text


def _sortable(stamp: str) -> str:
    """A time as Kubernetes writes it, "2026-01-02T03:04:05.12Z", with all nine digits."""
    seconds, _, fraction = stamp.rstrip("Z").partition(".")
    return f"{seconds}.{fraction:0<9}"
