"""The kernels' shared object: how it is compiled, chosen, loaded and refused, and its pool of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hvdcomp import kernels

ROOT = Path(__file__).parents[1]
SETTINGS = ("HVDCOMP_KERNELS", "HVDCOMP_KERNELS_LIBRARY", "HVDCOMP_THREADS")


@pytest.fixture(autouse=True)
def _loaded_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins and ends with what the environment says, and the best instruction set."""
    before = kernels.instruction_set()
    yield
    monkeypatch.undo()
    kernels.reset()
    if before is not None:
        kernels.use(before)


def found_inf(parts: list[np.ndarray], threads: int = 1) -> int:
    pointers = np.array([part.ctypes.data for part in parts], np.uint64)
    sizes = np.array([part.size for part in parts], np.int64)
    library = kernels.library()
    assert library is not None, kernels.why_not()
    return library.hvd_found_inf(pointers.ctypes.data, sizes.ctypes.data, len(parts), threads)


def python(code: str, **environment: str) -> str:
    """What a fresh Python prints that ends within a minute."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_kernels_here() -> None:
    assert kernels.available(), kernels.why_not()
    assert kernels.why_not() == ""
    assert kernels.instruction_set() in kernels.instruction_sets()
    assert "plain" in kernels.instruction_sets()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", kernels.INSTRUCTION_SETS)
def test_found_inf_finds_each_place(name: str, threads: int) -> None:
    if name not in kernels.instruction_sets():
        pytest.skip(f"{name} is not usable here")
    kernels.use(name)
    sizes = [0, 1, 7, 65536, 131075]
    parts = [np.full(size, np.finfo(np.float32).max, np.float32) for size in sizes]
    parts[2][:] = [-0.0, 1e-45, -1e-45, -np.finfo(np.float32).max, 0, 1, -1]
    assert found_inf(parts, threads) == 0
    for part in parts[1:]:
        for place in {0, part.size // 2, part.size - 1}:
            for bad in (np.inf, -np.inf, np.nan, -np.nan):
                kept, part[place] = part[place], bad
                assert found_inf(parts, threads) == 1, (part.size, place, bad)
                part[place] = kept
    assert found_inf([], threads) == 0
