"""Sparsifiers whose ranks send the same elements, against plain NumPy statements of the papers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hvdcomp import ARCTopK, TopKC
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.memory import NoMemory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Context
from hvdcomp.compressors.randomness import shared_generator
from tests.harness import BACKENDS, CountingCommunicator, as_numpy, assert_same_on_all_ranks, infos, make, run_engines

SHAPES = [(40, 48), (7, 9), (37, 29), (5, 4, 3)]


def chunks_to_send(xs: list[np.ndarray], ratio: float, chunk: int) -> np.ndarray:
    """TopKC: which elements of a flat tensor every rank sends."""
    size = xs[0].size
    chunk = min(chunk, size)
    padded = np.zeros((len(xs), -(-size // chunk) * chunk))
    padded[:, :size] = [x.ravel() for x in xs]
    squares = (padded.reshape(len(xs), -1, chunk) ** 2).sum(axis=(0, 2))
    count = min(len(squares), math.ceil(max(1, math.ceil(ratio * size)) / chunk))
    best = np.argsort(-squares, kind="stable")[:count]
    return np.isin(np.arange(padded.shape[1]) // chunk, best)[:size]


def rows_to_send(xs: list[np.ndarray], ratio: float, sketch: int, context: Context) -> np.ndarray:
    """ARC-Top-K: which elements of a flat matrix every rank sends."""
    rows, columns = xs[0].reshape(xs[0].shape[0], -1).shape
    random = shared_generator(context, "arctopk").standard_normal((columns, sketch), dtype=np.float32)
    sketched = np.mean([x.reshape(rows, columns).astype(float) @ random for x in xs], axis=0)
    count = min(rows, math.ceil(max(1, math.ceil(ratio * rows * columns)) / columns))
    best = np.argsort(-np.linalg.norm(sketched, axis=1), kind="stable")[:count]
    return np.repeat(np.isin(np.arange(rows), best), columns)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("spec", ["topkc:ratio=0.1,chunk=8", "topkc:ratio=0.3", "arctopk:ratio=0.2,sketch=3"])
def test_all_ranks_send_what_is_best_over_all_of_them(spec: str, ranks: int, backend: str) -> None:
    """With error feedback over some steps."""
    method: Any = parse_compressor(spec)
    tensors = infos({f"w{place}": shape for place, shape in enumerate(SHAPES)})
    steps = 3
    given = {
        (rank, step, one.name): np.random.default_rng((rank, step, place)).standard_t(3, one.shape).astype(np.float32)
        for rank in range(ranks)
        for step in range(steps)
        for place, one in enumerate(tensors)
    }

    def gradients(rank: int, step: int) -> dict[str, Any]:
        return {one.name: make(backend, given[rank, step, one.name]) for one in tensors}

    runs = run_engines(ranks, tensors, method, gradients, steps)
    assert_same_on_all_ranks(runs)
    for one in tensors:
        residuals = [np.zeros(one.size, np.float32) for _ in range(ranks)]
        for step in range(steps):
            xs = [residuals[rank] + given[rank, step, one.name].ravel() for rank in range(ranks)]
            shaped = [x.reshape(one.shape) for x in xs]
            if isinstance(method, TopKC):
                sent = chunks_to_send(shaped, method.ratio, method.chunk)
            else:
                context = Context(one.name, step=step, seed=0, rank=0, world_size=ranks)
                sent = rows_to_send(shaped, method.ratio, method.sketch, context)
            assert 0 < sent.sum() < one.size or one.size <= 64, "a chunk at least is sent"
            expected = np.where(sent, np.mean(xs, axis=0), 0)
            result = as_numpy(runs[0].results[step][one.name]).ravel()
            np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-7)
            residuals = [np.where(sent, 0, x).astype(np.float32) for x in xs]


@pytest.mark.parametrize(("method", "shape", "numbers"), [
    (TopKC(ratio=0.01), (512, 512), 4096 + 41 * 64),
    (TopKC(ratio=0.01, chunk=1000), (512, 512), 263 + 3 * 1000),
    (ARCTopK(ratio=0.01), (512, 512), 4 * 512 + 6 * 512),
])  # fmt: skip
def test_a_rank_sends_as_many_bytes_with_any_number_of_ranks(
    method: Compressor, shape: tuple[int, ...], numbers: int
) -> None:
    """4 (ratio d + d / chunk), in whole chunks: the same from 2 to 64 ranks, as the collectives count them."""
    assert method.payload_bytes(shape) == 4 * numbers
    assert method.payload_floats(shape) == numbers
    gradient = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    for ranks in (2, 16, 64):
        for run in run_engines(ranks, infos({"w": shape}), method, lambda rank, step: {"w": gradient}):
            communicator = run.engine.communicator
            assert isinstance(communicator, CountingCommunicator)
            assert {kind for kind, _, _, _ in communicator.started} == {"allreduce mean"}
            flag = 4  # bytes
            assert sum(one_bytes for *_, one_bytes in communicator.started) == 4 * numbers + flag


@pytest.mark.parametrize("name", ["topkc", "arctopk"])
def test_a_level_for_a_factor_sends_no_more(name: str) -> None:
    method = parse_compressor(f"{name}:ratio=0.5")
    for shape in [(512, 512), (64, 576)]:
        for factor in (2, 5, 8):
            level = method.level_for(factor, shape)
            assert method.payload_bytes(shape, level) <= 4 * math.prod(shape) / factor
            assert method.payload_bytes(shape, level) >= 4 * math.prod(shape) / factor - 4 * 576


def test_where_gradients_cancel_each_other_only_the_sketch_sees_it() -> None:
    """Row 0 is large on both ranks, with opposite signs; row 1 is smaller, and the same."""
    same = np.array([0.0, 1.0, 0.0, 0.0], np.float32).reshape(4, 1) * np.ones((4, 8), np.float32)
    opposite = np.array([8.0, 0.0, 0.0, 0.0], np.float32).reshape(4, 1) * np.ones((4, 8), np.float32)
    sent = {}
    for method in (TopKC(ratio=0.25, chunk=8), ARCTopK(ratio=0.25, sketch=2)):
        runs = run_engines(2, infos({"w": (4, 8)}), method, lambda rank, step: {"w": same + (-1) ** rank * opposite})
        sent[method.name] = as_numpy(runs[0].results[0]["w"])
    np.testing.assert_array_equal(sent["topkc"], np.zeros((4, 8)))
    np.testing.assert_array_equal(sent["arctopk"], same)


def kept_back(method: Compressor, xs: list[np.ndarray], steps: int = 1) -> list[list[np.ndarray]]:
    """The part of each rank's x that it does not send, step by step; x is the same in each."""
    runs = run_engines(
        len(xs), infos({"w": xs[0].shape}), method, lambda rank, step: {"w": xs[rank]}, steps, memory=NoMemory
    )
    sent = [as_numpy(results["w"]) != 0 for results in runs[0].results]
    return [[np.where(one, 0, x) for x in xs] for one in sent]


