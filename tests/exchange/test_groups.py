"""Groups of methods without a bucket form: what each tensor does by itself, and fewer collectives."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hvdcomp import ErrorFeedback, MomentumCorrection, NoMemory
from hvdcomp.adaptation.look import observe
from hvdcomp.arrays.types import Array
from hvdcomp.bindings.checkpoint import restore, state_of
from hvdcomp.communicators.in_process import InProcessGroup
from hvdcomp.compressors import inside
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Aggregation, AllGather, AllReduce, Context, Outcome, SparseVector
from hvdcomp.exchange.engine import Engine
from tests.harness import (
    INSTALLED,
    CountingCommunicator,
    as_numpy,
    bits,
    copy,
    infos,
    make,
    run_engines,
    set_to,
    states_of,
)

SHAPES = {"matrix": (6, 8), "vector": (77,), "odd": (5, 7, 3), "scalar": (), "large": (3, 30_001)}


@dataclass(frozen=True)
class Rounds(Compressor):
    """As many rounds as a tensor has dimensions, and two at least, with requests of two kinds; and a state that is
    made of the first x, and whose arrays are of any type."""

    share: float = 0.5

    name = "rounds"
    examples = ("rounds",)
    level_name = "share"
    sends = "all elements, several times"
    biased = True

    def prepare(self, xp: Any, x: Array, state: tuple[Array, ...], context: Context) -> tuple[Array, ...]:
        if state:
            return state
        return x * 0.25, xp.from_numpy(np.zeros(3), like=x)

    def aggregate(self, xp: Any, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        old, count = state
        half = xp.astype(x * self.share + old * 0.25, "float16")
        mean = yield AllReduce(half)
        mean = xp.astype(mean, "float32")
        for _ in range(len(x.shape) - 1):
            mean = yield AllReduce(mean, "max")
        ranks = yield AllGather((xp.flatten(mean)[:1], xp.astype(count, "int32")))
        return Outcome(mean * len(ranks), xp.astype(half, "float32"), (mean, count + ranks[0][1][0] + 1))


@dataclass(frozen=True)
class Sparse(Compressor):
    """The first elements, without rounding."""

    share: float = 0.5

    name = "sparse"
    examples = ("sparse",)
    level_name = "share"
    sends = "some elements"
    biased = True

    def aggregate(self, xp: Any, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        vector = xp.flatten(x)
        count = max(1, int(vector.shape[0] * self.share))
        indices = xp.from_numpy(np.arange(count, dtype=np.int64), like=x)
        values = xp.take(vector, indices)
        mean = yield AllReduce(values)
        dense = xp.add_at(xp.zeros(vector.shape, like=x), indices, mean)
        return Outcome(xp.reshape(dense, x.shape), SparseVector(indices, values))


def gradients(backend: str, rank: int, step: int, failing: int = -1) -> dict[str, Any]:
    rng = np.random.default_rng([rank, step])
    values = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    if step == failing and rank == 1:
        values["odd"][0, 0, 0] = np.inf
    return {name: make(backend, one) for name, one in values.items()}


def steps(
    backend: str, compressor: Compressor, memory: Memory | None = None, size: int = 2, per_node: int | None = None
) -> Any:
    """Of each rank, what five steps give, with another level from the third on, a fourth that does not count, and a
    checkpoint before the fifth."""

    def engine(communicator: Any) -> Engine:
        return Engine(communicator, infos(SHAPES), compressor, memory, min_numel=0, min_ndim=0)

    def work(communicator: Any) -> tuple[Any, ...]:
        mine, found = engine(communicator), []
        for step in range(5):
            if step == 2:
                mine.set_level(0.25 if compressor.level_name == "share" else compressor.level)
            if step == 4:
                state = state_of(mine, None, copy)
                mine = engine(communicator)
                restore(state, mine, None, lambda array, name: copy(array))
            mine.begin()
            results = mine.step(gradients(backend, communicator.rank, step, failing=3))
            cost = mine.ledger.last
            assert cost is not None
            own = {name: (one.bytes_sent, one.bytes_in_node, one.floats_sent) for name, one in cost.tensors.items()}
            counts = {name: bits(x) if step != 3 else b"" for name, x in results.items()}
            found.append((counts, states_of(mine), cost.bytes_sent, own))
        assert mine.buckets.tensor_groups
        return found

    return InProcessGroup(size, per_node).run(work)


@pytest.mark.parametrize("memory", [None, MomentumCorrection(0.75), ErrorFeedback(0.5), NoMemory()], ids=str)
@pytest.mark.parametrize("method", [Rounds(), Sparse()], ids=str)
def test_small_tensors_do_in_numpy_what_they_do_in_the_framework(
    memory: Memory | None, method: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, as the arithmetic of these methods has one result."""
    found = {}
    for backend, large in (("torch", inside.LARGE), ("torch", 0), ("numpy", inside.LARGE)):
        monkeypatch.setattr(inside, "LARGE", large)
        found[backend, large] = steps(backend, method, memory)
    first, *others = found.values()
    assert all(other == first for other in others)


@pytest.mark.parametrize("spec", ["two_level(stc:ratio=0.2)", "two_level(atomo:rank=2)"])
def test_bytes_of_a_tensor_in_two_levels_include_those_in_the_node(spec: str) -> None:
    (first_step, *_), *_ = steps("numpy", parse_compressor(spec), None, 4, 2)
    assert all(sent >= in_node for sent, in_node, _ in first_step[3].values())
    assert any(in_node for _, in_node, _ in first_step[3].values())


