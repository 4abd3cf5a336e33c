"""Reads a patch file, which is merged into the MPIJob. With it, users can set fields for which there is no setting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdcomp.errors import ConfigurationError

_FIXED = (("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace"))
"""The fields that a patch must not change, because they identify the job."""


def read_patch(path: Path) -> dict[str, Any]:
    """The content of a patch file, in YAML or JSON.

    Raises:
        ConfigurationError: if the file cannot be read, or does not consist of fields of an MPIJob.
    """
    try:
        import yaml
    except ImportError:
        raise ConfigurationError("patch: this needs PyYAML: pip install 'hvdcomp[k8s]'") from None
    try:
        patch = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"patch: {path} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"patch: {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(patch, dict):
        raise ConfigurationError(f"patch: {path} must contain fields of an MPIJob, and begin with metadata: or spec:")
    for place in _FIXED:
        value: Any = patch
        for key in place:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            raise ConfigurationError(
                f"patch: {path} sets {'.'.join(place)}, which another setting already sets: leave it out"
            )
    return patch


def merged(base: Any, patch: Any) -> Any:
    """Merges a patch into a manifest, and returns the result.

    Tables are merged field by field, and null removes a field. Lists whose items have a `name` (such as containers,
    volumes and variables) are merged item by item, and new items are added at the end. Mounts are matched by
    `mountPath`. Any other value replaces the value in `base`.
    """
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        result = {key: value for key, value in base.items() if patch.get(key, value) is not None}
        for key, value in patch.items():
            if value is not None:
                result[key] = merged(base.get(key), value)
        return result
    if isinstance(patch, Mapping):
        return merged({}, patch)  # this removes the nulls of the patch
    if isinstance(base, list) and isinstance(patch, list):
        whole = [*base, *patch]
        tables = all(isinstance(item, Mapping) for item in whole)
        key = "mountPath" if tables and any("mountPath" in item for item in whole) else "name"
        if tables and all(key in item for item in whole):
            items = {item[key]: item for item in base}
            for item in patch:
                items[item[key]] = merged(items.get(item[key]), item)
            return list(items.values())
    return patch
