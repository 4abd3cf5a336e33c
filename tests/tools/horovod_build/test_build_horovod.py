"""`hvdcomp build-horovod`: what it decides, and how it reads a build's output. A real build is the set-up itself."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import select
import signal
import subprocess
import sys
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdcomp.tools.commands.build_horovod import command
from hvdcomp.tools.horovod_build import BuildError, source, wheel
from hvdcomp.tools.horovod_build.edits import EDITS, Edit, applicable_edits, apply_edits, digest
from hvdcomp.tools.horovod_build.environment import Environment, Mpi, parse_mpi_version, release
from hvdcomp.tools.horovod_build.log import first_error, hint, parse_progress
from hvdcomp.tools.horovod_build.plan import Options, check_environment, make_plan, wheel_folder

OPEN_MPI = Mpi("Open MPI", "4.1.8", "/env/bin/mpirun", "/env/bin/mpicxx", inside=True)
ENVIRONMENT = Environment(
    python="3.11.7",
    machine="linux-x86_64",
    torch="2.13.0+cpu",
    tensorflow="2.21.0",
    mpi=OPEN_MPI,
    compiler="c++ 12.2.0",
    cpu_flags=("avx", "fma"),
)
CPU, GPU = Options(), Options(gpu=True, cuda_arch=(70, 80))


def changed(**values: object) -> Environment:
    return dataclasses.replace(ENVIRONMENT, **values)  # type: ignore[arg-type]


def with_cuda(**values: object) -> Environment:
    return changed(**{"torch": "2.13.0+cu126", "torch_cuda": "12.6", "nvcc": "12.4", **values})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.13.0+cpu", (2, 13, 0)), ("2.19.0rc1", (2, 19, 0)), ("5.0.3", (5, 0, 3)), ("unknown", ())],
)
def test_release_reads_the_numbers(text: str, expected: tuple[int, ...]) -> None:
    assert release(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to", ("Open MPI", "4.1.8")),
        ("HYDRA build details:\n    Version:                                 4.2.1\n", ("MPICH", "4.2.1")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005", ("Intel MPI", "2021.11")),
        ("SomeMPI 1.2", ("unknown MPI", "1.2")),
    ],
)
def test_mpi_names_itself(text: str, expected: tuple[str, str]) -> None:
    assert parse_mpi_version(text) == expected


# Edits.


def edited_files(environment: Environment, gpu: bool = True) -> set[str]:
    return {edit.file for edit in applicable_edits(environment, gpu)}


_KERAS = {"horovod/tensorflow/keras/callbacks.py", "horovod/_keras/callbacks.py"}
_TENSORFLOW = {"horovod/tensorflow/CMakeLists.txt", "horovod/tensorflow/mpi_ops.cc"} | _KERAS


def test_edits_follow_the_versions() -> None:
    assert edited_files(ENVIRONMENT) == {"CMakeLists.txt", "horovod/torch/CMakeLists.txt"} | _TENSORFLOW
    assert edited_files(changed(torch=None)) == _TENSORFLOW
    assert edited_files(changed(torch="2.0.1", tensorflow="2.18.1")) == _KERAS
    assert edited_files(changed(torch="2.0.1", tensorflow="2.15.1")) == set()
    assert edited_files(changed(torch=None, tensorflow=None, python="3.12.1")) == {"horovod/runner/js_run.py"}
    nothing = changed(torch=None, tensorflow=None)
    assert edited_files(nothing, gpu=False) == {"CMakeLists.txt"}
    assert edited_files(with_cuda(tensorflow=None), gpu=False) - edited_files(with_cuda(tensorflow=None)) == {
        "cmake/Modules/FindPytorch.cmake"
    }


def test_every_edit_says_when_and_why() -> None:
    assert all(edit.when and edit.why and edit.old != edit.new for _, edit in EDITS)


def test_apply_edits_replaces_exactly_the_text(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text("project(x)\nset(STANDARD 14)\nset(REQUIRED ON)\n")
    first = Edit("CMakeLists.txt", "set(STANDARD 14)", "set(STANDARD 20)", "always", "test")
    second = Edit("CMakeLists.txt", "set(REQUIRED ON)\n", "", "always", "test")
    apply_edits(tmp_path, [first, second])
    assert (tmp_path / "CMakeLists.txt").read_text() == "project(x)\nset(STANDARD 20)\n"


@pytest.mark.parametrize("text", ["nothing of the kind\n", "set(STANDARD 14)\nset(STANDARD 14)\n"])
def test_an_edit_that_does_not_fit_is_an_error_and_writes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "first.txt").write_text("one\n")
    (tmp_path / "CMakeLists.txt").write_text(text)
    fitting = Edit("first.txt", "one", "two", "always", "test")
    with pytest.raises(BuildError, match=r"CMakeLists\.txt.*STANDARD 14"):
        apply_edits(tmp_path, [fitting, Edit("CMakeLists.txt", "set(STANDARD 14)", "", "always", "test")])
    assert (tmp_path / "first.txt").read_text() == "one\n"


def test_an_edit_of_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no file gone\.txt"):
        apply_edits(tmp_path, [Edit("gone.txt", "a", "b", "always", "test")])


# Plan: refusals, variables, cache key.


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        (changed(torch=None, tensorflow=None), CPU, r"pip install 'hvdcomp\[torch\]'"),
        (changed(compiler=None), CPU, "install g\\+\\+"),
        (changed(mpi=dataclasses.replace(OPEN_MPI, version="5.0.6")), CPU, r"Open MPI 5\.0\.6.*does not work"),
        (ENVIRONMENT, GPU, "CUDA toolkit"),
        (changed(nvcc="12.4"), GPU, "CPU build"),
        (with_cuda(nvcc="13.0"), GPU, "major versions must be the same"),
        (ENVIRONMENT, Options(cuda_arch=(70,)), "add --gpu"),
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(environment: Environment, options: Options, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        check_environment(environment, options)


def test_what_can_work_is_accepted() -> None:
    assert check_environment(ENVIRONMENT, CPU) == []
    assert check_environment(with_cuda(), GPU) == []
    assert "only the Gloo controller" in check_environment(changed(mpi=None), CPU)[0]
    assert (
        "only the Gloo controller"
        in check_environment(changed(mpi=dataclasses.replace(OPEN_MPI, compiler=None)), CPU)[0]
    )


def test_variables_name_what_is_there() -> None:
    both = make_plan(ENVIRONMENT, CPU, {}).variables
    assert both["HOROVOD_WITH_PYTORCH"] == both["HOROVOD_WITH_TENSORFLOW"] == both["HOROVOD_WITH_MPI"] == "1"
    assert "HOROVOD_GPU_OPERATIONS" not in both
    only_torch = make_plan(changed(tensorflow=None, mpi=None), CPU, {})
    assert only_torch.variables["HOROVOD_WITHOUT_TENSORFLOW"] == only_torch.variables["HOROVOD_WITHOUT_MPI"] == "1"
    assert only_torch.frameworks == ["torch"]
    assert only_torch.controllers == ["gloo"]
    gpu = make_plan(with_cuda(), GPU, {}).variables
    assert gpu["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert gpu["HOROVOD_NCCL_LINK"] == "SHARED"
    assert gpu["HOROVOD_BUILD_CUDA_CC_LIST"] == "70,80"


def test_libraries_of_the_environment_are_found_relative_to_the_extension() -> None:
    inside = make_plan(ENVIRONMENT, CPU, {"LDFLAGS": "-Lmine"}).variables["LDFLAGS"]
    assert inside.startswith("-Lmine -Wl,-rpath,'$ORIGIN/../")
    outside = dataclasses.replace(OPEN_MPI, inside=False)
    assert "LDFLAGS" not in make_plan(changed(mpi=outside), CPU, {}).variables


def test_the_key_changes_with_everything_that_matters() -> None:
    plans = [
        make_plan(ENVIRONMENT, CPU, {}),
        make_plan(changed(torch="2.12.0+cpu"), CPU, {}),
        make_plan(changed(torch=None), CPU, {}),
        make_plan(changed(tensorflow="2.20.0"), CPU, {}),
        make_plan(changed(mpi=None), CPU, {}),
        make_plan(changed(mpi=dataclasses.replace(OPEN_MPI, version="4.1.6")), CPU, {}),
        make_plan(changed(mpi=dataclasses.replace(OPEN_MPI, inside=False)), CPU, {}),
        make_plan(changed(python="3.12.1"), CPU, {}),
        make_plan(changed(machine="linux-aarch64"), CPU, {}),
        make_plan(changed(compiler="c++ 13.1.0"), CPU, {}),
        make_plan(changed(cpu_flags=("avx",)), CPU, {}),
        make_plan(ENVIRONMENT, CPU, {"HOROVOD_BUILD_ARCH_FLAGS": "-mavx"}),
        make_plan(with_cuda(), CPU, {}),
        make_plan(with_cuda(), Options(gpu=True), {}),
        make_plan(with_cuda(), GPU, {}),
    ]
    assert len({plan.key for plan in plans}) == len(plans)


def test_the_key_ignores_what_does_not_matter() -> None:
    key = make_plan(ENVIRONMENT, CPU, {}).key
    assert make_plan(changed(python="3.11.9"), CPU, {"LANG": "C"}).key == key
    elsewhere = Mpi("Open MPI", "4.1.8", "/other/bin/mpirun", "/other/bin/mpicxx", inside=True)
    assert make_plan(changed(mpi=elsewhere), CPU, {}).key == key


def test_digest_covers_the_text_and_not_the_explanation() -> None:
    edit = Edit("a", "b", "c", "when", "why")
    assert digest([edit]) == digest([dataclasses.replace(edit, why="another reason")])
    assert digest([edit]) != digest([dataclasses.replace(edit, new="d")])


def test_cache_folder_can_be_chosen(tmp_path: Path) -> None:
    assert wheel_folder({"HVDCOMP_CACHE": str(tmp_path)}) == tmp_path / "horovod"
    assert wheel_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "hvdcomp" / "horovod"
    assert wheel_folder({}) == Path.home() / ".cache" / "hvdcomp" / "horovod"


# Source, cache, record.


def test_a_source_with_another_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / source.ARCHIVE).write_bytes(b"not the release")
    with pytest.raises(BuildError, match="differs from the published Horovod"):
        source.fetch_source(tmp_path)


def make_archive(path: Path, text: str) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in (
            ("setup.py", text),
            ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n"),
            ("horovod/__init__.py", "__version__ = '0.28.1'\n"),
        ):
            data = content.encode()
            member = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder whose source archive is a tiny package that builds like Horovod, without its C++."""
    pytest.importorskip("wheel")
    cache = tmp_path / "cache"
    cache.mkdir()
    archive = cache / source.ARCHIVE
    make_archive(
        archive,
        "import os, sys\n"
        "from setuptools import setup, find_packages\n"
        "print('[ 50%] Building CXX object horovod/CMakeFiles/x.dir/operations.cc.o', flush=True)\n"
        "assert os.environ['MAKEFLAGS'] == '-j3', os.environ['MAKEFLAGS']\n"
        "if 'broken' in os.environ.get('CXXFLAGS', ''):\n"
        "    print('operations.cc:7:3: error: expected a declaration', flush=True); sys.exit(1)\n"
        "setup(name='horovod', version='0.28.1', packages=find_packages())\n",
    )
    monkeypatch.setattr(source, "HOROVOD_SHA256", source.sha256(archive))
    monkeypatch.setenv("MAKEFLAGS", " -j --jobserver-auth=3,4")
    return cache


