"""Warm-up schedules: which level which step gets, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import hvdcomp
from hvdcomp.policies import DENSE, parse_policy
from hvdcomp.policies.schedules import WarmUp


def levels(schedule: WarmUp, count: int, own: float, steps_per_epoch: int | None = None) -> list:
    return [schedule.level_at(step, steps_per_epoch, own) for step in range(count)]


def test_a_list_of_levels_by_epochs_after_dense_steps() -> None:
    schedule = WarmUp(dense_steps=2, levels=(0.25, 0.0625), epochs=1)
    assert levels(schedule, 8, 0.001, steps_per_epoch=2) == [DENSE, DENSE, 0.25, 0.25, 0.0625, 0.0625, None, None]


def test_a_geometric_sequence_ends_before_the_own_level() -> None:
    schedule = WarmUp(start=0.25, periods=4, steps=1)
    found = levels(schedule, 6, 0.25 / 256)
    assert found[4:] == [None, None]
    np.testing.assert_allclose(found[:4], [0.25, 0.0625, 0.015625, 0.00390625])


def test_whole_levels_stay_whole() -> None:
    assert levels(WarmUp(start=16, periods=2, steps=1), 3, 4) == [16, 8, None]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("warmup", "nothing to do"),
        ("warmup:levels=0.5|0.1", "how long"),
        ("warmup:levels=0.5,epochs=1,steps=2", "one of the two"),
        ("warmup:levels=0.5,start=0.3,steps=2", "not both"),
        ("warmup:dense_steps=-1", "dense_steps=-1"),
        ("warmup:levels=half,steps=1", "half"),
        ("cooldown:steps=1", "there are: warmup"),
    ],
)
def test_what_is_refused(spec: str, words: str) -> None:
    with pytest.raises(hvdcomp.SpecError, match=words.replace("|", r"\|")):
        parse_policy(spec)


def test_a_schedule_must_suit_the_compressor_and_the_run() -> None:
    parameters = [("w", np.zeros(3))]
    one_level = "warmup:levels=0.5,epochs=1"
    with pytest.raises(hvdcomp.SpecError, match="no single level"):
        hvdcomp.Compression.from_spec("fp16", named_parameters=parameters, policy="warmup:levels=0.5,steps=1")
    with pytest.raises(hvdcomp.SpecError, match="steps_per_epoch"):
        hvdcomp.Compression.from_spec("topk:ratio=0.1", named_parameters=parameters, policy=one_level)
    with pytest.raises(hvdcomp.SpecError, match="ratio=3"):
        hvdcomp.Compression.from_spec("topk:ratio=0.1", named_parameters=parameters, policy="warmup:levels=3,steps=1")


def test_spec_strings() -> None:
    parsed = parse_policy("warmup:levels=0.25|0.0625,epochs=1,dense_steps=10")
    assert parsed == WarmUp(levels=(0.25, 0.0625), epochs=1, dense_steps=10)
    assert parse_policy(str(parsed)) == parsed
    assert parse_policy("warmup:levels=8|4,steps=5").levels == (8, 4)
