"""The ledger: sums by step, tensor and run, and times that come in late."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcomp import TopK
from hvdcomp.exchange.ledger import Cost, Ledger, StepCost
from tests.harness import BACKENDS, infos, make, run_engines


def step(number: int, **tensors: int) -> StepCost:
    costs = {name: Cost(bytes_sent=size, dense_bytes=10 * size, floats_sent=size / 4) for name, size in tensors.items()}
    result = StepCost(step=number, parts=tuple({name: cost} for name, cost in costs.items()), bytes_sent=8)
    for cost in costs.values():
        result.add(cost)
    return result


def test_sums() -> None:
    ledger = Ledger()
    ledger.record(step(0, a=100, b=20))
    ledger.record(step(1, a=40))
    assert ledger.steps == 2
    assert ledger.last is not None
    assert ledger.last.step == 1
    assert (ledger.last.bytes_sent, ledger.last.dense_bytes, ledger.last.floats_sent) == (48, 400, 10)
    assert (ledger.totals.bytes_sent, ledger.totals.dense_bytes, ledger.totals.floats_sent) == (176, 1600, 40)
    assert (ledger.tensors["a"].bytes_sent, ledger.tensors["b"].bytes_sent) == (140, 20)
    assert ledger.totals.encode_seconds is None  # not known, which is not zero


def test_the_compression_factor_is_of_bytes_that_may_leave_the_node() -> None:
    assert Cost().compression_factor is None
    assert Cost(bytes_sent=50, dense_bytes=4000).compression_factor == 80
    two_levels = Cost(bytes_sent=5050, dense_bytes=4000, bytes_in_node=5000)
    assert two_levels.compression_factor == 80
    two_levels.add(Cost(bytes_sent=150, dense_bytes=4000))
    assert two_levels.compression_factor == 40


def test_steps_that_cost_the_same_are_added_up_whenever_somebody_asks() -> None:
    """As casts are: the same costs by tensor in many steps, between steps with others and steps with times."""
    ledger, same, other, timed = Ledger(), step(0, a=100, b=20), step(0, a=1), step(0, b=7)
    expected = Cost()
    for number, cost in enumerate([same, same, same, other, same, timed, same, same]):
        ledger.record(cost, (lambda: True) if cost is timed else None)
        expected.add(cost)
        if number in (1, 4):  # reading changes nothing
            assert ledger.tensors["a"].bytes_sent == {1: 200, 4: 401}[number]
    assert ledger.totals == expected
    a, b = ledger.tensors["a"], ledger.tensors["b"]
    assert (a.bytes_sent, a.dense_bytes, a.floats_sent) == (601, 6010, 150.25)
    assert (b.bytes_sent, b.dense_bytes, b.floats_sent) == (127, 1270, 31.75)


def test_times_are_shared_out_by_bytes() -> None:
    ledger = Ledger()
    cost = step(0, a=60, b=32)

    def settle() -> bool:
        ledger.enter_times(cost, [(1.0, 0.25), (2.0, 0.5)], 10.0)
        return True

    ledger.record(cost, settle)
    assert (cost.encode_seconds, cost.communicate_seconds, cost.decode_seconds) == (3, 10, 0.75)
    assert (cost.tensors["a"].encode_seconds, cost.tensors["b"].decode_seconds) == (1, 0.5)
    assert cost.tensors["a"].communicate_seconds == 10 * 60 / 100
    assert ledger.tensors["b"].communicate_seconds == 10 * 32 / 100
    assert ledger.totals.encode_seconds == 3


def test_steps_whose_times_are_not_known_yet_are_settled_later_and_in_order() -> None:
    ledger = Ledger()
    passed: set[int] = set()
    asked: list[int] = []
    costs = [step(number, a=10) for number in range(4)]

    def settler(number: int):
        def settle() -> bool:
            asked.append(number)
            if number not in passed:
                return False
            ledger.enter_times(costs[number], [(1.0, 1.0)], 1.0)
            return True

        return settle

    ledger.record(costs[0], settler(0))
    ledger.record(costs[1], settler(1))
    assert asked == [0, 0]  # the device gets to steps in order, so the first is asked first
    assert ledger.totals.encode_seconds is None
    assert ledger.totals.bytes_sent == 36
    passed |= {0, 1}
    ledger.record(costs[2], settler(2))
    assert asked == [0, 0, 0, 1, 2]
    assert [cost.encode_seconds for cost in costs] == [1, 1, None, None]
    assert ledger.totals.encode_seconds == 2
    passed |= {2, 3}
    ledger.record(costs[3], settler(3))
    assert [cost.encode_seconds for cost in costs] == [1] * 4
    assert ledger.totals.encode_seconds == ledger.tensors["a"].encode_seconds == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_engine_fills_in_bytes_and_times(backend: str) -> None:
    (run,) = run_engines(
        1, infos({"w": (64, 64), "b": (64,)}), TopK(0.1),
        lambda rank, step: {"w": make(backend, np.ones((64, 64))), "b": make(backend, np.ones(64))}, 3, min_ndim=2,
    )  # fmt: skip
    ledger = run.engine.ledger
    assert ledger.steps == 3
    assert ledger.last is not None
    assert ledger.last.step == 2
    assert ledger.last.tensors["w"].bytes_sent == 6 * 410
    assert ledger.last.tensors["b"].bytes_sent == ledger.last.tensors["b"].dense_bytes == 256
    assert ledger.totals.dense_bytes == 3 * (4 * 4096 + 256)
    assert ledger.totals.floats_sent == 3 * (410 + 64)
    for cost in (ledger.last, ledger.totals, ledger.tensors["w"], ledger.tensors["b"]):
        for seconds in (cost.encode_seconds, cost.communicate_seconds, cost.decode_seconds):
            assert seconds is not None
            assert 0 < seconds < 60
    assert ledger.last.encode_seconds == pytest.approx(sum(c.encode_seconds or 0 for c in ledger.last.tensors.values()))
    shares = sum(cost.communicate_seconds or 0 for cost in ledger.last.tensors.values())
    assert 0 < shares <= (ledger.last.communicate_seconds or 0)  # the rest is the flag's
