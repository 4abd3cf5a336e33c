"""Which cluster is meant, and a client for it, from the kubeconfig or from inside a pod."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from hvdcomp.tools.launch.k8s.errors import KubernetesError

_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def connect(kubernetes: Any, context: str | None) -> tuple[Any, str]:
    """A client, and the namespace that is taken where none is named. Nothing is sent yet.

    Arguments:
        kubernetes: the module.
        context: of the kubeconfig; None for its current one.

    Raises:
        KubernetesError: no cluster is configured, or what configures it cannot be used.
    """
    import yaml

    # The client reads KUBECONFIG only when it is imported.
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
        # The client takes the form of the file for granted.
        said = " ".join(str(error).split())
        raise KubernetesError(
            f"{place} is not a kubeconfig that can be used ({type(error).__name__}: {said}): mend it, or set "
            "KUBECONFIG to another; `kubectl config view` shows what it holds"
        ) from None
    # The one who asks decides what is asked again; urllib3 would do so too, with a warning each time.
    client.rest_client.pool_manager.connection_pool_kw["retries"] = False
    return client, namespace


def _from_file(kubernetes: Any, file: str, context: str | None) -> tuple[Any, str]:
    config = kubernetes.config
    merged = config.kube_config.KubeConfigMerger(file).config
    if merged is None:
        raise KubernetesError(
            f"no cluster is configured, as there is no {file}: set KUBECONFIG to your kubeconfig, or see "
            "`kubectl config view`"
        )
    contexts = {context.value["name"]: context.value["context"] for context in merged.value["contexts"]}
    names = ", ".join(contexts) or "none"
    chosen = context or merged.value.get("current-context")
    if not chosen:
        raise KubernetesError(f"context: {file} has no current context: name one with --context; it has: {names}")
    if chosen not in contexts:
        raise KubernetesError(f"context: the kubeconfig has no {chosen!r}; it has: {names}")
    heard = _Errors()
    logging.getLogger().addHandler(heard)
    try:
        client = config.new_client_from_config(config_file=file, context=chosen)
    finally:
        logging.getLogger().removeHandler(heard)
    if heard.said:
        raise KubernetesError(
            f"context {chosen!r} of {file} logs in through a program that did not work ({heard.said[0]}): install it, "
            "or log in with it by hand; `kubectl auth whoami` uses it too"
        )
    return client, contexts[chosen].get("namespace") or "default"


class _Errors(logging.Handler):
    """Keeps errors that the client logs: for a user without credentials it goes on as nobody."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(" ".join(record.getMessage().split()))
