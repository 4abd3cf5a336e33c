"""`kubectl kustomize` for the folder k8s/: the real one where it is installed, and the few features that the folder
uses written out, for where it is not. A test holds one against the other.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]


def real_command() -> list[str] | None:
    """kustomize, or kubectl with kustomize in it, of a version that knows `patches` (4 or later); None without one."""
    for command, version in (
        (["kustomize", "build"], ["kustomize", "version"]),
        (["kubectl", "kustomize"], ["kubectl", "version", "--client", "--output", "yaml"]),
    ):
        if shutil.which(command[0]):
            said = subprocess.run(version, capture_output=True, text=True, check=False).stdout
            if command[0] == "kubectl":
                said = (yaml.safe_load(said) or {}).get("kustomizeVersion", "") if said else ""
            if said.strip().lstrip("v")[:1] in ("4", "5", "6"):
                return command
    return None


def build_really(folder: Path) -> list[Object]:
    command = real_command()
    assert command is not None
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def build(folder: Path) -> list[Object]:
    """The objects of a kustomization: resources, JSON patches by kind, image tags, config maps without a hash."""
    wanted = yaml.safe_load((folder / "kustomization.yaml").read_text())
    known = {"apiVersion", "kind", "resources", "images", "patches", "configMapGenerator", "generatorOptions"}
    assert set(wanted) <= known, f"{folder}: {set(wanted) - known} is not known to this test's kustomize"
    objects: list[Object] = []
    for resource in wanted["resources"]:
        path = (folder / resource).resolve()
        objects += build(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for generated in wanted.get("configMapGenerator", ()):
        options = wanted["generatorOptions"]
        assert options["disableNameSuffixHash"] is True
        metadata = {"name": generated["name"]} | {key: options[key] for key in options if key == "labels"}
        data = {name: (folder / name).read_text() for name in generated["files"]}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for patch in wanted.get("patches", ()):
        operations = yaml.safe_load(patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text())
        (target,) = (one for one in objects if one["kind"] == patch["target"]["kind"])
        for operation in operations:
            _patch(target, **operation)
    for image in wanted.get("images", ()):
        _tag(objects, image["name"], image["newTag"])
    return objects


def _patch(target: Any, op: str, path: str, value: Any = None) -> None:
    """RFC 6902: add and replace, and remove."""
    *way, last = (part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:])
    for part in way:
        target = target[int(part)] if isinstance(target, list) else target[part]
    value = copy.deepcopy(value)
    if isinstance(target, list):
        index = len(target) if last == "-" else int(last)
        if op in ("remove", "replace"):
            del target[index]
        if op in ("add", "replace"):
            target.insert(index, value)
    elif op == "remove":
        del target[last]
    else:
        assert op == "add" or last in target, f"{path} is not there to be replaced"
        target[last] = value


def _tag(node: Any, image: str, tag: str) -> None:
    for one in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _tag(one, image, tag)
    if isinstance(node, dict) and node.get("image") == image:
        node["image"] = f"{image}:{tag}"
