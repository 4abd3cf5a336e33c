"""Checkpoints of some ranks for another number of ranks: nothing that was left to be sent is lost, or counted twice."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdcomp
from hvdcomp import ConfigurationError, ErrorFeedback
from hvdcomp.bindings.checkpoint import restore, state_of
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.casts import NoCompression
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies import Policy, parse_policy
from tests.driven import Driven
from tests.harness import DTYPES, INSTALLED, as_numpy, bits, copy, dtype_of, infos, make, states_of

METHODS = {
    "topk:ratio=0.1": None,
    "dgc:ratio=0.1": None,
    "qsgd:bits=8,exchange=scatter": ErrorFeedback(),
    "two_level(topk:ratio=0.1)": None,
    "powersgd:rank=2": None,
    "int8": ErrorFeedback(),
    "eden": ErrorFeedback(),
}
SHAPES = {"linear": (12, 20), "conv": (4, 3, 3, 3), "vector": (17,)}
# How exactly a number of each element type is kept; the sum over ranks is taken in float32 at least.
PRECISION = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-20, "float64": 2**-48}


def engine_of(
    communicator: InProcessCommunicator, spec: str, dtype: str, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> Engine:
    compressor = parse_compressor(spec)
    return Engine(
        communicator, infos(shapes, dtype), compressor, memory=METHODS.get(spec), seed=3, min_numel=0, min_ndim=0
    )


def gradients_of(
    backend: str, dtype: str, rank: int, step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> dict[str, Any]:
    rng = np.random.default_rng([rank, step])
    return {name: make(backend, rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


def saved(
    ranks: int, spec: str, backend: str, dtype: str = "float32", shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> list[dict[str, Any]]:
    """What each rank saves after three steps."""

    def work(communicator: InProcessCommunicator) -> dict[str, Any]:
        engine = engine_of(communicator, spec, dtype, shapes)
        for step in range(3):
            engine.begin()
            engine.step(gradients_of(backend, dtype, communicator.rank, step, shapes))
        return state_of(engine, None, copy)

    return list(run_ranks(ranks, work, 2 if ranks % 2 == 0 else 1))


def reading(states: Sequence[Mapping[str, Any]], read: list[int]) -> Iterator[Mapping[str, Any]]:
    """The states one by one, as from files; notes which were read."""
    for state in states:
        read.append(state["own"]["rank"])
        yield state


def pending(states: Sequence[Mapping[str, Any]]) -> dict[str, list[np.ndarray]]:
    """The mean over the ranks of the arrays that memories keep, float64."""
    names = sorted({name for state in states for name in state["own"]["residuals"]})
    means = {}
    for name in names:
        kept = [state["own"]["residuals"][name]["arrays"] for state in states if name in state["own"]["residuals"]]
        means[name] = [
            np.sum([as_numpy(one).astype(np.float64) for one in arrays], axis=0) / len(states)
            for arrays in zip(*kept, strict=True)
        ]
    return means


shapes_of_tensors = st.fixed_dictionaries(
    {
        "matrix": st.tuples(st.integers(2, 12), st.integers(2, 12)),
        "vector": st.tuples(st.integers(1, 40)),
        "filters": st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    }
)


@given(
    spec=st.sampled_from(list(METHODS)),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    kind=st.sampled_from([(backend, dtype) for backend in INSTALLED for dtype in DTYPES[backend]]),
    shapes=shapes_of_tensors,
)
def test_the_mean_of_what_is_pending_is_that_of_before(
    spec: str, before: int, after: int, kind: tuple[str, str], shapes: dict[str, tuple[int, ...]]
) -> None:
    """In the states; in the engines that take them over; and in what the next step makes of it."""
    backend, dtype = kind
    states = saved(before, spec, backend, dtype, shapes)
    old = pending(states)
    read: dict[int, list[int]] = {rank: [] for rank in range(after)}

    def work(communicator: InProcessCommunicator) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        rank = communicator.rank
        engine = engine_of(communicator, spec, dtype, shapes)
        state = hvdcomp.state_for(reading(states, read[rank]), rank, after)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            restore(state, engine, None, lambda array, name: copy(array))
        taken = state_of(engine, None, copy)
        assert engine.step_number == engine.ledger.steps == 3
        warm = {name: [bits(one) for one in each["arrays"]] for name, each in taken["shared"]["warm_starts"].items()}
        assert warm == {
            name: [bits(one) for one in each["arrays"]] for name, each in states[0]["shared"]["warm_starts"].items()
        }
        engine.begin()
        results = engine.step({name: make(backend, np.zeros(shape), dtype) for name, shape in shapes.items()})
        return taken, state_of(engine, None, copy), results

    ranks = list(run_ranks(after, work, 2 if after % 2 == 0 else 1))
    new = pending([taken for taken, _, _ in ranks])
    compressor = parse_compressor(spec)
    compressed = {one.name for one in infos(shapes, dtype) if compressor.route(one) != NoCompression()}
    assert old.keys() == new.keys() == compressed, "PowerSGD sends small matrices and vectors dense"
    for taken, _, _ in ranks:
        for name, kept in taken["own"]["residuals"].items():
            theirs = states[0]["own"]["residuals"][name]
            assert kept["memory"] == theirs["memory"]
            assert [(dtype_of(one), one.shape) for one in kept["arrays"]] == [
                (dtype_of(one), one.shape) for one in theirs["arrays"]
            ]
    held = [
        abs(as_numpy(one)).max()
        for state in (*states, *(taken for taken, _, _ in ranks))
        for kept in state["own"]["residuals"].values()
        for one in kept["arrays"]
    ]
    largest = float(max(held, default=0.0))
    tolerance = 4 * PRECISION[dtype] * max(largest, 1e-3)
    for name, arrays in old.items():
        for one, other in zip(arrays, new[name], strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=tolerance)
    for rank, numbers in read.items():
        assert numbers[-1] % after == rank or numbers == [0], "nothing is read after the last that is needed"
    if spec.startswith("dgc"):
        return  # its momentum adds to what is pending
    if isinstance(compressor, Gathering):  # quantizers decode and average in single precision, whatever the type
        tolerance = max(tolerance, 4 * PRECISION["float32"] * max(largest, 1e-3))
    left = pending([state for _, state, _ in ranks])
    for name in shapes:
        total = as_numpy(ranks[0][2][name]).astype(np.float64) + (left[name][0] if name in left else 0)
        expected = old[name][0] if name in old else np.zeros(shapes[name])
        np.testing.assert_allclose(total, expected, rtol=0, atol=(8 * after) * tolerance)


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("backend", INSTALLED)
def test_on_as_many_ranks_as_before_nothing_is_changed(spec: str, backend: str) -> None:
    """Bit for bit: the states, and the steps that follow."""
    states = saved(4, spec, backend)

    def go_on(communicator: InProcessCommunicator, state: Mapping[str, Any]) -> tuple[Any, list[dict[str, bytes]]]:
        engine = engine_of(communicator, spec, "float32")
        restore(state, engine, None, lambda array, name: copy(array))
        results = []
        for step in range(3, 6):
            engine.begin()
            found = engine.step(gradients_of(backend, "float32", communicator.rank, step))
            results.append({name: bits(one) for name, one in found.items()})
        return states_of(engine), results

    def same(communicator: InProcessCommunicator) -> Any:
        return hvdcomp.state_for(reversed(states), communicator.rank, 4)

    for state, other in zip(run_ranks(4, same, 2), states, strict=True):
        assert state == other, "it holds the very arrays"
    plain = run_ranks(4, lambda communicator: go_on(communicator, states[communicator.rank]), 2)
    by_the_new_way = run_ranks(4, lambda communicator: go_on(communicator, same(communicator)), 2)
    assert list(plain) == list(by_the_new_way)


def changed(state: Mapping[str, Any], shared: Mapping[str, Any] | None = None, **own: Any) -> dict[str, Any]:
    """A state in which some things are different."""
    return {"shared": {**state["shared"], **(shared or {})}, "own": {**state["own"], **own}}


def kept_of(value: float, dtype: str = "float32", backend: str = "numpy", memory: str = "error_feedback") -> Any:
    return {"linear": {"memory": memory, "arrays": [make(backend, np.full(SHAPES["linear"], value), dtype)]}}


def test_with_a_sum_it_is_the_sum_that_stays() -> None:
    states = [changed(state, op="sum") for state in saved(3, "topk:ratio=0.1", "numpy")]
    sums = {name: 3 * arrays[0] for name, arrays in pending(states).items()}
    for ranks in (1, 2, 5):
        new = pending([hvdcomp.state_for(states, rank, ranks) for rank in range(ranks)])
        for name, total in sums.items():
            np.testing.assert_allclose(ranks * new[name][0], total, rtol=0, atol=1e-5)


def test_who_takes_over_from_whom() -> None:
    one = saved(1, "topk:ratio=0.1", "numpy")[0]
    states = [changed(one, rank=rank, size=5, residuals=kept_of(10.0**rank)) for rank in range(5)]
    for ranks, expected in ((2, [10101, 1010]), (3, [1001, 10010, 100]), (7, [1, 10, 100, 1000, 10000, 0, 0])):
        found = [hvdcomp.state_for(states, rank, ranks)["own"]["residuals"]["linear"] for rank in range(ranks)]
        assert [kept["arrays"][0][0, 0] * 5 / ranks for kept in found] == pytest.approx(expected)
    # Those that a rank needs are enough, and a rank that has nobody to take over from needs any.
    assert hvdcomp.state_for(states[1::2], 1, 2) is not None
    assert hvdcomp.state_for(states[3:4], 6, 7)["own"]["rank"] == 6


@pytest.mark.parametrize("backend", INSTALLED)
def test_half_precision_is_added_in_float32_and_what_does_not_fit_is_lost(backend: str) -> None:
    """1 + 2**-9 eight times would be 8 in bfloat16, if it was added in it."""
    one = saved(1, "topk:ratio=0.1", "numpy")[0]

    def taken_over(value: float, dtype: str, size: int, op: str | None) -> Any:
        residuals = kept_of(value, dtype, backend)
        states = [changed(one, rank=rank, size=size, residuals=residuals, op=op) for rank in range(size)]
        (array,) = hvdcomp.state_for(states, 0, 1)["own"]["residuals"]["linear"]["arrays"]
        assert dtype_of(array) == dtype
        return as_numpy(array)[0, 0]

    if backend == "torch" or "bfloat16" in DTYPES["numpy"]:
        assert taken_over(1.0078125, "bfloat16", 8, "sum") == 8.0625
        assert taken_over(1.0078125, "bfloat16", 8, None) == 1.0078125
    assert taken_over(60000, "float16", 2, None) == 60000
    assert taken_over(60000, "float16", 2, "sum") == 0


def test_dropped_residuals_are_dropped_on_all_ranks_and_everything_else_stays() -> None:
    states = saved(3, "powersgd:rank=2", "numpy")
    for ranks in (2, 3, 4):
        for rank in range(ranks):
            state = hvdcomp.state_for(states, rank, ranks, residuals="drop")
            assert state["own"]["residuals"] == {}
            assert (state["own"]["rank"], state["own"]["size"]) == (rank, ranks)
            assert state["shared"] == states[min(rank, 2) if rank < 3 else 0]["shared"]
    assert hvdcomp.state_for(states[2:], 0, 2, residuals="drop")["own"]["residuals"] == {}


def test_ranks_that_had_made_no_step_begin() -> None:
    assert hvdcomp.state_for([{}, {}], 1, 3) == {}


def test_what_cannot_be_taken_over_is_refused_by_name() -> None:
    states = saved(3, "topk:ratio=0.1", "numpy")
    way_out = 'residuals="drop"'
    other = {**states[1]["shared"]["tensors"], "conv": [4, 3, 5, 5]}
    momentum = kept_of(1, memory="momentum_correction:momentum=0.9")
    for offered, rank, ranks, message in (
        (states[:2], 0, 2, f"rank 0 of 2 needs the state that rank 2 saved .* 3 ranks.. .*{way_out}"),
        (states[1:2], 0, 1, "rank 0 of 1 needs the state that ranks 0, 2 saved .the checkpoint was saved by 3"),
        ([], 0, 1, "no state was given"),
        ([states[0], states[0]], 0, 1, "the state of rank 0 was given twice"),
        ([{"model": 1}], 0, 1, "not a state of hvdcomp.Compression"),
        ([{}, states[1]], 0, 1, "some of the states are empty"),
        ([states[0], changed(states[1], {"step": 9})], 0, 1, f"ranks 0 and 1 .*differ in the step: 3 and 9.*{way_out}"),
        ([states[0], changed(states[1], {"compressor": "int8"})], 0, 1, "compressor: topk:ratio=0.1 and int8"),
        ([states[0], changed(states[1], {"tensors": other})], 0, 1, "differ in the shapes of conv"),
        ([states[0], changed(states[1], size=2)], 0, 1, "number of ranks: 3 and 2"),
        ([states[0], changed(states[1], loss_scale=2.0)], 0, 1, "loss scale: None and 2.0"),
        ([states[0], changed(states[1], residuals=momentum)], 0, 1, f"of linear comes from .* on rank 1. .*{way_out}"),
        (states, 3, 3, "rank 3 of 3 ranks .* below 3"),
        (states, -1, 3, "rank -1 of 3 ranks"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            hvdcomp.state_for(offered, rank, ranks)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"residuals=.sum. .* .keep. .* or .drop."):
        hvdcomp.state_for(states, 0, 1, residuals="sum")


# Policies ------------------------------------------------------------------------------------------------------------

POLICY = "accordion:interval=1,eta=0.3,low=4,high=1"


def driven(communicator: InProcessCommunicator, steps_per_epoch: int, state: Any = None) -> Driven:
    policy = parse_policy(POLICY)
    assert isinstance(policy, Policy)
    return Driven(communicator, policy, "numpy", spec="powersgd:rank=2", steps_per_epoch=steps_per_epoch, state=state)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (2, 1)])
def test_the_policy_goes_on_with_what_rank_0_alone_knows(before: int, after: int) -> None:
    """In the middle of its second epoch, of 12 steps; on other ranks an epoch has others, of which half are over."""
    states = list(run_ranks(before, lambda one: driven(one, 12).run(18).state()))
    assert states[0]["own"]["coordinator"]["sums"]
    steps = 12 * before // after

    def work(communicator: InProcessCommunicator) -> list[dict[str, str]]:
        run = driven(communicator, steps, hvdcomp.state_for(states, communicator.rank, after))
        assert run.engine.step_number == run.coordinator.progress.step == 18
        assert (run.coordinator.progress.epoch, run.coordinator.progress.taken) == (1, steps // 2)
        mine, theirs = run.state(), states[0]
        assert mine["shared"]["coordinator"]["state"] == theirs["shared"]["coordinator"]["state"]
        if communicator.rank == 0:
            ours = {name: bits(one) for name, one in mine["own"]["coordinator"]["sums"].items()}
            assert ours == {name: bits(one) for name, one in theirs["own"]["coordinator"]["sums"].items()}
        run.run(steps - steps // 2)
        assert (run.coordinator.progress.epoch, run.coordinator.progress.taken) == (2, 0)
        return run.plans + run.run(steps).plans

    plans = list(run_ranks(after, work))
    assert all(each == plans[0] for each in plans)
    with pytest.raises(ConfigurationError, match=r"needs the state that rank 0 saved .* the pending decision"):
        hvdcomp.state_for(states[1:], 0, 2, residuals="drop")


def test_a_policy_of_before_epochs_were_noted_goes_on() -> None:
    states = list(run_ranks(2, lambda one: driven(one, 12).run(18).state()))
    for state in states:
        del state["shared"]["coordinator"]["steps_per_epoch"]
    (run,) = run_ranks(1, lambda one: driven(one, 24, hvdcomp.state_for(states, 0, 1)))
    assert (run.coordinator.progress.epoch, run.coordinator.progress.taken) == (1, 6)
