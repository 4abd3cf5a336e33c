"""A row that no rank's batch has used stays untouched under every method, but under signs that have no zero."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcomp.compressors import COMPRESSORS
from hvdcomp.compressors.parsing import parse_compressor
from tests.harness import as_numpy, infos, run_engines

SPECS = [spec for kind in COMPRESSORS.values() for spec in kind.examples]
ONE_BIT = ("efsignsgd", "onebit", "qsgd:bits=1")


@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_zeros_stay_so(spec: str) -> None:
    method = parse_compressor(spec)
    used = np.random.default_rng(1).standard_normal((3, 2, 40, 16)).astype(np.float32)
    used[:, :, 7:] = 0  # of three steps and two ranks

    runs = run_engines(2, infos({"embed": (40, 16)}), method, lambda rank, step: {"embed": used[step, rank]}, 3)
    moved = any(as_numpy(results["embed"])[7:].any() for run in runs for results in run.results)
    assert moved == (spec.startswith(ONE_BIT) and "per_row" not in spec)
