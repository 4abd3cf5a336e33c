"""The trainings of torch.distributed for other operators than the mpi-operator: k8s/jobset and k8s/trainer. What the
API server accepts, whether names and numbers fit, and torchrun's commands run as in the pods of these files."""

from __future__ import annotations

import copy
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hvdcomp.tools.launch.rank import from_variable
from tests import k8s_schemas, kustomize
from tests.launched import launcher_variables

ROOT = Path(__file__).parents[3]
FOLDERS = ("jobset", "trainer")
BUILT = {
    name: {one["kind"]: one for one in kustomize.build(ROOT / "k8s" / name)} for name in (*FOLDERS, "overlays/cpu-demo")
}
JOBSET = BUILT["jobset"]["JobSet"]
RUNTIME, TRAINJOB = (BUILT["trainer"][kind] for kind in ("ClusterTrainingRuntime", "TrainJob"))
JOBSETS = {"jobset": JOBSET["spec"], "trainer": RUNTIME["spec"]["template"]["spec"]}
OBJECTS = [JOBSET, RUNTIME, TRAINJOB]


def job(name: str) -> dict[str, Any]:
    """The spec of the one Job in a folder's JobSet."""
    (replicated,) = JOBSETS[name]["replicatedJobs"]
    found: dict[str, Any] = replicated["template"]["spec"]
    return found


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = job(name)["template"]["spec"]
    return spec


def started(name: str, index: int) -> tuple[list[str], dict[str, str]]:
    """What a pod runs, and its variables: of Kubernetes for the JobSet, of Kubeflow Trainer for the TrainJob."""
    (container,) = pod(name)["containers"]
    if name == "jobset":
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["command"]]
        return [*words, *container["args"]], {}
    trainer, own = TRAINJOB["spec"]["trainer"], TRAINJOB["metadata"]["name"]
    return [*trainer.get("command", container["command"]), *trainer["args"]], {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{own}-node-0-0.{own}",
        "PET_MASTER_PORT": "29500",
    }


