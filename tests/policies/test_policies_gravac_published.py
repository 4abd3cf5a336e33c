"""GraVAC by its settings `factor` and `gain`, as published and as here, against a plain NumPy statement of training
with it on two ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from hvdcomp.adaptation.observers import Observers
from hvdcomp.arrays import numpy_arrays
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.low_rank import fit_columns
from hvdcomp.compressors.protocol import Context
from hvdcomp.policies.gravac import GraVAC
from hvdcomp.tools.train.data import load_data
from hvdcomp.tools.train.options import TrainingOptions
from tests.driven import Driven
from tests.harness import DTYPES, needing

SHAPES = {"conv": (8, 4, 3, 3), "linear": (24, 40)}
RANKS, STEPS = 2, 13
MOMENTUM = 0.9  # of dgc
SPECS = ("topk:ratio=0.5", "dgc:ratio=0.5", "redsync:ratio=0.5", "powersgd:rank=4")
WHAT = tuple(itertools.product(SPECS, ("elements", "bytes"), ("raw", "error_feedback")))
HOW = ("exponential", "geometric")  # candidates follow

Tensors = dict[str, np.ndarray]


def gradients(rank: int, step: int) -> Tensors:
    """Few elements, and few directions, have most of their energy."""
    rng = np.random.default_rng([rank, step])
    return {
        name: (rng.standard_normal(shape) ** 3 + 9 * rng.standard_normal((shape[0], *[1] * (len(shape) - 1)))).astype(
            np.float32
        )
        for name, shape in SHAPES.items()
    }


def energy(tensors: Tensors) -> float:
    return float(sum(np.sum(np.square(x, dtype=np.float64)) for x in tensors.values()))


def amount(method: str, factor: float, unit: str, shape: tuple[int, ...]) -> int:
    """Elements, or the rank, that a factor leaves of a tensor."""
    size = math.prod(shape)
    if method == "powersgd":  # sends no indices
        return max(1, math.floor(size / factor / (shape[0] + size // shape[0])))
    if unit == "elements":
        return max(1, math.floor(size / factor))
    return max(1, math.floor(4 * size / factor / (4 + 2)))  # a value takes four bytes, its index two


def largest(x: np.ndarray, count: int) -> np.ndarray:
    """x with zeros in place of all but so many elements."""
    kept = np.zeros(x.size)
    places = np.argsort(-np.abs(x.reshape(-1)), kind="stable")[:count]
    kept[places] = x.reshape(-1)[places]
    return kept.reshape(x.shape)


class Statement:
    """Training with GraVAC on two ranks, in NumPy: what they keep, and what they have sent."""

    def __init__(self, method: str, unit: str) -> None:
        self.method, self.unit = method, unit
        self.r = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(RANKS)]
        self.u = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(RANKS)]
        self.q: Tensors = {}  # of PowerSGD

    def begin(self, step: int, minimum: float, candidate: float | None) -> None:
        self.step = step
        self.g = [gradients(rank, step) for rank in range(RANKS)]
        if self.method == "dgc":
            self.u = [{name: g[name] + MOMENTUM * u[name] for name in g} for g, u in zip(self.g, self.u, strict=True)]
        added = self.u if self.method == "dgc" else self.g
        self.x = [{name: r[name] + each[name] for name in r} for r, each in zip(self.r, added, strict=True)]
        self.minimum, self.candidate = minimum, candidate
        self.first = [self.alone(x, minimum) for x in self.x]
        self.second = [self.alone(x, candidate) for x in self.first] if candidate else []

    def alone(self, x: Tensors, factor: float) -> Tensors:
        """C(x) of a rank alone."""
        return {name: self.compressed(name, [each], factor) for name, each in x.items()}

    def compressed(self, name: str, xs: list[np.ndarray], factor: float, keeps: bool = False) -> np.ndarray:
        """C(x) of one rank; of PowerSGD that of several."""
        count = amount(self.method, factor, self.unit, SHAPES[name])
        if self.method != "powersgd":
            (x,) = xs
            return largest(x, count)
        matrices = [x.reshape(SHAPES[name][0], -1) for x in xs]
        context, like = Context(name, self.step, 0, 0, RANKS), np.zeros((), np.float32)
        columns = matrices[0].shape[1]
        start = fit_columns(numpy_arrays, like, self.q.get(name), columns, count, context, "powersgd")
        p = np.linalg.qr(np.mean([matrix @ np.linalg.qr(start)[0] for matrix in matrices], axis=0))[0]
        q = np.mean([matrix.T @ p for matrix in matrices], axis=0)
        if keeps:
            self.q[name] = q
        return (p @ q.T).reshape(SHAPES[name])

    def gains(self, gain: str) -> tuple[float, float | None]:
        """Of rank 0, by the formulas of the paper and of its authors' code."""
        below = energy(self.x[0] if gain == "error_feedback" else self.g[0])
        return energy(self.first[0]) / below, energy(self.second[0]) / below if self.second else None

    def send(self, what: str) -> tuple[Tensors, float]:
        """The result, and how many values, or numbers, one rank has sent for it."""
        if what == "dense":
            self.r = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(RANKS)]
            mean = {name: np.mean([x[name] for x in self.x], axis=0) for name in SHAPES}
            return mean, float(sum(map(math.prod, SHAPES.values())))
        factor = self.minimum if what == "minimum" else self.candidate
        assert factor
        sources = self.x if what == "minimum" else self.first
        sent, mean, numbers = [dict[str, np.ndarray]() for _ in range(RANKS)], {}, 0
        for name, shape in SHAPES.items():
            count = amount(self.method, factor, self.unit, shape)
            if self.method == "powersgd":
                own = [self.compressed(name, [each[name] for each in sources], factor, keeps=True)] * RANKS
                numbers += count * (shape[0] + math.prod(shape[1:]))
            else:
                own = [self.compressed(name, [each[name]], factor) for each in sources]
                numbers += count
            mean[name] = np.mean(own, axis=0)
            for each, one in zip(sent, own, strict=True):
                each[name] = one
        self.r = [{name: x[name] - one[name] for name in x} for x, one in zip(self.x, sent, strict=True)]
        self.u = [{name: u[name] * (one[name] == 0) for name in u} for u, one in zip(self.u, sent, strict=True)]
        return mean, float(numbers)


