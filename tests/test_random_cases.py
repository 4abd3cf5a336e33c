"""Any method with any parameters, on tensors of any shape and type, on any number of ranks, at levels that change."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdcomp import Compressor, ErrorFeedback, SpecError
from hvdcomp.collectives import TensorInfo
from hvdcomp.compressors import COMPRESSORS
from hvdcomp.engine import Engine
from hvdcomp.memory import Memory, MomentumCorrection
from hvdcomp.policies.schedules import DENSE
from hvdcomp.spec import parse_compressor
from tests.harness import DTYPES, INSTALLED, as_numpy, assert_same_on_all_ranks, make, run_engines

STEPS = 4
# Of the fields that compressors have; of another the values in the class's examples are tried.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "ratio": st.floats(1e-4, 1) | st.just(1.0),
    "values": st.sampled_from(["same", "fp16"]),
    "rank": st.integers(1, 6),
    "bits": st.integers(1, 16),
    "bucket": st.integers(1, 600),
    "clip": st.sampled_from([0.0, 0.5, 2.5]),
    "momentum": st.floats(0, 0.95),
    "min_rate": st.floats(1, 4),
    "iterations": st.integers(1, 3),
    "rounds": st.integers(1, 30),
    "stages": st.integers(1, 4),
    "zeros": st.sampled_from(["rows", "elements"]),
}
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple) | st.tuples(st.integers(1, 70), st.integers(1, 70))


@dataclass
class Case:
    """What one random training does; `levels` has one for each step."""

    backend: str
    ranks: int
    tensors: list[TensorInfo]
    compressor: Compressor
    levels: list[Any]
    memory: Memory | None
    options: dict[str, int]
    scale: float
    zeros: float


@st.composite
def compressors(draw: st.DrawFn) -> Compressor:
    kind = draw(st.sampled_from(list(COMPRESSORS.values())))
    values = {}
    for field in dataclasses.fields(kind):
        known = [getattr(parse_compressor(spec), field.name) for spec in kind.examples]
        strategy = st.booleans() if isinstance(known[0], bool) else FIELDS.get(field.name, st.sampled_from(known))
        if field.default is dataclasses.MISSING or draw(st.booleans()):
            values[field.name] = draw(strategy)
    try:
        return kind(**values)
    except SpecError:  # two settings that do not go together, or a value that only another method knows
        return parse_compressor(draw(st.sampled_from(kind.examples)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    backend = draw(st.sampled_from([backend for backend in INSTALLED if backend != "tensorflow"]))
    ranks = draw(st.integers(1, 5))
    compressor = draw(compressors())
    tensors = [
        TensorInfo(f"tensor{number}", shape, draw(st.sampled_from(DTYPES[backend])))
        for number, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=3)))
    ]

    def works(level: Any) -> bool:
        try:
            return level == DENSE or compressor.at_level(level).level >= (compressor.least_level(ranks) or 0)
        except SpecError:
            return False

    levels = [None] * STEPS
    if compressor.level_name is not None:
        some = (FIELDS[compressor.level_name] | st.sampled_from([DENSE, compressor.level])).filter(works)
        if not works(compressor.level):
            compressor = compressor.at_level(compressor.least_level(ranks))
        levels = draw(st.lists(some, min_size=STEPS, max_size=STEPS))
    # Residuals of an unbiased method may grow without end: it is used without a memory.
    memories = [None, ErrorFeedback(), ErrorFeedback(decay=0.5), MomentumCorrection(momentum=0.5)]
    memory = draw(st.sampled_from(memories)) if compressor.biased and not compressor.lossless else None
    options = {"seed": draw(st.integers(0, 9)), "min_numel": draw(st.sampled_from([0, 1024]))}
    options["min_ndim"] = draw(st.integers(0, 2))
    scale = 10.0 ** draw(st.integers(-2, 1))
    return Case(backend, ranks, tensors, compressor, levels, memory, options, scale, draw(st.sampled_from([0, 0.5, 1])))


def check(case: Case) -> None:
    """No error, the same bits on all ranks, nothing that is not finite, and as many bytes as promised."""

    def gradients(rank: int, step: int) -> dict[str, Any]:
        random = np.random.default_rng([case.options["seed"], rank, step])
        return {
            tensor.name: make(
                case.backend,
                np.asarray(random.normal(size=tensor.shape) * (random.random(tensor.shape) >= case.zeros) * case.scale),
                tensor.dtype,
            )
            for tensor in case.tensors
        }

    def before(engine: Engine, step: int) -> None:
        engine.set_level(case.levels[step])

    runs = run_engines(
        case.ranks, case.tensors, case.compressor, gradients, STEPS, before=before, memory=lambda: case.memory,
        **case.options,
    )  # fmt: skip
    assert_same_on_all_ranks(runs)
    for run in runs:
        assert all(np.isfinite(as_numpy(x)).all() for step in run.results for x in step.values())
        for state in run.engine.states.values():
            assert all(np.isfinite(as_numpy(x)).all() for x in (*state.memory, *state.compressor))
    last = runs[0].engine.ledger.last
    assert last is not None
    for tensor in case.tensors:
        chosen = runs[0].engine.plan[tensor.name]
        if not getattr(chosen, "alternating", False):  # of which the promise is the mean of two steps
            sent = last.tensors[tensor.name].bytes_sent
            assert sent == chosen.payload_bytes(tensor.shape, dtype=tensor.dtype), (tensor, chosen)


@given(cases())
def test_random_cases(case: Case) -> None:
    check(case)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@settings(max_examples=10_000)
@given(cases())
def test_ten_thousand_random_cases(case: Case) -> None:
    check(case)
