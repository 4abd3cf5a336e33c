"""Calls of the kernels for tests, in this process or a separate one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from hvdcomp import kernels

ROOT = Path(__file__).parents[1]


@pytest.fixture(params=kernels.INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Uses each instruction set in turn during the test, and skips sets that the CPU lacks."""
    before = kernels.instruction_set()
    assert before is not None, f"{kernels.why_not()}. {kernels.way_out()}"
    if request.param not in kernels.instruction_sets():
        pytest.skip(f"this CPU, or this build, has no {request.param}")
    kernels.use(request.param)
    yield request.param
    kernels.use(before)


def found_inf(parts: Sequence[np.ndarray], threads: int = 1) -> int:
    """The kernel `found_inf` over arrays of float32."""
    library = kernels.library()
    assert library is not None, kernels.why_not()
    pointers = np.array([part.ctypes.data for part in parts], np.uint64)
    sizes = np.array([part.size for part in parts], np.int64)
    result: int = library.hvd_found_inf(pointers.ctypes.data, sizes.ctypes.data, len(parts), threads)
    return result


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a new Python process, for at most a minute."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def python(code: str, **environment: str) -> str:
    """The output of a successful program in a new Python process."""
    process = run_python(code, **environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def degenerate_columns(length: int) -> np.ndarray:
    """A matrix (length, 9) with columns of zeros, that depend on those before, tiny and huge ones; between them columns
    that are well."""
    rng = np.random.default_rng(length)
    start = rng.normal(size=(length, 9)).astype(np.float32)
    start[:, 2] = start[:, 0] * np.float32(-2)
    start[:, 4] = 0
    start[:, 5] = start[:, 1] * np.float32(2.0**-120)
    start[:, 6] *= np.float32(2.0**100)
    start[:, 7] = np.finfo(np.float32).max
    return start
