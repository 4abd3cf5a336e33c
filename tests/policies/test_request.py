"""What policies are told, in checkpoints."""

from __future__ import annotations

import io

import pytest

from hvdcomp.policies.request import GravacGains, LevelTable, Statistics, Timing


def test_statistics_in_a_checkpoint_need_no_class_of_hvdcomp() -> None:
    """A decision that waits for the next step is saved with what it is made of, and `torch.load` refuses classes."""
    torch = pytest.importorskip("torch")
    table = LevelTable({"w": {0.1: 0.5, 0.2: 0.25}}, {"w": {0.1: 10, 0.2: 20}}, {"w": 0.1}, 5, 400)
    statistics = Statistics(
        3, epoch=1, norms={"w": 2.0}, step_times=(0.1, 0.2), level_table=table, gains=GravacGains(0.5, None, 4),
        timing=Timing(64.0, 2.0), exchange_seconds={10: 0.1},
    )  # fmt: skip
    file = io.BytesIO()
    torch.save(statistics.plain(), file)
    file.seek(0)
    assert Statistics.of_plain(torch.load(file, weights_only=True)) == statistics
    assert Statistics.of_plain(statistics.known()) == statistics
