"""DGC's momentum correction, against a plain statement of the paper and against SGD with momentum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcomp import DGC, ErrorFeedback, MomentumCorrection, NoCompression, PowerSGD, SpecError, TopK
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors.parsing import parse_compressor, parse_memory
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from tests.harness import BACKENDS, as_numpy, assert_same_on_all_ranks, infos, make, run_engines, set_to

torch = pytest.importorskip("torch")

SHAPES = {"conv": (6, 5, 3), "dense": (9, 11), "bias": (7,)}


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([rank, step])
    return {name: random.normal(size=shape) for name, shape in SHAPES.items()}


class PaperRank:
    """One rank of Lin et al. 2018, algorithm 4, in float64: what it sends of one tensor, step by step."""

    def __init__(self, size: int, momentum: float, nesterov: bool, masking: bool = True) -> None:
        self.u, self.v = np.zeros(size), np.zeros(size)
        self.momentum, self.nesterov, self.masking = momentum, nesterov, masking

    def send(self, g: np.ndarray, k: int | None) -> np.ndarray:
        """The elements sent, in a dense vector; all of them, without masking, for k=None."""
        if self.nesterov:
            self.u = self.momentum * (self.u + g)
            self.v = self.v + self.u + g
        else:
            self.u = self.momentum * self.u + g
            self.v = self.v + self.u
        mask = np.zeros(len(g), bool)
        mask[np.argsort(-np.abs(self.v))[:k]] = True
        sent = np.where(mask, self.v, 0)
        self.v = np.where(mask, 0, self.v)
        if k is not None and self.masking:
            self.u = np.where(mask, 0, self.u)
        return sent


def clipped(mine: dict[str, np.ndarray], clip: float, size: int) -> dict[str, np.ndarray]:
    norm = np.sqrt(sum(np.sum(g**2) for g in mine.values()))
    return {name: g * min(1, clip * size**-0.5 / norm) for name, g in mine.items()}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip", [0.0, 2.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_algorithm(backend: str, clip: float, nesterov: bool, size: int) -> None:
    """Two tensors compressed, one sent dense."""
    ratio, steps = 0.1, 12
    runs = run_engines(
        size, infos(SHAPES, "float64"), DGC(ratio, nesterov=nesterov, clip=clip),
        lambda rank, step: {name: make(backend, g, "float64") for name, g in gradients(rank, step).items()}, steps,
        min_ndim=2,
    )  # fmt: skip
    assert_same_on_all_ranks(runs)
    ranks = [
        {name: PaperRank(int(np.prod(shape)), 0.9, nesterov) for name, shape in SHAPES.items()} for _ in range(size)
    ]
    for step in range(steps):
        mine = [gradients(rank, step) for rank in range(size)]
        if clip:
            mine = [clipped(g, clip, size) for g in mine]
        for name, shape in SHAPES.items():
            k = None if len(shape) < 2 else int(np.ceil(ratio * np.prod(shape)))
            sent = [ranks[rank][name].send(mine[rank][name].ravel(), k) for rank in range(size)]
            result = as_numpy(runs[0].results[step][name]).ravel()
            np.testing.assert_allclose(result, sum(sent) / size, rtol=1e-12, atol=1e-12)
    for rank in range(size):
        for name in SHAPES:
            u, v = (as_numpy(array).ravel() for array in runs[rank].engine.states[name].memory)
            paper = ranks[rank][name]
            np.testing.assert_allclose(v, paper.v, rtol=1e-12, atol=1e-12)
            # The engine keeps u before the last multiplication with the momentum.
            np.testing.assert_allclose(u * 0.9 if nesterov else u, paper.u, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("sending", ["all of it by top-k", "dense", "levels in turn"])
def test_everything_sent_is_sgd_with_momentum(sending: str, nesterov: bool, size: int) -> None:
    """Weights after 20 steps of plain SGD on the results, and of torch's SGD with momentum on the mean gradient."""
    memory = MomentumCorrection(0.9, nesterov=nesterov, masking=False)
    compressors = {
        "all of it by top-k": [DGC(1.0)],
        "dense": [NoCompression()],
        "levels in turn": [DGC(1.0), NoCompression(), TopK(1.0)],
    }[sending]
    runs = run_engines(
        size, infos(SHAPES), compressors[0],
        lambda rank, step: {name: make("torch", g) for name, g in gradients(rank, step).items()}, 20,
        before=lambda engine, step: set_to(engine, compressors[step % len(compressors)]), memory=lambda: memory,
        min_ndim=2,
    )  # fmt: skip
    for name, shape in SHAPES.items():
        ours, theirs = torch.ones(shape), torch.nn.Parameter(torch.ones(shape))
        optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=nesterov)
        for step in range(20):
            ours -= 0.1 * runs[0].results[step][name]
            theirs.grad = sum(torch.tensor(gradients(rank, step)[name]).float() for rank in range(size)) / size
            optimizer.step()
        torch.testing.assert_close(ours, theirs.data, rtol=1e-5, atol=1e-5)


