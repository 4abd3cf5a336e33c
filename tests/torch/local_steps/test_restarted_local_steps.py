"""torchrun starts all ranks of `LocalSteps` again after one was killed in the middle of a round."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launched import run_forked_ranks

pytest.importorskip("torch")


@pytest.mark.alone
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_restarted_ranks_continue_bit_for_bit_and_fewer_ranks_share_residuals(tmp_path: Path) -> None:
    program = ["-m", "tests.multirank.restarted_local_steps", str(tmp_path), "19", "5", "11"]
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # docs/ddp.md
    done = run_forked_ranks(4, "torchrun", ["--max-restarts", "1", *program], own_store, timeout=400)
    assert done.returncode == 0, done.stdout
    assert "exitcode: -9" in done.stdout
    for rank in range(4):
        assert f"rank {rank} of 4 continued after 10 steps" in done.stdout
    for file in tmp_path.glob("15-*"):
        file.unlink()
    done = run_forked_ranks(3, "torchrun", program, timeout=400)
    assert done.returncode == 0, done.stdout
    for rank in range(3):
        assert f"rank {rank} of 3 continued after 10 steps" in done.stdout
