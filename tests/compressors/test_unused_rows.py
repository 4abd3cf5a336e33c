"""Which methods leave a row untouched that no rank's batch has used."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcomp.compressors import COMPRESSORS
from hvdcomp.compressors.parsing import parse_compressor
from tests.harness import as_numpy, infos, run_engines

SPECS = [spec for kind in COMPRESSORS.values() for spec in kind.examples]
ONE_BIT = {"efsignsgd", "onebit", "qsgd:bits=1,bucket=64", "chunkedtopk:chunk=8,k=1,values=sign"}
# The error of a block is spread over all of it.
ROTATED = {"eden", "eden:bits=1", "eden:block=512", "eden:bits=1,scaled=True"}
FEW_MAGNITUDES = {"stc:ratio=0.01", "chunkedtopk"}  # of the elements sent, with zeros among them if there are too few


def moves(spec: str, rows: int, used: int) -> bool:
    """Whether any but the first `used` rows changes in three steps of two ranks."""
    gradients = np.random.default_rng(1).standard_normal((3, 2, rows, 16)).astype(np.float32)
    gradients[:, :, used:] = 0
    runs = run_engines(
        2, infos({"embed": (rows, 16)}), parse_compressor(spec), lambda rank, step: {"embed": gradients[step, rank]}, 3
    )
    return any(as_numpy(results["embed"])[used:].any() for run in runs for results in run.results)


@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_zeros_stay_so_but_for_one_bit_and_rotations(spec: str) -> None:
    assert moves(spec, rows=40, used=7) == (spec in ONE_BIT | ROTATED)


@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_zeros_move_with_shared_magnitudes_too_if_more_is_sent_than_is_not_zero(spec: str) -> None:
    """The first 32 of 6400 elements are not zero. Rotations keep zeros behind a power of two."""
    assert moves(spec, rows=400, used=2) == (spec in ONE_BIT | FEW_MAGNITUDES)
