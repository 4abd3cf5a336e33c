"""A file that is merged into the MPIJob of `hvdcomp launch k8s`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hvdcomp.errors import ConfigurationError
from hvdcomp.tools.launch.job import Job
from hvdcomp.tools.launch.k8s.manifest import render
from hvdcomp.tools.launch.k8s.settings import KubernetesSettings

SETTINGS = KubernetesSettings(Job("a", ("python3", "train.py"), 1), "hvdcomp")
PATCH = """
metadata:
  finalizers: [example.org/kept]
spec:
  runPolicy: {suspend: true}
  mpiReplicaSpecs:
    Worker:
      template:
        spec:
          hostIPC: true
          enableServiceLinks: null
          containers:
          - name: worker
            volumeMounts:
            - {mountPath: /dev/shm, readOnly: true}
            - {name: data, mountPath: /data}
            - {name: data, mountPath: /more, subPath: more}
          - {name: sidecar, image: proxy, env: null}
          volumes:
          - {name: data, nfs: {server: files, path: /}}
"""


def test_a_patch_is_merged_into_the_job(tmp_path: Path) -> None:
    (tmp_path / "patch.yaml").write_text(PATCH)
    patched = replace(SETTINGS, patch=tmp_path / "patch.yaml")
    job, before = render(patched), json.loads(json.dumps(render(SETTINGS)))
    worker = before["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    before["metadata"]["finalizers"] = ["example.org/kept"]
    before["spec"]["runPolicy"]["suspend"] = True
    worker["hostIPC"] = True
    del worker["enableServiceLinks"]
    worker["containers"][0]["volumeMounts"][0]["readOnly"] = True
    worker["containers"][0]["volumeMounts"].append({"name": "data", "mountPath": "/data"})
    worker["containers"][0]["volumeMounts"].append({"name": "data", "mountPath": "/more", "subPath": "more"})
    worker["containers"].append({"name": "sidecar", "image": "proxy"})
    worker["volumes"].append({"name": "data", "nfs": {"server": "files", "path": "/"}})
    assert job == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: b: c", "is not valid YAML: mapping values are not allowed here"),
        ("- op: add", "must contain fields of an MPIJob, and begin with metadata: or spec:"),
        ("metadata: {name: other}", "sets metadata.name, which another setting already sets: leave it out"),
        ("kind: Pod", "sets kind, which another setting already sets"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_patch_that_cannot_be_merged_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "patch.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        render(replace(SETTINGS, patch=file))
