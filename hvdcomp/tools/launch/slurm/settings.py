"""The settings of a job for Slurm, checked before anything is submitted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hvdcomp.errors import ConfigurationError
from hvdcomp.tools.launch.job import Job
from hvdcomp.tools.options import flag_of, option

# Slurm's own forms of a time limit: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.
_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?"
    r"|(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+)|(?P<plain>\d+))"
)
_MEMORY = re.compile(r"[1-9]\d*[KMGT]?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]*")
_FEATURES = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:&|*()\[\],-]*")
# A generic resource: name, optional type, optional count.
_RESOURCE = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_-]*)(?::[A-Za-z_][A-Za-z0-9_.-]*)?(?::[1-9]\d*[KMG]?)?")


@dataclass(frozen=True)
class SlurmJob:
    """A job for Slurm. All fields except `job` are keys of the table [slurm] and flags of `hvdcomp launch slurm`.

    The product of `nodes` and `tasks_per_node` must be `job.ranks`. If you omit one of the two, it is computed from the
    other and the number of ranks. If you omit the number of ranks, it is computed from both, or from nodes and GPUs
    (`ranks_of`).

    Raises:
        ConfigurationError: if a field has a wrong value. The message names the field, and explains how to fix it.
    """

    # fmt: off
    job: Job
    nodes: int | None = option(None, "Number of nodes. [default: --ranks divided by --tasks-per-node, or 1]")
    tasks_per_node: int | None = option(
        None, "Number of ranks on each node. [default: --ranks divided by --nodes]"
    )
    cpus_per_task: int = option(1, "Number of cores of each rank. [default: 1]")
    gpus_per_node: int = option(0, "Number of GPUs of each node. Each rank sees all GPUs of its node, and uses one.")
    gres: tuple[str, ...] = option((), "Other resource of each node, such as nic:1; repeatable.")
    memory: str | None = option(None, "Memory of each node, such as 64G.")
    time: str = option("01:00:00", "Time limit of each start of the job, such as 04:00:00. [default: 01:00:00]")
    warning_seconds: int = option(  # Slurm may warn the ranks up to a minute earlier
        120, "How many seconds before the time limit the ranks are told to save a checkpoint."
    )
    requeue: bool = option(
        True, "Requeue a job that saved a checkpoint and stopped.", flags=("--requeue/--no-requeue",)
    )
    max_requeues: int = option(100, "Largest number of requeues.")
    launcher: Literal["srun", "mpirun"] = option("srun", "Program that starts the ranks.")
    mpi: str | None = option(  # None means pmix for Horovod
        None, "MPI plugin of srun (see srun --mpi=list); not needed for --backend torch.", metavar="PLUGIN"
    )
    partition: str | None = option(None, "Partition, as in sbatch.")
    account: str | None = option(None, "Account, as in sbatch.")
    qos: str | None = option(None, "Quality of service, as in sbatch.")
    constraint: str | None = option(None, "Node features, as in sbatch.")
    reservation: str | None = option(None, "Reservation, as in sbatch.")
    modules: tuple[str, ...] = option((), "Environment module; repeatable.", flags=("--modules", "--module"))
    container: Literal["none", "apptainer", "enroot"] = option("none", "Program that runs --image.")
    image: str | None = option(None, "Image of the container.")
    mounts: tuple[str, ...] = option(
        (), "Folder to mount in the container, as /outside:/inside; repeatable.", flags=("--mounts", "--mount")
    )
    log_folder: str = option(".", "Folder for the job's output.")
    # fmt: on

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_time()
        if self.memory is not None and not _MEMORY.fullmatch(self.memory):
            raise ConfigurationError(
                f"memory: {self.memory!r} is not an amount for Slurm: use a whole number and K, M, G or T, such as "
                '"64G"; without a letter it means megabytes'
            )
        for field in ("mpi", "partition", "account", "qos", "reservation"):
            self._check_word(field, getattr(self, field), _NAME, "letters, digits and _ . + -")
        self._check_word("constraint", self.constraint, _FEATURES, "names of features joined by &, | or , in [ ]")
        for module in self.modules:
            self._check_word("modules", module, _MODULE, "the names that `module avail` lists, such as cuda/12.6")
        self._check_resources()
        self._check_container()
        self._check_log_folder()

    @staticmethod
    def ranks_of(settings: Mapping[str, Any]) -> int | None:
        """Computes the number of ranks from the settings: `tasks_per_node` ranks on each node, or one rank for each
        GPU. The result is None if neither setting is given."""
        on_each = settings.get("tasks_per_node") or settings.get("gpus_per_node")
        # Values below 1 later raise an error that names their field.
        return max(1, on_each) * max(1, settings.get("nodes") or 1) if on_each else None

    @property
    def shape(self) -> tuple[int, int]:
        """The number of nodes, and the number of ranks on each node."""
        if self.tasks_per_node is None:
            nodes = 1 if self.nodes is None else self.nodes
            return nodes, self.job.ranks // nodes
        nodes = self.job.ranks // self.tasks_per_node if self.nodes is None else self.nodes
        return nodes, self.tasks_per_node

    def flags(self, names: Iterable[str]) -> str:
        """Writes the fields `names`, which may also contain "ranks", as flags with the values that Slurm gets. Defaults
        and computed values are included.

        A field that is not set is left out. If the first field is not set, the text says so, such as "no --account".
        """
        nodes, tasks = self.shape
        values: dict[str, Any] = {**vars(self), "ranks": self.job.ranks, "nodes": nodes, "tasks_per_node": tasks}
        words: list[str] = []
        for place, name in enumerate(names):
            flag, value = flag_of(name), values[name]
            words += [f"{flag} {word}" for word in (value if isinstance(value, tuple) else (value,)) if word]
            if not value and place == 0:
                words.append(f"no {flag}")
        return ", ".join(words)

    def _check_sizes(self) -> None:
        for field in ("nodes", "tasks_per_node", "cpus_per_task"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigurationError(f"{field}: {value} is too few: use 1 or more")
        for field in ("gpus_per_node", "max_requeues"):
            if getattr(self, field) < 0:
                raise ConfigurationError(f"{field}: {getattr(self, field)} is below 0: use 0 for none")
        nodes, tasks = self.shape
        if self.job.ranks != nodes * tasks:
            raise ConfigurationError(f"ranks: {self.job.ranks} ranks do not fill {self._misfit()}")
        if self.gpus_per_node and tasks > self.gpus_per_node:
            raise ConfigurationError(
                f"gpus_per_node: {self.gpus_per_node} GPUs are too few for {tasks} ranks on each node, because each "
                "rank needs one: ask for more GPUs, or use more nodes (nodes)"
            )

    def _misfit(self) -> str:
        """The message if the ranks do not fill all nodes. It explains how to fix this."""
        if self.tasks_per_node is None:
            return (
                f"{self.nodes} nodes evenly: use a multiple of {self.nodes} (ranks), or a different number of nodes "
                "(nodes)"
            )
        if self.nodes is None:
            return (
                f"nodes of {self.tasks_per_node} tasks (tasks_per_node): use a multiple of {self.tasks_per_node}, or "
                "leave tasks_per_node out"
            )
        return (
            f"{self.nodes} nodes of {self.tasks_per_node} tasks (tasks_per_node), which need "
            f"{self.nodes * self.tasks_per_node} ranks. Leave out nodes or tasks_per_node: hvdcomp then computes its "
            "value from the number of ranks"
        )

    def _check_resources(self) -> None:
        for resource in self.gres:
            match = _RESOURCE.fullmatch(resource)
            if match is None:
                raise ConfigurationError(
                    f"gres: {resource!r} is not a resource of Slurm: write NAME, NAME:COUNT or NAME:TYPE:COUNT, such "
                    "as nic:1"
                )
            if match["name"] == "gpu":
                raise ConfigurationError(
                    f"gres: {resource!r} asks for GPUs, which only gpus_per_node may do: set gpus_per_node instead"
                )

    def _check_time(self) -> None:
        seconds = seconds_of(self.time)
        if seconds < 60:
            raise ConfigurationError(
                f"time: {self.time!r} is less than a minute, which is Slurm's unit of time: use a longer time"
            )
        if not 1 <= self.warning_seconds <= 65535:
            raise ConfigurationError(
                f"warning_seconds: {self.warning_seconds} must be a number of seconds between 1 and 65535"
            )
        if self.warning_seconds >= seconds:
            raise ConfigurationError(
                f"warning_seconds: a warning {self.warning_seconds} s before the end would come before the start of "
                f"the job, because time {self.time!r} is only {seconds} s. Use a longer time or a shorter warning"
            )

    def _check_container(self) -> None:
        if self.container == "none":
            for field in ("image", "mounts"):
                if getattr(self, field):
                    raise ConfigurationError(
                        f'{field}: this setting needs a container: set container to "apptainer" or "enroot"'
                    )
            return
        if not self.image:
            raise ConfigurationError(f'image: container "{self.container}" needs an image: give its file or name')
        _check_plain("image", self.image)
        if self.image.startswith("-"):
            raise ConfigurationError(f"image: {self.image!r} starts with a hyphen: write ./{self.image}")
        for mount in self.mounts:
            _check_plain("mounts", mount)
            parts = mount.split(":")
            if "," in mount or len(parts) > 3 or not all(part.startswith("/") for part in parts[:2]):
                raise ConfigurationError(
                    f"mounts: {mount!r} is not a folder to mount: write /folder, or /outside:/inside, without commas"
                )
        if self.container == "enroot" and self.launcher != "srun":
            raise ConfigurationError(
                'launcher: enroot is started by srun\'s plugin pyxis, not by mpirun: set launcher to "srun"'
            )

    def _check_log_folder(self) -> None:
        _check_plain("log_folder", self.log_folder)
        # Slurm replaces %j and similar marks in this name. Quotes and blanks cannot be escaped.
        if not self.log_folder or re.search(r"[%\s\"'\\]", self.log_folder):
            raise ConfigurationError(
                f"log_folder: {self.log_folder!r} is empty or has a blank, a quote, a backslash or %, which Slurm "
                "would change: use another folder"
            )

    def _check_word(self, field: str, value: str | None, pattern: re.Pattern[str], allowed: str) -> None:
        if value is not None and not pattern.fullmatch(value):
            raise ConfigurationError(f"{field}: {value!r} is not a valid name: use {allowed}")


def seconds_of(time: str) -> int:
    """A time limit in seconds.

    Raises:
        ConfigurationError: if the limit is not in a format that sbatch accepts.
    """
    match = _TIME.fullmatch(time)
    if match is None:
        raise ConfigurationError(
            f"time: {time!r} is not a time limit: write minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
        )
    part = {name: int(text or 0) for name, text in match.groupdict().items()}
    minutes = part["minutes"] + part["m"] + part["plain"]
    hours = 24 * part["days"] + part["hours"] + part["h"]
    return (60 * hours + minutes) * 60 + part["seconds"] + part["s"]


def _check_plain(field: str, value: str) -> None:
    if not value.isprintable():
        raise ConfigurationError(f"{field}: {value!r} has characters that cannot be printed: remove them")
