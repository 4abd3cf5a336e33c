"""Ending threads that wait for the API server.

Python cannot end a thread that waits in C. It must not exit while such a thread exists either: the Kubernetes client
runs inside Rust (pydantic), and there the end of a thread aborts the process. Closing the connection ends the wait.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Iterable
from typing import Any


class Connections:
    """Collects all connections that a pool manager of urllib3 opens after this object was created."""

    def __init__(self, manager: Any) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._refusing = False
        manager.pool_classes_by_scheme = {
            scheme: self._noting(pool) for scheme, pool in manager.pool_classes_by_scheme.items()
        }

    def end(self, threads: Iterable[threading.Thread]) -> None:
        """Cut all connections, and return when their threads have ended.

        The threads' waits fail with an error, and the threads must not retry for ever. A thread that is connecting may
        take until the end of its timeout.
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
        """A subclass of the pool's class, which notes its connections."""

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
            raise ConnectionAbortedError("the job is no longer followed")
