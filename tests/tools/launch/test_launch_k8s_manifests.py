"""The MPIJobs of the folder k8s/ and of `hvdcomp launch k8s`: what API server and operator accept, what pods may do,
and that no argument becomes anything but an argument."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import jsonschema
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp.tools.cli import main
from hvdcomp.tools.launch import torch_rank
from hvdcomp.tools.launch.job import Job, read_settings
from hvdcomp.tools.launch.k8s.manifest import WORKERS, literal, render
from hvdcomp.tools.launch.k8s.settings import KubernetesSettings
from hvdcomp.tools.launch.rank import from_variable
from tests import k8s_schemas, kustomize

ROOT = Path(__file__).parents[3]
OVERLAYS = ("cpu-demo", "v100", "elastic")
BUILT = {name: kustomize.build(ROOT / "k8s" / "overlays" / name) for name in OVERLAYS}
BUILT["base"] = kustomize.build(ROOT / "k8s" / "base")
LAUNCHED = {
    "small": KubernetesSettings(Job("a", ("python3", "train.py"), 1), "hvdcomp"),
    "torch": KubernetesSettings(Job("a", ("python3", "train.py"), 4, backend="torch"), "hvdcomp", slots_per_worker=2),
    **{
        name: KubernetesSettings(
            Job("a", ("python3", "train.py"), 16, {"NCCL_DEBUG": "INFO"}),
            "hvdcomp",
            slots_per_worker=8,
            gpu_resource="nvidia.com/gpu",
            patch=ROOT / "k8s" / "patches" / f"{name}.yaml",
        )
        for name in ("efa", "several-nics")
    },
    "elastic ranks": KubernetesSettings(
        Job("a", ("python3", "train.py"), 8, {"A": "b"}),
        "hvdcomp",
        slots_per_worker=2,
        gpu_resource="nvidia.com/gpu",
        elastic="4:12",
    ),
    "metrics": KubernetesSettings(
        Job("a", ("hvdcomp", "train", "--metrics-port", "1", "--metrics-port=9400"), 4),
        "hvdcomp",
        slots_per_worker=4,
        pod_annotations={"prometheus.io/path": "/metrics", "prometheus.io/scrape": "false"},
    ),
    "all": KubernetesSettings(
        Job("a" * 40, ("python3", "train.py"), 64, {"OMPI_MCA_btl": "self,tcp", "A": "b"}),
        "registry.example.org:5000/team/hvdcomp:1.0@sha256:" + "0" * 64,
        slots_per_worker=8,
        namespace="team",
        gpu_resource="nvidia.com/gpu",
        cpu_limit=False,
        checkpoint_claim="disk",
        node_selector={"zone": "a"},
        spread="hosts",
        restart_policy="OnFailure",
        retries=3,
        clean_pods="All",
        time_limit=3600,
        keep_finished=60,
        pull_secret="login",
        forward=("PATH", "LD_LIBRARY_PATH", "A"),
        grace_period=300,
        labels={"kueue.x-k8s.io/queue-name": "team"},
        annotations={"example.org/why": "a, b: $(c)"},
        pod_labels={"example.org/team": "vision"},
        pod_annotations={"sidecar.istio.io/inject": "false"},
        queue="batch",
        priority_class="low",
        tolerations=("dedicated=training:NoSchedule", "spot"),
        service_account="trainer",
        secrets={"TOKEN": "login/token"},
        volumes={"/data": "datasets:ro", "/scratch": "scratch"},
        resources={"rdma/hca": "1"},
    ),
}


ELASTIC = ("elastic", "elastic ranks")


def mpijob(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (job,) = (one for one in objects if one["kind"] == "MPIJob")
    return job


JOBS = {name: mpijob(objects) for name, objects in BUILT.items()} | {
    name: render(settings) for name, settings in LAUNCHED.items()
}


def pods(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {role: one["template"]["spec"] for role, one in job["spec"]["mpiReplicaSpecs"].items()}


def only_container(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return container


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: expanded(one["value"], {}) for one in container["env"] if "value" in one}


def expanded(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of a text in `args` or `env`: `$$` is `$`, `$(NAME)` a variable's value if there is one."""

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


@pytest.fixture(scope="module")
def validator() -> Any:
    return jsonschema.Draft202012Validator(k8s_schemas.mpijob())


