"""A rank of a training with `LookAhead` is killed in mid-epoch: going on from a checkpoint is exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launched import run_forked_ranks

pytest.importorskip("torch")


@pytest.mark.alone
@pytest.mark.thorough
def test_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    program = ["-m", "tests.multirank.killed_look_ahead", str(tmp_path), "250", "50", "333"]
    killed = run_forked_ranks(2, "torchrun", program, timeout=200)
    assert killed.returncode != 0
    assert "Signal 9 (SIGKILL)" in killed.stdout
    done = run_forked_ranks(2, "torchrun", program, timeout=200)
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert f"rank {rank} went on after 300 steps and has the bits" in done.stdout