@pytest.mark.parametrize("one", OBJECTS, ids=[one["kind"] for one in OBJECTS])
def test_it_is_what_the_definition_of_its_kind_says(one: dict[str, Any]) -> None:
    k8s_schemas.check(one)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_patch_of_the_manual_leaves_the_user_to_openshift(name: str, tmp_path: Path) -> None:
    """And nothing else: pods are as unprivileged as before."""
    page = (ROOT / "docs" / "deploy-kubernetes.md").read_text()
    (patch,) = re.findall(r"```yaml\n(  patches:.*?)\n  ```", page, re.DOTALL)
    if name == "trainer":
        patch = patch.replace("JobSet", "ClusterTrainingRuntime").replace("path: /spec", "path: /spec/template/spec")
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    with (tmp_path / "k8s" / name / "kustomization.yaml").open("a") as file:
        file.write(f"{textwrap.dedent(patch)}\n")
    left = {one["kind"]: one for one in kustomize.build(tmp_path / "k8s" / name)}
    expected = copy.deepcopy(BUILT[name])
    pods_of = expected["JobSet"] if name == "jobset" else expected["ClusterTrainingRuntime"]["spec"]["template"]
    context = pods_of["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["securityContext"]
    for field in ("runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy"):
        del context[field]
    assert left == expected


@pytest.mark.parametrize(
    ("one", "place"),
    [
        (JOBSET, ["network"]),
        (JOBSET, ["replicatedJobs", 0, "template", "spec"]),
        (JOBSET, ["replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0]),
        (RUNTIME, ["mlPolicy"]),
        (RUNTIME, ["template", "spec", "replicatedJobs", 0, "template", "spec", "template", "spec"]),
        (TRAINJOB, ["trainer"]),
    ],
)
def test_the_definition_would_notice_a_wrong_field(one: dict[str, Any], place: list[Any]) -> None:
    with pytest.raises(jsonschema.ValidationError, match="hostNetwrok"):
        k8s_schemas.check(k8s_schemas.misspelt(one, ["spec", *place]))


@pytest.mark.parametrize("name", FOLDERS)
def test_its_pods_are_pods_and_satisfy_the_restricted_pod_security_standard(name: str) -> None:
    k8s_schemas.check_with_client("V1PodSpec", pod(name))
    k8s_schemas.check_restricted(pod(name))
    k8s_schemas.check_shared_memory(pod(name))
    # A pod that is told to end lives longer than torchrun waits for its ranks to save, which is 30 seconds.
    assert pod(name)["terminationGracePeriodSeconds"] > 30


@pytest.mark.parametrize("name", FOLDERS)
def test_a_lost_pod_ends_all_and_all_begin_again(name: str) -> None:
    assert pod(name)["restartPolicy"] == "Never"
    assert job(name)["backoffLimit"] == 0
    assert JOBSETS[name]["failurePolicy"]["maxRestarts"] >= 1


def test_kubeflow_trainer_finds_what_it_looks_for() -> None:
    (replicated,) = JOBSETS["trainer"]["replicatedJobs"]
    (container,) = pod("trainer")["containers"]
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    # By these names Trainer knows the container whose variables it sets, and rank 0's pod.
    assert (replicated["name"], container["name"]) == ("node", "node")
    assert RUNTIME["spec"]["mlPolicy"]["torch"] == {}
    assert TRAINJOB["spec"]["runtimeRef"] == {"name": RUNTIME["metadata"]["name"]}
    # Trainer refuses a job that sets torchrun's variables itself.
    assert not any(one["name"].startswith("PET_") for one in TRAINJOB["spec"]["trainer"].get("env", ()))
    assert container["image"] == pod("jobset")["containers"][0]["image"] == "hvdcomp:cpu"


@pytest.mark.parametrize("name", FOLDERS)
def test_torchrun_reads_how_many_pods_there_are_and_where_the_first_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pytest.importorskip("torch.distributed.run")
    own = {"jobset": JOBSET, "trainer": TRAINJOB}[name]["metadata"]["name"]
    pods = job("jobset")["parallelism"] if name == "jobset" else TRAINJOB["spec"]["trainer"]["numNodes"]
    if name == "jobset":
        assert job(name)["completionMode"] == "Indexed"
        assert job(name)["completions"] == pods
        assert JOBSET["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
        assert JOBSET["spec"]["replicatedJobs"][0]["replicas"] == 1
    assert len(f"{own}-node-0-{pods - 1}") <= 63
    for index in range(pods):
        words, variables = started(name, index)
        assert words[0] == "torchrun"
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        options = run.get_args_parser().parse_args(words[1:])
        assert (int(options.nnodes), int(options.node_rank), options.max_restarts) == (pods, index, 0)
        assert int(options.nproc_per_node) == 1
        assert (options.master_addr, int(options.master_port)) == (f"{own}-node-0-0.{own}", 29500)
        assert (options.module, options.training_script) == (True, "hvdcomp")


@pytest.mark.parametrize("name", FOLDERS)
def test_it_is_the_training_of_the_mpijob_and_serves_metrics_on_the_port_of_that_name(name: str) -> None:
    words, _ = started(name, 0)
    program = words[words.index("hvdcomp") :]
    (container,) = pod(name)["containers"]
    (port,) = container["ports"]
    metrics = ["--metrics-port", str(port["containerPort"]), "--metrics-address", "0.0.0.0"]
    assert port["name"] == "metrics"
    replicas = BUILT["overlays/cpu-demo"]["MPIJob"]["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    (command,) = (one["value"] for one in launcher["env"] if one["name"] == "HVDCOMP_COMMAND")
    assert program == [*from_variable(command), *metrics]
    (claim,) = (volume["persistentVolumeClaim"] for volume in pod(name)["volumes"] if volume["name"] == "checkpoints")
    volume = BUILT[name]["PersistentVolumeClaim"]
    assert claim["claimName"] == volume["metadata"]["name"]
    # The claims have one name, and a claim that is there cannot be changed to another access mode, or a smaller size.
    assert volume == BUILT["overlays/cpu-demo"]["PersistentVolumeClaim"]


@pytest.mark.skipif(kustomize.real_command() is None, reason="neither kustomize nor kubectl with kustomize 4 or later")
@pytest.mark.parametrize("name", [*FOLDERS, "monitoring"])
def test_kustomize_builds_what_these_tests_do(name: str) -> None:
    def ordered(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(objects, key=lambda one: (one["kind"], one["metadata"]["name"]))

    folder = ROOT / "k8s" / name
    assert ordered(kustomize.build_really(folder)) == ordered(kustomize.build(folder))


@pytest.mark.cluster
@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file of host names needs root")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare, of util-linux")
@pytest.mark.parametrize("name", FOLDERS)
def test_pods_train_save_when_one_is_told_to_end_and_go_on(name: str, tmp_path: Path) -> None:
    """The commands of both pods, with torchrun's real rendezvous. A file of host names stands for DNS."""
    pytest.importorskip("sklearn")
    pytest.importorskip("torch")
    pytest.importorskip("prometheus_client")
    own = {"jobset": JOBSET, "trainer": TRAINJOB}[name]["metadata"]["name"]
    (tmp_path / "hosts").write_text(Path("/etc/hosts").read_text() + f"127.0.0.1 {own}-node-0-0.{own}\n")
    (tmp_path / "cnn-state").mkdir()

    def start(index: int) -> subprocess.Popen[str]:
        words, variables = started(name, index)
        words = [word.replace("/checkpoints", str(tmp_path)).replace("0.0.0.0", "127.0.0.1") for word in words]
        words[words.index("--epochs") + 1] = "10"
        mounted = f'mount --bind {tmp_path}/hosts /etc/hosts && exec "$@"'
        python = [sys.executable, "-m", "torch.distributed.run"]
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", mounted, "sh", *python, *words[1:], "--checkpoint-every", "50"],
            env=launcher_variables(variables), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def ended(pods: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
        texts = [one.communicate(timeout=200)[0] for one in pods]
        return [one.returncode for one in pods], texts

    pods = [start(0), start(1)]
    until = time.monotonic() + 100
    while not list((tmp_path / "cnn-state").iterdir()) and time.monotonic() < until:
        time.sleep(0.2)
    pods[1].send_signal(signal.SIGTERM)
    codes, texts = ended(pods)
    assert all(codes), "torchrun says 1, whatever its ranks said"
    assert "213" in "".join(texts), texts
    codes, texts = ended([start(0), start(1)])
    assert codes == [0, 0], texts
    assert "continuing after step" in texts[0], texts[0]