def test_masking_stops_the_momentum_of_what_was_sent() -> None:
    """With everything sent and masked, nothing is left of the momentum."""
    (run,) = run_engines(
        1, infos({"w": (4, 5)}), DGC(1.0), lambda rank, step: {"w": np.full((4, 5), step + 1.0, np.float32)}, 4
    )
    for step in range(4):
        np.testing.assert_array_equal(run.results[step]["w"], np.full((4, 5), step + 1))
    assert not any(array.any() for array in run.engine.states["w"].memory)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_lost(backend: str) -> None:
    """v after the step is v before it, plus what was added, less what was sent; also of other compressors."""
    for compressor in (DGC(0.1), TopK(0.1, values="fp16"), PowerSGD(1)):
        (run,) = run_engines(
            1, infos({"w": (20, 30)}, "float64"), compressor,
            lambda rank, step: {"w": make(backend, np.random.default_rng(step).normal(size=(20, 30)), "float64")}, 6,
            memory=lambda: MomentumCorrection(0.5, masking=False),
        )  # fmt: skip
        u = added = np.zeros((20, 30))
        for step in range(6):
            u = 0.5 * u + np.random.default_rng(step).normal(size=(20, 30))
            added = added + u
        sent = sum(as_numpy(result["w"]) for result in run.results)
        np.testing.assert_allclose(sent + as_numpy(run.engine.states["w"].memory[1]), added, atol=1e-12)


def test_memory_of_each_tensor() -> None:
    """Momentum is for all tensors or for none, whatever the routing; and only as a default."""

    def engine(compressor: Any, memory: Any = None) -> Engine:
        tensors = [TensorInfo("a", (40, 50)), TensorInfo("b", (50, 50)), TensorInfo("c", (5,))]
        return run_ranks(1, lambda communicator: Engine(communicator, tensors, compressor, memory))[0]

    routed = parse_compressor('{"a": "dgc:ratio=0.1,momentum=0.8", "*": "topk:ratio=0.1"}')
    for compressor, momentum in ((DGC(0.1), 0.9), (routed, 0.8)):
        made = engine(compressor)
        assert {made.planner.memory_for(kind) for kind in made.plan.values()} == {MomentumCorrection(momentum)}
        assert not made.passthrough
    assert engine(TopK(0.1)).memory is None
    assert engine(DGC(0.1), ErrorFeedback()).planner.memory_for(DGC(0.1)) == ErrorFeedback()
    assert parse_memory("momentum_correction:momentum=0.8,nesterov=true") == MomentumCorrection(0.8, nesterov=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_clipping_takes_the_norm_of_all_tensors(backend: str, dtype: str) -> None:
    """Half-precision squares of these would overflow."""
    given = {"a": np.full((2, 8), 300.0), "b": np.full(9, -400.0), "empty": np.zeros((0, 2))}
    norm = np.sqrt(16 * 300.0**2 + 9 * 400.0**2)
    for clip, factor in ((5.0, 5 / 2 / norm), (3 * norm, 1.0)):
        runs = run_engines(
            4, infos({name: g.shape for name, g in given.items()}, dtype), NoCompression(),
            lambda rank, step: {name: make(backend, g, dtype) for name, g in given.items()},
            memory=lambda clip=clip: MomentumCorrection(0.5, clip=clip),
        )  # fmt: skip
        for name, g in given.items():
            result = as_numpy(runs[0].results[0][name])
            assert result.dtype == dtype
            np.testing.assert_allclose(result, g * factor, rtol=2e-3 if dtype == "float16" else 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_gradients_are_not_clipped_to_nan(backend: str) -> None:
    (run,) = run_engines(
        1, infos({"w": (3, 4)}), DGC(0.5, clip=1.0), lambda rank, step: {"w": make(backend, np.zeros((3, 4)))}, 2
    )
    np.testing.assert_array_equal(as_numpy(run.results[1]["w"]), np.zeros((3, 4)))


@pytest.mark.parametrize("wrong", [{"momentum": -0.1}, {"momentum": 1.0}, {"clip": -1.0}, {"clip": float("nan")}])
def test_wrong_settings(wrong: dict[str, float]) -> None:
    for kind in (MomentumCorrection, lambda **settings: DGC(0.1, **settings)):
        with pytest.raises(SpecError, match=r"momentum_correction: .* is not allowed"):
            kind(**wrong)


def test_a_changed_loss_scale_scales_momentum_and_residual() -> None:
    def run(change: bool) -> np.ndarray:
        def before(engine: Engine, step: int) -> None:
            if change and step == 3:
                engine.scale_residuals(4.0)

        (done,) = run_engines(
            1, infos({"w": (20, 30)}), DGC(0.05),
            lambda rank, step: {
                "w": np.random.default_rng(step).normal(size=(20, 30)).astype(np.float32)
                * np.float32(4 if change and step >= 3 else 1)
            }, 6, before=before,
        )  # fmt: skip
        return done.results[5]["w"]

    np.testing.assert_array_equal(run(True), 4 * run(False))


def test_a_learning_rate_scales_the_residual_alone() -> None:
    gradient = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    kept: list[tuple[np.ndarray, ...]] = []

    def before(engine: Engine, step: int) -> None:
        if step == 1:
            kept.append(tuple(array.copy() for array in engine.states["w"].memory))
            engine.scale_residuals(0.25, momentum=False)
            kept.append(tuple(array.copy() for array in engine.states["w"].memory))

    run_engines(1, infos({"w": (20, 30)}), DGC(0.05), lambda rank, step: {"w": gradient}, 2, before=before)
    (velocity, residual), (velocity_after, residual_after) = kept
    np.testing.assert_array_equal(velocity_after, velocity)
    np.testing.assert_array_equal(residual_after, residual / 4)
    assert residual.any()
