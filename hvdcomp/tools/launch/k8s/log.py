"""Reads the log of the launcher. Every line is read exactly once, even if connections are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from hvdcomp.tools.launch.k8s.cluster import Cluster
from hvdcomp.tools.launch.k8s.errors import KubernetesError
from hvdcomp.tools.launch.k8s.state import LAUNCHER

PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds before the next request to the API server. The pauses become longer while the server does not answer."""


def pause(failures: int) -> float:
    """The seconds to wait before the next request. failures: the number of failures in a row."""
    return PAUSES[min(failures, len(PAUSES) - 1)]


class Log:
    """Reads the logs of a job's attempts, one after the other, each to its end.

    Args:
        cluster: the cluster of the job.
        write: function that is called with each line, in another thread.
        lost: function that is called with the reason, in the same thread, if access to the log is denied. The request
            is then repeated.
        patience: seconds for which a denied request for the log is repeated.

    Attributes:
        thread: the thread that reads the log; None while there is nothing to read.
    """

    def __init__(
        self, cluster: Cluster, write: Callable[[str], None], lost: Callable[[str], None], patience: float
    ) -> None:
        self._cluster, self._write, self._lost, self._patience = cluster, write, lost, patience
        self._attempt: tuple[str, int] | None = None
        self.thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._stopped = threading.Event()
        self._lines = NewLines()

    def read(self, attempt: tuple[str, int] | None) -> None:
        """Starts reading the log of this attempt, unless it is already being read."""
        if attempt is None or attempt == self._attempt:
            return
        self.finish()
        if self._attempt is None or self._attempt[0] != attempt[0]:
            # Only a new pod needs new counters. A container that restarts in its pod continues with later times.
            self._lines = NewLines()
        self._attempt, self._ended = attempt, threading.Event()
        self.thread = threading.Thread(target=self._run, args=(attempt[0], self._ended), daemon=True, name="log")
        self.thread.start()

    def finish(self, seconds: float | None = None) -> None:
        """Waits until all lines of the attempt have been written. Call it after the end of the attempt.

        Args:
            seconds: longest time to wait until the log has been read completely, in seconds; None for no limit.
        """
        self._ended.set()
        if self.thread is not None:
            self.thread.join(seconds)
            if not self.thread.is_alive():
                self.thread = None

    def stop(self) -> None:
        """Stops writing lines and repeating requests."""
        self._stopped.set()
        self._ended.set()

    def _run(self, pod: str, ended: threading.Event) -> None:
        failures, since = 0, 0.0
        while not self._stopped.is_set():
            last = ended.is_set()  # checked before reading, because a log that is read after the end is complete
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
                if failures == 0:
                    since = time.monotonic()
                    if error.denied:
                        # The remedy for a missing permission helps only if the permission was never granted.
                        self._lost(str(error) if self._lines.seconds() is None else error.reason)
                # 400 means that the node of the pod does not answer.
                worth = error.transient or error.denied or error.status == 400
                waited = time.monotonic() - since
                more = failures < len(PAUSES) if last else not error.denied or waited <= self._patience
                if not (worth and more):
                    self._write(f"hvdcomp: {error}; the end of the log is missing")
                    return
                failures += 1
            (self._stopped if last else ended).wait(pause(failures))


class NewLines:
    """The new lines of a log that is read several times.

    Each line begins with its time. Several lines may have the same time, so the lines with the latest time are counted.
    """

    def __init__(self) -> None:
        self._time = ""
        self._count = 0
        self._received: float | None = None

    def seconds(self) -> int | None:
        """The number of seconds that a request must cover, with a margin, to get all new lines at the end of the log;
        None before the first line."""
        return None if self._received is None else int(time.monotonic() - self._received) + 30

    def of(self, lines: Iterable[bytes]) -> Iterator[str]:
        """The new lines of `lines`, without their times."""
        border, counted, repeated = self._time, self._count, 0
        for line in lines:
            stamp, _, text = line.decode(errors="replace").partition(" ")
            moment = _sortable(stamp)
            if moment < border:
                continue
            if moment == border:
                repeated += 1
                if repeated <= counted:
                    continue
            if moment > self._time:
                self._time, self._count = moment, 0
            if moment == self._time:
                self._count += 1
            self._received = time.monotonic()
            yield text


def _sortable(stamp: str) -> str:
    """Extends a time that Kubernetes wrote, such as "2026-01-02T03:04:05.12Z", to nine digits after the point, so that
    times can be compared as text."""
    seconds, _, fraction = stamp.rstrip("Z").partition(".")
    return f"{seconds}.{fraction:0<9}"
