"""Ending threads that wait for the API server.

Python cannot end a thread that waits in C, and must not exit beside one either: the Kubernetes client's calls run
inside Rust (pydantic), and a thread that Python ends there aborts the process. A cut connection ends the wait.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Iterable
from typing import Any


class Connections:
    """All connections that a pool manager of urllib3 opens from now on."""

    def __init__(self, manager: Any) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._refusing = False
        manager.pool_classes_by_scheme = {
            scheme: self._noting(pool) for scheme, pool in manager.pool_classes_by_scheme.items()
        }

    def end(self, threads: Iterable[threading.Thread]) -> None:
        """Cut all connections, and return when these threads have ended.

        They get an error from what they wait for, and must not try again for ever. A thread that is just connecting
        may take as long as it was given to connect.
        """
        with self._lock:
            self._refusing = True
            for connection in self._sockets:
                with contextlib.suppress(OSError):  # closed meanwhile
                    # Not SSLSocket's method, which changes what a reader uses.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)
        try:
            for thread in threads:
                thread.join()
        finally:
            self._refusing = False

    def _noting(self, pool: Any) -> Any:
        """The same class of pools, whose connections are noted."""

        class Connection(pool.ConnectionCls):
            def connect(connection: Any) -> None:  # noqa: N805 - self is that of Connections
                self._refuse()
                super().connect()
                with self._lock:
                    # Through a proxy that is itself reached by TLS, urllib3 wraps the socket.
                    self._sockets.add(getattr(connection.sock, "socket", connection.sock))
                try:
                    self._refuse()
                except OSError:
                    connection.close()
                    raise

        return type(pool.__name__, (pool,), {"ConnectionCls": Connection})

    def _refuse(self) -> None:
        if self._refusing:
            raise ConnectionAbortedError("it is no longer waited for")
