"""Ends threads that wait for the API server.

Python cannot end a thread that waits in C code, and must not exit while such a thread exists. The reason is that the
Kubernetes client runs inside Rust code (pydantic), and a thread that ends there aborts the process. Closing its
connection makes a thread stop waiting.
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
        """Closes all connections, and returns when their threads have ended.

        An error is raised in the threads that wait for an answer. These threads must not retry without limit. A thread
        that is just connecting may continue until its timeout.
        """
        with self._lock:
            self._refusing = True
            for connection in self._sockets:
                with contextlib.suppress(OSError):  # The connection may already be closed.
                    # SSLSocket's own method is not used, because it changes attributes that the reading thread uses.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)
        try:
            for thread in threads:
                thread.join()
        finally:
            self._refusing = False

    def _noting(self, pool: Any) -> Any:
        """A subclass of the pool's class that records its connections."""

        class Connection(pool.ConnectionCls):
            def connect(connection: Any) -> None:  # noqa: N805 - self is that of Connections
                self._refuse()
                super().connect()
                with self._lock:
                    # If the proxy is reached through TLS, urllib3 wraps the socket.
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
