"""Explains errors of the API server, and missing answers. An explanation describes what happened and how to fix it."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
from collections.abc import Iterator
from typing import Any

from hvdcomp.tools.launch.k8s.manifest import GROUP, PLURAL, VERSION
from hvdcomp.tools.launch.scheduler import SchedulerError

_TRANSIENT = {408, 410, 429, 500, 502, 503, 504}
_NO_RIGHT = re.compile(r'User "[^"]*" cannot ')
"""The API server's text for a missing permission. The HTTP status is not enough, because the server also answers 403 if
a quota is exceeded or an admission check fails."""


class KubernetesError(SchedulerError):
    """The cluster refused a request, or cannot be reached.

    Attributes:
        reason: what happened. The message also explains how to fix it, if this is known.
        status: the HTTP status, or None if there was no answer.
        transient: whether it makes sense to try again.
    """

    def __init__(
        self, message: str, status: int | None = None, transient: bool | None = None, advice: str | None = None
    ) -> None:
        super().__init__(message if advice is None else f"{message}: {advice}")
        self.reason = message
        self.status = status
        self.transient = status in _TRANSIENT if transient is None else transient

    @property
    def denied(self) -> bool:
        """Whether the server did not accept the user or the user's permissions. A server that has just started may not
        know the users and their permissions yet."""
        return self.status in (401, 403)


@contextlib.contextmanager
def explained(failed: str, server: str, namespace: str, creating: str | None = None) -> Iterator[None]:
    """A context manager that turns exceptions of the Kubernetes client into KubernetesError.

    Args:
        failed: a sentence that describes what failed.
        server: the API server's address.
        creating: the name of the job that is being created, if any.
    """
    import kubernetes
    import urllib3

    def unanswered(error: BaseException) -> KubernetesError:
        message = f"{failed}: no answer from {server} ({_innermost(error)})"
        if creating is not None and not _never_sent(error):
            message += f"; the job may have been created anyway: see `hvdcomp launch k8s status {creating}`"
        return KubernetesError(message, transient=True)

    try:
        yield
    except kubernetes.client.ApiException as error:
        # The client replaces an SSLError by its own exception.
        if isinstance(error.__context__, urllib3.exceptions.SSLError):
            raise unanswered(error.__context__) from None
        message = _message(error)
        if error.status == 409:
            replaced = f"{message}: in the meantime, another job was created under this name. It is not affected"
            message = "an MPIJob of this name exists already" if creating else replaced
        advice = _advice(error.status, message, namespace, creating)
        raise KubernetesError(f"{failed}: {message}", error.status, None if error.status else True, advice) from None
    except (urllib3.exceptions.HTTPError, ValueError) as error:  # ValueError: the answer is incomplete
        raise unanswered(error) from None


def _never_sent(error: BaseException) -> bool:
    """Whether no request was sent because there was no connection. This is the case if the server or proxy refused the
    connection, is unknown or silent, or has a certificate that was not accepted.

    This function examines the cause, because the type of the error is not enough. urllib3 also raises a proxy error if
    a connection through a proxy breaks after the request. Other TLS errors may also occur after the request.
    """
    from urllib3.exceptions import ConnectTimeoutError, NewConnectionError, ProxyError, SSLError

    if isinstance(error, ProxyError):
        return _never_sent(error.original_error)
    if isinstance(error, SSLError):
        return isinstance(error.args[0], ssl.SSLCertVerificationError)
    return isinstance(error, NewConnectionError | ConnectTimeoutError)


def _advice(status: int, message: str, namespace: str, creating: str | None) -> str | None:
    if status == 401:
        return "the cluster does not accept your login; log in again, and check it with `kubectl auth whoami`"
    if status == 403 and _NO_RIGHT.search(message):
        return f"ask for this right in namespace {namespace}, or use a different --namespace"
    if status == 403 and "exceeded quota" in message:
        return (
            f"delete jobs that are no longer needed (`hvdcomp launch k8s list --namespace {namespace}`), ask for a "
            "larger quota, or use a different --namespace"
        )
    if status == 409 and creating is not None:
        return (
            f"use a different --name, or delete the job with `hvdcomp launch k8s delete {creating} --namespace "
            f"{namespace}`"
        )
    if status == 404 and creating is not None:
        return (
            f"either there is no namespace {namespace}, or the cluster has no mpi-operator with MPIJob {VERSION}; see "
            f"`kubectl get crd {PLURAL}.{GROUP}`"
        )
    return None


def _message(error: Any) -> str:
    """The server's message for an error. If the server sent a Status object, this is the message in that object."""
    body = error.body
    try:
        message = json.loads(body)["message"]
    except (TypeError, KeyError, ValueError):
        message = body.decode(errors="replace") if isinstance(body, bytes) else body
    return str(message or error.reason or f"HTTP status {error.status}").strip().removesuffix(".")


def _innermost(error: BaseException) -> str:
    """The innermost cause of an error. urllib3 wraps this cause in other errors."""
    reason = getattr(error, "reason", None)
    return _innermost(reason) if isinstance(reason, BaseException) else str(error)
