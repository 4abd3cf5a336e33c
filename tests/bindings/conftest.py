"""Fixtures of the bindings' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdcomp.compressors import evidence, harm


@pytest.fixture
def at_one_rate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Evidence from the trainings at one learning rate only, which does not change as others are trained."""
    found = (*map(evidence._parse, evidence._read("evidence_one_rate.json")), evidence._WITH_MUON)
    monkeypatch.setattr(evidence, "evidence", lambda: found)
    harm._settings.cache_clear()
    yield
    monkeypatch.undo()
    harm._settings.cache_clear()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """torch.distributed with one rank, this process."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