def energy(arrays: list[np.ndarray]) -> float:
    return sum(float(np.sum(np.square(one, dtype=float))) for one in arrays)


@pytest.mark.parametrize("cancels", [False, True])
def test_topkc_contracts_what_the_ranks_keep_together(cancels: bool) -> None:
    """sum ||x - C(x)||^2 <= (1 - sent chunks / chunks) sum ||x||^2 over the ranks, also where their mean is small."""
    rng = np.random.default_rng(2)
    xs = [rng.standard_t(3, (32, 16)).astype(np.float32) for _ in range(4)]
    if cancels:
        xs = [xs[0], np.float32(1e-3) - xs[0], xs[1], np.float32(1e-3) - xs[1]]
    (left,) = kept_back(TopKC(ratio=0.25, chunk=8), xs)
    assert 0 < energy(left) <= (1 - 0.25) * energy(xs)


@pytest.mark.parametrize("flat", [False, True])
def test_arctopk_contracts_the_mean_in_expectation(flat: bool) -> None:
    """E ||m - C(m)||^2 <= (1 - sent rows / rows) ||m||^2 over its sketches (arXiv:2510.26709); m: mean of the ranks."""
    rng = np.random.default_rng(3)
    rows = np.ones(20) if flat else rng.exponential(size=20)
    xs = [(rng.standard_normal((20, 10)) * rows[:, None] + rank).astype(np.float32) for rank in range(2)]
    mean = [np.mean(xs, axis=0)]
    each_step = kept_back(ARCTopK(ratio=0.25, sketch=2), xs, 150)
    shares = [energy([np.mean(left, axis=0)]) / energy(mean) for left in each_step]
    assert len(set(shares)) > 1, "each step draws a sketch"
    assert np.mean(shares) <= 1 - 0.25


def test_what_would_send_no_less_goes_dense() -> None:
    for method, shape in ((ARCTopK(ratio=0.1, sketch=8), (100, 4)), (TopKC(ratio=1.0), (8, 8))):
        assert method.route(infos({"w": shape})[0]).name == "none"
