"""A server that speaks as much of the Kubernetes API as `hvdcomp launch k8s` uses, over real sockets: create, list,
watch and delete of MPIJobs and pods, logs, and errors as Status objects. What the mpi-operator and the nodes would do,
the test does, by changing the objects.
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

_JOBS = "/apis/kubeflow.org/v2beta1/namespaces/{}/mpijobs"
_PODS = "/api/v1/namespaces/{}/pods"
NAMESPACE = "team"
REASONS = {
    400: "BadRequest",
    403: "Forbidden",
    404: "NotFound",
    409: "AlreadyExists",
    410: "Expired",
    500: "InternalError",
}


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
    """The objects, their changes, and what the clients asked.

    Arguments:
        certificate: of `make_certificate`, to speak TLS.

    Attributes:
        requests: (verb, path, query) of each request.
        fail: is asked before each request is answered; returns None, or an HTTP status and a message.
        drop: is asked at each watch or log with the number of lines sent; True cuts the connection off.
        end: as `drop`, but the server ends the answer in good order.
        stall: is asked before each request is answered; while it is so, the server says each millisecond that it goes
            on ("100 Continue"), so that the client's thread waits for the answer and wakes all the time.
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
        self.server = _Server(("127.0.0.1", 0), self._handler())
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

    def write_kubeconfig(self, path: Path) -> Path:
        """A kubeconfig for this server; JSON is YAML."""
        cluster = {"server": self.url}
        if self.certificate is not None:
            cluster["certificate-authority-data"] = base64.b64encode(self.certificate.read_bytes()).decode()
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

    def put(self, kind: str, one: dict[str, Any]) -> dict[str, Any]:
        """Create or replace an object of the kind "mpijobs" or "pods"."""
        with self.changed:
            self.version += 1
            metadata = one["metadata"]
            before = self.objects.get((kind, metadata["name"]))
            metadata.setdefault("uid", before["metadata"]["uid"] if before else f"uid-{self.version}")
            metadata.setdefault("creationTimestamp", f"2026-01-01T00:00:{self.version % 60:02}Z")
            metadata["namespace"] = NAMESPACE
            one = json.loads(json.dumps({**one, "metadata": {**metadata, "resourceVersion": str(self.version)}}))
            self.objects[kind, metadata["name"]] = one
            self.history.append((self.version, kind, "MODIFIED" if before else "ADDED", one))
            self.changed.notify_all()
            return one

    def remove(self, kind: str, name: str) -> dict[str, Any]:
        with self.changed:
            self.version += 1
            one = self.objects.pop((kind, name))
            self.history.append((self.version, kind, "DELETED", one))
            self.changed.notify_all()
            return one

    def set_condition(self, name: str, kind: str, **more: str) -> None:
        """As the operator does at the end of a job."""
        job = self.objects["mpijobs", name]
        status = {"conditions": [{"type": kind, "status": "True", **more}]}
        self.put("mpijobs", {**job, "status": status})

    def put_pod(self, job: str, role: str, name: str, **status: Any) -> None:
        labels = {"training.kubeflow.org/job-name": job, "training.kubeflow.org/job-role": role}
        before = self.objects.get(("pods", name))
        metadata = {"name": name, "labels": labels}
        if before is not None:
            metadata |= {key: before["metadata"][key] for key in ("uid", "creationTimestamp")}
        self.put("pods", {"metadata": metadata, "spec": {"containers": [{"name": role}]}, "status": status})

    def write_log(self, pod: str, *lines: str) -> None:
        """Let a running container write; its log stays open until `end_log`."""
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

    def wait_for(self, what: Callable[[], Any], seconds: float = 30.0) -> None:
        """Until something is so; what the clients ask for wakes it too."""
        end = time.monotonic() + seconds
        with self.changed:
            while not what():
                assert self.changed.wait(end - time.monotonic()) or what(), (
                    f"waited {seconds} s; asked: {self.requests}"
                )

    def asked(self, verb: str, path: str) -> int:
        """How many requests of this kind there were; verbs are those of the API."""
        return sum(one[0] == verb and re.search(path, one[1]) is not None for one in self.requests)

    # What the server answers.

    def _handler(api: KubernetesApi) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - self is the handler's
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                watching = "watch" in self.query
                if self.refused("watch" if watching else "list"):
                    return None
                log = re.fullmatch(_PODS.format(NAMESPACE) + "/([^/]+)/log", self.place)
                if log is not None:
                    return self.log(log[1])
                kind = self.kind()
                if kind is None:
                    return self.status(404, f"the server could not find {self.place}")
                return self.watch(kind) if watching else self.answer_list(kind)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.refused("create"):
                    return None
                kind = self.kind()
                if kind is None:
                    return self.status(404, "the server could not find the requested resource")
                name = body["metadata"]["name"]
                if (kind, name) in api.objects:
                    return self.status(409, f'mpijobs.kubeflow.org "{name}" already exists')
                return self.json(201, api.put(kind, body))

            def do_DELETE(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
                if self.refused("delete"):
                    return None
                collection, _, name = self.place.rpartition("/")
                if self.place.rstrip("/") == _JOBS.format(NAMESPACE):  # all of them, as the real one does
                    for kind, every in list(api.objects):
                        if kind == "mpijobs":
                            api.remove(kind, every)
                    return self.json(200, {"kind": "Status", "status": "Success"})
                one = api.objects.get(("mpijobs", name)) if collection == _JOBS.format(NAMESPACE) else None
                if one is None:
                    return self.status(404, f'mpijobs.kubeflow.org "{name}" not found')
                wanted = body.get("preconditions", {}).get("uid", one["metadata"]["uid"])
                if wanted != one["metadata"]["uid"]:
                    return self.status(409, f"Precondition failed: UID in precondition: {wanted}")
                api.remove("mpijobs", name)
                return self.json(200, {"kind": "Status", "status": "Success"})

            @property
            def place(self) -> str:
                return urlsplit(self.path).path

            @property
            def query(self) -> dict[str, str]:
                return {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}

            def kind(self) -> str | None:
                return {_JOBS.format(NAMESPACE): "mpijobs", _PODS.format(NAMESPACE): "pods"}.get(self.place)

            def refused(self, verb: str) -> bool:
                with api.changed:
                    api.requests.append((verb, self.place, self.query))
                    api.changed.notify_all()
                while api.stall(verb, self.place) and not api.stopping:
                    self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    time.sleep(0.001)
                failure = api.fail(verb, self.place, self.query)
                if failure is not None:
                    self.status(*failure)
                return failure is not None

            def json(self, status: int, answer: dict[str, Any]) -> None:
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def status(self, code: int, message: str) -> None:
                self.json(code, _status(code, message))

            def selected(self, one: dict[str, Any]) -> bool:
                name, _, wanted = self.query.get("fieldSelector", "").partition("=")
                label, _, value = self.query.get("labelSelector", "").partition("=")
                assert name in ("", "metadata.name")
                return (not name or one["metadata"]["name"] == wanted) and (
                    not label or one["metadata"].get("labels", {}).get(label) == value
                )

            def answer_list(self, kind: str) -> None:
                with api.changed:
                    items = [one for (of, _), one in api.objects.items() if of == kind and self.selected(one)]
                    version = str(api.version)
                self.json(200, {"kind": "List", "metadata": {"resourceVersion": version}, "items": items})

            def watch(self, kind: str) -> None:
                since = int(self.query["resourceVersion"])
                self.begin()
                if since < api.oldest:
                    return self.end_chunks([_event("ERROR", _status(410, f"too old resource version: {since}"))])
                return self.pieces(lambda sent: self.events(kind, since)[sent:], lambda: False)

            def events(self, kind: str, since: int) -> list[bytes]:
                return [
                    _event(change, one)
                    for version, of, change, one in api.history
                    if version > since and of == kind and self.selected(one)
                ]

            def log(self, pod: str) -> None:
                if pod not in api.logs:
                    return self.status(404, f'pods "{pod}" not found')
                assert self.query["timestamps"].lower() == "true"
                self.begin()
                follows = self.query.get("follow", "").lower() == "true"
                return self.pieces(lambda sent: api.logs[pod][sent:], lambda: not follows or pod not in api.open_logs)

            def begin(self) -> None:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()

            def pieces(self, after: Callable[[int], list[bytes]], ended: Callable[[], bool]) -> None:
                """Send what there is, and what comes, until the end; or until the test wants it cut."""
                sent = 0
                while True:
                    with api.changed:
                        while not (new := after(sent)) and not ended() and not api.stopping:
                            if api.drop(self.path, sent) or api.end(self.path, sent):
                                break
                            api.changed.wait()
                        over = not new and (ended() or api.stopping)
                    for one in new:
                        if api.drop(self.path, sent):
                            break
                        self.piece(one)
                        sent += 1
                    if api.drop(self.path, sent):
                        self.piece(b"2026-01-01T00:00:00.9Z cut off in the mid")
                        self.close_connection = True
                        return None
                    if over or api.end(self.path, sent):
                        return self.end_chunks([])

            def piece(self, data: bytes) -> None:
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.flush()

            def end_chunks(self, pieces: list[bytes]) -> None:
                for one in pieces:
                    self.piece(one)
                self.wfile.write(b"0\r\n\r\n")

        return Handler


def _event(change: str, one: dict[str, Any]) -> bytes:
    return json.dumps({"type": change, "object": one}).encode() + b"\n"


def _status(code: int, message: str) -> dict[str, Any]:
    return {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "reason": REASONS.get(code, "Unknown"), "message": message, "code": code,
    }  # fmt: skip