def test_a_build_is_cached_with_its_record_and_log(small_source: Path) -> None:
    plan = make_plan(changed(torch=None, tensorflow=None), CPU, {})
    steps: list[str] = []
    assert wheel.cached_wheel(small_source, plan) is None
    built = wheel.build_wheel(small_source, plan, 3, lambda progress: steps.append(progress.step))
    assert wheel.cached_wheel(small_source, plan) == built
    assert "horovod/operations.cc" in steps
    assert {path.name for path in built.parent.iterdir()} == {built.name, "build.json", "build.log"}
    assert json.loads((built.parent / "build.json").read_text())["key"] == plan.key
    assert "horovod/hvdcomp_build.py" in zipfile.ZipFile(built).namelist()
    assert not list(small_source.glob("build-*"))
    again = wheel.build_wheel(small_source, plan, 3, lambda progress: None)
    assert again == built


def test_a_failed_build_names_the_first_error_and_leaves_the_cache_as_it_was(
    small_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXXFLAGS", "broken")
    plan = make_plan(changed(torch=None, tensorflow=None), CPU, {})
    with pytest.raises(BuildError, match="expected a declaration") as failure:
        wheel.build_wheel(small_source, plan, 3, lambda progress: None)
    log = small_source / "last-failed-build.log"
    assert str(log) in str(failure.value)
    assert "expected a declaration" in log.read_text()
    assert {path.name for path in small_source.iterdir()} == {source.ARCHIVE, log.name}


# A build whose pip starts a compiler that never ends.
_ENDLESS = """
import sys
from pathlib import Path
from click.testing import CliRunner
from hvdcomp.tools.commands import build_horovod
from hvdcomp.tools.horovod_build import wheel
from hvdcomp.tools.horovod_build.plan import make_plan
from tests.tools.horovod_build.test_build_horovod import CPU, changed

def build(*_):
    plan, report = make_plan(changed(torch=None, tensorflow=None), CPU, {}), lambda _: print("begun", flush=True)
    wheel._run_pip_wheel(folder, folder, plan, 1, folder / "failed.log", report)

folder = Path(sys.argv[1])
build_horovod.find_environment = build
build_horovod.command(["--force"])
"""
_PIP = """
import os, subprocess
from pathlib import Path
Path(__file__).with_name("session").write_text(str(os.getsid(0)))
with open(Path(__file__).with_name("compiler"), "w") as pipe:
    print("[  1%] compiling", flush=True)
    subprocess.run(["sh", "-c", "sleep 1000; true"], stdout=pipe)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("by_make", [False, True])
def test_compilers_end_with_what_has_started_them(by_make: bool, number: signal.Signals, tmp_path: Path) -> None:
    """A pipe is open as long as the compiler is there."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    os.mkfifo(tmp_path / "pip" / "compiler")
    pipe = os.open(tmp_path / "pip" / "compiler", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "pip" / "__main__.py").write_text(_PIP)
    program = tmp_path / "program.py"
    program.write_text(_ENDLESS)
    words = [sys.executable, str(program), str(tmp_path)]
    (tmp_path / "Makefile").write_text(f"all:\n\t@{' '.join(words)}\n")
    environment = {name: value for name, value in os.environ.items() if name != "MAKELEVEL"}
    environment["PYTHONPATH"] = f"{tmp_path}:{Path(__file__).parents[3]}"
    started = subprocess.Popen(
        ["make", "--no-print-directory", "-C", str(tmp_path)] if by_make else words,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    assert started.stdout is not None
    try:
        assert started.stdout.readline() == "begun\n"
        (os.killpg if number == signal.SIGINT else os.kill)(started.pid, number)  # Ctrl-C reaches all of a terminal
        started.communicate(timeout=30)
        assert select.select([pipe], [], [], 30)[0], "the compiler goes on"
    finally:
        os.close(pipe)
        for session in (started.pid, int((tmp_path / "pip" / "session").read_text())):
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
    assert started.returncode != 0


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="HVDCOMP_CACHE"):
        wheel.build_wheel(tmp_path / "file" / "cache", make_plan(ENVIRONMENT, CPU, {}), 1, lambda progress: None)


def test_the_installed_record_is_read_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "horovod", raising=False)
    assert wheel.installed_record() is None
    (package / "hvdcomp_build.py").write_text('"""How."""\n\nRECORD = {"key": "abc", "options": {"gpu": False}}\n')
    assert wheel.installed_record() == {"key": "abc", "options": {"gpu": False}}


