"""Schedules: which level which step, or which tensor, gets, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import hvdcomp
from hvdcomp.bindings.checkpoint import restore, state_of
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies import DENSE, parse_policy
from hvdcomp.policies.schedules import Legacy, LevelSchedule, Schedule, WarmUp
from tests.harness import copy, infos


def levels(schedule: LevelSchedule, count: int, own: float, steps_per_epoch: int | None = None) -> list:
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
        ("warmup", "changes nothing"),
        ("warmup:levels=0.5|0.1", "how long"),
        ("warmup:levels=0.5,epochs=1,steps=2", "exactly one of epochs=... and steps=..."),
        ("warmup:levels=0.5,start=0.3,steps=2", "not both"),
        ("warmup:dense_steps=-1", "dense_steps=-1"),
        ("warmup:levels=half,steps=1", "half"),
        ("cooldown:steps=1", "choose one of: schedule, legacy, warmup"),
        (
            "schedule:levels=0.1",
            "give exactly one of epochs=... or steps=..., to define when each level ends; you gave none",
        ),
        ("schedule:levels=0.1,epochs=1,steps=2", "you gave epochs and steps"),
        ("schedule:levels=0.1|0.2,epochs=1", "2 levels need 2 epochs, but there are 1: levels=0.1|0.2,epochs=1"),
        ("schedule:levels=0.1|0.2,steps=3|3", "must be increasing whole numbers of at least 1"),
        ("schedule:levels=0.1|0.2,steps=0|3", "must be increasing whole numbers of at least 1"),
        ("schedule:steps=3", "does not set levels"),
        ("legacy:levels=0.1|0.01", "give exactly one of epochs=..., steps=... or sizes=..., to define when"),
        ("legacy:levels=0.1|0.01,sizes=10,steps=3", "you gave steps and sizes"),
        ("legacy:levels=0.1|0.01,sizes=10|20", "2 levels need 1 sizes, but there are 2"),
        ("legacy:levels=0.1,sizes=10", "must be two or more decreasing numbers"),
        ("legacy:levels=0.1|0.1,sizes=10", "must be two or more decreasing numbers"),
        ("legacy:levels=0.01|0.1,sizes=10", "must be two or more decreasing numbers"),
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


def test_a_schedule_holds_each_level_until_its_end_and_then_the_own_one() -> None:
    by_steps = Schedule(levels=(0.1, 0.5, 0.002), steps=(2, 3, 6))
    assert levels(by_steps, 8, 0.01) == [0.1, 0.1, 0.5, 0.002, 0.002, 0.002, None, None]
    by_epochs = parse_policy("schedule:levels=0.1|0.002,epochs=1|3")
    assert levels(by_epochs, 8, 0.01, steps_per_epoch=2) == [0.1, 0.1, *[0.002] * 4, None, None]
    # A warm-up is one of them.
    warm_up = WarmUp(levels=(0.25, 0.0625), steps=3)
    assert levels(warm_up, 9, 0.01) == levels(Schedule(levels=(0.25, 0.0625), steps=(3, 6)), 9, 0.01)


def test_legacy_by_steps_ends_with_its_last_level() -> None:
    assert levels(Legacy(levels=(0.1, 0.01, 0.001), steps=(2, 3)), 6, 0.5) == [0.1, 0.1, 0.01, *[0.001] * 3]
    assert levels(Legacy(levels=(8, 4), epochs=(2,)), 6, 2, steps_per_epoch=2) == [8, 8, 8, 8, 4, 4]


@pytest.mark.parametrize("policy", ["schedule:levels=0.5|3,steps=1|2", "legacy:levels=3|0.5,sizes=10"])
def test_all_levels_of_a_list_must_suit_the_compressor(policy: str) -> None:
    parameters = [("w", np.zeros(3))]
    with pytest.raises(hvdcomp.SpecError, match="no single level"):
        hvdcomp.Compression.from_spec("fp16", named_parameters=parameters, policy=policy)
    with pytest.raises(hvdcomp.SpecError, match="ratio=3"):
        hvdcomp.Compression.from_spec("topk:ratio=0.1", named_parameters=parameters, policy=policy)
    with pytest.raises(hvdcomp.SpecError, match="steps_per_epoch"):
        hvdcomp.Compression.from_spec(
            "topk:ratio=0.1", named_parameters=parameters, policy="legacy:levels=0.5|0.1,epochs=3"
        )


SHAPES = {"small": (8, 8), "middle": (10, 10), "large": (40, 50), "bias": (30,)}


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def engine_of(spec: str) -> Engine:
    return Engine(LoopbackCommunicator(), infos(SHAPES), parse_compressor(spec), min_numel=50)


@pytest.mark.parametrize("as_json", [False, True])
def test_legacy_by_sizes_sends_more_of_small_tensors(as_json: bool) -> None:
    schedule = parse_policy("legacy:levels=0.5|0.1|0.01,sizes=100|2000")
    assert isinstance(schedule, Legacy)
    assert parse_policy(str(schedule)) == schedule
    first, second = levels(schedule, 2, 0.2)
    assert first == second
    engine = engine_of("topk:ratio=0.2")
    engine.set_level(through_json(first) if as_json else first)
    found = {name: str(one) for name, one in engine.begin().items()}
    assert found == {
        "small": "topk:ratio=0.5", "middle": "topk:ratio=0.1", "large": "topk:ratio=0.01", "bias": "none",
    }  # fmt: skip
    plan = engine.plan
    engine.set_level(second)
    assert engine.begin() is plan or as_json
    engine.set_level(None)
    assert engine.begin()["small"] == hvdcomp.TopK(0.2)


def test_a_checkpoint_holds_levels_by_sizes() -> None:
    engine, again = engine_of("topk:ratio=0.2"), engine_of("topk:ratio=0.2")
    engine.set_level(((100, 0.5), (None, 0.1)))
    state = through_json(state_of(engine, None, copy))
    restore(state, again, None, lambda array, name: copy(array))
    assert dict(again.begin()) == dict(engine.begin())
    last = [None, 0.1]
    for wrong in ([], [[100, 0.5]], [[100, None], last], [[None, 2.0]], [[100, 0.5, 1], last], [["a", 0.5], last]):
        state["shared"]["level"] = wrong
        with pytest.raises(hvdcomp.ConfigurationError, match="damaged: "):
            restore(state, engine_of("topk:ratio=0.2"), None, lambda array, name: copy(array))
