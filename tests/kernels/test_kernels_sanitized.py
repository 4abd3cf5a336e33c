"""The tests of the kernels once more, on a shared object that looks for wrong addresses and undefined behavior."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdcomp import kernels
from hvdcomp.kernels import build
from tests.kernel_calls import ROOT, run_python

# Of all others that call kernels in C, new ones too, all tests are run. The sanitizer refuses to load Triton.
LEFT_OUT = {"test_kernels_build.py", "test_kernels_sanitized.py"}
FOR_DEVICES = "test_kernels_cuda"

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In which Python loads the sanitized object. Its runtime must be there before all else."""
    compiler = build.find_compiler()
    asked = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    runtime = asked.stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"{compiler[0]} has no libasan.so, the runtime of gcc's address sanitizer")
    library = build.build(tmp_path_factory.mktemp("sanitized"), sanitize=True)
    return {
        # The runtime looks for C++'s exceptions when it starts, before any extension has brought them.
        "LD_PRELOAD": f"{runtime} libstdc++.so.6",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaves memory behind when it ends
        "HVDCOMP_KERNELS_LIBRARY": str(library),
    }


@pytest.mark.parametrize("name", kernels.INSTRUCTION_SETS)
def test_the_kernels_tests_find_nothing(environment: dict[str, str], name: str) -> None:
    if name not in kernels.instruction_sets():
        pytest.skip(f"this CPU, or this build, has no {name}")
    patterns = ("test_kernels_*.py", "test_buckets*.py")
    found = {path for pattern in patterns for path in (ROOT / "tests").rglob(pattern)}
    files = sorted(path for path in found if path.name not in LEFT_OUT and not path.name.startswith(FOR_DEVICES))
    # pytest would take all tests if there were none.
    assert {"test_kernels_casts.py", "test_buckets.py"} <= {path.name for path in files}
    chosen = "not thorough and not alone and not cluster"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--capture=sys", "-p", "no:cacheprovider", "-m", chosen, *files],
        cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT), "HVDCOMP_KERNELS": name},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize(("size", "start", "found"), [(101, 0, "heap-buffer-overflow"), (100, 1, "misaligned address")])
def test_a_wrong_call_would_be_found(environment: dict[str, str], size: int, start: int, found: str) -> None:
    """One number too many is read; a list of pointers lies at an odd address."""
    program = f"""
import numpy as np
from hvdcomp import kernels
numbers, sizes, pointers = np.zeros(100, np.float32), np.array([{size}]), np.zeros(16, np.uint8)[{start}:]
pointers[:8] = np.frombuffer(numbers.ctypes.data.to_bytes(8, "little"), np.uint8)
print(kernels.library().hvd_found_inf(pointers.ctypes.data, sizes.ctypes.data, 1, 1))
"""
    done = run_python(program, **environment)
    assert done.returncode != 0
    assert found in done.stderr