# The build's output.


def test_progress_lines() -> None:
    line = "  [ 84%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/__/common/gloo/gloo_controller.cc.o\n"
    progress = parse_progress(line)
    assert progress is not None
    assert (progress.percent, progress.step) == (84, "horovod/torch/common/gloo/gloo_controller.cc")
    linked = parse_progress("[100%] Linking CXX shared library ../../lib/mpi_lib_v2.so")
    assert linked is not None
    assert linked.step == "../../lib/mpi_lib_v2.so"
    assert parse_progress("[100%] Built target pytorch") is not None
    assert parse_progress("  copying horovod/version.py -> build/lib") is None


LOG = """\
  [ 40%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/mpi_ops_v2.cc.o
  warning: a variable named error: is never used
  In file included from /src/horovod/torch/mpi_ops_v2.cc:26:
  {error}
     17 | #include <Python.h>
        |          ^~~~~~~~~~
  compilation terminated.
  make[2]: *** [pytorch.dir/build.make:76: mpi_ops_v2.cc.o] Error 1
  Traceback (most recent call last):
  subprocess.CalledProcessError: Command '['cmake', '--build', '.']' returned non-zero exit status 2.
  error: subprocess-exited-with-error
"""


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("/torch/python.h:17:10: fatal error: Python.h: No such file or directory", "python3-dev"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("/tmp/cc1.s: No space left on device", "TMPDIR"),
        ("CMake Error at FindPackageHandleStandardArgs.cmake:230 (message): Could NOT find NCCL", "HOROVOD_NCCL_HOME"),
        ("torch/all.h:4:2: error: #error C++20 or later compatible compiler is required", "too old"),
        ("/usr/bin/ld: x.o: undefined reference to `c10::Error::what() const'", "constraints.txt"),
    ],
)
def test_first_error_and_hint(error: str, advice: str) -> None:
    found = first_error(LOG.format(error=error))
    assert found is not None
    assert found.splitlines()[0].strip() == error
    assert len(found.splitlines()) <= 6
    assert advice in (hint(found) or "")


