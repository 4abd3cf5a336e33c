"""Makes the MPIJob of a job from plain dictionaries, so that text in the settings cannot change the structure, as it
could in a template.

Kubernetes starts containers without a shell, but it replaces `$(NAME)` in arguments and variables. `literal` prevents
this replacement. The manifests in the folder `k8s/` explain the same fields in comments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdcomp.tools.launch.job import HOROVOD_ON_GPUS
from hvdcomp.tools.launch.k8s.patch import merged, read_patch
from hvdcomp.tools.launch.k8s.settings import SSH_PORT, TOLERATION, KubernetesSettings
from hvdcomp.tools.launch.promise import EXPECTED_SIZE
from hvdcomp.tools.launch.rank import COMMAND, to_variable
from hvdcomp.tools.launch.torch_rank import DEFAULT_PORT

GROUP, VERSION, PLURAL, KIND = "kubeflow.org", "v2beta1", "mpijobs", "MPIJob"

JOB_LABEL = "training.kubeflow.org/job-name"
ROLE_LABEL = "training.kubeflow.org/job-role"
"""Labels that the operator sets on pods; the role is "launcher" or "worker"."""

USER = 1000

_COMMUNICATION = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,vader,tcp",
    # Ranks in one pod are not allowed to read each other's memory (no CAP_SYS_PTRACE), so messages use /dev/shm.
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}
"""Variables for Open MPI, which Horovod uses to exchange data. If NCCL exchanges the data, Horovod uses Open MPI only
to coordinate the ranks."""
_RANK = ("sh", "-c", "trap '' USR1; exec python3 -m hvdcomp.tools.launch.rank")
"""The beginning of each rank's command. The shell makes the rank ignore SIGUSR1, the launcher's warning. Without this,
the signal would end a program that has no handler for it."""
_ELASTIC_RANK = ("sh", "-c", "trap '' USR1 USR2; exec python3 -m hvdcomp.tools.launch.rank")

WORKERS = "/etc/mpi/discover_hosts.sh"
"""The operator's program in the launcher's container. It prints the hosts of the running workers, one per line. If a
worker is added or lost, this list changes after a minute or two."""
_WORKERS_WITHIN = 1800
"""Seconds that the ranks of an elastic job wait for new ranks when there are too few."""
_USED_AGAIN = (60, 600)
"""Two limits, in seconds, of the time for which Horovod does not use a worker after one of its ranks failed or left.
After the first failure, this time is two or three times the first limit. It then grows up to the second limit.

Horovod must wait because the list of workers may still contain a lost worker. Horovod must use the worker again later
because the worker's pod may be created again under the same name."""

_ELASTIC_COMMUNICATION = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
"""The default of 30 seconds is too short for a new rank to start in a new pod. All ranks would fail together with the
new rank."""
_GPU_COMMUNICATION = {"NCCL_DEBUG": "WARN"}


def literal(text: str) -> str:
    """Escapes text so that `args` and `env` pass it unchanged: `$$` stands for a dollar sign."""
    return text.replace("$", "$$")


def render(settings: KubernetesSettings) -> dict[str, Any]:
    """Makes the MPIJob as plain data for the API server or for `yaml.safe_dump`.

    Raises:
        ConfigurationError: if the patch cannot be read.
    """
    job = settings.job
    metadata: dict[str, Any] = {
        "name": job.name,
        "labels": {"app.kubernetes.io/name": "hvdcomp", **settings.labels},
    }
    if settings.annotations:
        metadata["annotations"] = dict(settings.annotations)
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    manifest: dict[str, Any] = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": metadata,
        "spec": {
            "slotsPerWorker": settings.slots_per_worker,
            "sshAuthMountPath": f"{settings.home}/.ssh",
            "mpiImplementation": "OpenMPI",
            # In an elastic job, the launcher itself waits for the smallest number of workers.
            "launcherCreationPolicy": "AtStartup" if settings.elastic else "WaitForWorkersReady",
            "runPolicy": _run_policy(settings),
            "mpiReplicaSpecs": {
                "Launcher": {
                    "replicas": 1,
                    "restartPolicy": settings.restart_policy,
                    "template": _template(settings, _launcher(settings), {}),
                },
                "Worker": {
                    "replicas": settings.workers,
                    # A failed pod is never replaced. A container that is killed (for example because of its memory)
                    # restarts.
                    "restartPolicy": "OnFailure",
                    "template": _template(settings, _worker(settings), _scraped(settings)),
                },
            },
        },
    }
    return manifest if settings.patch is None else merged(manifest, read_patch(settings.patch))


