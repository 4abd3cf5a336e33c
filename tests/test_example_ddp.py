"""`examples/ddp.py` under torchrun: as a user starts it, and started again where one rank has saved more."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parent.parent / "examples" / "ddp.py"


def train(folder: Path) -> str:
    """What a run says. Its exit status is not looked at: with Gloo, PyTorch 2.13 now and then ends a rank that has done
    everything by SIGABRT while its interpreter goes away, with plain DistributedDataParallel too."""
    said = run_ranks(2, "torchrun", [str(EXAMPLE), str(folder)], timeout=90).stdout
    assert "times fewer bytes than dense" in said, said
    return said


def last_state(folder: Path, rank: int) -> dict[str, Any]:
    return torch.load(folder / f"rank{rank}-100.pt", weights_only=False)


def test_it_trains_and_goes_on_where_all_ranks_were(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    found = re.search(r"loss ([\d.]+), ([\d.]+) times fewer bytes", train(whole))
    assert found is not None
    assert float(found[1]) < 1
    assert float(found[2]) > 10
    stopped.mkdir()
    for name in ("rank0-40", "rank1-40", "rank1-50"):
        shutil.copy(whole / f"{name}.pt", stopped)
    train(stopped)
    assert (stopped / "rank0-50.pt").exists()
    for rank in (0, 1):
        first, second = (last_state(folder, rank)["model"] for folder in (whole, stopped))
        for name, weight in first.items():
            assert torch.equal(weight, second[name]), name
