"""What the API server refuses, and silence, in words: what happened, and what to do about it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

from hvdcomp.tools.launch.k8s.manifest import GROUP, PLURAL, VERSION
from hvdcomp.tools.launch.scheduler import SchedulerError

_TRANSIENT = {408, 410, 429, 500, 502, 503, 504}
_NO_RIGHT = re.compile(r'User "[^"]*" cannot ')
"""How the API server says that a right is missing. Quotas and what checks pods are answered by 403 too."""


class KubernetesError(SchedulerError):
    """The cluster refused, or cannot be reached.

    Attributes:
        said: what happened; the message goes on with the way out, if one is known.
        status: the HTTP status, or None if there was no answer.
        transient: whether it is worth asking again.
    """

    def __init__(
        self, said: str, status: int | None = None, transient: bool | None = None, advice: str | None = None
    ) -> None:
        super().__init__(said if advice is None else f"{said}: {advice}")
        self.said = said
        self.status = status
        self.transient = status in _TRANSIENT if transient is None else transient

    @property
    def denied(self) -> bool:
        """Whether the server did not accept the user or the right; one that has just started does not know them yet."""
        return self.status in (401, 403)


@contextlib.contextmanager
def explained(what: str, server: str, namespace: str, creating: str | None = None) -> Iterator[None]:
    """Turn the Kubernetes client's exceptions into KubernetesError.

    Arguments:
        what: cannot be done, as a sentence.
        server: the API server's address.
        creating: the name of the job that is being created, if any.
    """
    import kubernetes
    import urllib3

    try:
        yield
    except kubernetes.client.ApiException as error:
        said = _message(error)
        if error.status == 409:
            meanwhile = f"{said}: another job was made under this name meanwhile, and was left alone"
            said = "there is one already" if creating else meanwhile
        advice = _advice(error.status, said, namespace, creating)
        raise KubernetesError(f"{what}: {said}", error.status, None if error.status else True, advice) from None
    except (urllib3.exceptions.HTTPError, ValueError) as error:  # ValueError: half an object
        message = f"{what}: no answer from {server} ({_innermost(error)})"
        if creating is not None and not _never_sent(error):
            message += f"; it may have been created all the same: see `hvdcomp launch k8s status {creating}`"
        raise KubernetesError(message, transient=True) from None


def _never_sent(error: BaseException) -> bool:
    """Whether there was no connection, so that nothing was asked: it was refused, or its host is not known or silent.
    """
    from urllib3.exceptions import ConnectTimeoutError, MaxRetryError, NewConnectionError

    reason = error.reason if isinstance(error, MaxRetryError) else error
    return isinstance(reason, NewConnectionError | ConnectTimeoutError)


def _advice(status: int, said: str, namespace: str, creating: str | None) -> str | None:
    if status == 401:
        return "the cluster does not know you; log in anew, see `kubectl auth whoami`"
    if status == 403 and _NO_RIGHT.search(said):
        return f"ask for that right in namespace {namespace}, or take another --namespace"
    if status == 403 and "exceeded quota" in said:
        return (
            f"delete jobs that are no longer needed (`hvdcomp launch k8s list --namespace {namespace}`), ask for a "
            "larger quota, or take another --namespace"
        )
    if status == 409 and creating is not None:
        return f"take another --name, or delete it with `hvdcomp launch k8s delete {creating} --namespace {namespace}`"
    if status == 404 and creating is not None:
        return (
            f"either there is no namespace {namespace}, or the cluster has no mpi-operator with MPIJob {VERSION}; see "
            f"`kubectl get crd {PLURAL}.{GROUP}`"
        )
    return None


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
