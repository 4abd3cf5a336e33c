"""The facts of `hvdcomp doctor` about an environment: plain values, so that tests can make up any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdcomp.tools.horovod_build.environment import CudaToolkit, Mpi


@dataclass(frozen=True)
class Torch:
    """The imported PyTorch; `error` is the last line of a failed import."""

    version: str
    cuda: str | None = None
    nccl: str | None = None
    architectures: tuple[str, ...] = ()  # compiled for: sm_70, compute_90, ...; empty without a usable GPU
    backends: tuple[str, ...] = ()  # of torch.distributed: gloo, nccl, mpi; empty if it is not built in
    error: str | None = None


@dataclass(frozen=True)
class TensorFlow:
    """The imported TensorFlow; `keras` is the version behind `tf.keras`, `error` the last line of a failed import."""

    version: str
    keras: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class HorovodBinding:
    """Horovod's extension for a framework: its compiled-in libraries, or why it does not load."""

    mpi: bool = False
    gloo: bool = False
    nccl: bool = False
    keras_callbacks: bool | None = None  # whether they use the models' Keras; None without tf_keras
    error: str | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    name: str
    compute_capability: str | None  # "7.0"; None if nvidia-smi does not know it
    driver: str


@dataclass(frozen=True)
class Kernels:
    """hvdcomp's kernels in C: instruction set and number of threads.

    Without kernels, `why_not` is the reason, and `way_out` is the remedy.

    `error` is a wrong environment variable, which stops a training.
    """

    instruction_set: str | None = None
    threads: int = 1
    why_not: str = ""
    way_out: str = ""
    error: str | None = None


@dataclass(frozen=True)
class DeviceKernels:
    """hvdcomp's kernels for CUDA devices: the version of Triton and the C compiler.

    Without kernels, `why_not` is the reason, and `way_out` is the remedy.

    Triton compiles its loader at the first use, with $CC, gcc or clang.
    """

    triton: str | None = None
    why_not: str = ""
    way_out: str = ""
    compiler: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class InfiniBand:
    """Cards for InfiniBand or RoCE that have an active port.

    `usable` is the number of cards that libibverbs finds, `error` why that library does not load. `locked_memory` is
    the limit in bytes; None: no limit.
    """

    cards: tuple[str, ...]
    usable: int = 0
    locked_memory: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Package:
    """What `import hvdcomp` finds in the current folder.

    Attributes:
        root: the folder that holds the installed package; of an editable installation, the clone.
        is_empty: whether it finds a folder of that name that is no package, instead of the installed one.
        is_on_path: whether `root` is in Python's path; else a finder of an editable installation leads to it.
    """

    root: str
    is_empty: bool = False
    is_on_path: bool = True


# Each launcher's variables for size and rank. A launcher comes before those that may have started it.
_LAUNCHERS = (
    ("HOROVOD_SIZE", "HOROVOD_RANK"),
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    # SLURM_NTASKS and SLURM_PROCID are also set in the batch script itself, which is one process.
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


@dataclass(frozen=True)
class Started:
    """The outcome of `hvd.init()`, or of `init_process_group()` and an allreduce, in a process of its own.

    `size` is Horovod's size, or the number of ranks in the allreduce.
    """

    size: int | None = None
    rank: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """All facts that the checks use. None means: not installed, or not tried."""

    python: str
    prefix: str
    root: bool = False
    scripts_on_path: bool = True
    packages: Mapping[str, str] = field(default_factory=dict)
    package: Package | None = None
    torch: Torch | None = None
    tensorflow: TensorFlow | None = None
    horovod: str | None = None
    bindings: Mapping[str, HorovodBinding] = field(default_factory=dict)  # by framework: torch, tensorflow
    mpi: Mpi | None = None
    mpi4py_library: str | None = None
    gpus: tuple[Gpu, ...] = ()
    toolkit: CudaToolkit | None = None
    interfaces: tuple[str, ...] = ()  # of the network
    infiniband: InfiniBand | None = None
    master_error: str | None = None  # why MASTER_ADDR does not resolve; None if it does, or is not set
    variables: Mapping[str, str] = field(default_factory=dict)  # launcher, MPI, Horovod, torch.distributed, Keras
    started: Started | None = None
    kernels: Kernels | None = None
    device_kernels: DeviceKernels | None = None

    @property
    def launched_size(self) -> int | None:
        """The number of processes, by the launcher's variables; None without a launcher."""
        names = self._launcher()
        return int(self.variables[names[0]]) if names else None

    @property
    def launched_rank(self) -> int:
        """This process's rank by the launcher's variables; 0 without a launcher."""
        names = self._launcher()
        return int(self.variables[names[1]]) if names else 0

    @property
    def by_torch(self) -> bool:
        """Whether this process was started for torch.distributed: at least two of its variables are set, as a single
        variable may be there by chance. Horovod's launcher has precedence over the launcher that started it."""
        names = self.variables.keys()
        set_by_launcher = len({"RANK", "WORLD_SIZE", "MASTER_ADDR"} & names) >= 2
        return self.torch is not None and set_by_launcher and "HOROVOD_RANK" not in names

    def _launcher(self) -> tuple[str, str] | None:
        return next(
            (names for names in _LAUNCHERS if all(self.variables.get(name, "").isdecimal() for name in names)), None
        )
