"""`hvdcomp build-horovod` beside a CUDA toolkit, and its check that what was built can be loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdcomp.tools.commands.build_horovod import command
from hvdcomp.tools.horovod_build import BuildError, source
from hvdcomp.tools.horovod_build.check import load_extension
from hvdcomp.tools.horovod_build.edits import apply_edits
from hvdcomp.tools.horovod_build.environment import CudaToolkit, find_cuda_toolkit, scripts_first
from hvdcomp.tools.horovod_build.plan import check_environment, make_plan, process_variables, wheel_folder
from tests.tools.horovod_build.test_build_horovod import CPU, ENVIRONMENT, GPU, changed, with_cuda

_STRAY = {
    "HOROVOD_GPU": "CUDA",
    "HOROVOD_GPU_OPERATIONS": "NCCL",
    "HOROVOD_GPU_ALLREDUCE": "MPI",
    "HOROVOD_WITH_MXNET": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_CUDA_HOME": "/usr/local/cuda",
}


def test_stray_variables_do_not_steer_the_build() -> None:
    others = {"PATH": "/bin", "HOROVOD_BUILD_ARCH_FLAGS": "-mavx"}
    plan = make_plan(with_cuda(), CPU, _STRAY | others)
    assert process_variables(plan, _STRAY | others) == others | plan.variables
    assert plan.key == make_plan(with_cuda(), CPU, others).key
    assert "HOROVOD_GPU_OPERATIONS" not in plan.variables
    note = check_environment(ENVIRONMENT, CPU, _STRAY | others)[-1]
    assert all(name in note for name in _STRAY)
    assert "HOROVOD_BUILD_ARCH_FLAGS" not in note
    gpu = make_plan(with_cuda(), GPU, _STRAY)
    assert process_variables(gpu, _STRAY) == {"HOROVOD_CUDA_HOME": "/usr/local/cuda"} | gpu.variables


def test_a_build_for_cpu_does_not_depend_on_a_toolkit() -> None:
    assert make_plan(with_cuda(), CPU, {}).key == make_plan(with_cuda(nvcc=None), CPU, {}).key
    assert make_plan(with_cuda(), CPU, {}).variables["HOROVOD_WITHOUT_NVTX"] == "1"
    assert "built for the CPU" in check_environment(with_cuda(), CPU, {})[0]


def test_a_toolkit_that_does_not_work_is_not_asked(tmp_path: Path) -> None:
    """The release's own CMake files as edited for CPU, with a compiler for CUDA in sight that fails."""
    cmake = shutil.which("cmake", path=scripts_first()["PATH"])
    archive = wheel_folder() / source.ARCHIVE
    if cmake is None or not archive.is_file():
        pytest.skip("needs CMake, and Horovod's source, which hvdcomp build-horovod fetches")
    root = source.unpack(archive, tmp_path)
    plan = make_plan(changed(torch=None, tensorflow=None, mpi=None), CPU, _STRAY)
    apply_edits(root, plan.edits)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'no compiler'\nexit 1\n")
    nvcc.chmod(0o755)
    variables = scripts_first() | _STRAY | {"CUDA_HOME": f"{tmp_path}/cuda", "CUDA_PATH": f"{tmp_path}/cuda"}
    variables["PATH"] = f"{nvcc.parent}{os.pathsep}{variables['PATH']}"
    command = [cmake, "-S", root, "-B", tmp_path / "build", f"-DPYTHON_EXECUTABLE={sys.executable}"]
    command += ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    command += [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY_RELWITHDEBINFO={tmp_path}/lib"]
    done = subprocess.run(command, env=process_variables(plan, variables), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CUDA" not in (tmp_path / "build" / "compile_commands.json").read_text()


def test_the_toolkit_is_found_with_its_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "cuda-12.6"
    for folder in ("bin", "lib64", "include"):
        (home / folder).mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo release 12.6, V12.6.85 || echo '#$ _HERE_={home}/bin'\n")
    nvcc.chmod(0o755)
    (tmp_path / "wrapper").mkdir()
    (tmp_path / "wrapper" / "nvcc").symlink_to(nvcc)
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/wrapper{os.pathsep}{os.environ['PATH']}")
    assert find_cuda_toolkit() == CudaToolkit(f"{tmp_path}/wrapper/nvcc", "12.6", None)
    (home / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  12040\n")
    assert find_cuda_toolkit() == CudaToolkit(f"{tmp_path}/wrapper/nvcc", "12.6", None)
    (home / "lib64" / "libcudart.so.12").touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert find_cuda_toolkit() == CudaToolkit(str(nvcc), "12.6", "12.4")


# What is built can be loaded.

_EXTENSION = """
namespace absent { struct Stream; int handle_of(Stream*); }
extern "C" int ask() { return absent::handle_of(nullptr); }
"""


def test_an_extension_that_cannot_be_loaded_is_named_with_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    package = tmp_path / "horovod" / "torch"
    package.mkdir(parents=True)
    (tmp_path / "extension.cc").write_text(_EXTENSION)
    library = package / "mpi_lib.so"
    subprocess.run([compiler, "-shared", "-fPIC", tmp_path / "extension.cc", "-o", library], check=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    # Found when it is called, unless all is asked for at once.
    (package / "__init__.py").write_text(f"import ctypes, os\nctypes.CDLL({str(library)!r}, os.RTLD_LAZY)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"for torch cannot be loaded: .*absent::handle_of\(absent::Stream\*\)"):
        load_extension("torch")
    (package / "__init__.py").write_text("raise ImportError('libnccl.so.2: cannot open shared object file')\n")
    with pytest.raises(BuildError, match=r"libnccl\.so\.2: cannot open"):
        load_extension("torch")
    (package / "__init__.py").write_text("")
    load_extension("torch")


def test_what_cannot_be_loaded_does_not_stay_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def refuse(framework: str) -> None:
        raise BuildError(f"no {framework}")

    module = "hvdcomp.tools.commands.build_horovod"
    monkeypatch.setenv("HVDCOMP_CACHE", str(tmp_path))
    monkeypatch.setattr(f"{module}.find_environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(f"{module}.installed_record", lambda: None)
    monkeypatch.setattr(f"{module}.missing_build_requirements", list)
    monkeypatch.setattr(f"{module}.cached_wheel", lambda cache, plan: tmp_path / "horovod.whl")
    monkeypatch.setattr(f"{module}.install_wheel", lambda wheel: done.append("installed"))
    monkeypatch.setattr(f"{module}.uninstall", lambda: done.append("removed"))
    monkeypatch.setattr(f"{module}.load_extension", refuse)
    result = CliRunner().invoke(command, ["--no-check"])
    assert result.exit_code == 1
    assert "no torch" in result.output
    assert done == ["installed", "removed"]
