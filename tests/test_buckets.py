"""Buckets against the plain statement: the same steps with every tensor compressed by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hvdcomp import kernels
from hvdcomp.compressors import COMPRESSORS
from hvdcomp.compressors.parsing import parse_compressor
from tests.harness import Run, as_numpy, assert_same_on_all_ranks, bits, infos, make, run_engines, states_of, torch

SHAPES = {"matrix": (6, 8), "long": (3, 70_001), "vector": (77,), "odd": (5, 7, 3), "one": (1,), "scalar": ()}
BUCKETED = sorted(
    spec for kind in COMPRESSORS.values() for spec in kind.examples if parse_compressor(spec).bucket_family is not None
)
BACKENDS = ["numpy"] if torch is None else ["numpy", "torch"]
needs_kernels = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}")


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that makes every tensor go by itself from now on."""

    def switch_off() -> None:
        monkeypatch.setenv("HVDCOMP_KERNELS", "off")
        kernels.reset()

    yield switch_off
    monkeypatch.undo()
    kernels.reset()


def gradients(backend: str) -> Any:
    def of(rank: int, step: int) -> dict[str, Any]:
        rng = np.random.default_rng([rank, step])
        return {name: make(backend, rng.normal(size=shape), "float32") for name, shape in SHAPES.items()}

    return of


def run(backend: str, spec: str, ranks: int = 2, steps: int = 4, **options: Any) -> list[Run]:
    return list(run_engines(ranks, infos(SHAPES), parse_compressor(spec), gradients(backend), steps, **options))


def assert_close(runs: list[Run], plain: list[Run]) -> None:
    """Sums run in another order, so that the last bits may differ."""
    for mine, theirs in zip(runs, plain, strict=True):
        for step, (found, expected) in enumerate(zip(mine.results, theirs.results, strict=True)):
            for name, one in expected.items():
                where = f"{name} in step {step}"
                np.testing.assert_allclose(as_numpy(found[name]), as_numpy(one), rtol=2e-5, atol=1e-6, err_msg=where)
        for name, state in theirs.engine.states.items():
            for found, expected in zip(mine.engine.states[name].memory, state.memory, strict=True):
                np.testing.assert_allclose(as_numpy(found), as_numpy(expected), rtol=2e-5, atol=1e-6, err_msg=name)
        assert mine.engine.ledger.last.tensors.keys() == theirs.engine.ledger.last.tensors.keys()
        for name, cost in theirs.engine.ledger.last.tensors.items():
            assert mine.engine.ledger.last.tensors[name].bytes_sent == cost.bytes_sent, name


@needs_kernels
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", BUCKETED)
def test_a_bucket_does_what_its_tensors_do_by_themselves(backend: str, spec: str, no_kernels: Any) -> None:
    found = run(backend, spec)
    assert_same_on_all_ranks(found)
    assert found[0].engine.buckets.now, "no tensor went into a bucket"
    no_kernels()
    assert_close(found, run(backend, spec))


@needs_kernels
@pytest.mark.parametrize("spec", BUCKETED)
def test_instruction_sets_and_threads_change_no_bit(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernels.instruction_set()
    runs = []
    try:
        for instruction_set in kernels.instruction_sets():
            for threads in ("1", "3"):
                monkeypatch.setenv("HVDCOMP_THREADS", threads)
                kernels.use(instruction_set)
                runs.append(run("numpy", spec))
    finally:
        kernels.use(before or "plain")
    first = [[{name: bits(x) for name, x in step.items()} for step in one.results] for one in runs[0]]
    for other in runs[1:]:
        assert [[{name: bits(x) for name, x in step.items()} for step in one.results] for one in other] == first
        assert [states_of(one.engine) for one in other] == [states_of(one.engine) for one in runs[0]]
