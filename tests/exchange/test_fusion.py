"""Fusion: few collectives, stable names, exact bytes, whatever the mixture of compressors and element types."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hvdcomp import NoCompression
from hvdcomp.arrays import arrays_for
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import AllGather, AllReduce, AllToAll, ReduceScatter, TensorInfo
from hvdcomp.compressors.sizes import payload_of
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.fusion import Round
from tests.harness import (
    BACKENDS,
    DTYPES,
    INSTALLED,
    SPECS,
    CountingCommunicator,
    Run,
    as_numpy,
    assert_same_on_all_ranks,
    bits,
    dtype_of,
    infos,
    make,
    run_engines,
)

SHAPES = {f"layer{i}": (12, 10 + i) for i in range(5)} | {f"bias{i}": (12,) for i in range(5)}
STEPS = 3


def gradients_of(backend: str, rank: int, step: int) -> dict[str, Any]:
    rng = np.random.default_rng([rank, step])
    return {name: make(backend, rng.normal(size=shape)) for name, shape in SHAPES.items()}


def collectives_of(run: Run) -> list[tuple[str, str]]:
    """Kind and element type of each collective of one step; every step must be alike, down to the names."""
    started = run.engine.communicator.started
    assert len(started) % STEPS == 0
    steps = [started[i : i + len(started) // STEPS] for i in range(0, len(started), len(started) // STEPS)]
    assert all(step == steps[0] for step in steps)  # names and bytes
    assert len({name for _, _, name, _ in steps[0]}) == len(steps[0])
    return [entry[:2] for entry in steps[0]]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("none", ["allreduce mean float32"]),
        ("fp16", ["allreduce mean float16"]),
        ("bf16", ["allreduce mean float32", "allgather uint8"]),
        ("topk:ratio=0.1", ["allreduce mean float32", "allgather uint8"]),
        ("randomk:ratio=0.1", ["allreduce mean float32"]),
        ("powersgd:rank=2", ["allreduce mean float32", "allreduce mean float32"]),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_of_a_step(backend: str, spec: str, expected: list[str]) -> None:
    """Ten tensors, five of them vectors that go dense: never more than one collective per kind, type and round."""
    runs = run_engines(
        2, infos(SHAPES), parse_compressor(spec), lambda r, s: gradients_of(backend, r, s), STEPS, min_ndim=2
    )
    for run in runs:
        assert Counter(map(" ".join, collectives_of(run))) == Counter(expected)


MIXTURE = [*SPECS, "topk:ratio=0.05", "powersgd:rank=1", "bf16", "none"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mixture_of_all_compressors(backend: str) -> None:
    """The rounds are those of the longest; every tensor gets what it gets alone."""

    def mix(engine: Engine, step: int) -> None:
        engine.set_plan({name: parse_compressor(spec) for name, spec in zip(SHAPES, MIXTURE, strict=True)})

    runs = run_engines(3, infos(SHAPES), NoCompression(), lambda r, s: gradients_of(backend, r, s), STEPS, before=mix)
    assert_same_on_all_ranks(runs)
    for run in runs:
        first = ["allreduce mean float16", "allreduce mean float32", "allgather uint8"]
        assert Counter(map(" ".join, collectives_of(run))) == Counter([*first, "allreduce mean float32"])
        rounds = {name.split(".")[1] for _, _, name, _ in run.engine.communicator.started}
        assert rounds == {"round0", "round1"}
    for name, spec in zip(SHAPES, MIXTURE, strict=True):
        alone = run_engines(
            3, infos({name: SHAPES[name]}), parse_compressor(spec),
            lambda r, s, name=name: {name: gradients_of(backend, r, s)[name]}, STEPS,
            before=lambda engine, step, name=name, spec=spec: engine.set_plan({name: parse_compressor(spec)}),
        )  # fmt: skip
        for mixed, single in zip(runs[0].results, alone[0].results, strict=True):
            assert bits(mixed[name]) == bits(single[name])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ledger_has_every_byte_that_was_handed_over(backend: str, spec: str) -> None:
    (run,) = run_engines(
        1, infos(SHAPES), parse_compressor(spec), lambda r, s: gradients_of(backend, r, s), STEPS,
        bytes_beside=lambda tensors: 4 * tensors,
    )  # fmt: skip
    handed = sum(size for _, _, _, size in run.engine.communicator.started)
    own = 4 * len(SHAPES) * STEPS  # what the binding sends besides
    assert run.engine.ledger.totals.bytes_sent == handed + own
    last = run.engine.ledger.last
    overhead = last.bytes_sent - sum(cost.bytes_sent for cost in last.tensors.values()) - 4 * len(SHAPES)
    assert 2 <= overhead <= 4 + 7  # the flag, and padding to eight


@pytest.mark.parametrize("backend", BACKENDS)
def test_element_types_of_one_step_may_differ(backend: str) -> None:
    tensors = [TensorInfo(f"{spec} {dtype}", (5, 4), dtype) for spec in SPECS for dtype in DTYPES[backend]]

    def work(communicator: Any) -> Run:
        engine = Engine(CountingCommunicator(communicator), tensors, NoCompression())
        engine.set_plan({tensor.name: parse_compressor(tensor.name.split()[0]) for tensor in tensors})
        results = []
        for _ in range(2):
            engine.begin()
            values = np.arange(20.0).reshape(5, 4) * (1 + communicator.rank)
            results.append(engine.step({tensor.name: make(backend, values, tensor.dtype) for tensor in tensors}))
        return Run(engine, results)

    runs = run_ranks(2, work)
    assert_same_on_all_ranks(runs)
    for tensor in tensors:
        result = runs[0].results[0][tensor.name]
        assert dtype_of(result) == tensor.dtype
        cost = runs[0].engine.ledger.last.tensors[tensor.name]
        assert cost.bytes_sent == runs[0].engine.plan[tensor.name].payload_bytes((5, 4), dtype=tensor.dtype)
        if tensor.name.startswith(("none", "fp16", "bf16")):
            np.testing.assert_array_equal(as_numpy(result), np.arange(20.0).reshape(5, 4) * 1.5)
    first_round = [entry[:2] for entry in runs[0].engine.communicator.started if "round0" in entry[2]][:4]
    assert len(set(first_round)) == len(first_round) == 4  # allreduce of three types, and one allgather


# `exchange` itself


@st.composite
def parts(draw: st.DrawFn) -> np.ndarray:
    dtype = draw(st.sampled_from(["uint8", "int16", "int32", "float16", "float32", "float64"]))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=5))
    return draw(hnp.arrays(dtype, shape, elements=hnp.from_dtype(np.dtype(dtype), allow_nan=False)))


@given(
    st.lists(st.lists(parts(), min_size=1, max_size=3), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from(INSTALLED),
)
def test_gathered_parts_come_back_as_they_were(gathers: list[list[np.ndarray]], size: int, backend: str) -> None:
    """Every rank sends the same shapes; rank r sends the elements rolled by r places."""

    def of(rank: int) -> list[list[np.ndarray]]:
        return [[np.roll(part, rank) for part in gather] for gather in gathers]

    def work(communicator: Any) -> list:
        requests = [
            AllGather(tuple(make(backend, part, part.dtype.name) for part in gather))
            for gather in of(communicator.rank)
        ]
        like = requests[0].parts[0]
        xp = arrays_for(like)
        counting = CountingCommunicator(communicator)
        on_its_way = Round(xp, counting, requests, "test", like)
        answers, sent = on_its_way.wait(), on_its_way.sent
        ((_, _, _, length),) = counting.started
        assert length % 8 == 0
        assert 0 <= length - sum(payload_of(request).bytes for request in requests) < 8
        assert sent == (length, 0)
        return answers

    for answers in run_ranks(size, work):
        for number, gather in enumerate(gathers):
            assert len(answers[number]) == size
            for rank in range(size):
                for place, part in enumerate(gather):
                    got = as_numpy(answers[number][rank][place])
                    np.testing.assert_array_equal(got, np.roll(part, rank), strict=True)


@given(
    st.lists(st.lists(parts(), min_size=1, max_size=3), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from(INSTALLED),
)
def test_every_rank_gets_the_parts_that_are_for_it(sendings: list[list[np.ndarray]], size: int, backend: str) -> None:
    """What rank r sends to rank t is the elements rolled by r + 10 t places."""

    def work(communicator: Any) -> list:
        rolled = [
            [np.stack([np.roll(part, communicator.rank + 10 * to) for to in range(size)]) for part in parts]
            for parts in sendings
        ]
        requests = [AllToAll(tuple(make(backend, part, part.dtype.name) for part in parts)) for parts in rolled]
        like = requests[0].parts[0]
        xp = arrays_for(like)
        counting = CountingCommunicator(communicator)
        on_its_way = Round(xp, counting, requests, "test", like)
        answers, sent = on_its_way.wait(), on_its_way.sent
        ((_, _, _, length),) = counting.started
        assert length % (8 * size) == 0
        assert 0 <= length - sum(payload_of(request).bytes for request in requests) < 8 * size
        assert sent == (length, 0)
        return answers

    for to, answers in enumerate(run_ranks(size, work)):
        for answer, parts in zip(answers, sendings, strict=True):
            assert len(answer) == size
            for rank, got in enumerate(answer):
                for one, part in zip(got, parts, strict=True):
                    np.testing.assert_array_equal(as_numpy(one), np.roll(part, rank + 10 * to), strict=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_of_all_kinds_in_one_round(backend: str) -> None:
    size = 3

    def work(communicator: Any) -> tuple[list, list]:
        mine = np.arange(size * 4, dtype=np.float32).reshape(size, 2, 2) * 10**communicator.rank
        array = functools.partial(make, backend)
        requests = [
            ReduceScatter(array(mine), "sum"),
            AllToAll((array(mine),)),
            AllReduce(array(mine[0]), "sum"),
            AllGather((array(mine[0]),)),
            ReduceScatter(array(mine[:, 0]), "sum"),
            ReduceScatter(array(mine), "mean"),
        ]
        counting = CountingCommunicator(communicator)
        like = requests[0].array
        answers = Round(arrays_for(like), counting, requests, "test", like).wait()
        kinds = [kind for kind, *_ in counting.started]
        assert kinds == ["reducescatter sum", "alltoall", "allreduce sum", "allgather", "reducescatter mean"]
        return [[as_numpy(x[0]) for x in one] if isinstance(one, list) else as_numpy(one) for one in answers]

    base = np.arange(size * 4, dtype=np.float32).reshape(size, 2, 2)
    for rank, (scattered, sent, reduced, gathered, vectors, mean) in enumerate(run_ranks(size, work)):
        np.testing.assert_array_equal(scattered, 111 * base[rank])
        np.testing.assert_array_equal(sent, [base[rank] * 10**other for other in range(size)])
        np.testing.assert_array_equal(reduced, 111 * base[0])
        np.testing.assert_array_equal(gathered, [base[0] * 10**other for other in range(size)])
        np.testing.assert_array_equal(vectors, 111 * base[rank, 0])
        np.testing.assert_allclose(mean, 37 * base[rank], rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_operations_and_types_are_not_mixed_up(backend: str) -> None:
    requests = [("mean", "float32"), ("sum", "float32"), ("max", "float32"), ("mean", "float16"), ("mean", "float32")]

    def work(communicator: Any) -> tuple[list, list]:
        values = [
            AllReduce(make(backend, [[number + 10 * communicator.rank, number]], dtype), op)
            for number, (op, dtype) in enumerate(requests)
        ]
        counting = CountingCommunicator(communicator)
        on_its_way = Round(arrays_for(values[0].array), counting, values, "test", values[0].array)
        answers = on_its_way.wait()
        assert on_its_way.sent == (4 * 2 * 4 + 2 * 2, 0)
        return [as_numpy(answer).tolist() for answer in answers], counting.started

    for answers, started in run_ranks(2, work):
        assert answers == [[[5, 0]], [[12, 2]], [[12, 2]], [[8, 3]], [[9, 4]]]
        assert len(started) == 4


def test_ranks_that_ask_for_different_things_are_told() -> None:
    def work(communicator: Any) -> None:
        x = np.zeros(3 + communicator.rank, np.float32)
        Round(arrays_for(x), communicator, [AllReduce(x)], "test", x).wait()

    with pytest.raises(RuntimeError, match="the ranks started different collectives"):
        run_ranks(2, work)


@pytest.mark.parametrize("backend", INSTALLED)
def test_parts_without_elements_come_back(backend: str) -> None:
    def work(communicator: Any) -> list:
        part = make(backend, np.zeros(0, np.int16), "int16")
        gather = AllGather((part,))
        ((parts, *_), *_) = Round(arrays_for(part), communicator, [gather], "test", part).wait()
        return [tuple(part.shape) for part in parts]

    assert run_ranks(2, work) == [[(0,)], [(0,)]]
