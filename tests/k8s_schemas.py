"""Checks objects as the API server of Kubernetes would, without a server: with the operators' definitions as JSON
Schema that forbids unknown fields, and with the Kubernetes client's models."""

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


def check(manifest: dict[str, Any]) -> None:
    """Validates an object against the definition of its kind, one of tests/data/operators.yaml.

    Raises:
        jsonschema.ValidationError: names the wrong field.
    """
    kinds, definitions = _operators()
    check_kind(manifest, kinds[manifest["kind"]], definitions, {"type": "object", "required": ["name"]})


def check_kind(manifest: dict[str, Any], kind: Any, definitions: Any, metadata: Any) -> None:
    """Validates an object that has metadata and a spec, and nothing else.

    Args:
        kind: its `apiVersion`, and the schema of its `spec`.
        definitions: to which that schema refers.
        metadata: the schema of its metadata.

    Raises:
        jsonschema.ValidationError: names the wrong field.
    """
    schema = {
        "$defs": definitions,
        "type": "object",
        "additionalProperties": False,
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"const": kind["apiVersion"]},
            "kind": {"const": manifest["kind"]},
            "metadata": metadata,
            "spec": kind["spec"],
        },
    }
    jsonschema.Draft202012Validator(schema).validate(manifest)


def misspelt(manifest: dict[str, Any], place: Sequence[Any]) -> dict[str, Any]:
    """A copy of an object with an unknown field `hostNetwrok` at a place in it."""
    wrong = copy.deepcopy(manifest)
    functools.reduce(operator.getitem, place, wrong)["hostNetwrok"] = True  # type: ignore[arg-type]
    return wrong


def _closed(schema: Any) -> Any:
    """The schema with unknown fields forbidden, which the API server would drop with a warning."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        schema = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return schema


def check_with_client(model: str, manifest: dict[str, Any]) -> None:
    """Asserts that a model of the Kubernetes client, such as "V1PodSpec", has all fields of an object."""
    client = pytest.importorskip("kubernetes").client
    api = client.ApiClient()
    kind = getattr(client, model)
    if hasattr(kind, "from_dict"):  # since version 36 models read themselves
        read = kind.from_dict(json.loads(json.dumps(manifest)))
    else:

        class Answer:
            data = json.dumps(manifest)

        read = api.deserialize(Answer, model)
    assert api.sanitize_for_serialization(read) == manifest


def check_restricted(pod: dict[str, Any]) -> None:
    """Asserts that a pod of one container meets the *restricted* Pod Security Standard, and declares its resources."""
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
    """Asserts that /dev/shm of a pod's container is memory with an explicit size."""
    (container,) = pod["containers"]
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    (shared,) = (volume for volume in pod["volumes"] if volume["name"] == mounted["/dev/shm"])
    assert shared["emptyDir"]["medium"] == "Memory"
    assert shared["emptyDir"]["sizeLimit"]
