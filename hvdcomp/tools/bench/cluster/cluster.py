"""`Cluster`, a context manager for the emulated cluster. At the end of its `with` block, `Cluster` removes the cluster,
even after an error."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from hvdcomp.tools.bench.cluster import launch, namespaces, records
from hvdcomp.tools.bench.cluster.backends import BACKENDS
from hvdcomp.tools.bench.cluster.errors import ClusterError
from hvdcomp.tools.bench.cluster.rates import parse_rate
from hvdcomp.tools.bench.cluster.records import STANDING, Facts, Record

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_numbers = itertools.count(1)  # numbers for the names of this process's clusters


class Cluster:
    """Emulated hosts, which exist from the start to the end of a `with` block.

    At the end of the block, the processes of the hosts are ended, and the hosts are removed. The hosts are also removed
    after an exception. In the main thread of a program, Ctrl-C, SIGTERM and SIGHUP raise an exception in the block, so
    the hosts are removed after these signals, too. If the process is killed, the next cluster removes the remains.

    Args:
        hosts: number of emulated hosts, 2 to 64.
        rate: the rate of each host's link in each direction, in the notation of `tc`, such as "100mbit" or "1gbit".
        standing: whether the hosts continue to exist after the block, until `remove` is called. If True,
            `Cluster.standing()` finds the cluster later. A machine can have only one standing cluster.

    Raises:
        ClusterError: if a value is wrong, the user is not root, or a required program is missing. When the block
            begins, this error is also raised if the hosts cannot be created, or if a standing cluster already exists.
    """

    def __init__(self, hosts: int, rate: str, *, standing: bool = False) -> None:
        if not 2 <= hosts <= namespaces.MOST_HOSTS:
            raise ClusterError(f"a cluster cannot have {hosts} host(s); use 2 to {namespaces.MOST_HOSTS} hosts")
        parse_rate(rate)
        namespaces.check_machine()
        self.hosts = hosts
        self.rate = rate
        self.name = STANDING if standing else f"p{os.getpid()}n{next(_numbers)}"
        self._record: Record | None = None
        self._made_before = False
        self._stays = False
        self._handlers: dict[signal.Signals, Any] = {}
        self._leaving = False

    @classmethod
    def standing(cls) -> Cluster:
        """The standing cluster, for use in a `with` block.

        Raises:
            ClusterError: if there is no standing cluster. The `with` block also raises this error if another process
                uses the cluster.
        """
        facts = records.read(STANDING)
        if facts is None or not facts.standing:
            raise ClusterError(
                "no cluster is running; create a cluster with `python -m hvdcomp.tools.bench.cluster up --hosts 4 "
                "--rate 1gbit`, or give --hosts and --rate to create a cluster for this run"
            )
        cluster = cls(facts.hosts, facts.rate, standing=True)
        cluster._made_before = True
        return cluster

    def __enter__(self) -> Cluster:
        self._leaving = False
        self._catch_signals()
        try:
            with records.exclusive():
                namespaces.remove_leftovers()
                self._record = self._take_record()
            if self._made_before:
                namespaces.stop_processes(self.name)  # the processes of a run that was killed
            else:
                namespaces.make(self.name, self.hosts, self.rate)
            self._stays = self.name == STANDING
            self._record.write(Facts(self.hosts, self.rate, os.getpid(), standing=self._stays))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def remove(self) -> None:
        """Removes a standing cluster at the end of its `with` block. Call it inside the block."""
        self._stays = False

    def run(
        self,
        command: Sequence[str],
        *,
        ranks: int | None = None,
        backend: str = "horovod",
        env: Mapping[str, str] | None = None,
        output: Callable[[str], None] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Runs a command under Horovod or torch.distributed and waits for it.

        Args:
            command: the program and its arguments. Every rank runs it.
            ranks: the number of ranks, a multiple of the number of hosts. Default: one rank on each host.
            backend: the library that connects the ranks: "horovod" or "torch" (torch.distributed).
            env: variables to add to the environment of this process.
            output: a function that is called, in another thread, with each line of stdout and stderr (including the
                line end). Default: the lines go to the stdout and stderr of this process.
            timeout: seconds after which all ranks are ended; None for no limit.

        Returns:
            The exit code of the rank that failed first, or 0.

        Raises:
            ClusterError: if the number of ranks is wrong, or the backend is unknown.
            subprocess.TimeoutExpired: after the timeout.
        """
        ranks = self.hosts if ranks is None else ranks
        if ranks < self.hosts or ranks % self.hosts:
            raise ClusterError(
                f"{ranks} ranks on {self.hosts} hosts: the number of ranks must be a multiple of {self.hosts}"
            )
        if backend not in BACKENDS:
            raise ClusterError(f"the backend {backend!r} is not one of {', '.join(BACKENDS)}")
        if not command:
            raise ClusterError("no command to run was given")
        self._held()
        full = launch.ranks_command(backend, self.name, self.hosts, ranks, command)
        try:
            return launch.stream(full, launch.variables(env), output, timeout)
        finally:
            namespaces.stop_processes(self.name)

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a command on a single host. options: the options of subprocess.Popen."""
        self._held()
        return subprocess.Popen(launch.host_command(self.name, host, command), text=True, **options)

    def _held(self) -> Record:
        if self._record is None:
            raise ClusterError("the cluster does not exist: use it within its `with` block")
        return self._record

    def _take_record(self) -> Record:
        record = Record(self.name)
        facts = records.read(self.name)
        if facts is not None and facts.standing:
            if not self._made_before:
                record.release()
                raise ClusterError(
                    f"a cluster of {facts.hosts} hosts at {facts.rate} is already running; leave out --hosts and "
                    "--rate to use this cluster, or remove it with python -m hvdcomp.tools.bench.cluster down"
                )
            self._stays = True
        elif self._made_before:
            record.remove()
            raise ClusterError("the cluster was just removed by another process")
        else:
            record.write(Facts(self.hosts, self.rate, os.getpid()))
        return record

    def _leave(self) -> None:
        self._leaving = True
        try:
            if self._record is not None and self._stays:
                self._record.release()
            elif self._record is not None:
                namespaces.remove(self.name)
                self._record.remove()
            self._record = None
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers = {}

    def _catch_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, for example, ignores SIGHUP
                    self._handlers[number] = signal.signal(number, self._interrupted)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._leaving:
            return  # the cluster is already being removed
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
