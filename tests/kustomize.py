"""`kubectl kustomize` for the folder k8s/: the real command, and an implementation of the few features that the folder
uses, for machines without the command. A test compares both.
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
    """kustomize, or kubectl with kustomize in it, of a version with `patches` (4 or later); None without it."""
    for command, version in (
        (["kustomize", "build"], ["kustomize", "version"]),
        (["kubectl", "kustomize"], ["kubectl", "version", "--client", "--output", "yaml"]),
    ):
        if shutil.which(command[0]):
            version_text = subprocess.run(version, capture_output=True, text=True, check=False).stdout
            if command[0] == "kubectl":
                version_text = (yaml.safe_load(version_text) or {}).get("kustomizeVersion", "") if version_text else ""
            if version_text.strip().lstrip("v")[:1] in ("4", "5", "6"):
                return command
    return None


def build_really(folder: Path) -> list[Object]:
    command = real_command()
    assert command is not None
    process = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return list(yaml.safe_load_all(process.stdout))


def build(folder: Path) -> list[Object]:
    """The objects of a kustomization: resources, JSON patches by kind, image tags, config maps without a hash. Of
    components the patches alone."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    supported = {"apiVersion", "kind", "resources", "components", "images", "patches"}
    supported |= {"configMapGenerator", "generatorOptions"}
    unsupported = set(kustomization) - supported
    assert not unsupported, f"{folder}: {unsupported} is not supported by this test's kustomize"
    objects: list[Object] = []
    for resource in kustomization["resources"]:
        path = (folder / resource).resolve()
        objects += build(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for generated in kustomization.get("configMapGenerator", ()):
        options = kustomization["generatorOptions"]
        assert options["disableNameSuffixHash"] is True
        metadata = {"name": generated["name"]} | {key: options[key] for key in options if key == "labels"}
        data = {name: (folder / name).read_text() for name in generated["files"]}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for component in kustomization.get("components", ()):
        _patch_all(objects, yaml.safe_load((folder / component / "kustomization.yaml").read_text()), folder / component)
    _patch_all(objects, kustomization, folder)
    for image in kustomization.get("images", ()):
        _tag(objects, image["name"], image["newTag"])
    return objects


def _patch_all(objects: list[Object], kustomization: Object, folder: Path) -> None:
    for patch in kustomization.get("patches", ()):
        operations = yaml.safe_load(patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text())
        (target,) = (manifest for manifest in objects if manifest["kind"] == patch["target"]["kind"])
        for operation in operations:
            _patch(target, **operation)


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
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _tag(child, image, tag)
    if isinstance(node, dict) and node.get("image") == image:
        node["image"] = f"{image}:{tag}"
