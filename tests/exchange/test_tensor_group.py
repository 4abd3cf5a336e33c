"""Steps in which some tensors are in a bucket and the others go through array functions: nobody sees which is which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hvdcomp import kernels
from hvdcomp.adaptation.look import Look, observe
from hvdcomp.arrays.types import Array
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.memory import ErrorFeedback
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.engine_bucket import Sums
from tests.harness import previews_of

SHAPES = {"a": (20, 30), "b": (9, 7), "c": (20, 30), "d": (11,)}
DTYPES = {"a": "float32", "b": "float32", "c": "float64", "d": "float64"}  # float64 is in no bucket
RANKS, STEPS = 2, 3

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}")


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(shape).astype(DTYPES[name]) for name, shape in SHAPES.items()}


def engine_of(communicator: InProcessCommunicator) -> Engine:
    tensors = [TensorInfo(name, shape, DTYPES[name]) for name, shape in SHAPES.items()]
    return Engine(communicator, tensors, parse_compressor("efsignsgd"), ErrorFeedback(), min_numel=0, min_ndim=0)


def sent(x: np.ndarray) -> np.ndarray:
    """EF-SignSGD (Karimireddy et al. 2019, arXiv:1901.09847, algorithm 1), stated once more."""
    return np.abs(x).mean() * np.sign(x)


def close(found: Any, right: Any) -> None:
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)


@needs_kernels
def test_means_residuals_sums_and_parts_are_those_of_numpy() -> None:
    def work(communicator: InProcessCommunicator) -> None:
        engine = engine_of(communicator)
        totals = {name: np.zeros(shape, DTYPES[name]) for name, shape in SHAPES.items()}

        def add(given: Mapping[str, Array], found_inf: Array) -> None:
            for name, one in given.items():
                totals[name] += 0.5 * one

        own_sums = Sums(lambda given: [totals[name] for name in given], add, 0.5)
        kept = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(RANKS)]
        added = dict.fromkeys(SHAPES, 0.0)
        for step in range(STEPS):
            engine.begin()
            results = engine.step(gradients(communicator.rank, step), sums=own_sums)
            xs = [{name: one + kept[rank][name] for name, one in gradients(rank, step).items()} for rank in (0, 1)]
            kept = [{name: x - sent(x) for name, x in one.items()} for one in xs]
            assert results.keys() == SHAPES.keys()
            for name in SHAPES:
                added[name] = added[name] + 0.5 * gradients(communicator.rank, step)[name]
                close(results[name], sum(sent(one[name]) for one in xs) / RANKS)
                close(engine.states[name].memory[0], kept[communicator.rank][name])
                close(totals[name], added[name])
                assert results[name].dtype == DTYPES[name]
        last = engine.ledger.last
        assert last is not None
        assert [list(part) for part in last.parts] == [["a", "b"], ["c", "d"]]
        assert last.seconds is not None
        assert all(encode > 0 and decode > 0 for encode, decode in last.seconds)

    run_ranks(RANKS, work)


@needs_kernels
@pytest.mark.parametrize("failing", SHAPES)
def test_what_is_not_finite_in_one_spoils_all_and_changes_nothing(failing: str) -> None:
    def work(communicator: InProcessCommunicator) -> None:
        engine = engine_of(communicator)
        engine.begin()
        engine.step(gradients(communicator.rank, 0))
        before = {name: np.array(state.memory[0]) for name, state in engine.states.items()}
        given = gradients(communicator.rank, 1)
        if communicator.rank == 1:
            given[failing].flat[3] = np.inf
        engine.begin()
        results = engine.step(given)
        assert engine.found_inf is not None
        assert np.isnan(engine.found_inf.item())
        for name in SHAPES:
            assert np.isnan(results[name]).any(), name
            np.testing.assert_array_equal(engine.states[name].memory[0], before[name])

    run_ranks(RANKS, work)


@needs_kernels
def test_a_look_sees_x_of_all_and_what_is_put_in_its_place_is_sent() -> None:
    """x of the second step has a residual; what is compressed is twice x, of a tensor of each kind."""

    def work(communicator: InProcessCommunicator) -> None:
        engine = engine_of(communicator)
        engine.begin()
        engine.step(gradients(communicator.rank, 0))
        first = [gradients(rank, 0) for rank in range(RANKS)]
        xs = [
            {name: one + first[rank][name] - sent(first[rank][name]) for name, one in gradients(rank, 1).items()}
            for rank in range(RANKS)
        ]
        own, told = xs[communicator.rank], []

        def look(x_of: Look) -> Mapping[str, Array]:
            assert list(x_of) == ["a", "b", "c", "d"]
            assert ("d" in x_of, "e" in x_of, len(x_of)) == (True, False, 4)
            close(x_of["c"], own["c"])  # before anybody has asked for x of the bucket
            asked = ["d", "b", "c"]
            numbers = x_of.energies(asked).numbers()
            assert numbers.keys() == set(asked)
            close([numbers[name] for name in asked], [np.sum(own[name] ** 2) for name in asked])
            of_gradient, mine = x_of.gradient_energies(asked).numbers(), gradients(communicator.rank, 1)
            close([of_gradient[name] for name in asked], [np.sum(mine[name] ** 2) for name in asked])
            lost = previews_of(engine).lost(x_of, engine.plan, asked).numbers()
            close([lost[name] for name in asked], [np.sum((own[name] - sent(own[name])) ** 2) for name in asked])
            told.append(x_of.lost_when_sent(["b", "d"]))
            return {"a": 2 * x_of["a"], "c": 2 * x_of["c"]}

        observe(engine, look)
        engine.begin()
        results = engine.step(gradients(communicator.rank, 1))
        for name in SHAPES:
            factor = 2 if name in ("a", "c") else 1
            close(results[name], sum(sent(factor * one[name]) for one in xs) / RANKS)
            close(engine.states[name].memory[0], own[name] - sent(factor * own[name]))
        ((found, names),) = told
        assert names == {"b", "d"}
        assert found.numbers().keys() == names
        for name, lost in found.numbers().items():
            close(lost, np.sum((own[name] - sent(own[name])) ** 2))

    run_ranks(RANKS, work)


@needs_kernels
def test_residuals_that_were_sent_whole_are_forgotten_of_both_kinds() -> None:
    def work(communicator: InProcessCommunicator) -> None:
        engine = engine_of(communicator)
        engine.begin()
        engine.step(gradients(communicator.rank, 0))
        assert all(state.has_residual for state in engine.states.values())
        engine.set_level("dense")
        engine.begin()
        engine.step(gradients(communicator.rank, 1))
        assert not engine.has_residuals

    run_ranks(RANKS, work)
