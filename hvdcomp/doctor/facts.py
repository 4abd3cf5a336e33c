"""What `hvdcomp doctor` knows about an environment: plain values, so that a check needs no real situation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdcomp.horovod_build.environment import CudaToolkit, Mpi


@dataclass(frozen=True)
class Torch:
    """PyTorch as importing it shows; `error` holds the last line if that failed."""

    version: str
    cuda: str | None = None
    nccl: str | None = None
    architectures: tuple[str, ...] = ()  # compiled for: sm_70, compute_90, ...; empty without a usable GPU
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
    """hvdcomp's kernels for CUDA devices: the version of Triton, why there are none, and the C compiler.

    Triton compiles a loader of its own at the first use, with what CC names, or gcc, or clang.
    """

    triton: str | None = None
    why_not: str = ""
    compiler: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Started:
    """The outcome of `hvd.init()` in a process of its own, beside this one."""

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
    variables: Mapping[str, str] = field(default_factory=dict)  # launcher, MPI, Horovod, Keras
    started: Started | None = None
    kernels: Kernels | None = None
    device_kernels: DeviceKernels | None = None

    @property
    def launched_size(self) -> int | None:
        """How many processes the launcher started, by its variables; None if no launcher started this one."""
        for name, present in (
            ("HOROVOD_SIZE", "HOROVOD_RANK"),
            ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
            ("PMI_SIZE", "PMI_RANK"),
            # SLURM_NTASKS alone is also set in the batch script itself, which is one process.
            ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
            ("SLURM_NTASKS", "SLURM_PROCID"),
        ):
            value = self.variables.get(name, "")
            if present in self.variables and value.isdigit():
                return int(value)
        return None

    @property
    def launched_rank(self) -> int:
        """This process's rank by the launcher's variables; 0 without a launcher."""
        for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
            value = self.variables.get(name, "")
            if value.isdigit():
                return int(value)
        return 0
