"""PowerSGD's residual stays x with P and Q of the step until somebody asks for it: nobody sees the difference."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hvdcomp import ErrorFeedback, MomentumCorrection, kernels
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.residuals import Residuals
from hvdcomp.kernels.tables import FACTORS, PRODUCT, product
from tests.harness import bits, infos

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}")

# The last one's factors are so large that freed ones are gone at once.
SHAPES = {"square": (24, 30), "wide": (5, 2100), "filter": (12, 7, 3, 3), "tall": (40_000, 8)}
MEMORIES = [ErrorFeedback(0.7), MomentumCorrection(0.9)]
SPECS = ["powersgd:rank=4", "powersgd:rank=7,iterations=2", "powersgd:rank=3,alternating=True"]

Look = Callable[[Engine, int], None]


def gradients(step: int, value: float | None = None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    found = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    if value is not None:
        found["filter"][3, 1] = value
    return found


class Run:
    """Steps of one rank.

    Args:
        look: called between two steps.
    """

    def __init__(self, spec: str, memory: Memory, look: Look = lambda engine, step: None) -> None:
        tensors = infos(SHAPES)
        self.engine = Engine(LoopbackCommunicator(1), tensors, parse_compressor(spec), memory, min_numel=0, min_ndim=0)
        self.engine.set_plan(dict.fromkeys(SHAPES, parse_compressor(spec)))  # also where sending dense takes less
        self.look = look
        self.results: list[dict[str, bytes]] = []

    def step(self, given: dict[str, np.ndarray], plan: dict[str, str] | None = None) -> None:
        if plan is not None:
            self.engine.set_plan({name: parse_compressor(plan[name]) for name in SHAPES})
        self.engine.begin()
        found = self.engine.step(given)
        self.results.append({name: bits(x) for name, x in found.items()})
        self.look(self.engine, len(self.results))

    @property
    def kept(self) -> dict[str, list[bytes]]:
        return {name: [bits(array) for array in state.memory] for name, state in self.engine.states.items()}

    @property
    def lazy(self) -> set[str]:
        """The tensors of which a product is still to be taken off."""
        rules = self.engine.buckets._residuals._sent["rule"]
        return {name for name, rule in zip(self.engine.tensors, rules, strict=True) if rule == PRODUCT}


def ask(names: Sequence[str], steps: Sequence[int] = range(99)) -> Look:
    def look(engine: Engine, step: int) -> None:
        for name in names:
            if step in steps:
                assert engine.states[name].memory[-1].shape == SHAPES[name]

    return look


@pytest.mark.parametrize("look", [ask(list(SHAPES)), ask(["wide", "tall"], [2, 5])])
@pytest.mark.parametrize("memory", MEMORIES, ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_who_asks_for_a_residual_changes_nothing(spec: str, memory: Memory, look: Look) -> None:
    """While levels and methods change, and a tensor leaves the bucket and comes back."""
    same = dict.fromkeys(SHAPES, spec)
    lower = dict.fromkeys(SHAPES, spec.replace(spec.partition(",")[0], "powersgd:rank=2"))
    mixed = same | {"wide": "topk:ratio=0.1", "square": "efsignsgd", "filter": "sidco:ratio=0.1"}
    runs = [Run(spec, memory, look), Run(spec, memory)]
    for step, plan in enumerate([same, same, lower, lower, same, mixed, same, same]):
        for one in runs:
            one.step(gradients(step), plan)
    assert runs[0].results == runs[1].results
    assert runs[1].lazy == set(SHAPES)
    assert runs[0].kept == runs[1].kept
    assert not runs[1].lazy


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_a_step_that_does_not_count_leaves_the_product(spec: str, memory: Memory) -> None:
    """Two of them, so that a method that alternates goes on with the same half."""
    failing, plain = Run(spec, memory), Run(spec, memory)
    for step in range(5):
        if step in (1, 2, 4):
            for one in range(2):
                before = failing.lazy
                failing.step(gradients(100 + one, [np.nan, np.inf][one]))
                assert failing.lazy == before == set(SHAPES)
                failing.results.pop()
        for run in (failing, plain):
            run.step(gradients(step))
    assert failing.results == plain.results
    assert failing.kept == plain.kept


def test_what_a_loss_scale_multiplies_is_the_residual() -> None:
    run, plain = (Run(SPECS[0], ErrorFeedback()) for _ in range(2))
    for one in (run, plain):
        one.step(gradients(0))
    assert run.lazy
    run.engine.scale_residuals(0.5)
    for name, state in run.engine.states.items():
        expected = plain.engine.states[name].memory[0] * np.float32(0.5)
        np.testing.assert_array_equal(state.memory[0], expected)


def test_a_dense_step_sends_it() -> None:
    run, asked = Run(SPECS[0], ErrorFeedback()), Run(SPECS[0], ErrorFeedback(), ask(list(SHAPES), [1]))
    for one in (run, asked):
        one.step(gradients(0))
        one.step(gradients(1), dict.fromkeys(SHAPES, "none"))
    assert run.results == asked.results
    assert not run.engine.has_residuals


@pytest.mark.parametrize("rank", [1, 3, 4, 9])
def test_a_product_adds_up_column_after_column(rank: int) -> None:
    rng = np.random.default_rng(rank)
    p, q = rng.normal(size=(rank, 11)).astype(np.float32), rng.normal(size=(rank, 13)).astype(np.float32)
    row = np.zeros(1, FACTORS)
    row["p"], row["q"], row["rank"], row["columns"] = p.ctypes.data, q.ctypes.data, rank, 13
    expected = np.outer(p[0], q[0])
    for k in range(1, rank):
        expected = expected + np.outer(p[k], q[k])
    np.testing.assert_array_equal(product(row[0], 11 * 13), expected.reshape(-1))


def test_whoever_has_the_factors_stays_as_long_as_they_are_needed() -> None:
    class Owner:
        def commit(self) -> None:
            pass

    def bucket(sizes: dict[str, int], owner: Owner | None = None) -> Bucket:
        tensors = [TensorInfo(name, (size,)) for name, size in sizes.items()]
        return Bucket(tensors, [parse_compressor("powersgd:rank=1")] * len(tensors), ErrorFeedback(), factors=owner)

    owner = Owner()
    seen, residuals = weakref.ref(owner), Residuals([6, 4])
    residuals.enter(bucket({"a": 6, "b": 4}), np.arange(2))
    residuals.commit(bucket({"a": 6, "b": 4}, owner), np.arange(2))
    del owner
    residuals.commit(bucket({"a": 6}), np.array([0]))
    assert seen() is not None
    residuals.commit(bucket({"b": 4}), np.array([1]))
    assert seen() is None
