"""QSGD, TernGrad, natural compression and Global-QSGD against plain NumPy statements of the papers.

The statements are in float64 and are given the uniform numbers that the method draws. Tests of distributions allow
five standard deviations: one false alarm in about a million.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import (
    QSGD,
    Compressor,
    ConfigurationError,
    GlobalQSGD,
    Natural,
    NoMemory,
    SpecError,
    TernGrad,
)
from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.types import number_of_elements
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Context
from hvdcomp.compressors.randomness import random_words, rank_key, uniform
from hvdcomp.exchange.engine import Engine
from tests.harness import (
    BACKENDS,
    BACKENDS_AND_DTYPES,
    INSTALLED,
    as_numpy,
    assert_same_on_all_ranks,
    bits,
    infos,
    make,
    run_engines,
)
from tests.lockstep import run_lockstep

COMPRESSORS: list[Compressor] = [
    *(QSGD(bits=width) for width in (1, 2, 3, 8)),
    QSGD(bits=4, bucket=7),
    TernGrad(),
    TernGrad(clip=0),
    Natural(),
    *(GlobalQSGD(bits=width) for width in (5, 8)),
]
SHAPES = st.lists(st.integers(1, 8), min_size=0, max_size=4).map(tuple)
# Where a number lies this close to the border between two roundings, float32 may decide otherwise than float64.
BORDER = 2e-5


def noise(name: str, count: int, rank: int, step: int = 0) -> np.ndarray:
    """The uniform numbers of a rank in the step of a lockstep run with seed 0."""
    key = rank_key(Context("w", step, 0, rank, 1), name)
    return uniform(numpy_arrays, key, count, like=np.zeros(1, np.float32)).astype(np.float64)


def choose(v: np.ndarray, u: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`upper` with probability (v - lower) / (upper - lower), else `lower`; and where that is not on the border."""
    probability = np.where(upper > lower, (v - lower) / np.where(upper > lower, upper - lower, 1), 0)
    return np.where(u >= 1 - probability, upper, lower), np.abs(u - (1 - probability)) > BORDER


