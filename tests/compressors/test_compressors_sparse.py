"""Threshold sparsifiers, against plain NumPy statements of their papers, and how values and indices travel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdcomp import DGC, ErrorFeedback, MSTopK, RandomK, RedSync, SIDCo, SpecError, TopK
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import number_of_elements, wide_dtype
from hvdcomp.compressors import sparse_payload
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import AllReduce, Context
from hvdcomp.compressors.sparse_payload import elements_kept
from hvdcomp.compressors.sparsification import Sparsifier
from hvdcomp.compressors.thresholds import stage_shares
from tests.harness import (
    BACKENDS,
    BACKENDS_AND_DTYPES,
    SpyFeedback,
    as_numpy,
    assert_same_on_all_ranks,
    densify,
    infos,
    make,
    run_engines,
)

torch = pytest.importorskip("torch")

METHODS = [TopK, MSTopK, RedSync, DGC, SIDCo]
SHAPES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda random, size: random.normal(size=size),
    "double exponential": lambda random, size: random.laplace(size=size),
    "heavy tail": lambda random, size: random.standard_t(2, size=size),
    "few nonzero": lambda random, size: random.normal(size=size) * (random.random(size) < 0.004),
    "uniform": lambda random, size: random.uniform(-1, 1, size),
    "clusters": lambda random, size: clusters(random, size),
}


def clusters(random: np.random.Generator, size: int) -> np.ndarray:
    """Some large elements, many that no search for a threshold tells apart, growing with the index, and small ones."""
    x = random.laplace(scale=0.1, size=size)
    places = random.permutation(size)
    x[places[: size // 200]] = 9 + random.random(size // 200)
    x[np.sort(places[size // 200 : size // 20])] = 5 + 1e-12 * np.arange(size // 20 - size // 200)
    return x


# The papers' algorithms.


def from_thresholds(m: np.ndarray, low: float, high: float, k: int, most: int) -> set[int]:
    """The k largest among the first `most` of: those that reach high, then those that reach low, by index."""
    order = [i for i in range(len(m)) if m[i] >= high] + [i for i in range(len(m)) if low <= m[i] < high]
    return set(sorted(order[:most], key=lambda i: -m[i])[:k])


def bisection(m: np.ndarray, k: int, most: int, rounds: int) -> tuple[float, float]:
    """Shi et al. 2021, algorithm 1 (most = k); Fang et al. 2019, threshold binary search (most = 2 k)."""
    left, right, low, high = 0.0, 1.0, 0.0, math.inf
    for _ in range(rounds):
        ratio = (left + right) / 2
        threshold = m.mean() + ratio * (m.max() - m.mean())
        count = (m >= threshold).sum()
        if count <= most:
            high = threshold
        if k <= count <= most:
            break
        if count > most:
            low = left_threshold = threshold
            assert left_threshold >= 0
            left = ratio
        else:
            right = ratio
    return low, high


def mstopk(x: np.ndarray, k: int, rounds: int = 25) -> set[int]:
    m = np.abs(x)
    return from_thresholds(m, *bisection(m, k, k, rounds), k, k)


def redsync(x: np.ndarray, k: int) -> set[int]:
    m = np.abs(x)
    return from_thresholds(m, *bisection(m, k, min(2 * k, len(m)), 25), k, min(2 * k, len(m)))


def dgc(x: np.ndarray, k: int, ratio: float) -> set[int]:
    """Lin et al. 2018, section 5 (sampling), with at most 2 k passing the threshold."""
    m, most = np.abs(x), min(2 * k, len(x))
    sample = np.sort(m[:: min(97, len(m) // 1024 | 1)])[::-1]
    threshold = sample[max(1, math.ceil(ratio * len(sample))) - 1]
    low, high = 0.0, math.inf
    for _ in range(11):
        count = (m >= threshold).sum()
        if count > most:
            low = max(low, threshold)
        else:
            high = min(high, threshold)
        if k <= count <= most:
            break
        threshold *= 0.8 if count < k else 1.3
        if not low < threshold <= min(high, m.max()):
            threshold = (low + min(high, m.max())) / 2
    return from_thresholds(m, low, high, k, most)


def sidco(x: np.ndarray, k: int, ratio: float, stages: int) -> set[int]:
    """Abdelmoniem et al. 2021: maximum likelihood of an exponential distribution, stage by stage."""
    m, most = np.abs(x), min(4 * k, len(x))
    threshold, low, high = 0.0, 0.0, math.inf
    for stage in range(stages):
        first = max(ratio, 0.25) if stages > 1 else ratio
        share = first if stage == 0 else (ratio / first) ** (1 / (stages - 1))
        passing = m[m >= threshold]
        threshold += (passing - threshold).mean() * -math.log(share) if len(passing) else 0.0
        if (m >= threshold).sum() > most:
            low = max(low, threshold)
        else:
            high = min(high, threshold)
    return from_thresholds(m, low, high, k, most)


ORACLES: list[tuple[Sparsifier, Callable[[np.ndarray, int], set[int]]]] = [
    (MSTopK(0.01), mstopk),
    (MSTopK(0.3), mstopk),
    (MSTopK(0.01, rounds=1), lambda x, k: mstopk(x, k, 1)),
    (MSTopK(0.02, rounds=4), lambda x, k: mstopk(x, k, 4)),
    (RedSync(0.01), redsync),
    (RedSync(0.6), redsync),
    (DGC(0.001), lambda x, k: dgc(x, k, 0.001)),
    (DGC(0.02), lambda x, k: dgc(x, k, 0.02)),
    (SIDCo(0.01), lambda x, k: sidco(x, k, 0.01, 2)),
    (SIDCo(0.01, stages=1), lambda x, k: sidco(x, k, 0.01, 1)),
    (SIDCo(0.05, stages=3), lambda x, k: sidco(x, k, 0.05, 3)),
    (SIDCo(0.4), lambda x, k: sidco(x, k, 0.4, 2)),
]


def choose_on(backend: str, method: Sparsifier, x: np.ndarray, k: int) -> np.ndarray:
    """The indices that a method chooses with NumPy, or with a framework."""
    vector = make(backend, x, x.dtype.name)
    indices = as_numpy(method.choose(arrays_for(vector), vector, k))
    assert indices.dtype == np.int32
    return indices


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(("method", "oracle"), ORACLES, ids=[str(method) for method, _ in ORACLES])
def test_paper(method: Sparsifier, oracle: Callable[[np.ndarray, int], set[int]], kind: str, backend: str) -> None:
    x = SHAPES[kind](np.random.default_rng(3), 8000)
    k = elements_kept(method.ratio, len(x))
    chosen = choose_on(backend, method, x, k)
    assert len(chosen) == len(set(chosen.tolist())) == k
    expected = oracle(x, k)
    if kind == "few nonzero":  # zeros are as good as each other
        np.testing.assert_array_equal(np.sort(np.abs(x[chosen])), np.sort(np.abs(x[list(expected)])))
    else:
        assert set(chosen.tolist()) == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", [TopK(0.01), MSTopK(0.01), RedSync(0.01), DGC(0.01), DGC(0.001)], ids=str)
def test_the_largest_are_chosen(method: Sparsifier, backend: str) -> None:
    """On what gradients look like, these searches end with the k largest themselves."""
    for kind in ("normal", "double exponential", "heavy tail"):
        x = SHAPES[kind](np.random.default_rng(5), 200_000).astype(np.float32)
        k = elements_kept(method.ratio, len(x))
        chosen = choose_on(backend, method, x, k)
        np.testing.assert_array_equal(np.sort(np.abs(x[chosen])), np.sort(np.abs(x))[-k:])


def test_sidco_estimates_well_where_its_model_holds() -> None:
    x = np.random.default_rng(0).laplace(size=100_000).astype(np.float32)
    for stages in (1, 2, 3):
        chosen = SIDCo(0.01, stages).choose(arrays_for(x), x, 1000)
        assert np.sum(x[chosen] ** 2) > 0.97 * np.sum(np.sort(x**2)[-1000:])


@given(st.floats(0.0001, 1), st.integers(1, 6))
def test_shares_of_stages(ratio: float, stages: int) -> None:
    shares = stage_shares(ratio, stages)
    assert len(shares) == stages
    assert math.prod(shares) == pytest.approx(ratio)
    assert all(0 < share <= 1 for share in shares)


ODD = {
    "zeros": np.zeros(5000),
    "equal": np.full(5000, -3.0),
    "two values": np.tile([1.0, -2.0], 2500),
    "one": np.array([4.0]),
    "a zero": np.array([0.0]),
    "two": np.array([1.0, 2.0]),
    "one large": np.eye(1, 5000)[0],
    "nan": np.where(np.arange(5000) % 7 == 0, np.nan, 1.0),
    "all nan": np.full(5000, np.nan),
    "inf": np.where(np.arange(5000) == 17, -np.inf, np.arange(5000.0)),
    "all inf": np.full(5000, np.inf),
    "huge": np.linspace(1e30, 3e38, 5000),
    "tiny": np.linspace(0, 1e-44, 5000),
}


@pytest.mark.filterwarnings("ignore:.*overflow")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("values", list(ODD.values()), ids=list(ODD))
@pytest.mark.parametrize("kind", METHODS)
def test_exactly_k_of_anything(kind: type[Sparsifier], values: np.ndarray, backend: str) -> None:
    x = values.astype(np.float32)
    for ratio in (0.001, 0.01, 0.3, 1.0):
        k = elements_kept(ratio, len(x))
        chosen = choose_on(backend, kind(ratio), x, k)
        assert len(chosen) == len(set(chosen.tolist())) == k
        assert chosen.min() >= 0
        assert chosen.max() < len(x)
        if kind is not SIDCo and np.isfinite(values).all() and values.max() < 1e30:
            magnitude = np.abs(x)
            np.testing.assert_array_equal(np.sort(magnitude[chosen]), np.sort(magnitude)[-k:])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.floats(0.001, 1), st.integers(0, 10**6), st.sampled_from(METHODS))
def test_any_size_and_ratio(size: int, ratio: float, seed: int, kind: type[Sparsifier]) -> None:
    x = np.round(np.random.default_rng(seed).normal(size=size) * 3).astype(np.float32)  # many ties
    k = elements_kept(ratio, size)
    chosen = kind(ratio).choose(arrays_for(x), x, k)
    assert len(set(chosen.tolist())) == len(chosen) == k


@pytest.mark.parametrize("spec", [
    "topk:ratio=0.01", "mstopk:ratio=0.01,rounds=25", "redsync:ratio=0.01,values=fp16", "dgc:ratio=0.001,clip=1",
    "dgc:ratio=0.01,nesterov=true", "sidco:ratio=0.01,stages=2", "randomk:ratio=0.01,values=fp16",
])  # fmt: skip
def test_nothing_waits_for_an_accelerator(spec: str) -> None:
    """Tensors without data cannot be asked for a number or for how many of their elements are not zero."""
    from hvdcomp.arrays import torch_arrays as xp

    compressor = parse_compressor(spec)
    memory = compressor.default_memory
    gradient = torch.empty(300, 1000, device="meta")
    factor = memory.gradient_factor(xp, [gradient, gradient], 2)
    x, kept = memory.compensate(xp, gradient if factor is None else gradient * factor, memory.prepare(xp, gradient, ()))
    exchange = compressor.aggregate(xp, x, (), Context("w", 0, 0, 0, 2))
    request = exchange.send(None)
    with pytest.raises(StopIteration) as end:
        exchange.send(request.array if isinstance(request, AllReduce) else [request.parts, request.parts])
    outcome = end.value.value
    assert outcome.mean.shape == gradient.shape
    assert all(kept.shape == gradient.shape for kept in memory.update(xp, x, outcome.sent, kept))
    with pytest.raises((RuntimeError, NotImplementedError)):  # what the test relies on
        bool(gradient.sum() > 0)
    with pytest.raises((RuntimeError, NotImplementedError)):
        gradient.nonzero()


# How values and indices travel.


def plain_index_bytes(k: int, d: int) -> int:
    if d <= 65536:
        return 2 * k
    return min(4 * k, 2 * k + 4 * math.ceil(d / 65536))


@given(st.integers(1, 10**6), st.floats(1, 1e5), st.sampled_from(["same", "fp16"]))
def test_level_is_the_largest_within_the_budget(d: int, factor: float, values: str) -> None:
    method = TopK(0.5, values=values)
    level = method.level_for(factor, (d,))
    assert isinstance(level, float)
    k = elements_kept(level, d)
    size_of = lambda count: count * (4 if values == "same" else 2) + plain_index_bytes(count, d)  # noqa: E731
    assert method.payload_bytes((d,), level) == size_of(k)
    assert k == 1 or size_of(k) <= 4 * d / factor
    assert k == d or size_of(k + 1) > 4 * d / factor * (1 - 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d", [1, 300, 65535, 65536, 65537, 131072, 131073, 400_000])
def test_indices_arrive_as_they_were_sent(backend: str, d: int) -> None:
    random = np.random.default_rng(d)
    for k in {1, min(d, 2), min(d, 7), math.ceil(d / 300), d}:
        chosen = random.permutation(d)[:k].astype(np.int32)
        chosen[0] = d - 1 if d - 1 not in chosen else chosen[0]
        vector = make(backend, np.arange(1.0, d + 1))
        xp = arrays_for(vector)
        parts, sent = sparse_payload.encode(xp, vector, make(backend, chosen, "int32"), "same")
        decoded = as_numpy(sparse_payload.decode_indices(xp, parts, d))
        assert decoded.dtype == np.int32
        np.testing.assert_array_equal(decoded, as_numpy(sent.indices))
        np.testing.assert_array_equal(np.sort(decoded), np.sort(chosen))
        np.testing.assert_array_equal(as_numpy(parts[0]), decoded + 1.0)
        assert sum(as_numpy(part).nbytes for part in parts) == 4 * k + plain_index_bytes(k, d)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_full_block_among_empty_ones(backend: str) -> None:
    vector = make(backend, np.zeros(4 * 65536))
    chosen = np.arange(65536, 2 * 65536, dtype=np.int32)[::-1].copy()
    xp = arrays_for(vector)
    parts, _ = sparse_payload.encode(xp, vector, make(backend, chosen, "int32"), "fp16")
    np.testing.assert_array_equal(as_numpy(parts[2]), [0, 65536, 0, 0])
    np.testing.assert_array_equal(as_numpy(sparse_payload.decode_indices(xp, parts, 4 * 65536)), np.sort(chosen))


SPECS = [
    "topk:ratio=0.05,values=fp16", "mstopk:ratio=0.05", "mstopk:ratio=0.05,values=fp16", "redsync:ratio=0.02",
    "sidco:ratio=0.03,stages=2", "dgc:ratio=0.01", "dgc:ratio=0.05,clip=1.0", "randomk:ratio=0.05,values=fp16",
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_steps_on_ranks(backend: str, dtype: str, spec: str, size: int) -> None:
    """Results are the mean of what was sent, alike on all ranks; nothing is lost; bytes are as announced."""
    compressor = parse_compressor(spec)
    for shape in [(40, 53), (1,), (3, 65536 // 3 + 300)]:
        if shape[-1] > 1000 and (size in (2, 4) or dtype == "float16"):
            continue
        runs = run_engines(
            size, infos({"w": shape}, dtype), compressor,
            lambda r, s, shape=shape: {
                "w": make(backend, np.random.default_rng([r, s]).laplace(size=shape), dtype)
            }, 3, memory=SpyFeedback,
        )  # fmt: skip
        assert_same_on_all_ranks(runs)
        cost = runs[0].engine.ledger.last.tensors["w"]
        assert cost.bytes_sent == compressor.payload_bytes(shape, dtype=dtype)
        assert cost.floats_sent == elements_kept(compressor.level, number_of_elements(shape))
        for step in range(3):
            logs = [run.engine.memory.log[step] for run in runs]
            for log in logs:
                sent = densify(log.sent, shape).astype(np.float64)
                x, after = as_numpy(log.left).astype(np.float64), as_numpy(log.after).astype(np.float64)
                # What was sent as it is leaves nothing behind, and a rounding error fits the type it is kept in.
                np.testing.assert_allclose(sent + after, x, rtol=0 if wide_dtype(dtype) == dtype else 2e-7)
            mean = sum(densify(log.sent, shape).astype(np.float64) for log in logs) / size
            loose = "randomk" in spec and compressor.values == "fp16"
            tolerance = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 2e-3 if loose else 1e-6}.get(
                dtype, 2e-3 if loose else 1e-14
            )
            np.testing.assert_allclose(as_numpy(runs[0].results[step]["w"]), mean, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [TopK, RandomK])
def test_what_half_precision_cannot_hold_is_kept(kind: Any, backend: str, size: int) -> None:
    values = np.array([[1e5, -3e5, 1 / 3, 1e-9]])
    largest = 65504.0 if kind is TopK else float(np.float16(65504 / 2 / size))
    third = float(np.float16(1 / 3))
    runs = run_engines(
        size, infos({"w": (1, 4)}), kind(1.0, values="fp16"), lambda r, s: {"w": make(backend, values)},
        memory=ErrorFeedback,
    )  # fmt: skip
    mean, kept = as_numpy(runs[0].results[0]["w"]), as_numpy(runs[0].engine.states["w"].memory[0])
    np.testing.assert_allclose(mean, [[largest, -largest, third, 0]], rtol=2e-3)
    np.testing.assert_allclose(kept, [[1e5 - largest, largest - 3e5, 1 / 3 - third, 1e-9]], rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("spec", [
    "mstopk:ratio=0.1,rounds=0", "mstopk:ratio=0", "redsync:ratio=1.5", "sidco:ratio=0.1,stages=0",
    "topk:ratio=0.1,values=fp8", "randomk:ratio=0.1,values=int8", "dgc:ratio=0.1,momentum=1", "dgc:ratio=0.1,clip=-1",
])  # fmt: skip
def test_wrong_settings_are_refused(spec: str) -> None:
    with pytest.raises(SpecError, match=r"is not allowed"):
        parse_compressor(spec)


@pytest.mark.parametrize("spec", [*SPECS, "mstopk:ratio=0.01,rounds=10", "dgc:ratio=0.001,nesterov=True,clip=0.5"])
def test_spec_strings_come_back(spec: str) -> None:
    assert parse_compressor(str(parse_compressor(spec))) == parse_compressor(spec)
