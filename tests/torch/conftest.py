"""Fixtures of the tests of `hvdcomp.torch`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """torch.distributed with one rank, this process."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
