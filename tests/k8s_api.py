"""A server for the part of the Kubernetes API that `hvdcomp launch k8s` uses, over real sockets: create, list, watch
and delete of MPIJobs, pods and events, logs, and errors as Status objects (`tests.k8s_http`). The test changes the
objects as the mpi-operator and the nodes would.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.k8s_http import NAMESPACE, make_handler


def make_certificate(folder: Path) -> Path:
    """A key and a certificate signed with it, for 127.0.0.1, in one file. Needs the command `openssl`."""
    file = folder / "certificate.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", file,
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    file.write_text(file.read_text() + (folder / "key.pem").read_text())
    return file


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client may go at any time
            super().handle_error(request, client_address)


class KubernetesApi:
    """The objects, their changes, and the requests of the clients.

    Arguments:
        certificate: of `make_certificate`, to speak TLS.

    Attributes:
        requests: (verb, path, query) of each request.
        fail: called before each answer; returns None, or an HTTP status and a message.
        drop: called in each watch or log with the number of sent lines; True closes the connection.
        end: as `drop`, but the server completes the answer.
        stall: called before each answer; while it returns True, the server sends "100 Continue" every millisecond, so
            that the client's thread waits for the answer and wakes all the time.
    """

    def __init__(self, certificate: Path | None = None) -> None:
        self.changed = threading.Condition()
        self.version = 100
        self.oldest = 0
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.history: list[tuple[int, str, str, dict[str, Any]]] = []
        self.logs: dict[str, list[bytes]] = {}
        self.open_logs: set[str] = set()
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.fail: Callable[[str, str, dict[str, str]], tuple[int, str] | None] = lambda verb, path, query: None
        self.drop: Callable[[str, int], bool] = lambda path, lines: False
        self.end: Callable[[str, int], bool] = lambda path, lines: False
        self.stall: Callable[[str, str], bool] = lambda verb, path: False
        self.stopping = False
        self.generation = 0
        self.denials: list[int] = []
        self.server = _Server(("127.0.0.1", 0), make_handler(self))
        self.certificate = certificate
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            # The handshake belongs to the thread of the connection, at its first read, not to the one that accepts.
            self.server.socket = context.wrap_socket(
                self.server.socket, server_side=True, do_handshake_on_connect=False
            )
        scheme = "http" if certificate is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[KubernetesApi]:
        thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            with self.changed:
                self.stopping = True
                self.changed.notify_all()
            self.server.shutdown()
            self.server.server_close()
            thread.join()

    def write_kubeconfig(self, path: Path, **fields: str) -> Path:
        """A kubeconfig for this server, with other fields of its cluster; JSON is YAML."""
        cluster = {"server": self.url}
        if self.certificate is not None:
            cluster["certificate-authority-data"] = base64.b64encode(self.certificate.read_bytes()).decode()
        cluster |= fields
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
            "contexts": [
                {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}},
                {"name": "bare", "context": {"cluster": "c", "user": "u"}},
            ],
        }
        path.write_text(json.dumps(config))
        return path

    # What the cluster does.

    def put(self, kind: str, manifest: dict[str, Any]) -> dict[str, Any]:
        """Create or replace an object of the kind "mpijobs" or "pods"."""
        with self.changed:
            self.version += 1
            metadata = manifest["metadata"]
            before = self.objects.get((kind, metadata["name"]))
            metadata.setdefault("uid", before["metadata"]["uid"] if before else f"uid-{self.version}")
            metadata.setdefault("creationTimestamp", f"2026-01-01T00:00:{self.version % 60:02}Z")
            metadata["namespace"] = NAMESPACE
            versioned = {**metadata, "resourceVersion": str(self.version)}
            manifest = json.loads(json.dumps({**manifest, "metadata": versioned}))
            self.objects[kind, metadata["name"]] = manifest
            self.history.append((self.version, kind, "MODIFIED" if before else "ADDED", manifest))
            self.changed.notify_all()
            return manifest

    def remove(self, kind: str, name: str) -> dict[str, Any]:
        with self.changed:
            self.version += 1
            deleted = self.objects.pop((kind, name))
            self.history.append((self.version, kind, "DELETED", deleted))
            self.changed.notify_all()
            return deleted

    def set_condition(self, name: str, kind: str, **more: str) -> None:
        """Sets a condition of a job, as the operator does at its end."""
        job = self.objects["mpijobs", name]
        status = {"conditions": [{"type": kind, "status": "True", **more}]}
        self.put("mpijobs", {**job, "status": status})

    def restart(self, denials: list[int]) -> None:
        """Simulates a restart of the server: watches and logs break, and the server denies all requests while it loads
        users and rights.

        Arguments:
            denials: the HTTP status of the next requests, 401 or 403; later requests are granted.
        """
        with self.changed:
            self.generation += 1
            self.denials = list(denials)
            self.changed.notify_all()

    def denial(self, path: str, query: dict[str, str]) -> tuple[int, str] | None:
        """The answer to a request while the server starts."""
        with self.changed:
            if not self.denials:
                return None
            status = self.denials.pop(0)
            self.changed.notify_all()
        if status == 401:
            return status, "Unauthorized"
        kind = path.rpartition("/")[2]
        return status, f'{cannot("watch" if "watch" in query else "list", kind)}: RBAC: role "trainer" not found'

    def put_event(self, job: str, kind: str, reason: str, message: str) -> None:
        """Adds an event of the operator about a job; the kind is "Normal" or "Warning"."""
        about = {"kind": "MPIJob", "name": job, "uid": self.objects["mpijobs", job]["metadata"]["uid"]}
        event = {"involvedObject": about, "type": kind, "reason": reason, "message": message}
        time = f"2026-01-01T00:00:{self.version % 60:02}Z"
        self.put("events", {"metadata": {"name": f"{job}.{self.version:x}"}, **event, "lastTimestamp": time})

    def put_pod(self, job: str, role: str, name: str, **status: Any) -> None:
        labels = {"training.kubeflow.org/job-name": job, "training.kubeflow.org/job-role": role}
        before = self.objects.get(("pods", name))
        metadata = {"name": name, "labels": labels}
        if before is not None:
            metadata |= {key: before["metadata"][key] for key in ("uid", "creationTimestamp")}
        self.put("pods", {"metadata": metadata, "spec": {"containers": [{"name": role}]}, "status": status})

    def write_log(self, pod: str, *lines: str) -> None:
        """Adds lines to a running container's log, which stays open until `end_log`."""
        with self.changed:
            log = self.logs.setdefault(pod, [])
            self.open_logs.add(pod)
            for line in lines:
                log.append(f"2026-01-01T00:00:00.{len(log) + 1:09}Z {line}\n".encode())
            self.changed.notify_all()

    def end_log(self, pod: str) -> None:
        with self.changed:
            self.open_logs.discard(pod)
            self.changed.notify_all()

    @contextmanager
    def endless_log(self, pod: str) -> Iterator[None]:
        """Makes a container write lines without end within the block."""
        closed = threading.Event()

        def write() -> None:
            number = 0
            while not closed.wait(0.01):
                number += 1
                self.write_log(pod, f"line {number}")

        writer = threading.Thread(target=write)
        writer.start()
        try:
            yield
        finally:
            closed.set()
            writer.join()

    def wait_for(self, condition: Callable[[], Any], seconds: float = 30.0) -> None:
        """Waits until the condition is true; requests of clients wake it too."""
        end = time.monotonic() + seconds
        with self.changed:
            while not condition():
                assert self.changed.wait(end - time.monotonic()) or condition(), (
                    f"waited {seconds} s; asked: {self.requests}"
                )

    def asked(self, verb: str, path: str) -> int:
        """The number of requests with a verb of the API and a path."""
        return sum(request[0] == verb and re.search(path, request[1]) is not None for request in self.requests)


def cannot(verb: str, kind: str) -> str:
    """The API server's message for a missing right."""
    group = "kubeflow.org" if kind == "mpijobs" else ""
    resource = f"{kind}.{group}" if group else kind
    return (
        f'{resource} is forbidden: User "ann" cannot {verb} resource "{kind}" in API group "{group}" in the namespace '
        f'"{NAMESPACE}"'
    )


QUOTA = (
    'mpijobs.kubeflow.org "mnist" is forbidden: exceeded quota: jobs, requested: count/mpijobs.kubeflow.org=1, used: '
    "count/mpijobs.kubeflow.org=4, limited: count/mpijobs.kubeflow.org=4"
)
"""How it says so of a quota."""
