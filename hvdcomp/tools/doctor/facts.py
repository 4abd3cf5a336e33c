"""What `hvdcomp doctor` knows about an environment: plain values, so that a check needs no real situation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdcomp.tools.horovod_build.environment import CudaToolkit, Mpi


@dataclass(frozen=True)
class Torch:
    """PyTorch as importing it shows; `error` holds the last line if that failed."""

    version: str
    cuda: str | None = None
    nccl: str | None = None
    architectures: tuple[str, ...] = ()  # compiled for: sm_70, compute_90, ...; empty without a usable GPU
    backends: tuple[str, ...] = ()  # of torch.distributed, of gloo, nccl and mpi; empty where it is not built in
    error: str | None = None


@dataclass(frozen=True)
class TensorFlow:
    """TensorFlow as importing it shows; `keras` is the version behind `tf.keras`."""

    version: str
    keras: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class HorovodBinding:
    """Horovod's extension for one framework: what is compiled into it, or why it does not load."""

    mpi: bool = False
    gloo: bool = False
    nccl: bool = False
    keras_callbacks: bool | None = None  # whether Horovod's ask the Keras that models are of; None without tf_keras
    error: str | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    name: str
    compute_capability: str  # "7.0"
    driver: str


@dataclass(frozen=True)
class Kernels:
    """hvdcomp's kernels in C: the instruction set and the number of threads; or why there are none, and the way out.

    `error` is a setting of the environment that no training accepts.
    """

    instruction_set: str | None = None
    threads: int = 1
    why_not: str = ""
    way_out: str = ""
    error: str | None = None


@dataclass(frozen=True)
class DeviceKernels:
    """hvdcomp's kernels for CUDA devices: the version of Triton, why there are none, the way out, and the C compiler.

    Triton compiles a loader of its own at the first use, with what CC names, or gcc, or clang.
    """

    triton: str | None = None
    why_not: str = ""
    way_out: str = ""
    compiler: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class InfiniBand:
    """Cards for InfiniBand or RoCE with a port that is up, and what a program can do with them.

    `usable` is how many cards libibverbs finds, `error` why that library does not load. `locked_memory` is the limit in
    bytes; None is without a limit.
    """

    cards: tuple[str, ...]
    usable: int = 0
    locked_memory: int | None = None
    error: str | None = None


# The variables of size and rank that launchers set, the inner launcher before those that may have started it.
_LAUNCHERS = (
    ("HOROVOD_SIZE", "HOROVOD_RANK"),
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    # SLURM_NTASKS alone is also set in the batch script itself, which is one process.
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
)


@dataclass(frozen=True)
class Started:
    """The outcome of `hvd.init()`, or of `init_process_group()` and an allreduce, in a process of its own.

    `size` is what Horovod says, or how many ranks took part in the allreduce.
    """

    size: int | None = None
    rank: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """Everything the checks look at. None means: not installed, or not asked."""

    python: str
    prefix: str
    root: bool = False
    scripts_on_path: bool = True
    packages: Mapping[str, str] = field(default_factory=dict)
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
    master_error: str | None = None  # why MASTER_ADDR stands for no address; None where it does, or is not set
    variables: Mapping[str, str] = field(default_factory=dict)  # launcher, MPI, Horovod, torch.distributed, Keras
    started: Started | None = None
    kernels: Kernels | None = None
    device_kernels: DeviceKernels | None = None

    @property
    def launched_size(self) -> int | None:
        """How many processes the launcher started, by its variables; None if no launcher started this one."""
        names = self._launcher()
        return int(self.variables[names[0]]) if names else None

    @property
    def launched_rank(self) -> int:
        """This process's rank by the launcher's variables; 0 without a launcher."""
        names = self._launcher()
        return int(self.variables[names[1]]) if names else 0

    @property
    def by_torch(self) -> bool:
        """Whether this process was started to train with torch.distributed: two of its variables are set, not one by
        chance. Horovod's launcher wins over what it was started in."""
        names = self.variables.keys()
        told = len({"RANK", "WORLD_SIZE", "MASTER_ADDR"} & names) >= 2
        return self.torch is not None and told and "HOROVOD_RANK" not in names

    def _launcher(self) -> tuple[str, str] | None:
        return next(
            (names for names in _LAUNCHERS if all(self.variables.get(name, "").isdecimal() for name in names)), None
        )