def _run_policy(settings: KubernetesSettings) -> dict[str, Any]:
    # By default, the gang consists of the workers and the launcher. However, the launcher is created only when all
    # workers run, so such a gang would never start. The launcher of an elastic job is created immediately, and starts
    # with the smallest number of workers.
    least = settings.workers if settings.elastic is None else settings.bounds[0] // settings.slots_per_worker + 1
    gang: dict[str, Any] = {"minAvailable": least}
    if settings.queue is not None:
        gang["queue"] = settings.queue
    policy: dict[str, Any] = {
        "cleanPodPolicy": settings.clean_pods,
        "backoffLimit": settings.retries,
        "schedulingPolicy": gang,
    }
    if settings.time_limit is not None:
        policy["activeDeadlineSeconds"] = settings.time_limit
    if settings.keep_finished is not None:
        policy["ttlSecondsAfterFinished"] = settings.keep_finished
    return policy


def _template(settings: KubernetesSettings, spec: dict[str, Any], annotations: Mapping[str, str]) -> dict[str, Any]:
    metadata = {"labels": dict(settings.pod_labels), "annotations": {**annotations, **settings.pod_annotations}}
    metadata = {name: values for name, values in metadata.items() if values}
    return {"metadata": metadata, "spec": spec} if metadata else {"spec": spec}


def _scraped(settings: KubernetesSettings) -> dict[str, str]:
    """Annotations that make Prometheus scrape the worker, if a job has only one worker. With several workers, only the
    first would answer, because mpirun starts rank 0 there. All workers have the same annotations, so Prometheus would
    report the others as down."""
    if settings.metrics_port is None or settings.bounds[1] > settings.slots_per_worker:
        return {}
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(settings.metrics_port)}


def _launcher(settings: KubernetesSettings) -> dict[str, Any]:
    amounts = {"cpu": settings.launcher_cpu, "memory": settings.launcher_memory}
    variables = _variables(settings)
    if settings.elastic is None:
        command = ["hvdcomp.tools.launch.k8s.launcher", str(SSH_PORT), "mpirun"]
        arguments = _mpirun(settings, [*variables, *settings.secrets])
    else:
        least = settings.bounds[0] // settings.slots_per_worker
        command = ["hvdcomp.tools.launch.k8s.elastic", str(SSH_PORT), WORKERS, str(least)]
        arguments = _horovodrun(settings)
    container = {
        "name": "launcher",
        **_image(settings),
        "command": ["python3", "-m", *command],
        "args": [literal(argument) for argument in arguments],
        "env": [
            *({"name": name, "value": literal(value)} for name, value in variables.items()),
            *({"name": name, "valueFrom": _secret(source)} for name, source in settings.secrets.items()),
        ],
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "securityContext": _unprivileged(),
    }
    return {**_pod(settings), "containers": [container]}


def _variables(settings: KubernetesSettings) -> dict[str, str]:
    """The variables of the launcher's container. mpirun or horovodrun passes them to the ranks. The job's own variables
    override the other variables."""
    if settings.elastic is not None:
        needed = _ELASTIC_COMMUNICATION
    else:
        needed = _rendezvous(settings) if settings.job.backend == "torch" else _COMMUNICATION
    return {
        **({} if settings.elastic is not None else {EXPECTED_SIZE: str(settings.job.ranks)}),
        COMMAND: to_variable(settings.program),
        **needed,
        **(_GPU_COMMUNICATION if settings.gpu_resource else {}),
        **(HOROVOD_ON_GPUS if settings.gpu_resource and settings.job.backend == "horovod" else {}),
        **settings.job.environment,
    }


def _rendezvous(settings: KubernetesSettings) -> dict[str, str]:
    """The address to which the ranks of torch.distributed connect. mpirun starts rank 0 in the first worker. The
    operator creates a headless Service with the name of the job, and this Service gives the worker its host name."""
    name = settings.job.name
    return {"MASTER_ADDR": f"{name}-worker-0.{name}", "MASTER_PORT": DEFAULT_PORT, "TORCHELASTIC_RUN_ID": name}


def _secret(source: str) -> dict[str, Any]:
    secret, _, key = source.partition("/")
    return {"secretKeyRef": {"name": secret, "key": key}}


def _mpirun(settings: KubernetesSettings, variables: list[str]) -> list[str]:
    arguments = ["-np", str(settings.job.ranks), "--bind-to", "none", "--map-by", "slot"]
    # The operator also sets OMPI_MCA_plm_rsh_args, but without the port. An argument overrides this variable.
    ssh = (
        f"-p {SSH_PORT} -o ConnectionAttempts=10 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "
        "-o LogLevel=ERROR"
    )
    arguments += ["--mca", "plm_rsh_args", ssh]
    # Open MPI itself passes the variables whose names begin with OMPI_MCA_
    job_names = (name for name in variables if not name.startswith("OMPI_MCA_"))
    for name in dict.fromkeys([*settings.forward, *job_names]):
        arguments += ["-x", name]
    return [*arguments, *_RANK]