def train(spec: str, policy: GraVAC, gain: str, unit: str) -> list[tuple[Any, ...]]:
    """Of each step: minimum, candidate, and what is sent of them; the gains told; the results; the floats sent."""
    assert policy.window is not None
    assert policy.smoothing is not None
    factors, exponent = [policy.min], 1
    while factors[-1] < policy.max:
        factors.append(min(policy.max, policy.min * 2**exponent))
        exponent = 2 * exponent if policy.scaling == "exponential" else exponent + 1
    statement = Statement(spec.partition(":")[0], unit)
    place, smoothed, choice, log = 1, dict[float, float](), "dense", []
    for step in range(STEPS):
        minimum, candidate = factors[0], factors[place]
        statement.begin(step, minimum, candidate)
        told = statement.gains(gain)
        for factor, new in zip((minimum, candidate), told, strict=True):
            assert new is not None
            smoothed[factor] = new + (1 - policy.smoothing) * (smoothed.get(factor, new) - new)
        log.append((minimum, candidate, choice, told, *statement.send(choice)))
        if (step + 1) % policy.window == 0:
            place = min(place + 1, len(factors) - 1)
            smoothed = {factor: old for factor, old in smoothed.items() if factor in (minimum, factors[place])}
        choice = choose(smoothed, minimum, factors[place], policy.epsilon)
    return log


def choose(smoothed: dict[float, float], minimum: float, candidate: float, epsilon: float) -> str:
    if smoothed.get(candidate, 0) >= epsilon:
        return "candidate"
    return "minimum" if smoothed.get(minimum, 0) >= epsilon else "dense"


@pytest.mark.parametrize(
    ("spec", "unit", "gain", "scaling", "backend"),
    [
        needing(backend, *what, how, backend, thorough=(place + place // 4 + turn) % 2 > 0 or (place + number) % 2 > 0)
        for place, what in enumerate(WHAT)
        for turn, how in enumerate(HOW)
        for number, backend in enumerate(DTYPES)
    ],
)
def test_decisions_gains_and_what_is_sent_are_those_of_numpy(
    spec: str, unit: Any, gain: Any, scaling: str, backend: str
) -> None:
    least, most, epsilon = (1.5, 5.0, 0.82) if spec.startswith("powersgd") else (4.0, 60.0, 0.4)
    settings = {"scaling": scaling, "factor": unit, "gain": gain}
    policy = GraVAC(min=least, max=most, epsilon=epsilon, omega=0.0, window=3, smoothing=0.5, every=1, **settings)
    right = train(spec, policy, gain, unit)

    def work(communicator: InProcessCommunicator) -> tuple[list[Any], list[Any]]:
        driven = Driven(communicator, policy, backend, spec=spec, gradients=gradients, shapes=SHAPES)
        observers, gains, sent = driven.coordinator.observers, [], []

        def statistics(*args: Any) -> dict[str, Any]:
            found = Observers.statistics(observers, *args)
            if "gains" in found:
                gains.append((found["gains"].minimum, found["gains"].candidate))
            return found

        observers.statistics = statistics  # type: ignore[method-assign]
        for _ in range(STEPS):
            driven.step()
            assert driven.engine.ledger.last is not None
            sent.append((driven.results[-1], driven.engine.ledger.last.floats_sent))
        return gains, sent

    (gains, sent), (none, other) = run_ranks(RANKS, work)
    assert not none  # only rank 0 measures
    assert [numbers for _, numbers in other] == [numbers for _, numbers in sent] == [step[5] for step in right]
    np.testing.assert_allclose(gains, [step[3] for step in right[: len(gains)]], rtol=1e-4)
    assert len(gains) >= STEPS - 1
    for (found, _), step in zip(sent, right, strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(found[name], step[4][name], rtol=1e-4, atol=5e-3, err_msg=f"{step[:3]} {name}")


@pytest.mark.parametrize("spec", ["dgc:ratio=0.5", "powersgd:rank=4"])
def test_they_are_so_without_compiled_kernels(spec: str, without_kernels: None) -> None:
    test_decisions_gains_and_what_is_sent_are_those_of_numpy(spec, "bytes", "error_feedback", "exponential", "numpy")


def test_the_residual_makes_gravacs_gain_small_and_its_published_code_leaves_it_out() -> None:
    pytest.importorskip("torch")
    from benchmarks.quality import gravac_gain as gains

    settings = TrainingOptions(model="cnn", data="digits", batch_size=16, epochs=1, samples=320).resolved()
    found = gains.measure(load_data(settings), settings, gains.ratio_of(10.0))
    assert found.text < 0.8 * found.alone
    assert found.code > 1
    assert found.residual > 0.2
    assert gains.ratio_of(10.0) == 0.05
    assert gains.ratio_of(10.0, "elements") == 0.1
