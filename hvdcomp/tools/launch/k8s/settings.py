"""The settings of a job on Kubernetes. They are checked in the same way as the API server and the mpi-operator check
them.

The operator refuses a wrong MPIJob only after the API server has accepted it. The operator then writes an event, and
the MPIJob exists but does not do anything. Therefore this module runs all of the operator's checks before anything is
sent.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hvdcomp.errors import ConfigurationError
from hvdcomp.tools.launch.job import NAME_LENGTH, VARIABLE, Job
from hvdcomp.tools.launch.k8s.quantity import quantity
from hvdcomp.tools.launch.promise import EXPECTED_SIZE
from hvdcomp.tools.launch.rank import COMMAND
from hvdcomp.tools.options import option, required

HOST_NAME_LENGTH = 63
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")

_IMAGE = re.compile(
    r"(?:[a-zA-Z0-9](?:[-.a-zA-Z0-9]*[a-zA-Z0-9])?(?::[0-9]+)?/)?"  # registry, with its port
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"  # path
    r"(?::[\w][\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?",  # tag, digest
    re.ASCII,
)
_LABEL_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"(?:[a-z0-9](?:[-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_LABEL_NAME}")
_LABEL_VALUE = re.compile(rf"(?:{_LABEL_NAME})?")
_DNS_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?")
_PATH = re.compile(r"/[\w./+-]*", re.ASCII)
TOLERATION = re.compile(rf"({_LABEL_KEY.pattern})(?:=({_LABEL_NAME}))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?")
"""A taint in the notation of kubectl. The groups of the pattern are the key, the value and the effect."""

SSH_PORT = 2222
"""The port of sshd in the workers. Ports below 1024 need root."""

_METRICS_PORT, _METRICS_ADDRESS = "--metrics-port", "--metrics-address"

OPERATOR_DOMAIN = "training.kubeflow.org/"
_MPI_PARAMETER = re.compile(r"[\w.,:^/@=+-]*", re.ASCII)


@dataclass(frozen=True)
class KubernetesSettings:
    """The settings of an MPIJob. Each worker pod runs `slots_per_worker` ranks. The launcher pod runs only `mpirun`.

    Attributes:
        job: the job: its program, and the number of its ranks, which must be a multiple of slots_per_worker.
        image: the image of launcher and workers. The image must contain the program, Horovod or PyTorch, Open MPI 4.1
            and sshd.
        slots_per_worker: the number of ranks in each worker pod.
        namespace, context: the namespace of the job, and the context of the kubeconfig; None for the defaults of the
            kubeconfig.
        gpu_resource: an extended resource such as "nvidia.com/gpu". Every rank gets one unit of it. None for training
            on CPUs.
        worker_cpu, worker_memory: the CPU and the memory that each worker pod requests. The pod cannot use more memory
            than it requests. It can use more CPU, unless cpu_limit is set.
        cpu_limit: whether workers are limited to the cores that they requested.
        shared_memory: the size of /dev/shm, through which the ranks of a pod exchange data. This memory counts as
            memory of the pod.
        launcher_cpu, launcher_memory: the CPU and the memory that the launcher pod requests.
        checkpoint_claim: name of an existing PersistentVolumeClaim, which is mounted in every worker.
        checkpoint_path: the folder where this claim is mounted.
        home: the home folder of user 1000 in the image. The operator's ssh key is mounted in its `.ssh`.
        node_selector: labels that the workers' nodes must have.
        spread: "hosts" puts workers on different nodes, "zone" puts them close together in one zone, and with "none"
            the scheduler chooses.
        restart_policy: the restart policy of the launcher. "Never" creates a new pod for another attempt, and
            "OnFailure" restarts the container in its pod.
        retries: how often the launcher restarts after a failure, or after the job was preempted and has saved.
        grace_period: the seconds that pods have for saving before they are killed.
        clean_pods: which pods the operator deletes at the end.
        time_limit: the largest number of seconds from the creation of the launcher to the end of the job, including all
            attempts; None for no limit. The launcher is created when all workers are ready, so the time spent waiting
            for workers does not count. In an elastic job, it does count, because the launcher is created immediately.
        keep_finished: the seconds after which a finished launcher is deleted; None to keep it.
        pull_secret: name of the Secret for a private registry.
        pull_policy: when nodes fetch the image.
        forward: the names of variables of the image that ranks need. Sessions of sshd do not inherit these variables.
        labels, annotations: labels and annotations of the MPIJob, such as a queue of Kueue.
        pod_labels, pod_annotations: labels and annotations of the pods of launcher and workers.
        queue: name of a queue of a gang scheduler.
        priority_class: name of the priority class of launcher and workers.
        tolerations: the taints that launcher and workers tolerate, as "KEY=VALUE:EFFECT". VALUE and EFFECT may be left
            out.
        service_account: name of the service account of launcher and workers. Its token is not mounted.
        secrets: variables of every rank whose values come from Secrets, each as "SECRET/KEY".
        volumes: existing PersistentVolumeClaims. A key is the folder in every worker at which a claim is mounted.
            "CLAIM:ro" is read-only.
        resources: further extended resources of each worker pod, for example for RDMA.
        patch: a YAML file that is merged into the MPIJob, to set other fields (`patch.merged`).
        elastic: "MIN:MAX" for elastic Horovod. The job needs at least MIN ranks, and uses at most MAX ranks. It begins
            with `job.ranks` ranks, a number from MIN to MAX. None if the number of ranks is fixed.
        interface: the network interface of the pods through which the ranks of an elastic job find each other.
    """

    job: Job
    image: str = required("Container image of launcher and workers.")
    slots_per_worker: int = option(1, "Ranks in each worker pod. [default: 1]")
    namespace: str | None = None
    context: str | None = None
    gpu_resource: str | None = option(
        None, "Resource that gives each rank a GPU, such as nvidia.com/gpu. [default: none]", metavar="NAME"
    )
    worker_cpu: str = option("2", "CPUs of each worker pod. [default: 2]", metavar="QUANTITY")
    worker_memory: str = option("4Gi", "Memory of each worker pod. [default: 4Gi]", metavar="QUANTITY")
    cpu_limit: bool = True
    shared_memory: str = option(
        "1Gi", "Size of /dev/shm, which counts as part of the memory. [default: 1Gi]", metavar="QUANTITY"
    )
    launcher_cpu: str = "500m"
    launcher_memory: str = "512Mi"
    checkpoint_claim: str | None = option(None, "PersistentVolumeClaim to mount at /checkpoints.", metavar="NAME")
    checkpoint_path: str = "/checkpoints"
    home: str = "/home/mpiuser"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    spread: Literal["none", "hosts", "zone"] = "none"
    restart_policy: Literal["Never", "OnFailure"] = "Never"
    retries: int = 0
    grace_period: int = 120
    clean_pods: Literal["None", "Running", "All"] = "Running"
    time_limit: int | None = None
    keep_finished: int | None = None
    pull_secret: str | None = None
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    forward: tuple[str, ...] = ("PATH",)
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    pod_annotations: Mapping[str, str] = field(default_factory=dict)
    queue: str | None = None
    priority_class: str | None = None
    tolerations: tuple[str, ...] = ()
    service_account: str | None = None
    secrets: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, str] = field(default_factory=dict)
    patch: Path | None = None
    elastic: str | None = option(
        None,
        "Elastic Horovod: the job starts with --ranks ranks, and their number may then vary from MIN to MAX.",
        metavar="MIN:MAX",
    )
    interface: str = "eth0"

    def __post_init__(self) -> None:
        self._check_names()
        self._check_ranks()
        self._check_elastic()
        self._check_quantities()
        self._check_environment()
        self._check_mounts()
        self._check_labels()
        _ = self.metrics_port  # raises an error if the port is wrong
        for name, number, least in (
            ("retries", self.retries, 0),
            ("grace_period", self.grace_period, 1),
            ("time_limit", self.time_limit, 1),
            ("keep_finished", self.keep_finished, 0),
        ):
            if number is not None and not least <= number < 2**31:
                raise ConfigurationError(f"{name}: {number} must be at least {least}, and below 2^31")

    @property
    def workers(self) -> int:
        """The number of worker pods."""
        return self.job.ranks // self.slots_per_worker

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of ranks."""
        least, _, most = (self.elastic or f"{self.job.ranks}:{self.job.ranks}").partition(":")
        return int(least), int(most)

    @property
    def program(self) -> tuple[str, ...]:
        """The command of each rank. If the program is `hvdcomp train`, the options for an elastic job and for
        Prometheus are added."""
        words = self.job.program
        if not _trains(self.job.command):
            return words
        added: tuple[str, ...] = ()
        if self.elastic is not None and "--elastic" not in words:
            added += ("--elastic",)
        if self.metrics_port is not None and not any(word.partition("=")[0] == _METRICS_ADDRESS for word in words):
            added += (_METRICS_ADDRESS, "0.0.0.0")
        place = words.index("train") + 1
        return (*words[:place], *added, *words[place:])

    @property
    def metrics_port(self) -> int | None:
        """The port at which Prometheus scrapes rank 0. It is the value of the program's option `--metrics-port`; None
        without this option."""
        port = None
        for word, following in zip(self.job.command, [*self.job.command[1:], ""], strict=True):
            if word == _METRICS_PORT:
                port = following
            elif word.startswith(f"{_METRICS_PORT}="):
                port = word.partition("=")[2]
        if port is None:
            return None
        if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535 or int(port) == SSH_PORT:
            raise ConfigurationError(
                f"command: {_METRICS_PORT} {port!r} is not a port for metrics: use a number from 1 to 65535, such as "
                f"9400, but not {SSH_PORT}, which sshd uses"
            )
        return int(port)

    def _check_names(self) -> None:
        check_job_name(self.job.name)
        if not self.image:
            raise ConfigurationError(
                "image: the name is empty: give the image to run, such as registry.example.org/hvdcomp:cpu"
            )
        if not _IMAGE.fullmatch(self.image):
            raise ConfigurationError(
                f"image: {self.image!r} is not an image's name: write it as registry.example.org/path/name:tag"
            )
        if self.namespace is not None:
            check_namespace(self.namespace)
        for name in ("checkpoint_claim", "pull_secret", "queue", "priority_class", "service_account"):
            _check_object(name, getattr(self, name))
        for name in ("gpu_resource", *(f"resources.{key}" for key in self.resources)):
            key = name.partition(".")[2] or self.gpu_resource
            if key is not None and "/" not in key:
                raise ConfigurationError(
                    f"{name}: {key!r} has no domain: write nvidia.com/gpu, for example, or leave it out for CPU"
                )
        for text in self.tolerations:
            if not TOLERATION.fullmatch(text):
                raise ConfigurationError(
                    f"tolerations: {text!r} is not a taint: write KEY, KEY=VALUE, KEY:EFFECT or KEY=VALUE:EFFECT, with "
                    "NoSchedule, PreferNoSchedule or NoExecute as the effect"
                )

    def _check_labels(self) -> None:
        keys = [("gpu_resource", self.gpu_resource)] if self.gpu_resource is not None else []
        for name in ("node_selector", "labels", "annotations", "pod_labels", "pod_annotations", "resources"):
            keys += [(name, key) for key in getattr(self, name)]
        for name, key in keys:
            if not _LABEL_KEY.fullmatch(key):
                raise ConfigurationError(f"{name}: {key!r} is not a valid label name; write one as example.org/name")
        for name in ("node_selector", "labels", "pod_labels"):
            for key, value in getattr(self, name).items():
                if not _LABEL_VALUE.fullmatch(value):
                    raise ConfigurationError(
                        f"{name}.{key}: {value!r} is not a label's value: use at most 63 letters, digits and -_."
                    )
        for key in self.pod_labels:
            if key.startswith(OPERATOR_DOMAIN):
                raise ConfigurationError(f"pod_labels: the mpi-operator itself sets {key!r}: leave it out")

    def _check_mounts(self) -> None:
        folders = [("checkpoint_path", self.checkpoint_path), ("home", self.home)]
        folders += [("volumes", folder) for folder in self.volumes]
        for name, folder in folders:
            if not _PATH.fullmatch(folder) or folder == "/" or ".." in folder.split("/"):
                raise ConfigurationError(
                    f"{name}: {folder!r} is not a folder to mount at: use an absolute path of letters, digits "
                    "and ._+- other than /"
                )
        occupied = {"/dev/shm", f"{self.home}/.ssh"}
        if self.checkpoint_claim is not None:
            occupied.add(self.checkpoint_path)
        for folder, claim in self.volumes.items():
            if folder.rstrip("/") in {mount.rstrip("/") for mount in occupied}:
                raise ConfigurationError(
                    f"volumes: something else is already mounted at {folder!r}: use a different folder"
                )
            occupied.add(folder)
            _check_object(f"volumes.{folder}", claim.removesuffix(":ro"))

    def _check_ranks(self) -> None:
        if self.slots_per_worker < 1:
            raise ConfigurationError(f"slots_per_worker: {self.slots_per_worker} must be 1 or more")
        if self.job.ranks % self.slots_per_worker:
            raise ConfigurationError(
                f"ranks: {self.job.ranks} ranks do not fill pods of slots_per_worker={self.slots_per_worker} ranks "
                f"each: use a multiple of {self.slots_per_worker}, or a different slots_per_worker"
            )
        self._check_last(self.workers)

    def _check_last(self, workers: int) -> None:
        last = f"{self.job.name}-worker-{workers - 1}"
        if len(last) > HOST_NAME_LENGTH:
            raise ConfigurationError(
                f"name: the last worker would be called {last!r}, which is longer than the {HOST_NAME_LENGTH} "
                "characters that a host name may have: use a shorter name"
            )

    def _check_elastic(self) -> None:
        trains = _trains(self.job.command)
        if self.elastic is None:
            if trains and "--elastic" in self.job.command:
                raise ConfigurationError(
                    "command: `hvdcomp train --elastic` needs an elastic job: set elastic, such as 2:8, or leave "
                    "--elastic out"
                )
            return
        if not re.fullmatch(r"[1-9][0-9]*:[1-9][0-9]*", self.elastic, re.ASCII):
            raise ConfigurationError(
                f"elastic: {self.elastic!r} must be MIN:MAX, the least and the largest number of ranks, both 1 or "
                "more, such as 2:8"
            )
        least, most = self.bounds
        if not least <= self.job.ranks <= most:
            raise ConfigurationError(
                f"elastic: the range {self.elastic} must contain the number of ranks at the start of the job, "
                f"ranks={self.job.ranks}: use MIN <= ranks <= MAX"
            )
        if least % self.slots_per_worker or most % self.slots_per_worker:
            raise ConfigurationError(
                f"elastic: the limits {self.elastic} do not fill pods of slots_per_worker={self.slots_per_worker} "
                f"ranks each: use multiples of {self.slots_per_worker}"
            )
        self._check_last(most // self.slots_per_worker)
        if self.job.backend != "horovod":
            raise ConfigurationError(
                f"elastic: only Horovod can be elastic, and backend is {self.job.backend}: leave elastic out. If you "
                "set retries, a job that lost a worker restarts from its checkpoint"
            )
        if not re.fullmatch(r"[\w.-]{1,15}", self.interface, re.ASCII):
            raise ConfigurationError(
                f"interface: {self.interface!r} is not a network interface: use one name, such as eth0"
            )
        memory = 128 + 32 * most
        if quantity("launcher_memory", self.launcher_memory) < memory * 2**20:
            raise ConfigurationError(
                f"launcher_memory: {self.launcher_memory} is too little for elastic={self.elastic}, because the "
                f"launcher runs processes for each rank: use {memory}Mi or more"
            )
        if trains:
            self._check_training()

    def _check_training(self) -> None:
        """Checks the conditions of `hvdcomp train --elastic`."""
        words = self.job.command
        if not any(word.partition("=")[0] == "--checkpoint-folder" for word in words):
            raise ConfigurationError(
                "elastic: `hvdcomp train` continues from its checkpoint when the ranks change: add "
                "--checkpoint-folder, in a volume that all workers share"
            )
        if self.checkpoint_claim is None and not self.volumes and self.patch is None:
            raise ConfigurationError(
                "elastic: no volume is mounted, so workers would not find each other's checkpoints: set "
                "checkpoint_claim to a claim that all workers can mount, and checkpoint_path to a folder that contains "
                "the --checkpoint-folder"
            )
        if "--backend=ddp" in words or ("--backend", "ddp") in itertools.pairwise(words):
            raise ConfigurationError("elastic: `hvdcomp train --backend ddp` does not use Horovod: leave --backend out")

    def _check_quantities(self) -> None:
        for name in ("worker_cpu", "worker_memory", "shared_memory", "launcher_cpu", "launcher_memory"):
            if quantity(name, getattr(self, name)) <= 0:
                raise ConfigurationError(f"{name}: {getattr(self, name)!r} must be more than 0")
        for name in ("worker_memory", "shared_memory", "launcher_memory"):
            if getattr(self, name).endswith("m"):
                raise ConfigurationError(
                    f"{name}: {getattr(self, name)!r} counts thousandths of a byte: write M or Mi for megabytes"
                )
        for key, amount in self.resources.items():
            if not re.fullmatch(r"[1-9][0-9]*", amount, re.ASCII) or key == self.gpu_resource:
                raise ConfigurationError(
                    f"resources.{key}: {amount!r} must be a whole number in quotes, and the resource must not be "
                    "gpu_resource"
                )
        if quantity("shared_memory", self.shared_memory) >= quantity("worker_memory", self.worker_memory):
            raise ConfigurationError(
                f"shared_memory: {self.shared_memory} is part of worker_memory={self.worker_memory} and must be smaller"
            )

    def _check_environment(self) -> None:
        for name, value in self.job.environment.items():
            if name in (COMMAND, EXPECTED_SIZE):
                raise ConfigurationError(f"environment: the launcher itself sets {name}: leave it out")
            if name.startswith("OMPI_MCA_") and not _MPI_PARAMETER.fullmatch(value):
                # mpirun puts these values on a command line that a shell interprets on every host.
                raise ConfigurationError(
                    f"environment: {name}={value!r}: Open MPI's parameters may contain only letters, digits and "
                    "_.,:^/@=+-"
                )
        for name, source in self.secrets.items():
            if name in self.job.environment or name in (COMMAND, EXPECTED_SIZE) or name.startswith("OMPI_MCA_"):
                raise ConfigurationError(
                    f"secrets: {name} is set by another setting, or belongs to Open MPI: use a different name"
                )
            if not VARIABLE.fullmatch(name):
                raise ConfigurationError(f"secrets: {name!r} is not the name of a variable: give only a name, no value")
            secret, _, key = source.partition("/")
            if not _DNS_NAME.fullmatch(secret) or not re.fullmatch(r"[-._a-zA-Z0-9]+", key):
                raise ConfigurationError(
                    f"secrets.{name}: {source!r} does not name a key of a Secret: write it as SECRET/KEY"
                )
        for name in self.forward:
            if not VARIABLE.fullmatch(name):
                raise ConfigurationError(f"forward: {name!r} is not the name of a variable: give only a name, no value")


def _trains(command: tuple[str, ...]) -> bool:
    """Whether a command is `hvdcomp train`, or `python3 -m hvdcomp train`."""
    return (Path(command[0]).name, *command[1:2]) == ("hvdcomp", "train") or command[1:4] == ("-m", "hvdcomp", "train")


def check_job_name(name: str) -> None:
    """Checks the name of an MPIJob.

    Raises:
        ConfigurationError: if the name is not valid for a job or for a Service.
    """
    if not _DNS_LABEL.fullmatch(name) or len(name) > NAME_LENGTH:
        raise ConfigurationError(
            f"name: {name!r} cannot be the name of a job on Kubernetes, because the job's hosts are named after it. "
            f"Use at most {NAME_LENGTH} lower-case letters, digits and hyphens, with a letter or digit first and last"
        )
    # The operator also creates a Service with this name. The name of a Service must not begin with a digit (DNS-1035).
    if name[0].isdigit():
        raise ConfigurationError(
            f"name: {name!r} must begin with a letter, because a Service of Kubernetes will have the same name"
        )


def _check_object(name: str, value: str | None) -> None:
    if value is not None and not _DNS_NAME.fullmatch(value):
        raise ConfigurationError(
            f"{name}: {value!r} is not an object's name: use at most 253 lower-case letters, digits, dots, hyphens"
        )


def check_namespace(namespace: str) -> None:
    """Checks the name of a namespace.

    Raises:
        ConfigurationError: if the name is not a DNS-1123 label.
    """
    if not _DNS_LABEL.fullmatch(namespace) or len(namespace) > 63:
        raise ConfigurationError(
            f"namespace: {namespace!r} is not a namespace: use at most 63 lower-case letters, digits and hyphens"
        )
