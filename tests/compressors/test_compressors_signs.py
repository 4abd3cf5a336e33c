"""SignSGD, one-bit SGD and EF-SignSGD against plain NumPy statements of the papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import Compressor, EFSignSGD, ErrorFeedback, NoMemory, OneBit, SignSGD, SpecError
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import number_of_elements
from hvdcomp.compressors.parsing import parse_compressor
from tests.harness import (
    BACKENDS,
    BACKENDS_AND_DTYPES,
    DTYPES,
    INSTALLED,
    as_numpy,
    assert_same_on_all_ranks,
    infos,
    make,
    needing,
    run_engines,
)
from tests.lockstep import last_of_many, run_lockstep

COMPRESSORS = [SignSGD(), SignSGD("elements"), OneBit(), OneBit(per_row=True), EFSignSGD()]
WITH_MAGNITUDE = [OneBit(), OneBit(per_row=True), EFSignSGD()]
SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-6, "float64": 1e-6}


def sign_votes(x: np.ndarray, compressor: SignSGD, step: int, rank: int) -> np.ndarray:
    """-1, 0 or 1 for each element."""
    votes = np.sign(x).astype(int)
    if compressor.zeros == "elements" or x.ndim < 2:
        return votes
    for row, vote in zip(x, votes, strict=True):
        if row.any():
            vote[row == 0] = 1 if (step + rank) % 2 == 0 else -1
    return votes


def one_bit(x: np.ndarray) -> np.ndarray:
    """Every element replaced by the mean of those that share its bit."""
    result = np.empty_like(x)
    for side in (x > 0, x <= 0):
        if side.any():
            result[side] = x[side].mean()
    return result


def decoded(compressor: Compressor, x: np.ndarray, step: int = 0, rank: int = 0) -> np.ndarray:
    """C(x) in float64, by the paper."""
    x = np.asarray(x, np.float64)
    if isinstance(compressor, SignSGD):
        return sign_votes(x, compressor, step, rank).astype(float)
    if isinstance(compressor, OneBit):
        if compressor.per_row and x.ndim:
            return np.stack([one_bit(np.atleast_1d(row)).reshape(row.shape) for row in x])
        return one_bit(x)
    return np.where(x >= 0, 1, -1) * np.abs(x).mean()


def aggregated(compressor: Compressor, xs: list[np.ndarray], step: int = 0) -> np.ndarray:
    """What the optimizer gets, in float64."""
    parts = [decoded(compressor, x, step, rank) for rank, x in enumerate(xs)]
    return np.sign(sum(parts)) if isinstance(compressor, SignSGD) else np.mean(parts, 0)


def bytes_by_hand(compressor: Compressor, shape: tuple[int, ...]) -> int:
    size, rows = number_of_elements(shape), shape[0] if shape else 1

    def octets(count: int) -> int:
        return (count + 7) // 8

    if isinstance(compressor, SignSGD):
        return octets(size) + octets(size if compressor.zeros == "elements" else rows)
    if isinstance(compressor, OneBit):
        return octets(size) + 8 * (rows if compressor.per_row else 1)
    return octets(size) + 4


def gradients_with_zeros(shape: tuple[int, ...], backend: str, dtype: str) -> Callable[[int, int], dict[str, Any]]:
    def gradients(rank: int, step: int) -> dict[str, Any]:
        generator = np.random.default_rng([rank, step])
        return {"w": make(backend, generator.standard_normal(shape) * (generator.random(shape) < 0.7), dtype)}

    return gradients


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_results_are_those_of_the_paper(backend: str, dtype: str, compressor: Compressor, size: int) -> None:
    gradients = gradients_with_zeros((5, 3, 4), backend, dtype)
    tensors = infos({"w": (5, 3, 4)}, dtype)
    runs = run_engines(size, tensors, compressor, gradients, steps=3, memory=NoMemory)
    assert_same_on_all_ranks(runs)
    for step in range(3):
        expected = aggregated(compressor, [as_numpy(gradients(rank, step)["w"]) for rank in range(size)], step)
        result = runs[0].results[step]["w"]
        assert arrays_for(result).dtype_name(result) == dtype
        if isinstance(compressor, SignSGD):
            np.testing.assert_array_equal(as_numpy(result), expected)
        else:
            np.testing.assert_allclose(as_numpy(result), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@given(shape=SHAPES, seed=st.integers(0, 1000), size=st.integers(1, 3))
def test_any_shape(compressor: Compressor, shape: tuple[int, ...], seed: int, size: int) -> None:
    generator = np.random.default_rng(seed)
    drawn = [generator.integers(-2, 3, shape) * generator.random(shape) for _ in range(size)]
    payloads = []
    for backend in INSTALLED:
        xs = [make(backend, x) for x in drawn]
        exchanged = run_lockstep(compressor, xs, step=seed)
        assert exchanged.bytes_sent() == bytes_by_hand(compressor, shape) == compressor.payload_bytes(shape)
        for rank, (x, outcome) in enumerate(zip(xs, exchanged.outcomes, strict=True)):
            assert tuple(outcome.mean.shape) == tuple(outcome.sent.shape) == shape
            expected = aggregated(compressor, [as_numpy(each) for each in xs], seed)
            np.testing.assert_allclose(as_numpy(outcome.mean), expected, rtol=1e-6, atol=1e-6)
            sent = decoded(compressor, as_numpy(x), seed, rank)
            np.testing.assert_allclose(as_numpy(outcome.sent), sent, rtol=1e-6, atol=1e-6)
            np.testing.assert_array_equal(as_numpy(x), drawn[rank].astype(np.float32))
        payloads.append([exchanged.payloads(rank)[0] for rank in range(size)])
    assert all(payload == payloads[0] for payload in payloads)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 4), (3, 3), (17, 5), (8, 16)])
def test_the_ledger_counts_what_was_said_in_advance(compressor: Compressor, shape: tuple[int, ...]) -> None:
    runs = run_engines(2, infos({"w": shape}), compressor, gradients_with_zeros(shape, "numpy", "float32"))
    step = runs[0].engine.ledger.last
    assert step is not None
    assert step.tensors["w"].bytes_sent == compressor.payload_bytes(shape) == bytes_by_hand(compressor, shape)
    # With the flag of non-finite gradients and the padding of rows.
    sent = sum(started[3] for started in runs[0].engine.communicator.started)
    assert sent == -(-(compressor.payload_bytes(shape) + 4) // 8) * 8


# --- SignSGD's zero votes ---


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_gradient_vote_for_neither(backend: str) -> None:
    """An embedding of four words: one seen by nobody, one by rank 0 alone, one by two ranks, one by all."""
    seen = [{1, 2, 3}, {2, 3}, {3}]
    sign = np.array([[1, -1, 1], [-1, -1, 1], [1, 1, -1], [-1, 1, -1]])
    xs = [make(backend, sign * np.array([[word in words] for word in range(4)])) for words in seen]
    for step in (0, 1):
        for outcome in run_lockstep(SignSGD(), xs, step).outcomes:
            np.testing.assert_array_equal(as_numpy(outcome.mean), sign * [[0], [1], [1], [1]])


@pytest.mark.parametrize("compressor", [SignSGD(), SignSGD("elements")], ids=str)
def test_a_tie_gives_zero(compressor: SignSGD) -> None:
    xs = [np.array([[1, 1, -2]], np.float32), np.array([[-3, 1, -1]], np.float32)]
    assert run_lockstep(compressor, xs).outcomes[0].mean.tolist() == [[0, 1, -1]]


def test_zeros_among_nonzero_elements_cancel_between_two_ranks() -> None:
    xs = [np.array([[0, 1]], np.float32)] * 2
    for step in (0, 1):
        assert run_lockstep(SignSGD(), xs, step).outcomes[1].mean.tolist() == [[0, 1]]


def test_zeros_among_nonzero_elements_of_one_rank_cancel_within_two_steps() -> None:
    xs = [np.array([[0, -0.0, 1]], np.float32)]
    results = [run_lockstep(SignSGD(), xs, step).outcomes[0].mean for step in (6, 7)]
    assert (results[0] + results[1]).tolist() == [[0, 0, 2]]
    assert np.abs(results[0]).tolist() == [[1, 1, 1]]


def test_with_a_bit_for_each_element_every_zero_votes_for_neither() -> None:
    xs = [np.array(row, np.float32).reshape(1, 3) for row in ([0, 0, 1], [0, 2, -1], [0, 0, -1])]
    for step in (0, 1):
        assert run_lockstep(SignSGD("elements"), xs, step).outcomes[0].mean.tolist() == [[0, 1, -1]]


def test_elements_of_a_vector_are_rows() -> None:
    assert run_lockstep(SignSGD(), [np.array([0, 3, -2], np.float32)]).outcomes[0].mean.tolist() == [0, 1, -1]


@pytest.mark.parametrize(
    ("backend", "size"),
    [needing(backend, backend, size) for backend in DTYPES for size in [127, 128, 300]],
)
def test_hundreds_of_votes_are_counted(backend: str, size: int) -> None:
    """Unanimous, decided by one vote (or tied), and with many abstentions."""
    generator = np.random.default_rng(size)
    half = generator.permutation(size) < size // 2 + 1
    xs = [
        make(backend, [[1.0, -1.0, 1.0 if half[rank] else -1.0], [float(rank == 5), 0.0, 0.0]]) for rank in range(size)
    ]
    expected = np.array([[1, -1, np.sign(2 * half.sum() - size)], [1, 1, 1]])
    result = as_numpy(last_of_many(SignSGD("elements"), xs).mean)
    np.testing.assert_array_equal(result, expected * [[1, 1, 1], [1, 0, 0]])


# --- memory ---


def test_default_memories() -> None:
    assert SignSGD().biased
    assert SignSGD().default_memory == NoMemory()
    for compressor in WITH_MAGNITUDE:
        assert compressor.default_memory == ErrorFeedback()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("compressor", WITH_MAGNITUDE, ids=str)
def test_receivers_decode_what_the_sender_subtracts(compressor: Compressor, dtype: str) -> None:
    """One rank's mean is what it sent: its scales are rounded to the gradient's type before they travel."""
    x = np.random.default_rng(1).standard_normal((6, 5)).astype(dtype)
    outcome = run_lockstep(compressor, [x]).outcomes[0]
    np.testing.assert_array_equal(outcome.mean.astype(np.float64), outcome.sent.astype(np.float64))


@pytest.mark.parametrize("compressor", WITH_MAGNITUDE, ids=str)
def test_error_feedback_delivers_everything_in_the_long_run(compressor: Compressor) -> None:
    gradient = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    runs = run_engines(1, infos({"w": (4, 6)}), compressor, lambda rank, step: {"w": gradient.copy()}, steps=200)
    mean = np.mean([result["w"] for result in runs[0].results], 0)
    np.testing.assert_allclose(mean, gradient, atol=0.2)


# --- special gradients ---


@pytest.mark.parametrize("value", [2.0, -0.25])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (1, 1)])
def test_constant_gradients_arrive_whole(compressor: Compressor, value: float, shape: tuple[int, int]) -> None:
    xs = [np.full(shape, value, np.float32)] * 3
    expected = np.sign(value) if isinstance(compressor, SignSGD) else value
    for outcome in run_lockstep(compressor, xs).outcomes:
        np.testing.assert_allclose(outcome.mean, np.full(shape, expected), rtol=1e-6)


# --- descriptions ---


@pytest.mark.parametrize(
    ("spec", "compressor"),
    [
        ("signsgd", SignSGD()),
        ("signsgd:zeros=elements", SignSGD(zeros="elements")),
        ("onebit:per_row=true", OneBit(per_row=True)),
        ("onebit", OneBit()),
        ("efsignsgd", EFSignSGD()),
    ],
)
def test_spec_strings(spec: str, compressor: Compressor) -> None:
    assert parse_compressor(spec) == compressor
    assert parse_compressor(str(compressor)) == compressor
    assert compressor.reference
    assert compressor.level is None
    assert compressor.level_for(10, (4, 4)) is None
    assert compressor.payload_floats((16, 16)) == compressor.payload_bytes((16, 16)) / 4


def test_wrong_values_are_refused() -> None:
    with pytest.raises(SpecError, match=r'zeros=.columns. is not allowed; it must be "rows".*or "elements"'):
        SignSGD(zeros="columns")
    with pytest.raises(SpecError, match="per_row=3 is not allowed"):
        OneBit(per_row=3)  # type: ignore[arg-type]
