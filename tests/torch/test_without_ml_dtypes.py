"""Residuals in bfloat16 where NumPy does not know that type, on real ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.alone
def test_residuals_in_16_bits_are_saved_and_loaded(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    arguments = ["-m", "tests.multirank.without_ml_dtypes", str(tmp_path)]
    done = run_ranks(2, "torchrun", arguments, {"COLUMNS": "300"})
    assert done.returncode == 0, done.stdout[-6000:]
    assert all(f"rank {rank}: as expected" in done.stdout for rank in range(2))
    # An error of our own in loading is not the files' fault, which are to be kept.
    assert "on rank 1: " in done.stdout
    assert "but not loaded: TypeError('our own fault')" in done.stdout
    assert "Keep the checkpoint" in done.stdout
    assert "in broken" in done.stdout, "the traceback"
    assert "remove it" not in done.stdout


def in_numpy(hidden: str) -> str:
    """What a new process says that keeps residuals of NumPy arrays in bfloat16 and cannot import the hidden modules."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({hidden.split()}))
import numpy as np
from hvdcomp import ConfigurationError, ErrorFeedback
from hvdcomp.arrays import numpy_arrays
try:
    memory = ErrorFeedback(dtype="bf16")
    (kept,) = memory.update(numpy_arrays, np.full(2, 1.01, np.float32), np.zeros(2, np.float32), ())
    print(numpy_arrays.dtype_name(kept), kept.astype(float).tolist())
except ConfigurationError as error:
    print(error)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_numpy_keeps_bfloat16_where_ml_dtypes_is_installed_and_says_so_where_it_is_not() -> None:
    pytest.importorskip("ml_dtypes")
    assert in_numpy("tensorflow") == "bfloat16 [1.0078125, 1.0078125]\n"
    assert "pip install ml_dtypes" in in_numpy("tensorflow ml_dtypes")