def test_requests_of_all_tensors_travel_together() -> None:
    """A tensor that has ended keeps no other one waiting."""
    (run, _) = run_engines(2, infos(SHAPES), Rounds(), lambda rank, step: gradients("numpy", rank, step))
    communicator = run.engine.communicator
    assert isinstance(communicator, CountingCommunicator)
    flag = 1  # by an allreduce of half precision, as the first round is
    elements = sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert [(kind, dtype) for kind, dtype, _, _ in communicator.started] == [
        ("allreduce mean", "float16"), ("allreduce max", "float32"), ("allgather", "uint8"),
        ("allgather", "uint8"), ("allreduce max", "float32"), ("allgather", "uint8"),
    ]  # fmt: skip
    assert communicator.started[0][3] == 2 * (elements + flag)


def test_a_step_that_does_not_count_leaves_states_as_they_were() -> None:
    """Also one in which the method has just come: nothing is made of an x that holds an inf."""

    def work(communicator: Any) -> list[dict[str, tuple[bytes, ...]]]:
        engine = Engine(communicator, infos(SHAPES), parse_compressor("none"), ErrorFeedback(), min_numel=0, min_ndim=0)
        set_to(engine, Rounds())
        found = []
        for step in range(3):
            engine.begin()
            engine.step(gradients("numpy", communicator.rank, step, failing=(0, 2)[step == 2]))
            found.append(states_of(engine))
        return found

    for first, second, third in InProcessGroup(2, None).run(work):
        assert set(first.values()) == {()}
        assert all(len(arrays) == 3 for arrays in second.values())
        assert third == second


@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38, 2e5])
def test_what_is_not_finite_gives_no_result_and_no_warning(value: float) -> None:
    """A loss scaler tries scales that are too large. 2e5 is not finite as a number of half precision, for the wire."""

    def given(rank: int, step: int) -> dict[str, np.ndarray]:
        return {name: x if rank else np.full_like(x, value) for name, x in gradients("numpy", rank, step).items()}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for run in run_engines(2, infos(SHAPES), Rounds(), given):
            assert all(np.isnan(x).any() for x in run.results[0].values())
            assert not run.engine.has_residuals


@dataclass(frozen=True)
class Overflows(Compressor):
    """A method of which something overflows although every x is finite, but nothing in most of its results.

    Attributes:
        what: "cast", for the wire, which hides in the largest of all ranks' numbers; the "sum" of the ranks; the
            "state"; the "residual".
    """

    what: str

    name = "overflows"
    examples = ("overflows:what=sum",)
    sends = "all elements"
    biased = True

    def prepare(self, xp: Any, x: Array, state: tuple[Array, ...], context: Context) -> tuple[Array, ...]:
        return state or ((xp.zeros(x.shape, like=x),) if self.what == "state" else ())

    def aggregate(self, xp: Any, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        sent = xp.astype(x, "float16") if self.what == "cast" else x
        answer = yield AllReduce(sent, {"cast": "max", "sum": "sum"}.get(self.what, "mean"))
        mean = xp.astype(answer, "float32")
        sent = -x if self.what == "residual" else xp.astype(sent, "float32")
        return Outcome(mean, sent, (mean * 10,) if self.what == "state" else ())

    def payload_bytes(self, *_: Any, **__: Any) -> int:
        return 0


@pytest.mark.parametrize(("what", "values"), [("cast", (-2e5, 1.0)), ("sum", (3e38, 3e38)), ("state", (1e38, 1e38))])
@pytest.mark.parametrize("backend", INSTALLED)
def test_what_overflows_on_the_way_makes_the_step_count_nowhere(
    backend: str, what: str, values: tuple[float, float]
) -> None:
    given = lambda rank, step: {"w": make(backend, np.full((2, 3), values[rank]))}  # noqa: E731
    for run in run_engines(2, infos({"w": (2, 3)}), Overflows(what), given):
        assert run.engine.buckets.tensor_groups
        assert np.isnan(as_numpy(run.results[0]["w"])).any()
        assert states_of(run.engine) == {"w": ()}


def test_a_residual_that_overflows_is_lost_and_no_other() -> None:
    given = lambda rank, step: {"w": np.array([[3e38, 1.0]], np.float32)}  # noqa: E731
    for run in run_engines(1, infos({"w": (1, 2)}), Overflows("residual"), given):
        assert run.results[0]["w"].tolist() == given(0, 0)["w"].tolist()
        assert as_numpy(run.engine.states["w"].memory[0]).tolist() == [[0.0, 2.0]]


@pytest.mark.parametrize("backend", INSTALLED)
def test_what_is_put_in_place_of_x_is_compressed(backend: str) -> None:
    """And taken off x."""

    def look(engine: Engine, step: int) -> None:
        observe(engine, lambda xs: {"matrix": xs["matrix"] * 0.5})

    given = lambda rank, step: {"matrix": make(backend, np.full((6, 8), 4.0)), "w": make(backend, np.ones(3))}  # noqa: E731
    shapes = {"matrix": (6, 8), "w": (3,)}
    for run in run_engines(2, infos(shapes), Overflows("nothing"), given, before=look):
        assert run.engine.buckets.tensor_groups
        for name, result, left in (("matrix", 2.0, 2.0), ("w", 1.0, 0.0)):
            assert np.all(as_numpy(run.results[0][name]) == result)
            assert np.all(as_numpy(run.engine.states[name].memory[0]) == left)
