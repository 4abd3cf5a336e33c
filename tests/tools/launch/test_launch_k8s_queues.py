"""The queues of the folder k8s/queues, and the jobs that docs/deploy-queues.md sends to them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from hvdcomp.tools.cli import main
from hvdcomp.tools.launch.k8s.quantity import quantity
from tests import k8s_schemas

ROOT = Path(__file__).parents[3]
FILES = ("kueue", "volcano")
KINDS = yaml.safe_load((ROOT / "tests" / "data" / "queues.yaml").read_text())
DEFINITIONS = KINDS.pop("$defs")
PAGE = (ROOT / "docs" / "deploy-queues.md").read_text(encoding="utf-8")


def objects(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a file, by their kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((ROOT / "k8s" / "queues" / f"{name}.yaml").read_text())}


def check(one: dict[str, Any]) -> None:
    kind = KINDS[one["kind"]]
    place = ["name", "namespace"] if kind["namespaced"] else ["name"]
    metadata = {
        "type": "object",
        "additionalProperties": False,
        "required": place,
        "properties": {key: {"$ref": "#/$defs/name"} for key in place},
    }
    k8s_schemas.check_kind(one, kind, DEFINITIONS, metadata)


@pytest.mark.parametrize("name", FILES)
def test_the_queues_are_what_their_definitions_say(name: str) -> None:
    for one in objects(name).values():
        check(one)
        with pytest.raises(jsonschema.ValidationError, match="qouta"):
            check({**one, "spec": {**one["spec"], "qouta": 1}})


@pytest.fixture(params=FILES)
def queued(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """The MPIJob that the page's command for this queue makes."""
    monkeypatch.chdir(ROOT)
    section = PAGE.partition(f"\n## {request.param.capitalize()}\n")[2].partition("\n## ")[0]
    (command,) = re.findall(r"^hvdcomp (launch k8s (?:.*\\\n)*.*)$", section, re.MULTILINE)
    flags = shlex.split(command.replace("\\\n", " "))
    text = re.search(r"```toml\n(.*?)```", section, re.DOTALL)
    assert text is not None
    file = ROOT / "k8s" / "overlays" / "v100" / "launch.toml"
    assert flags[flags.index("--settings") + 1] == "queued.toml"
    settings = Path(request.getfixturevalue("tmp_path")) / "queued.toml"
    settings.write_text(file.read_text() + text[1])
    flags[flags.index("--settings") + 1] = str(settings)
    result = CliRunner().invoke(main, [*flags, "--dry-run"])
    assert result.exit_code == 0, result.output
    return request.param, yaml.safe_load(result.stdout)


def test_a_job_of_the_page_finds_its_queue_and_fits_into_it(queued: tuple[str, dict[str, Any]]) -> None:
    name, job = queued
    made = objects(name)
    policy = job["spec"]["runPolicy"]["schedulingPolicy"]
    if name == "kueue":
        local, flavor = made["LocalQueue"], made["ResourceFlavor"]["metadata"]["name"]
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]
        assert job["metadata"]["namespace"] == local["metadata"]["namespace"]
        assert local["spec"]["clusterQueue"] == made["ClusterQueue"]["metadata"]["name"]
        (group,) = made["ClusterQueue"]["spec"]["resourceGroups"]
        (offered,) = group["flavors"]
        assert offered["name"] == flavor
        room = {one["name"]: one["nominalQuota"] for one in offered["resources"]}
        assert set(room) == set(group["coveredResources"])
    else:
        assert policy["queue"] == made["Queue"]["metadata"]["name"]
        room = made["Queue"]["spec"]["capability"]
    # Kueue admits nothing that asks for a resource without quota, and both let a job wait for ever that has no room.
    asked: dict[str, Any] = {}
    for replica in job["spec"]["mpiReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        for resource, amount in container["resources"]["requests"].items():
            asked[resource] = asked.get(resource, 0) + replica["replicas"] * quantity(resource, amount)
    assert set(asked) <= set(room)
    assert [resource for resource in asked if asked[resource] > quantity(resource, str(room[resource]))] == []
