"""`hvdcomp launch` and the names of jobs: a command reaches the job that was named, or none.

The collection of MPIJobs has the path of a job with an empty name: the server that is asked to delete that job deletes
all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("kubernetes", reason="the Kubernetes client is not installed: pip install 'hvdcomp[k8s]'")

from hvdcomp.tools.cli import main
from hvdcomp.tools.launch.k8s.cluster import Cluster
from hvdcomp.tools.launch.k8s.errors import KubernetesError
from tests.k8s_api import KubernetesApi

NO_NAMES = ["", " ", ".", "..", "../..", "a/b", "a%2Fb", "a,b", "A", "a b", "a\n", "4-ranks", "a" * 41]
COMMANDS = [["status"], ["status", "--json"], ["logs"], ["logs", "--follow"], ["delete"]]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    with KubernetesApi().running() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        for name in ("one", "two"):
            make(server, name)
        yield server


def make(api: KubernetesApi, name: str) -> None:
    spec = {"mpiReplicaSpecs": {"Launcher": {"replicas": 1}, "Worker": {"replicas": 1}}}
    api.put("mpijobs", {"metadata": {"name": name}, "spec": spec})


def launch(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["launch", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_no_job_can_be_called_never_reaches_the_server(api: KubernetesApi, name: str) -> None:
    submit = ["--image", "hvdcomp:cpu", "--ranks", "2", "--name", name, "--", "true"]
    for arguments in (*([*command, name] for command in COMMANDS), submit):
        result = launch("k8s", *arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert f"{'name (--name)' if arguments is submit else 'name'}: {name!r}" in result.stderr
        assert "letter" in result.stderr
    assert not api.requests
    assert len(api.objects) == 2


@pytest.mark.parametrize("namespace", ["", "..", "a/b", "Team"])
def test_what_no_namespace_can_be_called_never_reaches_the_server(api: KubernetesApi, namespace: str) -> None:
    for command in COMMANDS:
        result = launch("k8s", *command, "one", "--namespace", namespace)
        assert result.exit_code == 2
        assert f"namespace (--namespace): {namespace!r} is not a namespace" in result.stderr
    assert not api.requests


@pytest.mark.parametrize("name", ["", ".", "..", "../mpijobs", "three"])
def test_only_a_job_that_was_found_is_deleted(api: KubernetesApi, name: str) -> None:
    with pytest.raises(KubernetesError, match="there is no MPIJob") as refused:
        Cluster().delete(name)
    assert refused.value.status == 404
    assert not api.asked("delete", "")
    assert len(api.objects) == 2


def test_a_job_made_anew_under_the_same_name_is_not_deleted(api: KubernetesApi) -> None:
    first = api.objects["mpijobs", "one"]["metadata"]["uid"]

    def replace(verb: str, path: str, query: dict[str, str]) -> None:
        if verb == "delete":
            api.remove("mpijobs", "one")
            make(api, "one")

    api.fail = replace
    result = launch("k8s", "delete", "one")
    assert result.exit_code == 125
    assert "in the meantime, another job was created under this name. It is not affected" in result.stderr
    assert api.objects["mpijobs", "one"]["metadata"]["uid"] != first

    api.fail = lambda verb, path, query: None
    with pytest.raises(KubernetesError, match="there is no MPIJob"):
        Cluster().delete("one", first)
    assert ("mpijobs", "one") in api.objects
    assert launch("k8s", "delete", "one").exit_code == 0
    assert ("mpijobs", "one") not in api.objects


@pytest.mark.parametrize("number", ["", "0", "12_3", " 12", "1.5", "a", "..", "1" * 11, "\uff11"])
def test_what_is_no_number_of_a_job_never_reaches_slurm(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("hvdcomp.tools.launch.slurm.client._run", lambda *arguments, **options: asked.append(arguments))
    for arguments in (["status"], ["logs"], ["logs", "--follow"], ["delete"]):
        result = launch("slurm", *arguments, number)
        assert result.exit_code == 2, result.output
    assert launch("slurm", "--name", "..", "--ranks", "1", "--", "true").exit_code == 2
    assert not asked
