"""The facts that `hvdcomp doctor` collects about an environment. They are plain values, so that tests can make up any
facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdcomp.tools.horovod_build.environment import CudaToolkit, Mpi


@dataclass(frozen=True)
class Torch:
    """The installed PyTorch. `error` is the last line of the error if the import failed."""

    version: str
    cuda: str | None = None
    nccl: str | None = None
    # The architectures for which it was compiled, such as sm_70 or compute_90; empty without a usable GPU.
    architectures: tuple[str, ...] = ()
    # the backends of torch.distributed, such as gloo, nccl, mpi; empty if torch.distributed is not built in
    backends: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class TensorFlow:
    """The installed TensorFlow. `keras` is the version of Keras that `tf.keras` uses. `error` is the last line of the
    error if the import failed."""

    version: str
    keras: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class HorovodBinding:
    """Horovod's extension for a framework: the libraries with which it was compiled, or the reason why it cannot be
    loaded."""

    mpi: bool = False
    gloo: bool = False
    nccl: bool = False
    # whether Horovod's callbacks use the same Keras as the models; None without tf_keras
    keras_callbacks: bool | None = None
    error: str | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU, as nvidia-smi lists it."""

    name: str
    compute_capability: str | None  # "7.0"; None if nvidia-smi does not report it
    driver: str


@dataclass(frozen=True)
class Kernels:
    """hvdcomp's kernels in C: their instruction set and number of threads.

    If there are no kernels, `why_not` is the reason, and `way_out` is the remedy. `error` names an environment variable
    whose value is wrong, which prevents training from starting.
    """

    instruction_set: str | None = None
    threads: int = 1
    why_not: str = ""
    way_out: str = ""
    error: str | None = None


@dataclass(frozen=True)
class DeviceKernels:
    """hvdcomp's kernels for CUDA devices: the version of Triton and the C compiler.

    If there are no kernels, `why_not` is the reason, and `way_out` is the remedy. Triton compiles its loader when it is
    first used, with $CC, gcc or clang.
    """

    triton: str | None = None
    why_not: str = ""
    way_out: str = ""
    compiler: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class InfiniBand:
    """Cards for InfiniBand or RoCE that have an active port.

    `usable` is the number of cards that libibverbs finds. `error` is the reason why libibverbs cannot be loaded.
    `locked_memory` is the limit for locked memory in bytes; None means that there is no limit.
    """

    cards: tuple[str, ...]
    usable: int = 0
    locked_memory: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Package:
    """What `import hvdcomp` finds in the current folder.

    Attributes:
        root: the folder that contains the installed package. For an editable installation, this is the clone.
        is_empty: whether the import finds a folder that has the same name but is not a package, instead of the
            installed package.
        is_on_path: whether `root` is in Python's path. If it is not, Python imports the package through the import
            hook of an editable installation.
    """

    root: str
    is_empty: bool = False
    is_on_path: bool = True


# For each launcher, the variables with the number of ranks and with the rank. If one launcher may start another, the
# variables of both are set, so the launcher that is started last comes first in this list.
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
    """The result of `hvd.init()`, or of `init_process_group()` and an allreduce, in a separate process.

    `size` is Horovod's size, or the number of ranks that took part in the allreduce.
    """

    size: int | None = None
    rank: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """All facts that the checks use. None means that something is not installed, or was not tried."""

    python: str
    prefix: str
    root: bool = False
    scripts_on_path: bool = True
    packages: Mapping[str, str] = field(default_factory=dict)
    package: Package | None = None
    torch: Torch | None = None
    tensorflow: TensorFlow | None = None
    horovod: str | None = None
    bindings: Mapping[str, HorovodBinding] = field(default_factory=dict)  # the keys are torch and tensorflow
    mpi: Mpi | None = None
    mpi4py_library: str | None = None
    gpus: tuple[Gpu, ...] = ()
    toolkit: CudaToolkit | None = None
    interfaces: tuple[str, ...] = ()  # the network interfaces
    infiniband: InfiniBand | None = None
    master_error: str | None = None  # the reason why MASTER_ADDR cannot be resolved; None if it can, or is not set
    # environment variables of launchers, MPI, Horovod, torch.distributed and Keras
    variables: Mapping[str, str] = field(default_factory=dict)
    started: Started | None = None
    kernels: Kernels | None = None
    device_kernels: DeviceKernels | None = None

    @property
    def launched_size(self) -> int | None:
        """The number of processes according to the launcher's variables; None without a launcher."""
        names = self._launcher()
        return int(self.variables[names[0]]) if names else None

    @property
    def launched_rank(self) -> int:
        """The rank of this process according to the launcher's variables; 0 without a launcher."""
        names = self._launcher()
        return int(self.variables[names[1]]) if names else 0

    @property
    def by_torch(self) -> bool:
        """Whether this process was started for torch.distributed. At least two variables of torch.distributed must be
        set, because a single variable may be set by chance. If Horovod's launcher has also set its own variables, the
        process was started for Horovod."""
        names = self.variables.keys()
        set_by_launcher = len({"RANK", "WORLD_SIZE", "MASTER_ADDR"} & names) >= 2
        return self.torch is not None and set_by_launcher and "HOROVOD_RANK" not in names

    def _launcher(self) -> tuple[str, str] | None:
        return next(
            (names for names in _LAUNCHERS if all(self.variables.get(name, "").isdecimal() for name in names)), None
        )
