"""What loads the kernels for CUDA devices, where there is no C compiler, and a home that nobody prepared."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tools.doctor.test_doctor_image import driver, needs_compiler

__all__ = ["driver"]

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None or find_spec("torch") is None, reason="needs PyTorch and Triton"),
    needs_compiler,
]

ROOT = Path(__file__).parents[2]

_STEP = """
import warnings
import torch
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.kernels import cuda

torch.cuda.is_available = lambda: True
engine = Engine(LoopbackCommunicator(2), [TensorInfo("x", (64, 33))], parse_compressor("int8"), min_numel=0, min_ndim=0)
with cuda.serving_host(), warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        engine.begin()
        x = torch.arange(64.0 * 33).reshape(64, 33)
        assert (engine.step({"x": x.clone()})["x"] - x).abs().max() < 64 * 33 / 250
assert all(group.bucket.device is None for group in engine.buckets.now)  # on the host there may be kernels in C
(only,) = said
print(only.message)
"""

_LOADS = """
import torch
torch.cuda.is_available = lambda: True
from hvdcomp.kernels import cuda
print(cuda.why_not() or "loads")
assert bool(cuda.why_not()) == bool(cuda.way_out())
"""


def _run(program: str, driver: Path, **variables: str) -> str:
    """Runs a program where PATH holds no compiler, and nobody can write to the home."""
    path = driver / "bin"
    path.mkdir(exist_ok=True)
    asked = shutil.which("file")  # by Triton, which finds compiled code by what that says of the platform
    if asked is not None and not (path / "file").exists():
        (path / "file").symlink_to(asked)
    lost = ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "CC")
    environment = {name: value for name, value in os.environ.items() if name not in lost}
    environment |= {"PATH": str(path), "HOME": "/dev/null", "LD_LIBRARY_PATH": str(driver)} | variables
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_it_a_step_goes_without_kernels_and_says_so_once(driver: Path) -> None:
    said = _run(_STEP, driver)
    assert said.count("\n") == 1
    assert said.startswith("gradients on the GPU are compressed one tensor after the other, which is slower: ")
    assert "Failed to find C compiler" in said
    assert "HVDCOMP_TRITON_CACHE=/path" in said


@pytest.mark.thorough
def test_it_is_found_in_a_folder_that_is_only_read(driver: Path, tmp_path: Path) -> None:
    """Where the command of the Dockerfile has put it."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    (program,) = re.findall(r"python3 -c '(.*CudaUtils\(\))'", text)
    folder = tmp_path / "folder"
    _run(program, driver, TRITON_CACHE_DIR=str(folder), PATH=os.environ["PATH"])
    before = sorted(folder.rglob("*"))
    assert before
    assert _run(_LOADS, driver, HVDCOMP_TRITON_CACHE=str(folder)) == "loads\n"
    assert sorted(folder.rglob("*")) == before
    assert "C compiler" in _run(_LOADS, driver, HVDCOMP_TRITON_CACHE=str(tmp_path / "none"))