@pytest.mark.parametrize("name", JOBS)
def test_it_is_what_the_definition_of_mpijob_says(validator: Any, name: str) -> None:
    validator.validate(JOBS[name])


@pytest.mark.parametrize("place", ["spec", "spec/mpiReplicaSpecs/Worker/template/spec", "spec/runPolicy"])
def test_the_definition_would_notice_a_wrong_field(validator: Any, place: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match="hostNetwrok"):
        validator.validate(k8s_schemas.misspelt(JOBS["small"], place.split("/")))


@pytest.mark.parametrize("name", JOBS)
def test_its_pods_are_pods_to_the_kubernetes_client(name: str) -> None:
    for pod in pods(JOBS[name]).values():
        k8s_schemas.check_with_client("V1PodSpec", pod)


@pytest.mark.parametrize("name", JOBS)
def test_the_operator_accepts_it(name: str) -> None:
    job = JOBS[name]
    spec = job["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    assert set(spec["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    assert launcher["replicas"] == 1
    assert worker["replicas"] >= 1
    assert launcher["restartPolicy"] in ("Never", "OnFailure")
    assert worker["restartPolicy"] in ("Never", "OnFailure")
    last = f"{job['metadata']['name']}-worker-{worker['replicas'] - 1}"
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", last)
    assert spec["slotsPerWorker"] >= 1
    assert spec["mpiImplementation"] == "OpenMPI"
    gang = spec["runPolicy"]["schedulingPolicy"]["minAvailable"]
    if name in ELASTIC:
        assert spec["launcherCreationPolicy"] == "AtStartup"
        assert gang == 1 + int(only_container(launcher["template"]["spec"])["command"][-1])
    else:
        assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
        # A gang that counts the launcher, which is made when the workers are ready, would never be placed.
        assert gang == worker["replicas"]
    assert spec["sshAuthMountPath"] == "/home/mpiuser/.ssh"
    assert spec["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")


@pytest.mark.parametrize("name", JOBS)
def test_its_pods_satisfy_the_restricted_pod_security_standard(name: str) -> None:
    for role, pod in pods(JOBS[name]).items():
        k8s_schemas.check_restricted(pod)
        if role == "Worker":
            k8s_schemas.check_shared_memory(pod)
            assert only_container(pod)["readinessProbe"]["tcpSocket"]["port"] == 2222


@pytest.mark.parametrize("name", ELASTIC)
def test_bounds_and_slots_of_an_elastic_job_agree(name: str) -> None:
    spec = JOBS[name]["spec"]
    launcher = only_container(pods(JOBS[name])["Launcher"])
    slots, replicas = spec["slotsPerWorker"], spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    horovodrun = pytest.importorskip("horovod.runner.launch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["horovodrun", *launcher["args"]])
        options = horovodrun.parse_args()
    least = options.min_num_proc
    assert least <= slots * replicas <= options.max_num_proc
    assert (options.num_proc, options.slots, options.nics) == (least, slots, {"eth0"})
    assert options.cooldown_range == [60, 600]
    assert launcher["command"][:5] == ["python3", "-m", "hvdcomp.tools.launch.k8s.elastic", "2222", WORKERS]
    assert int(launcher["command"][5]) * slots == least
    assert "HVDCOMP_EXPECTED_SIZE" not in environment(launcher)
    assert options.command == ["sh", "-c", "trap '' USR1 USR2; exec python3 -m hvdcomp.tools.launch.rank"]
    assert from_variable(environment(launcher)["HVDCOMP_COMMAND"])[0] == "python3"


@pytest.mark.parametrize("name", [name for name in JOBS if name not in ELASTIC])
def test_ranks_slots_gpus_and_the_promise_agree(name: str) -> None:
    spec = JOBS[name]["spec"]
    launcher, worker = (only_container(pod) for pod in pods(JOBS[name]).values())
    arguments = launcher["args"]
    ranks = arguments[arguments.index("-np") + 1]
    assert int(ranks) == spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert environment(launcher)["HVDCOMP_EXPECTED_SIZE"] == ranks
    resources = worker["resources"]
    if "nvidia.com/gpu" in resources["limits"]:
        assert resources["limits"]["nvidia.com/gpu"] == str(spec["slotsPerWorker"])
        assert resources["requests"]["nvidia.com/gpu"] == str(spec["slotsPerWorker"])
    forwarded = [arguments[index + 1] for index, one in enumerate(arguments) if one == "-x"]
    assert len(forwarded) == len(set(forwarded))
    own = {variable for variable in environment(launcher) if not variable.startswith("OMPI_MCA_")}
    assert own <= set(forwarded)
    assert from_variable(environment(launcher)["HVDCOMP_COMMAND"])


def test_ranks_of_torch_are_told_where_rank_0_is_and_need_nothing_for_mpi() -> None:
    variables = environment(only_container(pods(JOBS["torch"])["Launcher"]))
    # The operator's name for the first worker's host is a-worker-0.a.<namespace>.svc.
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("a-worker-0.a", "29500")
    assert variables["TORCHELASTIC_RUN_ID"] == "a"
    assert from_variable(variables["HVDCOMP_COMMAND"])[2:] == ["hvdcomp.tools.launch.torch_rank", "python3", "train.py"]
    assert not any(name.startswith("OMPI_MCA_") for name in variables)


@pytest.mark.parametrize("name", [*OVERLAYS, "base"])
def test_the_claim_that_is_mounted_is_there(name: str) -> None:
    (claim,) = (one["metadata"]["name"] for one in BUILT[name] if one["kind"] == "PersistentVolumeClaim")
    volumes = pods(JOBS[name])["Worker"]["volumes"]
    assert [one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one] == [claim]


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_settings_beside_an_overlay_make_the_same_job(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where the patch is looked for
    file = ROOT / "k8s" / "overlays" / name / "launch.toml"
    assert render(read_settings(file, "k8s", KubernetesSettings, {})) == JOBS[name]


def test_the_file_of_every_setting_has_them_all_and_makes_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = ROOT / "k8s" / "every-setting.toml"
    tables = tomllib.loads(file.read_text())
    for name, kind in {"job": Job, "k8s": KubernetesSettings}.items():
        assert tables[name].keys() == {field.name for field in fields(kind)} - {"job"}
    assert render(read_settings(file, "k8s", KubernetesSettings, {}))["kind"] == "MPIJob"


@pytest.mark.parametrize(
    ("name", "resource", "annotation"),
    [("efa", "vpc.amazonaws.com/efa", None), ("several-nics", "rdma/hca", "rail-1, rail-2")],
)
def test_patches_ask_for_cards_beside_what_the_settings_ask_for(name: str, resource: str, annotation: str) -> None:
    worker = JOBS[name]["spec"]["mpiReplicaSpecs"]["Worker"]["template"]
    resources = only_container(worker["spec"])["resources"]
    for amounts in resources.values():
        assert {"nvidia.com/gpu", "memory", resource} <= amounts.keys()
    extended = [{key: one[key] for key in one if "/" in key or "hugepages" in key} for one in resources.values()]
    assert extended[0] == extended[1]  # Kubernetes promises no more of these than the limit
    assert worker.get("metadata", {}).get("annotations", {}).get("k8s.v1.cni.cncf.io/networks") == annotation


@pytest.mark.parametrize("name", ["efa", "several-nics"])
def test_the_settings_in_a_patch_s_comment_bring_the_ranks_every_variable_it_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # where the patch is looked for
    patch = Path("k8s", "patches", f"{name}.yaml")
    comment = "".join(re.findall(r"^#.*\n", patch.read_text(), re.MULTILINE))
    file = tmp_path / "launch.toml"
    file.write_text("\n".join(re.findall(r"^#   (.*)", comment, re.MULTILINE)))
    flags = {"name": "a", "image": "hvdcomp", "ranks": 2, "gpu_resource": "nvidia.com/gpu", "command": ("./train",)}
    settings = read_settings(file, "k8s", KubernetesSettings, flags)
    assert settings.patch == patch
    arguments = only_container(pods(render(settings))["Launcher"])["args"]
    passed = {name for flag, name in itertools.pairwise(arguments) if flag == "-x"}
    assert set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", comment)) <= passed


@pytest.mark.skipif(kustomize.real_command() is None, reason="neither kustomize nor kubectl with kustomize 4 or later")
@pytest.mark.parametrize("name", [*OVERLAYS, "base"])
def test_kustomize_builds_what_these_tests_do(name: str) -> None:
    folder = ROOT / "k8s" / ("base" if name == "base" else f"overlays/{name}")

    def ordered(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(objects, key=lambda one: one["kind"])

    assert ordered(kustomize.build_really(folder)) == ordered(BUILT[name])


# Anything that a process can be given: no NUL, no half of a surrogate pair. With what shells, YAML, Kubernetes and
# mpirun read as their own.
HOSTILE = st.one_of(
    st.sampled_from(
        [
            "$(HOME)",
            "$$(HOME)",
            "$HVDCOMP_COMMAND",
            "$$",
            "$",
            "`id`",
            "$(id)",
            "'",
            '"',
            "a b",
            "",
            ":",
            "--mca",
            "-x",
            "--",
        ]
    ),
    st.sampled_from(
        ["- a\n- b", "key: {x: 1}", "!!python/object:os.system", "\n---\n", "&a *a", "%YAML", "\ufeff", "\x85"]
    ),
    st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=20),
)


def test_the_expansion_that_this_test_assumes() -> None:
    assert expanded("$(A) $$(A) $(B) $A $$ $", {"A": "1"}) == "1 $(A) $(B) $A $ $"


@given(text=HOSTILE)
def test_kubernetes_expands_nothing_in_a_literal(text: str) -> None:
    assert expanded(literal(text), {"HOME": "/root", "HVDCOMP_COMMAND": "x", "id": "0", "": ""}) == text


@given(arguments=st.lists(HOSTILE, max_size=6), value=HOSTILE)
def test_a_command_arrives_as_it_was_given(arguments: list[str], value: str) -> None:
    job = Job("safe", ("./program", *arguments), 2, {"VALUE": value})
    manifest = render(KubernetesSettings(job, "hvdcomp"))
    assert yaml.safe_load(yaml.safe_dump(manifest)) == manifest
    assert json.loads(json.dumps(manifest)) == manifest
    launcher = only_container(pods(manifest)["Launcher"])
    assert environment(launcher)["VALUE"] == value
    command = environment(launcher)["HVDCOMP_COMMAND"]
    assert from_variable(command) == ["./program", *arguments]
    assert command.isascii()
    assert "\n" not in command
    # Neither words on mpirun's command line, nor fields of the object, come from the program.
    plain = render(KubernetesSettings(Job("safe", ("x",), 2, {"VALUE": ""}), "hvdcomp"))
    launcher["env"] = only_container(pods(plain)["Launcher"])["env"]
    assert manifest == plain


def test_what_clusters_demand_is_where_they_look_for_it() -> None:
    job = JOBS["all"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job["metadata"]["annotations"] == {"example.org/why": "a, b: $(c)"}
    assert job["spec"]["runPolicy"] == {
        "cleanPodPolicy": "All",
        "backoffLimit": 3,
        "activeDeadlineSeconds": 3600,
        "ttlSecondsAfterFinished": 60,
        "schedulingPolicy": {"minAvailable": 8, "queue": "batch"},
    }
    plain = {"cleanPodPolicy": "Running", "backoffLimit": 0, "schedulingPolicy": {"minAvailable": 1}}
    assert JOBS["small"]["spec"]["runPolicy"] == plain
    for role, replica in job["spec"]["mpiReplicaSpecs"].items():
        template = replica["template"]
        assert template["metadata"] == {
            "labels": {"example.org/team": "vision"},
            "annotations": {"sidecar.istio.io/inject": "false"},
        }
        pod = template["spec"]
        assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("low", "trainer")
        assert pod["terminationGracePeriodSeconds"] == 300
        assert pod["tolerations"][:2] == [
            {"key": "dedicated", "operator": "Equal", "value": "training", "effect": "NoSchedule"},
            {"key": "spot", "operator": "Exists"},
        ]
        assert [one["key"] for one in pod["tolerations"][2:]] == (["nvidia.com/gpu"] if role == "Worker" else [])
    launcher, worker = map(only_container, pods(job).values())
    token = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "login", "key": "token"}}}
    assert launcher["env"][-1] == token
    assert launcher["args"][launcher["args"].index("TOKEN") - 1] == "-x"
    assert worker["resources"]["limits"]["rdma/hca"] == worker["resources"]["requests"]["rdma/hca"] == "1"
    mounted = {mount["mountPath"]: mount["name"] for mount in worker["volumeMounts"]}
    volumes = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pods(job)["Worker"]["volumes"]}
    assert volumes[mounted["/data"]] == {"claimName": "datasets", "readOnly": True}
    assert volumes[mounted["/scratch"]] == {"claimName": "scratch"}