def _horovodrun(settings: KubernetesSettings) -> list[str]:
    """Those options of horovodrun that `hvdcomp.tools.launch.k8s.elastic` does not add itself, followed by the program
    of the ranks."""
    least, most = settings.bounds
    return [
        *("-np", str(least), "--min-np", str(least), "--max-np", str(most)),
        *("--slots-per-host", str(settings.slots_per_worker)),  # the operator's list does not contain the slots
        *("--network-interfaces", settings.interface),
        *("--elastic-timeout", str(_WORKERS_WITHIN)),
        *("--blacklist-cooldown-range", *map(str, _USED_AGAIN)),
        *_ELASTIC_RANK,
    ]


def _worker(settings: KubernetesSettings) -> dict[str, Any]:
    requests = {"cpu": settings.worker_cpu, "memory": settings.worker_memory}
    limits = dict(requests) if settings.cpu_limit else {"memory": settings.worker_memory}
    pod = _pod(settings)
    if settings.gpu_resource is not None:
        requests[settings.gpu_resource] = limits[settings.gpu_resource] = str(settings.slots_per_worker)
        gpu = {"key": settings.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
        pod["tolerations"] = [*pod.get("tolerations", ()), gpu]
    requests |= settings.resources
    limits |= settings.resources
    if settings.node_selector:
        pod["nodeSelector"] = dict(settings.node_selector)
    pod |= _placement(settings)
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}}
    ]
    if settings.checkpoint_claim is not None:
        mounts.append({"name": "checkpoints", "mountPath": settings.checkpoint_path})
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": settings.checkpoint_claim}})
    for number, (folder, claim) in enumerate(settings.volumes.items()):
        source = {"claimName": claim.removesuffix(":ro")} | ({"readOnly": True} if claim.endswith(":ro") else {})
        mounts.append({"name": f"volume-{number}", "mountPath": folder})
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": source})
    ports = [{"name": "ssh", "containerPort": SSH_PORT}]
    if settings.metrics_port is not None:
        ports.append({"name": "metrics", "containerPort": settings.metrics_port})
    container = {
        "name": "worker",
        **_image(settings),
        "command": ["/usr/sbin/sshd"],
        "args": [literal(argument) for argument in _sshd(settings)],
        "ports": ports,
        "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 5},
        "lifecycle": {"preStop": {"exec": {"command": ["python3", "-m", "hvdcomp.tools.launch.k8s.warn"]}}},
        "resources": {"requests": requests, "limits": limits},
        "securityContext": _unprivileged(),
        "volumeMounts": mounts,
    }
    return {**pod, "containers": [container], "volumes": volumes}


def _sshd(settings: KubernetesSettings) -> list[str]:
    """The arguments of sshd for a user without privileges. The image's own configuration of sshd is not used.
    StrictModes=no is needed because root owns the mounted key. LogLevel is set because sshd reports each readiness
    probe as an error."""
    options = ("PidFile=none", "StrictModes=no", "UsePAM=no", "PasswordAuthentication=no", "LogLevel=FATAL")
    arguments = ["-D", "-e", "-f", "/dev/null", "-p", str(SSH_PORT), "-h", f"{settings.home}/.ssh/id_rsa"]
    return arguments + [word for option in options for word in ("-o", option)]


def _placement(settings: KubernetesSettings) -> dict[str, Any]:
    workers = {"matchLabels": {JOB_LABEL: settings.job.name, ROLE_LABEL: "worker"}}
    if settings.spread == "hosts":
        constraint = {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": workers,
        }
        return {"topologySpreadConstraints": [constraint]}
    if settings.spread == "zone":
        term = {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": workers}
        preferred = [{"weight": 100, "podAffinityTerm": term}]
        return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}}
    return {}


def _pod(settings: KubernetesSettings) -> dict[str, Any]:
    """The pod specification that launcher and workers share: user 1000, no privileges, and no credentials of the
    cluster."""
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": settings.grace_period,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if settings.pull_secret is not None:
        pod["imagePullSecrets"] = [{"name": settings.pull_secret}]
    if settings.priority_class is not None:
        pod["priorityClassName"] = settings.priority_class
    if settings.service_account is not None:
        pod["serviceAccountName"] = settings.service_account
    if settings.tolerations:
        pod["tolerations"] = [_toleration(text) for text in settings.tolerations]
    return pod


def _toleration(text: str) -> dict[str, str]:
    match = TOLERATION.fullmatch(text)
    assert match is not None  # the settings were checked
    key, value, effect = match.groups()
    toleration = {"key": key, "operator": "Exists" if value is None else "Equal"}
    return toleration | ({} if value is None else {"value": value}) | ({} if effect is None else {"effect": effect})


def _image(settings: KubernetesSettings) -> dict[str, str]:
    return {"image": settings.image, "imagePullPolicy": settings.pull_policy}


def _unprivileged() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
