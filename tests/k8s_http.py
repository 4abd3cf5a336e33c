"""The requests and answers of the server of `tests.k8s_api`, like those of a real API server (Kubernetes 1.36)."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from tests.k8s_api import KubernetesApi

NAMESPACE = "team"
_JOBS = f"/apis/kubeflow.org/v2beta1/namespaces/{NAMESPACE}/mpijobs"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"
_KINDS = {_JOBS: "mpijobs", _PODS: "pods", _EVENTS: "events"}
_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "AlreadyExists",
    410: "Expired",
    500: "InternalError",
}


def make_handler(api: KubernetesApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            watching = "watch" in self.query
            if self.refused("watch" if watching else "list"):
                return None
            log = re.fullmatch(f"{_PODS}/([^/]+)/log", self.place)
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
            if self.place.rstrip("/") == _JOBS:  # all of them, as the real one does
                for kind, every in list(api.objects):
                    if kind == "mpijobs":
                        api.remove(kind, every)
                return self.json(200, {"kind": "Status", "status": "Success"})
            job = api.objects.get(("mpijobs", name)) if collection == _JOBS else None
            if job is None:
                return self.status(404, f'mpijobs.kubeflow.org "{name}" not found')
            uid = body.get("preconditions", {}).get("uid", job["metadata"]["uid"])
            if uid != job["metadata"]["uid"]:
                return self.status(409, f"Precondition failed: UID in precondition: {uid}")
            api.remove("mpijobs", name)
            return self.json(200, {"kind": "Status", "status": "Success"})

        @property
        def place(self) -> str:
            return urlsplit(self.path).path

        @property
        def query(self) -> dict[str, str]:
            return {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}

        def kind(self) -> str | None:
            return _KINDS.get(self.place)

        def refused(self, verb: str) -> bool:
            with api.changed:
                api.requests.append((verb, self.place, self.query))
                # At once: a test that has seen the request may restart the server before this thread answers it.
                denial, self.generation = api.denial(self.place, self.query), api.generation
                api.changed.notify_all()
            while api.stall(verb, self.place) and not api.stopping:
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                time.sleep(0.001)
            failure = denial or api.fail(verb, self.place, self.query)
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

        def selected(self, manifest: dict[str, Any]) -> bool:
            """Whether an object matches the selectors of fields ("a.b=c,d=e") and labels ("a=b" or "a")."""
            for field in filter(None, self.query.get("fieldSelector", "").split(",")):
                path, _, wanted = field.partition("=")
                value: Any = manifest
                for key in path.split("."):
                    value = value[key]
                if value != wanted:
                    return False
            label, sign, wanted = self.query.get("labelSelector", "").partition("=")
            value = (manifest["metadata"].get("labels") or {}).get(label)
            return not label or (value == wanted if sign else value is not None)

        def answer_list(self, kind: str) -> None:
            with api.changed:
                of_kind = [manifest for (kept_kind, _), manifest in api.objects.items() if kept_kind == kind]
                items = [manifest for manifest in of_kind if self.selected(manifest)]
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
                _event(change, manifest)
                for version, of, change, manifest in api.history
                if version > since and of == kind and self.selected(manifest)
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
            """Sends existing and new pieces until their end, or until the test cuts the connection."""
            sent = 0

            def cut() -> bool:
                return self.generation != api.generation or api.drop(self.path, sent)

            while True:
                with api.changed:
                    while not (new := after(sent)) and not ended() and not api.stopping:
                        if cut() or api.end(self.path, sent):
                            break
                        api.changed.wait()
                    over = not new and (ended() or api.stopping)
                for event in new:
                    if cut():
                        break
                    self.piece(event)
                    sent += 1
                if cut():
                    self.piece(b"2026-01-01T00:00:00.9Z cut off in the mid")
                    self.close_connection = True
                    return None
                if over or api.end(self.path, sent):
                    return self.end_chunks([])

        def piece(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def end_chunks(self, pieces: list[bytes]) -> None:
            for piece in pieces:
                self.piece(piece)
            self.wfile.write(b"0\r\n\r\n")

    return Handler


def _event(change: str, manifest: dict[str, Any]) -> bytes:
    return json.dumps({"type": change, "object": manifest}).encode() + b"\n"


def _status(code: int, message: str) -> dict[str, Any]:
    return {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "reason": _REASONS.get(code, "Unknown"), "message": message, "code": code,
    }  # fmt: skip