def test_prometheus_is_told_where_rank_0_is_scraped() -> None:
    """In the first worker; annotations name it only where there is no other. Annotations of the settings win."""
    launched = KubernetesSettings(
        Job("a", ("hvdcomp", "train", "--metrics-port", "9400"), 4), "hvdcomp", slots_per_worker=4
    )
    launcher, worker = (one["template"] for one in render(launched)["spec"]["mpiReplicaSpecs"].values())
    assert "metadata" not in launcher
    assert worker["metadata"] == {"annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": "9400"}}
    own_program = Job("a", ("python3", "train.py", "--metrics-port", "9400"), 4)
    may_grow = replace(LAUNCHED["elastic ranks"], job=own_program, slots_per_worker=4)
    for several in (replace(launched, slots_per_worker=2), may_grow):
        worker = render(several)["spec"]["mpiReplicaSpecs"]["Worker"]["template"]
        assert "metadata" not in worker
        assert only_container(worker["spec"])["ports"][1:] == [{"name": "metrics", "containerPort": 9400}]
    launcher, worker = (one["template"] for one in JOBS["metrics"]["spec"]["mpiReplicaSpecs"].values())
    own = {"prometheus.io/path": "/metrics", "prometheus.io/scrape": "false"}
    assert launcher["metadata"]["annotations"] == own
    assert worker["metadata"]["annotations"] == {**own, "prometheus.io/port": "9400"}
    assert launched.program == ("hvdcomp", "train", "--metrics-address", "0.0.0.0", *launched.job.command[2:])
    by_torch = KubernetesSettings(replace(launched.job, backend="torch"), "hvdcomp")
    assert by_torch.program == (*torch_rank.PROGRAM, *launched.program)
    for command in (
        ("hvdcomp", "train", "--metrics-port", "9400", "--metrics-address=127.0.0.1"),
        ("python3", "train.py", "--metrics-port", "9400"),
    ):
        assert KubernetesSettings(Job("a", command, 4), "hvdcomp").program == command
    assert "prometheus" not in json.dumps([JOBS["small"], JOBS["torch"], JOBS["all"]])


