"""Finds the configured cluster, either in the kubeconfig or from inside a pod, and creates a client for it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from hvdcomp.tools.launch.k8s.errors import KubernetesError

_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def connect(kubernetes: Any, context: str | None) -> tuple[Any, str]:
    """Creates a client, and finds the default namespace. Does not send anything yet.

    Args:
        kubernetes: the Python module `kubernetes`.
        context: name of the context in the kubeconfig; None for its current context.

    Raises:
        KubernetesError: if no cluster is configured, or its configuration cannot be used.
    """
    import yaml

    # The client reads the variable KUBECONFIG only when it is imported, so the variable is read here again.
    named = os.environ.get("KUBECONFIG")
    in_cluster = context is None and named is None and (_IN_CLUSTER / "token").exists()
    place = str(_IN_CLUSTER) if in_cluster else named or str(Path.home() / ".kube" / "config")
    try:
        if in_cluster:
            kubernetes.config.load_incluster_config()
            client, namespace = kubernetes.client.ApiClient(), (_IN_CLUSTER / "namespace").read_text().strip()
        else:
            client, namespace = _from_file(kubernetes, place, context)
    except (
        kubernetes.config.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, KeyError, AttributeError,
    ) as error:  # fmt: skip
        # The client does not check the form of the file, so any error may occur.
        reason = " ".join(str(error).split())
        raise KubernetesError(
            f"{place} is not a usable kubeconfig ({type(error).__name__}: {reason}): correct this file, or set "
            "KUBECONFIG to another file; `kubectl config view` shows its content"
        ) from None
    # The caller decides about retries. urllib3 would also retry, and warn each time.
    client.rest_client.pool_manager.connection_pool_kw["retries"] = False
    return client, namespace


def _from_file(kubernetes: Any, file: str, context: str | None) -> tuple[Any, str]:
    config = kubernetes.config
    merged = config.kube_config.KubeConfigMerger(file).config
    if merged is None:
        raise KubernetesError(
            f"no cluster is configured, because there is no file {file}: set KUBECONFIG to your kubeconfig, or see "
            "`kubectl config view`"
        )
    contexts = {context.value["name"]: context.value["context"] for context in merged.value["contexts"]}
    names = ", ".join(contexts) or "none"
    chosen = context or merged.value.get("current-context")
    if not chosen:
        raise KubernetesError(
            f"context: {file} has no current context: name a context with --context; its contexts are: {names}"
        )
    if chosen not in contexts:
        raise KubernetesError(f"context: the kubeconfig has no context {chosen!r}; its contexts are: {names}")
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    try:
        client = config.new_client_from_config(config_file=file, context=chosen)
    finally:
        logging.getLogger().removeHandler(errors)
    if errors.messages:
        raise KubernetesError(
            f"context {chosen!r} of {file} logs in through a program that failed ({errors.messages[0]}). Install this "
            "program, or use it to log in by hand. `kubectl auth whoami` uses the same program"
        )
    return client, contexts[chosen].get("namespace") or "default"


class _Errors(logging.Handler):
    """Keeps the errors that the client logs. Without credentials, the client only logs an error and continues as an
    anonymous user."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(" ".join(record.getMessage().split()))
