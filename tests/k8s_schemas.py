"""What the API server of Kubernetes would accept, without one: definitions of operators as JSON Schema, which forbids
what they do not name, and the Kubernetes client's own models."""

from __future__ import annotations

import copy
import functools
import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

_DATA = Path(__file__).parent / "data"


@functools.cache
def mpijob() -> Any:
    """The schema of an MPIJob."""
    definition = (_DATA / "mpijob_crd_v2beta1.yaml").read_text()
    crd = yaml.load(definition, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # 9,000 lines
    (version,) = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"x-kubernetes-preserve-unknown-fields": True}
    return _closed(schema)


@functools.cache
def _operators() -> Any:
    kinds = _closed(yaml.safe_load((_DATA / "operators.yaml").read_text()))
    replicas = mpijob()["properties"]["spec"]["properties"]["mpiReplicaSpecs"]["additionalProperties"]
    return kinds, {**kinds.pop("$defs"), "podTemplate": replicas["properties"]["template"]}


def check(one: dict[str, Any]) -> None:
    """Validates an object against the definition of its kind, one of tests/data/operators.yaml.

    Raises:
        jsonschema.ValidationError: names what is wrong.
    """
    kinds, definitions = _operators()
    check_kind(one, kinds[one["kind"]], definitions, {"type": "object", "required": ["name"]})


def check_kind(one: dict[str, Any], kind: Any, definitions: Any, metadata: Any) -> None:
    """Validates an object that has metadata and a spec, and nothing else.

    Args:
        kind: its `apiVersion`, and the schema of its `spec`.
        definitions: which that schema refers to.
        metadata: the schema of its metadata.

    Raises:
        jsonschema.ValidationError: names what is wrong.
    """
    schema = {
        "$defs": definitions,
        "type": "object",
        "additionalProperties": False,
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"const": kind["apiVersion"]},
            "kind": {"const": one["kind"]},
            "metadata": metadata,
            "spec": kind["spec"],
        },
    }
    jsonschema.Draft202012Validator(schema).validate(one)


def misspelt(one: dict[str, Any], place: Sequence[Any]) -> dict[str, Any]:
    """A copy of an object with a field `hostNetwrok` at a place in it, which no kind has."""
    wrong = copy.deepcopy(one)
    functools.reduce(operator.getitem, place, wrong)["hostNetwrok"] = True  # type: ignore[arg-type]
    return wrong


def _closed(schema: Any) -> Any:
    """The schema with unknown fields forbidden, which the API server would drop with a warning."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        schema = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return schema


def check_with_client(model: str, one: dict[str, Any]) -> None:
    """Asserts that a model of the Kubernetes client, such as "V1PodSpec", holds all that an object says."""
    client = pytest.importorskip("kubernetes").client
    api = client.ApiClient()
    kind = getattr(client, model)
    if hasattr(kind, "from_dict"):  # since version 36 models read themselves
        read = kind.from_dict(json.loads(json.dumps(one)))
    else:

        class Answer:
            data = json.dumps(one)

        read = api.deserialize(Answer, model)
    assert api.sanitize_for_serialization(read) == one


def check_restricted(pod: dict[str, Any]) -> None:
    """Asserts that a pod of one container meets the *restricted* Pod Security Standard, and says what it needs."""
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 1000
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert pod["automountServiceAccountToken"] is False
    assert all("hostPath" not in volume for volume in pod.get("volumes", ()))
    assert all(port["containerPort"] >= 1024 for port in container.get("ports", ()))
    resources = container["resources"]
    assert {"cpu", "memory"} <= set(resources["requests"])
    assert resources["limits"]["memory"] == resources["requests"]["memory"]


def check_shared_memory(pod: dict[str, Any]) -> None:
    """Asserts that /dev/shm of a pod's container is memory of a size that the pod says."""
    (container,) = pod["containers"]
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    (shared,) = (volume for volume in pod["volumes"] if volume["name"] == mounted["/dev/shm"])
    assert shared["emptyDir"]["medium"] == "Memory"
    assert shared["emptyDir"]["sizeLimit"]