def test_a_dry_run_prints_the_job_and_needs_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    words = ["--name", "it", "--image", "hvdcomp:cpu", "--ranks", "4", "--slots-per-worker", "2", "--env", "A=b=c $(D)"]
    program = ["--", "status", "--dry-run", "--", "a\n- b: $(HOME)", "'\""]
    result = CliRunner().invoke(main, ["launch", "k8s", *words, "--dry-run", *program])
    assert result.exit_code == 0, result.output
    job = Job("it", tuple(program[1:]), 4, {"A": "b=c $(D)"})
    assert yaml.safe_load(result.stdout) == render(KubernetesSettings(job, "hvdcomp:cpu", slots_per_worker=2))
    elastic = CliRunner().invoke(main, ["launch", "k8s", *words, "--elastic", "2:8", "--dry-run", *program])
    assert yaml.safe_load(elastic.stdout) == render(
        KubernetesSettings(job, "hvdcomp:cpu", slots_per_worker=2, elastic="2:8")
    )
    for_torch = CliRunner().invoke(main, ["launch", "k8s", *words, "--backend", "torch", "--dry-run", *program])
    job = replace(job, backend="torch")
    assert yaml.safe_load(for_torch.stdout) == render(KubernetesSettings(job, "hvdcomp:cpu", slots_per_worker=2))


def test_horovod_on_gpus_does_not_wait_for_them_in_each_round() -> None:
    """And the job's own environment wins."""

    def said(backend: Literal["horovod", "torch"], gpus: str | None, **own: str) -> str | None:
        job = Job("a", ("python3", "train.py"), 2, own, backend=backend)
        rendered = render(KubernetesSettings(job, "hvdcomp", gpu_resource=gpus))
        launcher = only_container(pods(rendered)["Launcher"])
        found = environment(launcher).get("HOROVOD_ENABLE_ASYNC_COMPLETION")
        assert ("HOROVOD_ENABLE_ASYNC_COMPLETION" in launcher["args"]) == (found is not None)
        return found

    assert said("horovod", "nvidia.com/gpu") == "1"
    assert said("horovod", "nvidia.com/gpu", HOROVOD_ENABLE_ASYNC_COMPLETION="0") == "0"
    assert said("torch", "nvidia.com/gpu") is None
    assert said("horovod", None) is None
