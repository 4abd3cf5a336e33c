"""The launcher's requests to the API server, sent with the official client.

Objects are plain dictionaries, as in the JSON of the API. Each request is sent only once. `follow` repeats requests
whose error is transient (`KubernetesError.transient`).
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hvdcomp.tools.launch.k8s.connections import Connections
from hvdcomp.tools.launch.k8s.errors import KubernetesError, explained
from hvdcomp.tools.launch.k8s.kubeconfig import connect
from hvdcomp.tools.launch.k8s.manifest import GROUP, JOB_LABEL, KIND, PLURAL, ROLE_LABEL, VERSION

ANSWER_WITHIN = (10.0, 30.0)
"""Two timeouts of requests, in seconds: for connecting to the server, and for its answer."""

WATCH_FOR = 240
"""Seconds after which the server ends a watch, and a new watch begins."""

LOG_SILENCE = 60.0
"""A log is requested again after this number of seconds without a line, because a dead connection looks like a silent
program."""

OPENED = "OPENED"
"""The first event of a watch. It means that the server has accepted the watch. The object of this event is empty."""

Call = Callable[..., Any]


class Cluster:
    """One namespace of a cluster.

    Args:
        namespace: the namespace; None for the namespace in the kubeconfig or, if it has none, "default".
        context: name of the context in the kubeconfig; None for its current context.

    Raises:
        KubernetesError: if the client is not installed, or no cluster is configured.
    """

    def __init__(self, namespace: str | None = None, context: str | None = None) -> None:
        try:
            import kubernetes
        except ImportError:
            raise KubernetesError("this needs the Kubernetes client: pip install 'hvdcomp[k8s]'") from None
        self._kubernetes: Any = kubernetes
        client, configured = connect(kubernetes, context)
        self.namespace: str = namespace or configured
        self._jobs: Any = kubernetes.client.CustomObjectsApi(client)
        self._core: Any = kubernetes.client.CoreV1Api(client)
        self._connections = Connections(client.rest_client.pool_manager)
        self._server: str = client.configuration.host

    def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Creates the MPIJob, and returns it as stored by the server."""
        name = manifest["metadata"]["name"]
        with self._explained(f"MPIJob {self.namespace}/{name} cannot be created", creating=name):
            return self._jobs.create_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, dict(manifest), _request_timeout=ANSWER_WITHIN
            )

    def delete(self, name: str, uid: str | None = None) -> None:
        """Deletes the MPIJob and its pods.

        The request contains the uid of the job that currently has this name. If a different job is created later with
        the same name, it is therefore not deleted.

        Args:
            name: name of the job.
            uid: the uid of the only job that may be deleted; None for any job with this name.
        """
        jobs = [job["metadata"] for job in self.list_jobs(name)[1] if uid in (None, job["metadata"]["uid"])]
        if not jobs:
            raise KubernetesError(f"there is no MPIJob {self.namespace}/{name} to delete", 404)
        client = self._kubernetes.client
        options = client.V1DeleteOptions(
            propagation_policy="Background", preconditions=client.V1Preconditions(uid=jobs[0]["uid"])
        )
        with self._explained(f"MPIJob {self.namespace}/{name} cannot be deleted"):
            self._jobs.delete_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, jobs[0]["name"], body=options, _request_timeout=ANSWER_WITHIN
            )

    def end(self, threads: Iterable[threading.Thread]) -> None:
        """Closes all connections, and returns when the threads that use them have ended (`Connections.end`)."""
        self._connections.end(threads)

    def list_jobs(self, name: str | None = None) -> tuple[str, list[dict[str, Any]]]:
        """The resource version from which a watch must start, and the MPIJob with this name, if it exists. Without a
        name, the list has all MPIJobs."""
        return self._list("MPIJobs cannot be listed", *self._named(name))

    def list_pods(self, name: str | None = None) -> tuple[str, list[dict[str, Any]]]:
        """The resource version from which a watch must start, and the pods of the MPIJob, or of all MPIJobs."""
        return self._list("pods cannot be listed", *self._labeled(name))

    def list_events(self, name: str) -> tuple[str, list[dict[str, Any]]]:
        """The resource version from which a watch must start, and the operator's events about the MPIJob in the last
        hour or so."""
        return self._list("events cannot be listed", *self._about(name))

    def watch_jobs(self, name: str, version: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields OPENED, and then the changes of the MPIJob since `version`, until the server ends the watch. Each
        change is a pair of a type, such as "ADDED", and the changed object."""
        return self._watch("MPIJobs cannot be watched", version, *self._named(name))

    def watch_pods(self, name: str, version: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the changes of the pods since `version`, like `watch_jobs`."""
        return self._watch("pods cannot be watched", version, *self._labeled(name))

    def watch_events(self, name: str, version: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the operator's events since `version`, like `watch_jobs`."""
        return self._watch("events cannot be watched", version, *self._about(name))

    def _named(self, name: str | None) -> tuple[Call, dict[str, str]]:
        place = {"group": GROUP, "version": VERSION, "namespace": self.namespace, "plural": PLURAL}
        selector = {} if name is None else {"field_selector": f"metadata.name={name}"}
        return self._jobs.list_namespaced_custom_object, {**place, **selector}

    def _labeled(self, name: str | None) -> tuple[Call, dict[str, str]]:
        selector = JOB_LABEL if name is None else f"{JOB_LABEL}={name}"
        return self._core.list_namespaced_pod, {"namespace": self.namespace, "label_selector": selector}

    def _about(self, name: str) -> tuple[Call, dict[str, str]]:
        selector = f"involvedObject.kind={KIND},involvedObject.name={name}"
        return self._core.list_namespaced_event, {"namespace": self.namespace, "field_selector": selector}

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
            yield OPENED, {}
            for line in _lines(response):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise KubernetesError(f"{failed}: {status.get('message')}", status.get("code"))
                yield event["type"], event["object"]

    def log(self, pod: str, container: str, *, follow: bool, since: int | None = None) -> Iterator[bytes]:
        """Yields the lines of a container's log without line ends. Each line begins with its time.

        A line that was cut off by a broken connection is not returned.

        Args:
            follow: whether to continue until the container ends.
            since: if not None, only the lines of the last `since` seconds are returned.
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
        """The raw answer. It is not parsed with the client's models, because these refuse fields from other versions of
        the API."""
        response = call(**arguments, _preload_content=False)
        try:
            if not 200 <= response.status <= 299:
                raise self._kubernetes.client.ApiException(http_resp=_Read(response))
            yield response
        finally:
            response.close()
            response.release_conn()

    def _explained(self, failed: str, creating: str | None = None) -> contextlib.AbstractContextManager[None]:
        return explained(failed, self._server, self.namespace, creating)


class _Read:
    """A raw response in the form that ApiException reads."""

    def __init__(self, response: Any) -> None:
        self.status, self.reason, self.data = response.status, response.reason, response.read()
        self.headers = response.headers

    def getheaders(self) -> Any:
        return self.headers


def _lines(response: Any) -> Iterator[bytes]:
    """The lines of an answer, without line ends. The last line may be incomplete."""
    partial = b""
    for piece in response.stream(65536):
        *lines, partial = (partial + piece).split(b"\n")
        yield from lines
    if partial:
        yield partial


def is_role(pod: Mapping[str, Any], role: str) -> bool:
    """Whether a pod is a "launcher" or a "worker"."""
    return (pod["metadata"].get("labels") or {}).get(ROLE_LABEL) == role
