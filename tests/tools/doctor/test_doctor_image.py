"""What an image for GPUs is looked at for without one: on real libraries and code for GPUs, made small."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvdcomp.tools.doctor import image
from hvdcomp.tools.doctor.facts import Facts

# Not imported: where TensorFlow is in the process, that needs care.
triton = find_spec("triton")
needs_triton = pytest.mark.skipif(triton is None or find_spec("torch") is None, reason="needs PyTorch and Triton")

_NCCL = "nvidia/nccl/lib/libnccl.so.2"
_NO_FACTS = Facts("3.11", "/")
_COMPILE = """
import sys
from pathlib import Path
from tests.cuda_kernels import code_for, launches
for capability in map(int, sys.argv[2:]):
    launch = launches("fp16", [(64, 1100)])[0]
    (Path(sys.argv[1]) / f"kernel.{capability}").write_bytes(code_for(launch, capability))
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `kernel.70` and `kernel.90`: one of hvdcomp's kernels, compiled for these GPUs."""
    folder = tmp_path_factory.mktemp("code")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-c", _COMPILE, str(folder), "70", "90"],
        check=True, cwd=Path(__file__).parents[3], env=environment | {"TRITON_CACHE_DIR": str(folder / "cache")},
    )  # fmt: skip
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that packages are found in first."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(image, "wanted_capabilities", lambda: ("7.0",))
    monkeypatch.setattr(image, "_LIBRARIES", (_NCCL, "none/of/these"))  # those of TensorFlow are large
    return tmp_path / _NCCL


@needs_triton
@pytest.mark.thorough
def test_code_for_gpus_is_found_in_a_library(code: Path) -> None:
    assert image.code_in(code / "kernel.70") == ("sm_70",)
    assert image.code_in(code / "kernel.90") == ()  # sm_90a, which runs on no other GPU
    assert image.code_in(Path(sys.executable)) == ()


@needs_triton
@pytest.mark.thorough
def test_a_library_without_the_code_is_named(code: Path, installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installed.parent.mkdir(parents=True)
    installed.write_bytes((code / "kernel.70").read_bytes())
    assert list(image.look_at_code(_NO_FACTS)) == []
    assert "nvidia/nccl/lib/libnccl.so.2: sm_70" in capsys.readouterr().out
    installed.write_bytes((code / "kernel.90").read_bytes())
    (wrong,) = image.look_at_code(_NO_FACTS)
    assert wrong == f"{installed} has no code for GPUs of compute capability 7.0"


@pytest.mark.parametrize(
    ("record", "expected"),
    [(None, ()), ({"options": {"cuda_arch": ()}}, ()), ({"options": {"cuda_arch": (70, 86)}}, ("7.0", "8.6"))],
)
def test_the_gpus_are_those_that_horovod_was_compiled_for(
    record: dict[str, object] | None, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "installed_record", lambda: record)
    assert image.wanted_capabilities() == expected


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")


def _shared_object(source: str, path: Path, *options: str) -> None:
    path.with_suffix(".c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", *options, "-o", path, path.with_suffix(".c")], check=True)


@needs_compiler
def test_a_symbol_that_no_library_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernels.so"
    monkeypatch.setenv("HVDCOMP_KERNELS_LIBRARY", str(path))
    _shared_object("int nowhere(void); int here(void) { return 1; }", path)
    assert list(image.look_at_symbols(_NO_FACTS)) == []
    _shared_object("int nowhere(void); int here(void) { return nowhere(); }", path)
    (wrong,) = image.look_at_symbols(_NO_FACTS)
    assert "undefined symbol: nowhere" in wrong


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Path]:
    """A folder with what stands in for the driver's library."""
    assert triton is not None
    assert triton.origin is not None
    source = (Path(triton.origin).parent / "backends" / "nvidia" / "driver.c").read_text()
    names = sorted(set(re.findall(r"\b(cu[A-Z]\w*)\(", source)))
    _shared_object(
        "\n".join(f"void {name}(void) {{}}" for name in names), tmp_path / "libcuda.so.1", "-Wl,-soname,libcuda.so.1"
    )
    return tmp_path


@needs_triton
@pytest.mark.thorough
def test_gpus_without_kernels_compiled_ahead_are_named(
    code: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = code / "cache"
    monkeypatch.setattr(image, "ask_python", lambda program, timeout: {})  # the driver is there
    monkeypatch.setattr(image, "wanted_capabilities", lambda: ("7.0", "8.6", "9.0"))
    monkeypatch.setenv("HVDCOMP_TRITON_CACHE", str(cache))
    assert list(image.look_at_triton(_NO_FACTS)) == [f"{cache} has no kernels for GPUs of compute capability 8.6"]
    assert f"{cache}: 1 kernels for compute capability 7.0\n" in capsys.readouterr().out
    monkeypatch.setenv("HVDCOMP_TRITON_CACHE", str(code / "none"))
    assert len(list(image.look_at_triton(_NO_FACTS))) == 3


@needs_triton
@needs_compiler
@pytest.mark.thorough
def test_triton_needs_no_compiler_where_its_driver_lies_compiled(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command of the Dockerfile, which is run there as another user."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("HVDCOMP_TRITON_CACHE", str(driver))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    (wrong,) = image.look_at_triton(_NO_FACTS)
    assert wrong.startswith(f"Triton's driver, which should be compiled in {driver}: ")
    text = (Path(__file__).parents[3] / "docker" / "Dockerfile").read_text()
    (program,) = re.findall(r"python3 -c '(.*CudaUtils\(\))'", text)
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"TRITON_CACHE_DIR": str(driver)})
    assert list(image.look_at_triton(_NO_FACTS)) == []
