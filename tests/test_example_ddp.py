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


def last_state(folder: Path, rank: int) -> dict[str, Any]:
    return torch.load(folder / f"rank{rank}-100.pt", weights_only=False)


def test_it_trains_and_goes_on_where_all_ranks_were(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    done = run_ranks(2, "torchrun", [str(EXAMPLE), str(whole)], timeout=90)
    assert done.returncode == 0, done.stdout
    found = re.search(r"loss ([\d.]+), ([\d.]+) times fewer bytes", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) < 1
    assert float(found[2]) > 10
    stopped.mkdir()
    for name in ("rank0-40", "rank1-40", "rank1-50"):
        shutil.copy(whole / f"{name}.pt", stopped)
    done = run_ranks(2, "torchrun", [str(EXAMPLE), str(stopped)], timeout=90)
    assert done.returncode == 0, done.stdout
    assert (stopped / "rank0-50.pt").exists()
    for rank in (0, 1):
        first, second = (last_state(folder, rank)["model"] for folder in (whole, stopped))
        for name, weight in first.items():
            assert torch.equal(weight, second[name]), name