def qsgd(x: np.ndarray, compressor: QSGD, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bucket by bucket: the multiple of norm / s below or above each element."""
    result, sure = np.zeros(len(x)), np.ones(len(x), bool)
    for start in range(0, len(x), compressor.bucket):
        part = slice(start, start + compressor.bucket)
        norm = np.float64(np.float32(np.linalg.norm(x[part])))
        if norm == 0:
            continue
        if compressor.bits == 1:
            lower, upper = np.full(len(x[part]), -norm), np.full(len(x[part]), norm)
        else:
            unit = norm / (2 ** (compressor.bits - 1) - 1)
            lower = np.floor(x[part] / unit) * unit
            upper = lower + unit
        result[part], sure[part] = choose(x[part], u[part], lower, upper)
    return result, sure


def terngrad(x: np.ndarray, compressor: TernGrad, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bound = compressor.clip * np.sqrt(np.mean(x * x)) if compressor.clip else np.inf
    clipped = np.clip(x, -bound, bound)
    scale = np.abs(clipped).max()
    if scale == 0:
        return np.zeros(len(x)), np.ones(len(x), bool)
    ternary, sure = choose(clipped / scale, u, np.floor(clipped / scale), np.floor(clipped / scale) + 1)
    at_bound = np.abs(np.abs(clipped) - scale) < BORDER * scale
    return np.where(at_bound, np.sign(clipped), ternary) * scale, sure | at_bound


def natural(x: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The power of two below or above; below 2**-126 the choice is between 0 and that."""
    exponent = np.frexp(np.abs(x))[1]
    lower = np.where(np.abs(x) < 2.0**-126, 0, np.ldexp(1.0, exponent - 1))
    upper = np.where(np.abs(x) < 2.0**-126, 2.0**-126, 2 * lower)
    probability = (np.abs(x) - lower) / (upper - lower)
    return np.sign(x) * np.where(u >= 1 - probability, upper, lower), np.abs(u - (1 - probability)) > 2.0**-23


def globalqsgd(x: np.ndarray, largest: float, levels: int, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if largest == 0:
        return np.zeros(len(x)), np.ones(len(x), bool)
    v = x / largest * levels
    whole, sure = choose(v, u, np.floor(v), np.floor(v) + 1)
    # The distance from the border between the two; at a whole v that lies at u = 0 as well as at u = 1.
    away = np.abs(u - (1 - (v - np.floor(v))))
    sure &= np.minimum(away, 1 - away) > np.abs(v) * 2.0**-22  # float32 has no more digits
    return np.clip(whole, -levels, levels) * largest / levels, sure


def decoded(compressor: Compressor, xs: list[np.ndarray], step: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """C(x) of each rank by the paper, and which elements are not on a border."""
    result = []
    for rank, x in enumerate(np.asarray(x, np.float64).reshape(-1) for x in xs):
        if isinstance(compressor, Natural):
            words = random_words(
                numpy_arrays, rank_key(Context("w", step, 0, rank, 1), "natural"), len(x), np.zeros(1, np.float32)
            )
            result.append(natural(x, ((words >> 9) & 0x7FFFFF) / 2.0**23))
            continue
        u = noise(compressor.name, len(x), rank, step)
        if isinstance(compressor, QSGD):
            result.append(qsgd(x, compressor, u))
        elif isinstance(compressor, TernGrad):
            result.append(terngrad(x, compressor, u))
        else:
            assert isinstance(compressor, GlobalQSGD)
            levels = (2**compressor.bits - 1) // (2 * len(xs))
            result.append(globalqsgd(x, max(np.abs(each).max() for each in xs), levels, u))
    return result


def bytes_by_hand(compressor: Compressor, shape: tuple[int, ...]) -> int:
    size = number_of_elements(shape)
    if isinstance(compressor, QSGD):
        # Whole bytes of each power of two in the width.
        packed = sum(-(-size * width // 8) for width in (1, 2, 4, 8) if compressor.bits & width)
        return packed + 4 * -(-size // compressor.bucket)
    if isinstance(compressor, TernGrad):
        return (size + 3) // 4 + 4
    if isinstance(compressor, Natural):
        return size + (size + 7) // 8
    assert isinstance(compressor, GlobalQSGD)
    return 4 + 4 * -(-size // (32 // compressor.bits))


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@given(shape=SHAPES, seed=st.integers(0, 1000), size=st.integers(1, 3), power=st.integers(-8, 8))
def test_codes_are_those_of_the_paper(
    compressor: Compressor, shape: tuple[int, ...], seed: int, size: int, power: int
) -> None:
    generator = np.random.default_rng(seed)
    drawn = [
        (generator.standard_normal(shape) * (generator.random(shape) < 0.8) * 10.0**power).astype(np.float32)
        for _ in range(size)
    ]
    expected = decoded(compressor, drawn, step=seed)
    payloads = []
    for backend in INSTALLED:
        xs = [make(backend, x) for x in drawn]
        exchanged = run_lockstep(compressor, xs, step=seed)
        assert exchanged.bytes_sent() == bytes_by_hand(compressor, shape) == compressor.payload_bytes(shape)
        for x, original, (values, sure), outcome in zip(xs, drawn, expected, exchanged.outcomes, strict=True):
            assert tuple(outcome.mean.shape) == tuple(outcome.sent.shape) == shape
            sent = as_numpy(outcome.sent).reshape(-1)
            scale = max(np.abs(original).max(), 10.0**power)
            np.testing.assert_allclose(sent[sure], values[sure], rtol=2e-6, atol=2e-6 * scale)
            mean = np.mean([as_numpy(each.sent) for each in exchanged.outcomes], 0)
            np.testing.assert_allclose(as_numpy(outcome.mean), mean, rtol=2e-6, atol=2e-6 * scale)
            np.testing.assert_array_equal(as_numpy(x), original)
        payloads.append([as_numpy(outcome.sent) for outcome in exchanged.outcomes])
    for ours, *others in zip(*payloads, strict=True):
        for theirs in others:
            np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6 * 10.0**power)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_through_the_engine(backend: str, dtype: str, compressor: Compressor, size: int) -> None:
    """Results on all ranks are the same bits, of the gradient's type, and the mean of what the ranks send."""

    def gradients(rank: int, step: int) -> dict[str, Any]:
        return {"w": make(backend, np.random.default_rng([rank, step]).standard_normal((9, 4)), dtype)}

    runs = run_engines(size, infos({"w": (9, 4)}, dtype), compressor, gradients, steps=2, memory=NoMemory)
    assert_same_on_all_ranks(runs)
    for step in range(2):
        xs = [as_numpy(gradients(rank, step)["w"]) for rank in range(size)]
        expected = decoded(compressor, xs, step)
        sure = np.logical_and.reduce([each[1] for each in expected])
        result = runs[0].results[step]["w"]
        assert arrays_for(result).dtype_name(result) == dtype
        tolerance = {"float16": 2e-3, "bfloat16": 1.6e-2}.get(dtype, 2e-6)
        mean = np.mean([each[0] for each in expected], 0)
        np.testing.assert_allclose(as_numpy(result).reshape(-1)[sure], mean[sure], rtol=tolerance, atol=tolerance)
        assert sure.mean() > 0.9
    entry = runs[0].engine.ledger.last
    assert entry is not None
    assert entry.tensors["w"].bytes_sent == compressor.payload_bytes((9, 4), dtype=dtype)


# --- distributions ---

TILES = 2000
UNBIASED = [
    *(QSGD(bits=width, bucket=48) for width in (1, 2, 4)),
    TernGrad(clip=0),
    Natural(),
    GlobalQSGD(bits=4),
    GlobalQSGD(bits=8),
]


@pytest.mark.parametrize("compressor", UNBIASED, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_expectation_is_the_gradient(backend: str, compressor: Compressor) -> None:
    """48 numbers in 2000 copies over 5 steps: each mean within 5 standard errors, and their squares as expected."""
    numbers = np.random.default_rng(7).standard_normal(48).astype(np.float32)
    numbers[:3] = 0, 1, -0.5
    x = make(backend, np.tile(numbers, TILES))
    drawn = np.concatenate(
        [
            as_numpy(run_lockstep(compressor, [x], step).outcomes[0].sent).astype(np.float64).reshape(TILES, 48)
            for step in range(5)
        ]
    )
    spread = drawn.std(0)
    error = drawn.mean(0) - numbers
    certain = spread == 0
    np.testing.assert_allclose(drawn[0][certain], numbers[certain], rtol=1e-6)
    z = error[~certain] / (spread[~certain] / np.sqrt(len(drawn)))
    assert np.abs(z).max() < 5
    assert abs((z**2).mean() - 1) < 5 * np.sqrt(2 / len(z))
    assert certain.sum() < 10


@pytest.mark.parametrize(
    ("compressor", "unit"), [(QSGD(bits=3, bucket=4), np.sqrt(30) / 3), (GlobalQSGD(bits=3), 4 / 3), (TernGrad(0), 4)]
)
def test_the_variance_is_that_of_two_neighbors(compressor: Compressor, unit: float) -> None:
    """p (1 - p) unit**2, with p the distance from the lower neighbor in units."""
    numbers = np.array([1, 2, -3, 4], np.float32)
    drawn = run_lockstep(compressor, [np.tile(numbers, 10000)]).outcomes[0].sent.reshape(10000, 4)
    p = numbers / unit - np.floor(numbers / unit)
    np.testing.assert_allclose(drawn.var(0), p * (1 - p) * unit**2, atol=5 * unit**2 / np.sqrt(10000))


def test_clipped_terngrad_has_the_expectation_of_the_clipped_gradient() -> None:
    numbers = np.random.default_rng(3).standard_normal(48).astype(np.float32)
    numbers[5], numbers[6] = 9, -9
    x = np.tile(numbers, TILES)
    bound = 2.5 * np.sqrt(np.mean(numbers.astype(np.float64) ** 2))
    drawn = run_lockstep(TernGrad(), [x]).outcomes[0].sent.reshape(TILES, 48)
    assert bound < 9
    assert set(np.round(np.unique(drawn) / bound, 5)) == {-1, 0, 1}
    error = drawn.mean(0) - np.clip(numbers, -bound, bound)
    assert np.abs(error).max() < 5 * bound / 2 / np.sqrt(TILES)


# --- each method's own ---


@pytest.mark.parametrize("backend", BACKENDS)
def test_natural_leaves_powers_of_two_alone(backend: str) -> None:
    values = [1.0, -2.0, 0.5, -(2.0**-126), 2.0**127, 0.0, -0.0, 3.0]
    sent = as_numpy(run_lockstep(Natural(), [make(backend, values)]).outcomes[0].sent)
    assert sent[:7].tolist() == values[:7]
    assert sent[7] in (2, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_natural_rounds_numbers_at_the_ends_of_float32(backend: str) -> None:
    x = make(backend, np.concatenate([np.full(20000, 2.0**-128), np.full(100, -3.4e38)]))
    sent = as_numpy(run_lockstep(Natural(), [x]).outcomes[0].sent).astype(np.float64)
    assert set(np.unique(sent[:20000])) == {0, 2.0**-126}
    assert abs(sent[:20000].mean() / 2.0**-128 - 1) < 5 * np.sqrt(3 / 20000)
    assert set(np.unique(sent[20000:])) == {-(2.0**127)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize("power", [-30, 30])
def test_very_small_and_very_large_gradients(backend: str, compressor: Compressor, power: int) -> None:
    """Their squares do not fit into float32."""
    numbers = np.random.default_rng(0).standard_normal(64)
    expected = as_numpy(run_lockstep(compressor, [make(backend, numbers)]).outcomes[0].mean)
    result = as_numpy(run_lockstep(compressor, [make(backend, numbers * 2.0 ** (3 * power))]).outcomes[0].mean)
    np.testing.assert_allclose(result.astype(np.float64) / 2.0 ** (3 * power), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("width", "size"), [(2, 1), (3, 2), (3, 3), (4, 7), (5, 15), (6, 31), (7, 5), (8, 127), (8, 3), (11, 9), (16, 300)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sum_of_global_qsgd_leaves_its_field(backend: str, width: int, size: int) -> None:
    """All ranks at the same end of the range, in every pattern of neighboring fields; `run_lockstep` watches int32."""
    count = 6 * (32 // width) + 1
    x = np.random.default_rng(width).choice([-3.0, 3.0], count)
    exchanged = run_lockstep(GlobalQSGD(bits=width), [make(backend, x)] * size)
    np.testing.assert_allclose(as_numpy(exchanged.outcomes[-1].mean), x, rtol=1e-6)


def test_global_qsgd_sends_floats_for_the_scale_and_integers_for_the_sum() -> None:
    gradients = {rank: np.random.default_rng(rank).standard_normal((8, 5)).astype(np.float32) for rank in range(3)}
    runs = run_engines(3, infos({"w": (8, 5)}), GlobalQSGD(bits=8), lambda rank, step: {"w": gradients[rank]})
    started = runs[0].engine.communicator.started
    assert [(kind, dtype, size) for kind, dtype, _, size in started] == [
        ("allreduce max", "float32", 4),
        ("allgather", "uint8", 8),  # the flag of non-finite gradients, padded
        ("allreduce sum", "int32", 40),
    ]


def test_ranks_too_many_for_a_field_are_refused_everywhere() -> None:
    refused = []

    def work(communicator: Any) -> None:
        engine = Engine(communicator, infos({"w": (4, 4)}), GlobalQSGD(bits=3), min_numel=0)
        with pytest.raises(
            ConfigurationError, match=r"gradients of at most 3 ranks, but there are 4 ranks, which need .*bits=4"
        ):
            engine.step({"w": np.ones((4, 4), np.float32)})
        refused.append(communicator.rank)

    run_ranks(4, work)
    assert sorted(refused) == [0, 1, 2, 3]
    for width in range(2, 17):
        most = (2**width - 1) // 2
        assert GlobalQSGD(bits=width).levels(most) == 1
        with pytest.raises(ConfigurationError):
            GlobalQSGD(bits=width).levels(most + 1)
        assert GlobalQSGD(bits=(2 * most).bit_length()).levels(most) >= 1


# --- special gradients ---


@pytest.mark.parametrize("value", [3.0, -0.7])
@pytest.mark.parametrize("compressor", [TernGrad(), TernGrad(0), GlobalQSGD(4), GlobalQSGD(8)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5)])
def test_constant_gradients_arrive_whole(compressor: Compressor, value: float, shape: tuple[int, int]) -> None:
    for step in range(3):
        outcome = run_lockstep(compressor, [np.full(shape, value, np.float32)] * 3, step).outcomes[0]
        np.testing.assert_allclose(outcome.mean, np.full(shape, value), rtol=1e-6)


@pytest.mark.parametrize("width", range(1, 9))
def test_one_element_is_its_own_norm(width: int) -> None:
    for value in (5.0, -0.1):
        outcome = run_lockstep(QSGD(bits=width), [np.array([value], np.float32)]).outcomes[0]
        np.testing.assert_allclose(outcome.mean, [value], rtol=1e-6)


# --- memory, randomness, levels ---


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_unbiased_methods_keep_nothing_unless_told_to(compressor: Compressor) -> None:
    assert not compressor.biased
    assert compressor.default_memory == NoMemory()


@pytest.mark.parametrize("compressor", [QSGD(4), TernGrad(), Natural(), GlobalQSGD(8)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_and_step_rounds_otherwise_and_a_run_can_be_repeated(backend: str, compressor: Compressor) -> None:
    values = np.random.default_rng(0).standard_normal((16, 16))
    xs = [make(backend, values) for _ in range(3)]

    def sent(step: int, seed: int, name: str = "w") -> list[bytes]:
        exchanged = run_lockstep(compressor, xs, step, seed, name)
        return [bits(outcome.sent) for outcome in exchanged.outcomes]

    drawn = [*sent(0, 0), *sent(1, 0), *sent(0, 1), *sent(0, 0, "v")]
    assert len(set(drawn)) == len(drawn)
    assert sent(0, 0) == drawn[:3]


@pytest.mark.parametrize("compressor", [QSGD(4), QSGD(1), TernGrad(0), Natural(), GlobalQSGD(8)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_payloads_are_the_same_in_every_framework(backend: str, compressor: Compressor) -> None:
    """Bit for bit, where no sum is rounded otherwise: powers of two."""
    values = 2.0 ** np.random.default_rng(0).integers(-3, 3, (40, 9))
    ours, theirs = (run_lockstep(compressor, [make(each, values)] * 2) for each in ("numpy", backend))
    assert [ours.payloads(rank) for rank in (0, 1)] == [theirs.payloads(rank) for rank in (0, 1)]


@pytest.mark.parametrize("compressor", [QSGD(bits=4), GlobalQSGD()], ids=str)
@given(factor=st.floats(1, 64), shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple))
def test_levels_for_a_compression_factor(compressor: Compressor, factor: float, shape: tuple[int, ...]) -> None:
    allowed = range(1, 9) if isinstance(compressor, QSGD) else range(2, 17)
    level = compressor.level_for(factor, shape)
    assert level in allowed
    budget = 4 * number_of_elements(shape) / factor
    if level > allowed[0]:
        assert compressor.payload_bytes(shape, level) <= budget
    for better in allowed:
        if better > level:
            assert compressor.payload_bytes(shape, better) > budget
    assert compressor.at_level(level).payload_bytes(shape) == compressor.payload_bytes(shape, level)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_descriptions(compressor: Compressor) -> None:
    assert parse_compressor(str(compressor)) == compressor
    assert "arXiv" in compressor.reference


def test_spec_strings() -> None:
    assert parse_compressor("qsgd:bits=4,bucket=512") == QSGD(bits=4)
    assert parse_compressor("terngrad:clip=2.5") == TernGrad()
    assert parse_compressor("terngrad:clip=inf") == TernGrad(clip=float("inf"))
    assert parse_compressor("natural") == Natural()
    assert parse_compressor("globalqsgd:bits=4") == GlobalQSGD(bits=4)
    same = [run_lockstep(TernGrad(clip), [np.arange(9, dtype=np.float32)]).payloads() for clip in (0, float("inf"))]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: QSGD(bits=0), "qsgd: bits=0 is not allowed; it must be a whole number from 1 to 8"),
        (lambda: QSGD(bits=9), "bits=9 is not allowed"),
        (lambda: QSGD(bits=2.5), "bits=2.5 is not allowed"),
        (lambda: QSGD(bits=4, bucket=0), "bucket=0 is not allowed"),
        (lambda: TernGrad(clip=-1), "clip=-1 is not allowed"),
        (lambda: TernGrad(clip=float("nan")), "clip=nan is not allowed"),
        (lambda: GlobalQSGD(bits=1), "globalqsgd: bits=1 is not allowed; it must be a whole number from 2 to 16"),
        (lambda: GlobalQSGD(bits=17), "bits=17 is not allowed"),
        (lambda: QSGD(bits=4).level_for(0.5, (4,)), "compression factor 0.5 is not allowed"),
    ],
)
def test_wrong_values_are_refused(make_it: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace(".", r"\.")):
        make_it()
