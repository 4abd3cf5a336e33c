"""Probes: what each of many compression factors would keep of each tensor, and what it would cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from hvdcomp.adaptation.gains import LevelProbe
from hvdcomp.adaptation.plans import Plans
from hvdcomp.compressors.memory import NoMemory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies.decisions import Probe
from tests.driven import COMPRESSED, SHAPES, gradients_of, random_gradients
from tests.harness import BACKENDS, copy, infos, make, run_engines, states_of
from tests.two_levels import gain_of, top

every_backend = pytest.mark.parametrize("backend", BACKENDS)


class Probed(LevelProbe):
    """A probe that is shown gradients: steps of an engine which has kept nothing of the steps before."""

    def __init__(self, engine: Engine, probe: Probe, names: tuple[str, ...] = COMPRESSED) -> None:
        super().__init__(Plans(engine, names), probe)
        self.engine = engine
        engine.before_compress = self.before_compress

    def look(self, inputs: Mapping[str, Any]) -> None:
        self.engine.begin()
        self.engine.step(inputs)


def probe_on(factors: tuple[float, ...], every: int, spec: str = "topk:ratio=0.5") -> Probed:
    (run,) = run_engines(
        1, infos(SHAPES), parse_compressor(spec), lambda r, s: {}, 0, min_numel=16, memory=NoMemory
    )
    return Probed(run.engine, Probe(factors, every, send=factors[0]))


@every_backend
@pytest.mark.parametrize("every", [1, 2, 3])
def test_probes_sum_energies_over_the_measured_steps(backend: str, every: int) -> None:
    factors = (2.0, 8.0, 64.0)
    probe = probe_on(factors, every)

    def right(steps: Sequence[int]) -> dict[str, dict[float, float]]:
        xs = {name: [random_gradients(0, step)[name] for step in steps] for name in COMPRESSED}
        return {
            name: {factor: gain_of([(x, top(x, factor)) for x in xs[name]]) for factor in factors}
            for name in COMPRESSED
        }

    for step in range(5):
        probe.look(gradients_of(backend, 0, step))
        gains, expected = probe.gains(), right(range(0, step + 1, every))
        assert gains.keys() == expected.keys()
        for name in COMPRESSED:
            assert gains[name] == pytest.approx(expected[name], rel=1e-5)
    probe.clear()
    assert probe.gains() == {}
    for step in (5, 6):  # the first step of the new period is measured again
        probe.look(gradients_of(backend, 0, step))
    expected = right([5, 6] if every == 1 else [5])
    for name in COMPRESSED:
        assert probe.gains()[name] == pytest.approx(expected[name], rel=1e-5)


@every_backend
def test_probes_of_zeros_and_of_missing_tensors(backend: str) -> None:
    probe = probe_on((2.0, 8.0), 1)
    inputs = gradients_of(backend, 0, 0)
    del inputs["conv"]
    probe.look(inputs | {"linear": inputs["linear"] * 0})
    gains = probe.gains()
    assert gains.keys() == {"linear"}  # the bias is not compressed
    assert np.isnan(list(gains["linear"].values())).all()
    probe.look(inputs | {"linear": inputs["linear"] * 0 + 1})
    k = math.floor(4 * 384 / 8 / 6)
    assert probe.gains()["linear"][8.0] == pytest.approx(k / 384, rel=1e-5)  # the step of zeros weighs nothing
    assert probe.costs().keys() == set(COMPRESSED)


@every_backend
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of what is meant to happen here
def test_gains_of_what_is_not_finite_are_nan(backend: str, bad: float) -> None:
    probe = probe_on((2.0, 8.0), 1)
    values = random_gradients(0, 0)
    values["linear"][3, 5] = bad
    probe.look({name: make(backend, x) for name, x in values.items()})
    assert np.isnan(list(probe.gains()["linear"].values())).all()
    assert np.isfinite(list(probe.gains()["conv"].values())).all()


@every_backend
def test_costs_are_bytes_over_dense_bytes(backend: str) -> None:
    assert probe_on((2.0, 8.0), 1).costs() == {
        name: {factor: 6 * math.floor(4 * size / factor / 6) / (4 * size) for factor in (2.0, 8.0)}
        for name, size in (("conv", 288), ("linear", 384))
    }
    costs = probe_on((2.0, 8.0, 1000.0), 1, "powersgd:rank=1").costs()
    assert costs["linear"] == {2.0: 4 * 40 / 384, 8.0: 40 / 384, 1000.0: 40 / 384}
    half = [TensorInfo("w", (16, 24), "float16")]
    (run,) = run_engines(1, half, parse_compressor("topk:ratio=0.5"), lambda r, s: {}, 0)
    probe = LevelProbe(Plans(run.engine, ("w",)), Probe((8.0,), 1, send=8.0))
    assert probe.costs()["w"][8.0] == 32 * (2 + 2) / (2 * 384)  # k as for single precision, values half as long


@every_backend
def test_probing_sends_nothing_and_changes_no_step(backend: str) -> None:
    def results(probing: bool) -> Any:
        def before(engine: Engine, step: int) -> None:
            if probing and step == 0 and engine.communicator.rank == 0:
                probe = LevelProbe(Plans(engine, COMPRESSED), Probe((2.0, 8.0), 2, send=2.0))
                engine.before_compress = probe.before_compress

        gradients: Callable[[int, int], Any] = lambda rank, step: gradients_of(backend, rank, step)  # noqa: E731
        runs = run_engines(
            2, infos(SHAPES), parse_compressor("powersgd:rank=2"), gradients, 4, before=before, min_numel=16
        )
        return [
            (states_of(run.engine), run.engine.communicator.started, run.engine.ledger.totals.bytes_sent)
            for run in runs
        ]

    assert results(True) == results(False)


@every_backend
def test_a_probe_goes_on_from_its_state(backend: str) -> None:
    whole, first = probe_on((2.0, 8.0), 2), probe_on((2.0, 8.0), 2)
    places: set[str] = set()

    def place(array: Any, name: str) -> Any:
        places.add(name)
        return copy(array)

    for step in range(5):
        for probe in (whole, first):
            probe.look(gradients_of(backend, 0, step))
        state = first.state(copy)
        kept = first.gains()
        first.look(gradients_of(backend, 1, step))  # nobody looks at this one any more
        first = probe_on((2.0, 8.0), 2)
        first.restore(state, place)
        assert first.gains() == kept == whole.gains()
    assert places == set(COMPRESSED)
