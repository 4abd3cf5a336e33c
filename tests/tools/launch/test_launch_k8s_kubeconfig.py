"""What configures the cluster, and is missing or wrong: one line that says so, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

pytest.importorskip("kubernetes", reason="the Kubernetes client is not installed: pip install 'hvdcomp[k8s]'")

from hvdcomp.tools.cli import main
from hvdcomp.tools.launch.k8s.cluster import Cluster

STATUS = ["launch", "k8s", "status", "mnist"]
CLUSTER: dict[str, Any] = {"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}
UNKNOWN_AUTHORITY = {"name": "c", "cluster": {**CLUSTER["cluster"], "certificate-authority": "/nowhere"}}
CONTEXTS = [
    {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
    {"name": "bare", "context": {"cluster": "c", "user": "u"}},
]


def config(**changes: Any) -> dict[str, Any]:
    users = [{"name": "u", "user": {"token": "secret"}}]
    whole = {"current-context": "here", "clusters": [CLUSTER], "users": users, "contexts": CONTEXTS, **changes}
    return {key: value for key, value in whole.items() if value is not None}


def plugin(*words: str) -> dict[str, Any]:
    """A configuration whose user logs in by a program."""
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": words[0], "args": list(words[1:])}
    return config(users=[{"name": "u", "user": {"exec": command}}])


def written(tmp_path: Path, content: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "kubeconfig"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    monkeypatch.setenv("KUBECONFIG", str(file))
    return file


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("a: b: c", [], "is not a usable kubeconfig (ScannerError: mapping values are not allowed here"),
        ("- a", [], "is not a usable kubeconfig"),
        ("text", [], "is not a usable kubeconfig"),
        ("", [], "is not a usable kubeconfig (ConfigException: Invalid kube-config."),
        (config(contexts=[{"name": "here"}]), [], "is not a usable kubeconfig (KeyError: 'context')"),
        (config(clusters=[]), [], "Expected object with name c in"),
        (config(clusters=[UNKNOWN_AUTHORITY]), [], "File does not exist: /nowhere"),
        (config(**{"current-context": None}), [], "name a context with --context; its contexts are: here, bare"),
        (config(**{"current-context": "gone"}), [], "no context 'gone'; its contexts are: here, bare"),
        (config(), ["--context", "there"], "no context 'there'; its contexts are: here, bare"),
        (plugin("no-such-plugin"), [], "a program that failed ([Errno 2] No such file or directory: "),
        (plugin("sh", "-c", "echo expired >&2; exit 3"), [], "failed (exec: process returned 3. expired)"),
        (plugin("echo", "{}"), [], "failed (exec: malformed response. missing key 'apiVersion')"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_kubeconfig_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, options: list[str], said: str
) -> None:
    written(tmp_path, content, monkeypatch)
    result = CliRunner().invoke(main, [*STATUS, *options], catch_exceptions=False)
    assert result.exit_code == 125
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_context_may_be_named_where_none_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, config(**{"current-context": None}), monkeypatch)
    assert Cluster(context="here").namespace == "team"
    assert Cluster(context="bare").namespace == "default"


def test_no_kubeconfig_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    result = CliRunner().invoke(main, STATUS, catch_exceptions=False)
    assert result.exit_code == 125
    assert result.stderr.startswith(
        "Error: no cluster is configured, because there is no file /nowhere: set KUBECONFIG"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (config(), "no answer from https://127.0.0.1:9 (Connection(host='127.0.0.1', port=9): Failed to establish"),
        (plugin("no-such-plugin"), "logs in through a program that failed"),
    ],
)
def test_nothing_else_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, said: str) -> None:
    """As a process of its own: the client, and what it sends requests with, log where nobody set up logging."""
    written(tmp_path, content, monkeypatch)
    command = [sys.executable, "-c", "from hvdcomp.tools.cli import main; main()", *STATUS]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (125, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
