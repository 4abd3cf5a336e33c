"""The API server, through the official client: what the launcher asks of it, and its errors in words.

Objects are plain dicts as in the API's JSON. Everything here asks once; what is worth asking again is said by
`KubernetesError.transient`, and `follow` does so.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdcomp.launch.k8s.connections import Connections
from hvdcomp.launch.k8s.manifest import GROUP, JOB_LABEL, PLURAL, ROLE_LABEL, VERSION
from hvdcomp.launch.scheduler import SchedulerError

ANSWER_WITHIN = (10.0, 30.0)
"""Seconds to connect, and to wait for an answer."""

WATCH_FOR = 240
"""Seconds after which the server ends a watch by itself, and another one is begun."""

LOG_SILENCE = 60.0
"""Seconds without a line after which a log is asked for anew: a dead connection looks like a silent program."""

Call = Callable[..., Any]

_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TRANSIENT = {408, 410, 429, 500, 502, 503, 504}


class KubernetesError(SchedulerError):
    """The cluster refused, or cannot be reached.

    Attributes:
        status: the HTTP status, or None if there was no answer.
    """

    def __init__(self, message: str, status: int | None = None, transient: bool | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.transient = status in _TRANSIENT if transient is None else transient


class Cluster:
    """One namespace of a cluster.

    Arguments:
        namespace: None for the kubeconfig's, or "default".
        context: of the kubeconfig; None for its current one.

    Raises:
        KubernetesError: the client is not installed, or no cluster is configured.
    """

    def __init__(self, namespace: str | None = None, context: str | None = None) -> None:
        try:
            import kubernetes
        except ImportError:
            raise KubernetesError("this needs the Kubernetes client: pip install 'hvdcomp[k8s]'") from None
        self._kubernetes: Any = kubernetes
        client, configured = self._connect(context)
        self.namespace: str = namespace or configured
        self._jobs: Any = kubernetes.client.CustomObjectsApi(client)
        self._core: Any = kubernetes.client.CoreV1Api(client)
        self._connections = Connections(client.rest_client.pool_manager)
        self._server: str = client.configuration.host

    def _connect(self, context: str | None) -> tuple[Any, str]:
        config = self._kubernetes.config
        if context is None and "KUBECONFIG" not in os.environ and (_IN_CLUSTER / "token").exists():
            config.load_incluster_config()
            return self._kubernetes.client.ApiClient(), (_IN_CLUSTER / "namespace").read_text().strip()
        # The client reads KUBECONFIG only when it is imported.
        file = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
        try:
            contexts, active = config.list_kube_config_contexts(file)
            chosen = active if context is None else next((one for one in contexts if one["name"] == context), None)
            if chosen is None:
                names = ", ".join(one["name"] for one in contexts)
                raise KubernetesError(f"context: the kubeconfig has no {context!r}; it has: {names}")
            client = config.new_client_from_config(config_file=file, context=chosen["name"])
        except config.ConfigException as error:
            raise KubernetesError(
                f"no cluster is configured ({error}): set KUBECONFIG to your kubeconfig, or see `kubectl config view`"
            ) from None
        return client, chosen["context"].get("namespace") or "default"

    def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create the MPIJob; returns it as the server has it."""
        name = manifest["metadata"]["name"]
        with self._explained(f"MPIJob {self.namespace}/{name} cannot be created", creating=name):
            return self._jobs.create_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, dict(manifest), _request_timeout=ANSWER_WITHIN
            )

    def delete(self, name: str, uid: str | None = None) -> None:
        """Delete the MPIJob that is there now; its pods go with it.

        The request names the job that was found and its uid: a job made anew under the same name is left alone, and
        no name can stand for anything but a job.

        Arguments:
            uid: of the only job that may be deleted; None for whichever has the name.
        """
        found = [job["metadata"] for job in self.list_jobs(name)[1] if uid in (None, job["metadata"]["uid"])]
        if not found:
            raise KubernetesError(f"there is no MPIJob {self.namespace}/{name} to delete", 404)
        client = self._kubernetes.client
        options = client.V1DeleteOptions(
            propagation_policy="Background", preconditions=client.V1Preconditions(uid=found[0]["uid"])
        )
        with self._explained(f"MPIJob {self.namespace}/{name} cannot be deleted"):
            self._jobs.delete_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, found[0]["name"], body=options, _request_timeout=ANSWER_WITHIN
            )

    def end(self, threads: Iterable[threading.Thread]) -> None:
        """Cut what these threads wait for, and return when they have ended; see `Connections.end`."""
        self._connections.end(threads)

    def list_jobs(self, name: str) -> tuple[str, list[dict[str, Any]]]:
        """The MPIJob of that name, if there is one, and the version from which to watch."""
        return self._list("MPIJobs cannot be listed", *self._named(name))

    def list_pods(self, name: str) -> tuple[str, list[dict[str, Any]]]:
        """The pods of the MPIJob, and the version from which to watch."""
        return self._list("pods cannot be listed", *self._labelled(name))

    def watch_jobs(self, name: str, version: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The changes of the MPIJob since `version`, as ("ADDED" and so on, object), until the server ends it."""
        return self._watch("MPIJobs cannot be watched", version, *self._named(name))

    def watch_pods(self, name: str, version: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The changes of the pods since `version`, as above."""
        return self._watch("pods cannot be watched", version, *self._labelled(name))

    def _named(self, name: str) -> tuple[Call, dict[str, str]]:
        call = self._jobs.list_namespaced_custom_object
        place = {"group": GROUP, "version": VERSION, "namespace": self.namespace, "plural": PLURAL}
        return call, {**place, "field_selector": f"metadata.name={name}"}

    def _labelled(self, name: str) -> tuple[Call, dict[str, str]]:
        call = self._core.list_namespaced_pod
        return call, {"namespace": self.namespace, "label_selector": f"{JOB_LABEL}={name}"}

    def _list(self, failed: str, call: Call, place: dict[str, str]) -> tuple[str, list[dict[str, Any]]]:
        with self._explained(failed), self._answer(call, **place, _request_timeout=ANSWER_WITHIN) as response:
            answer = json.loads(response.read())
        return answer["metadata"]["resourceVersion"], answer["items"]

    def _watch(
        self, failed: str, version: str, call: Call, place: dict[str, str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        options = {"watch": True, "resource_version": version, "timeout_seconds": WATCH_FOR}
        patience = (ANSWER_WITHIN[0], WATCH_FOR + 30)
        with (
            self._explained(failed),
            self._answer(call, **place, **options, _request_timeout=patience) as response,
        ):
            for line in _lines(response):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise KubernetesError(f"{failed}: {status.get('message')}", status.get("code"))
                yield event["type"], event["object"]

    def log(self, pod: str, container: str, *, follow: bool, since: int | None = None) -> Iterator[bytes]:
        """The lines of a container's log, each with the time it was written in front, without their ends.

        A line that a broken connection cut off is not returned.

        Arguments:
            follow: go on until the container ends.
            since: only lines of the last `since` seconds.
        """
        options: dict[str, Any] = {"container": container, "follow": follow, "timestamps": True}
        if since is not None:
            options["since_seconds"] = since
        patience = (ANSWER_WITHIN[0], LOG_SILENCE)
        place = {"name": pod, "namespace": self.namespace}
        call = self._core.read_namespaced_pod_log
        with (
            self._explained(f"the log of {pod} cannot be read"),
            self._answer(call, **place, **options, _request_timeout=patience) as response,
        ):
            yield from _lines(response)

    @contextlib.contextmanager
    def _answer(self, call: Call, **arguments: Any) -> Iterator[Any]:
        """The answer as it comes. The client's own models of objects refuse what another version of the API has."""
        response = call(**arguments, _preload_content=False)
        try:
            if not 200 <= response.status <= 299:
                raise self._kubernetes.client.ApiException(http_resp=_Read(response))
            yield response
        finally:
            response.close()
            response.release_conn()

    @contextlib.contextmanager
    def _explained(self, what: str, creating: str | None = None) -> Iterator[None]:
        """Turn the client's exceptions into KubernetesError."""
        import urllib3

        try:
            yield
        except self._kubernetes.client.ApiException as error:
            raise KubernetesError(
                f"{what}: {self._reason(error, creating)}", error.status, None if error.status else True
            ) from None
        except (urllib3.exceptions.HTTPError, ValueError) as error:  # ValueError: half an object
            message = f"{what}: no answer from {self._server} ({_innermost(error)})"
            if creating is not None:
                message += f"; it may have been created all the same: see `hvdcomp launch k8s status {creating}`"
            raise KubernetesError(message, transient=True) from None

    def _reason(self, error: Any, creating: str | None) -> str:
        said = _message(error)
        if error.status == 401:
            return f"{said}: the cluster does not know you; log in anew, see `kubectl auth whoami`"
        if error.status == 403:
            return f"{said}: ask for that right in namespace {self.namespace}, or take another --namespace"
        if error.status == 409 and creating is not None:
            return (
                f"there is one already: take another --name, or delete it with `hvdcomp launch k8s delete {creating}"
                f" --namespace {self.namespace}`"
            )
        if error.status == 409:
            return f"{said}: another job was made under this name meanwhile, and was left alone"
        if error.status == 404 and creating is not None:
            return (
                f"{said}: either there is no namespace {self.namespace}, or the cluster has no mpi-operator with "
                f"MPIJob {VERSION}; see `kubectl get crd {PLURAL}.{GROUP}`"
            )
        return said


class _Read:
    """A raw response in the shape that ApiException reads."""

    def __init__(self, response: Any) -> None:
        self.status, self.reason, self.data = response.status, response.reason, response.read()
        self.headers = response.headers

    def getheaders(self) -> Any:
        return self.headers


def _lines(response: Any) -> Iterator[bytes]:
    """The lines of an answer, without their ends; the last one also if it has no end."""
    rest = b""
    for piece in response.stream(65536):
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _message(error: Any) -> str:
    """What the server said of an error: the message of its Status object if it sent one."""
    body = error.body
    try:
        said = json.loads(body)["message"]
    except (TypeError, KeyError, ValueError):
        said = body.decode(errors="replace") if isinstance(body, bytes) else body
    return str(said or error.reason or f"HTTP status {error.status}").strip().removesuffix(".")


def _innermost(error: BaseException) -> str:
    """The first cause; urllib3 wraps it."""
    reason = getattr(error, "reason", None)
    return _innermost(reason) if isinstance(reason, BaseException) else str(error)


def is_role(pod: Mapping[str, Any], role: str) -> bool:
    """Whether a pod is a "launcher" or a "worker"."""
    return (pod["metadata"].get("labels") or {}).get(ROLE_LABEL) == role
