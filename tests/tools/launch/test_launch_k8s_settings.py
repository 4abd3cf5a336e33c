"""Settings that API server or operator would refuse are refused before anything is sent, with the way out."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp.errors import ConfigurationError
from hvdcomp.tools.launch.job import Job
from hvdcomp.tools.launch.k8s.quantity import quantity
from hvdcomp.tools.launch.k8s.settings import KubernetesSettings


def settings(
    name: str = "run",
    ranks: int = 4,
    environment: dict[str, str] | None = None,
    command: tuple[str, ...] = ("python3", "train.py"),
    backend: Any = "horovod",
    **more: Any,
) -> KubernetesSettings:
    job = Job(name, command, ranks, environment or {}, backend)
    return KubernetesSettings(**{"job": job, "image": "hvdcomp:cpu", **more})


TRAIN = ("hvdcomp", "train", "--model", "mlp")
SAVES = (*TRAIN, "--checkpoint-folder", "/checkpoints/mlp")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "Run"}, "name: 'Run' cannot be the name of a job on Kubernetes"),
        ({"name": "a_b"}, "lower-case letters, digits and hyphens"),
        ({"name": "a.b"}, "letter or digit first and last"),
        ({"name": "4-ranks"}, "name: '4-ranks' must begin with a letter"),
        ({"image": ""}, "image: the name is empty"),
        ({"image": "HVDCOMP"}, "image: 'HVDCOMP' is not an image's name"),
        ({"image": "a b"}, "image: 'a b'"),
        ({"image": "hvdcomp:"}, "image: 'hvdcomp:'"),
        ({"image": "hvdcomp:a\n"}, "image: 'hvdcomp:a\\n'"),
        ({"image": "hvdcomp@sha256:12"}, "write it as registry.example.org/path/name:tag"),
        ({"namespace": "My"}, "namespace: 'My'"),
        ({"namespace": "a" * 64}, "at most 63"),
        ({"slots_per_worker": 3}, "ranks: 4 ranks do not fill pods of slots_per_worker=3"),
        ({"slots_per_worker": 8}, "ranks: 4 ranks do not fill pods of slots_per_worker=8"),
        ({"slots_per_worker": 0}, "slots_per_worker: 0 must be 1 or more"),
        ({"name": "a" * 40, "ranks": 10**16}, "longer than the 63 characters that"),
        ({"worker_cpu": "two"}, "worker_cpu: 'two' is not a quantity"),
        ({"worker_memory": "4GB"}, "worker_memory: '4GB' is not a quantity: write a number and, if needed, a unit"),
        ({"worker_memory": "4 Gi"}, "is not a quantity"),
        ({"worker_memory": "-4Gi"}, "is not a quantity"),
        ({"worker_memory": "4Gi\n"}, "is not a quantity"),
        ({"worker_memory": "500m"}, "thousandths of a byte"),
        ({"launcher_memory": "0"}, "launcher_memory: '0' must be more than 0"),
        ({"shared_memory": "4Gi"}, "shared_memory: 4Gi is part of worker_memory=4Gi and must be smaller"),
        ({"shared_memory": "5000M"}, "must be smaller"),
        ({"gpu_resource": "gpu"}, "gpu_resource: 'gpu' has no domain: write nvidia.com/gpu"),
        ({"gpu_resource": "nvidia.com/"}, "is not a valid label name"),
        ({"node_selector": {"a b": "c"}}, "node_selector: 'a b' is not a valid label name"),
        ({"node_selector": {"a": "b c"}}, "node_selector.a: 'b c' is not a label's value"),
        ({"checkpoint_claim": "A"}, "checkpoint_claim: 'A' is not an object's name"),
        ({"pull_secret": ""}, "pull_secret: ''"),
        ({"checkpoint_path": "checkpoints"}, "checkpoint_path: 'checkpoints' is not a folder"),
        ({"checkpoint_path": "/"}, "other than /"),
        ({"home": "/home/../etc"}, "home: '/home/../etc'"),
        ({"home": "/home/$(HOME)"}, "home: "),
        ({"labels": {"kueue.x-k8s.io/queue name": "a"}}, "labels: 'kueue.x-k8s.io/queue name' is not a valid label"),
        ({"labels": {"queue": "a b"}}, "labels.queue: 'a b' is not a label's value"),
        ({"annotations": {"a b": "any text"}}, "annotations: 'a b' is not a valid label name"),
        (
            {"pod_labels": {"training.kubeflow.org/job-name": "x"}},
            "pod_labels: the mpi-operator itself sets 'training.",
        ),
        ({"queue": "Team"}, "queue: 'Team' is not an object's name"),
        ({"priority_class": "a b"}, "priority_class: 'a b' is not an object's name"),
        ({"service_account": ""}, "service_account: '' is not an object's name"),
        ({"tolerations": ("a=b:Never",)}, "tolerations: 'a=b:Never' is not a taint: write KEY, KEY=VALUE, KEY:EFFECT"),
        ({"tolerations": ("a b",)}, "tolerations: 'a b' is not a taint"),
        ({"secrets": {"A-B": "login/token"}}, "secrets: 'A-B' is not the name of a variable"),
        (
            {"secrets": {"TOKEN": "login"}},
            "secrets.TOKEN: 'login' does not name a key of a Secret: write it as SECRET/KEY",
        ),
        ({"secrets": {"A": "login/a"}, "environment": {"A": ""}}, "secrets: A is set by another setting"),
        ({"secrets": {"HVDCOMP_COMMAND": "login/a"}}, "secrets: HVDCOMP_COMMAND is set by another setting"),
        (
            {"secrets": {"OMPI_MCA_a": "login/a"}},
            "secrets: OMPI_MCA_a is set by another setting, or belongs to Open MPI",
        ),
        ({"volumes": {"data": "disk"}}, "volumes: 'data' is not a folder to mount at"),
        ({"volumes": {"/data": "Disk"}}, "volumes./data: 'Disk' is not an object's name"),
        ({"volumes": {"/dev/shm/": "disk"}}, "volumes: something else is already mounted at '/dev/shm/'"),
        (
            {"volumes": {"/c": "a"}, "checkpoint_claim": "b", "checkpoint_path": "/c"},
            "something else is already mounted at '/c'",
        ),
        ({"volumes": {"/a": "a", "/a/": "b"}}, "volumes: something else is already mounted at '/a/'"),
        ({"resources": {"rdma": "1"}}, "resources.rdma: 'rdma' has no domain"),
        ({"resources": {"rdma/hca": "0"}}, "resources.rdma/hca: '0' must be a whole number in quotes"),
        ({"resources": {"a.b/c": "1"}, "gpu_resource": "a.b/c"}, "the resource must not be gpu_resource"),
        ({"grace_period": 0}, "grace_period: 0 must be at least 1"),
        ({"retries": -1}, "retries: -1 must be at least 0"),
        ({"time_limit": 0}, "time_limit: 0 must be at least 1"),
        ({"keep_finished": 2**31}, "below 2^31"),
        ({"forward": ("A=1",)}, "forward: 'A=1' is not the name of a variable"),
        ({"command": ("a", "--metrics-port")}, "command: --metrics-port '' is not a port for metrics"),
        ({"command": ("a", "--metrics-port=x")}, "command: --metrics-port 'x' is not a port for metrics"),
        ({"command": ("a", "--metrics-port", "65536")}, "use a number from 1 to 65535"),
        ({"command": ("a", "--metrics-port", "2222")}, "but not 2222, which sshd uses"),
        ({"environment": {"HVDCOMP_COMMAND": "[]"}}, "the launcher itself sets HVDCOMP_COMMAND"),
        ({"environment": {"HVDCOMP_EXPECTED_SIZE": "1"}}, "the launcher itself sets HVDCOMP_EXPECTED_SIZE"),
        ({"environment": {"OMPI_MCA_a": "$(touch x)"}}, "may contain only letters, digits and _.,:^/@=+-"),
        ({"environment": {"OMPI_MCA_a": "a b"}}, "OMPI_MCA_a='a b'"),
        ({"elastic": "8"}, "the least and the largest number of ranks, both 1 or more, such as 2:8"),
        ({"elastic": "0:4"}, "elastic: '0:4' must be MIN:MAX"),
        ({"elastic": "-1:4"}, "elastic: '-1:4' must be MIN:MAX"),
        ({"elastic": "2:8\n"}, "elastic: '2:8\\n' must be MIN:MAX"),
        ({"elastic": "8:2"}, "elastic: the range 8:2 must contain the number"),
        ({"elastic": "5:8"}, "at the start of the job, ranks=4: use MIN <="),
        ({"elastic": "1:4", "slots_per_worker": 2}, "elastic: the limits 1:4 do not fill pods"),
        ({"elastic": "2:5", "slots_per_worker": 2}, "elastic: the limits 2:5 do not fill pods"),
        ({"name": "a" * 40, "elastic": f"2:{10**16}"}, "longer than the 63 characters that"),
        ({"elastic": "2:8", "backend": "torch"}, "elastic: only Horovod can be elastic, and backend is torch"),
        ({"elastic": "2:8", "interface": "eth0,lo"}, "interface: 'eth0,lo' is not a network interface"),
        ({"elastic": "2:64"}, "launcher_memory: 512Mi is too little for elastic=2:64, because the launcher"),
        ({"elastic": "2:8", "command": TRAIN, "checkpoint_claim": "disk"}, "elastic: `hvdcomp train` continues from"),
        ({"elastic": "2:8", "command": ("python3", "-m", *TRAIN)}, "add --checkpoint-folder, in a volume that all"),
        ({"elastic": "2:8", "command": SAVES}, "elastic: no volume is mounted, so workers would not find"),
        (
            {"elastic": "2:8", "command": (*SAVES, "--backend", "ddp"), "checkpoint_claim": "disk"},
            "elastic: `hvdcomp train --backend ddp` does not use Horovod",
        ),
        ({"command": (*SAVES, "--elastic")}, "command: `hvdcomp train --elastic` needs an elastic job"),
    ],
)
def test_what_is_wrong_is_named_with_the_way_out(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        settings(**values)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "image",
    ["hvdcomp", "hvdcomp:cpu", "a/b/c:1.0", "localhost:5000/hvdcomp", "ghcr.io/a_b/c-d:v1_2", "x@sha256:" + "a1" * 32],
)
def test_images(image: str) -> None:
    assert settings(image=image).image == image


def test_what_is_right_is_taken() -> None:
    taken = settings(
        ranks=8, slots_per_worker=4, environment={"OMPI_MCA_btl": "^openib,self/x:1"}, gpu_resource="amd.com/gpu"
    )
    assert taken.workers == 2


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (SAVES, (*SAVES[:2], "--elastic", *SAVES[2:])),
        (("/opt/bin/hvdcomp", *SAVES[1:]), ("/opt/bin/hvdcomp", "train", "--elastic", *SAVES[2:])),
        (("python3", "-m", *SAVES), ("python3", "-m", "hvdcomp", "train", "--elastic", *SAVES[2:])),
        ((*SAVES, "--elastic"), (*SAVES, "--elastic")),
        (("python3", "train.py"), ("python3", "train.py")),
    ],
)
def test_hvdcomp_train_of_an_elastic_job_is_told_so(command: tuple[str, ...], program: tuple[str, ...]) -> None:
    elastic = settings(ranks=4, command=command, elastic="2:8", slots_per_worker=2, checkpoint_claim="disk")
    assert (elastic.program, elastic.bounds, elastic.workers) == (program, (2, 8), 2)
    assert "--elastic" in command or settings(command=command).program == command


@given(
    number=st.decimals(0, 1000, places=3),
    unit=st.sampled_from([("", 1), ("k", 1000), ("Mi", 2**20), ("Gi", 2**30), ("E", 10**18), ("m", Decimal("0.001"))]),
)
def test_quantities(number: Decimal, unit: tuple[str, Any]) -> None:
    assert quantity("memory", f"{number:f}{unit[0]}") == number * unit[1]