def test_no_error_is_recognised_in_a_good_log() -> None:
    assert first_error("[100%] Built target pytorch\nSuccessfully built horovod\n") is None


# The command.


def test_dry_run_prints_the_plan_and_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDCOMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("hvdcomp.tools.commands.build_horovod.find_environment", lambda: ENVIRONMENT)
    result = CliRunner().invoke(command, ["--dry-run"])
    assert result.exit_code == 0, result.output
    for part in ("torch 2.13.0+cpu", "TensorFlow 2.21.0", "Open MPI 4.1.8", "HOROVOD_WITH_MPI=1", "CMakeLists.txt"):
        assert part in result.output
    assert not (tmp_path / "cache").exists()


def test_a_refusal_is_an_error_message_without_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = changed(torch=None, tensorflow=None)
    monkeypatch.setattr("hvdcomp.tools.commands.build_horovod.find_environment", lambda: nothing)
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 1
    assert "Neither PyTorch nor TensorFlow is installed" in result.output


def test_a_horovod_whose_ranks_do_not_run_is_not_left_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call would say that it is installed, and check nothing."""
    done: list[str] = []

    def fails(framework: str, controller: str) -> None:
        raise BuildError(f"two ranks of {framework} did not run under {controller}")

    for name, stand_in in {
        "find_environment": lambda: ENVIRONMENT,
        "installed_record": lambda: None,
        "missing_build_requirements": list,
        "cached_wheel": lambda cache, plan: tmp_path / "horovod.whl",
        "install_wheel": lambda wheel: done.append("installed"),
        "load_extension": lambda framework: None,
        "run_two_ranks": fails,
        "uninstall": lambda: done.append("uninstalled"),
    }.items():
        monkeypatch.setattr(f"hvdcomp.tools.commands.build_horovod.{name}", stand_in)
    result = CliRunner().invoke(command, [])
    assert (result.exit_code, done) == (1, ["installed", "uninstalled"]), result.output
    assert "two ranks of torch did not run under mpi" in result.output
    assert CliRunner().invoke(command, ["--no-check"]).exit_code == 0
    assert done[2:] == ["installed"]


@pytest.mark.parametrize("value", ["7.0", "sm_70", "70,x"])
def test_a_wrong_architecture_is_refused(value: str) -> None:
    result = CliRunner().invoke(command, ["--gpu", "--cuda-arch", value])
    assert result.exit_code == 2
    assert value in result.output
