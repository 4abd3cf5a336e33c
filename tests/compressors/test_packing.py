"""Bit packing against a statement of its layout in Python integers, the array functions it needs, and the random
numbers of the quantizers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.compressors.packing import average_decoded, pack, packed_bytes, pad, unpack
from hvdcomp.compressors.protocol import Context
from hvdcomp.compressors.randomness import random_words, rank_key, step_keys, tensor_keys, uniform
from tests.harness import BACKENDS, as_numpy, make, random_states_untouched


def packed_by_hand(codes: np.ndarray, width: int) -> np.ndarray:
    """Plane by plane, group by group, code by code."""
    result: list[int] = []
    shift = 0
    for plane in {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}.get(width, (width,)):
        together = 8 // plane
        for start in range(0, len(codes), 512):
            group = [(int(code) >> shift) % 2**plane for code in codes[start : start + 512]]
            length = -(-len(group) // together)
            packed = [0] * length
            for place, code in enumerate(group):
                packed[place % length] |= code << (place // length * plane)
            result += packed
        shift += plane
    return np.array(result, np.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", range(1, 9))
@given(seed=st.integers(0, 1000), count=st.integers(1, 70) | st.integers(500, 1600) | st.sampled_from([512, 1024]))
def test_codes_survive_packing_in_the_stated_layout(backend: str, width: int, seed: int, count: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**width, count, np.uint8)
    array = make(backend, codes, "uint8")
    xp = arrays_for(array)
    packed = pack(xp, array, width)
    assert as_numpy(packed).dtype == np.uint8
    np.testing.assert_array_equal(as_numpy(packed), packed_by_hand(codes, width))
    assert packed.shape[0] == packed_bytes(width, count)
    np.testing.assert_array_equal(as_numpy(unpack(xp, packed, width, count)), codes)
    np.testing.assert_array_equal(as_numpy(array), codes)


@pytest.mark.parametrize(
    ("count", "width", "expected"),
    [(8, 3, 3), (9, 3, 5), (8, 1, 1), (9, 1, 2), (3, 2, 1), (3, 4, 2), (8, 5, 5), (4, 6, 3), (9, 7, 10), (5, 8, 5)],
)
def test_packed_sizes(count: int, width: int, expected: int) -> None:
    assert pack(numpy_arrays, np.zeros(count, np.uint8), width).shape == (expected,)


def test_the_highest_codes_of_three_bits_fill_three_bytes() -> None:
    assert pack(numpy_arrays, np.full(8, 7, np.uint8), 3).tolist() == [255, 255, 255]


@pytest.mark.parametrize("backend", BACKENDS)
def test_pad(backend: str) -> None:
    x = make(backend, [1, 2, 3], "int32")
    xp = arrays_for(x)
    assert as_numpy(pad(xp, x, 2)).tolist() == [1, 2, 3, 0]
    assert pad(xp, x, 3) is x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_average_decoded_keeps_what_this_rank_sent(backend: str, size: int) -> None:
    values = np.random.default_rng(0).standard_normal((size, 6)).astype(np.float32)
    ranks = [(make(backend, row),) for row in values]
    for rank in range(size):
        mean, sent = average_decoded(ranks, lambda row: row * 2, Context("w", 0, 0, rank, size))
        np.testing.assert_allclose(as_numpy(mean), 2 * values.mean(0), rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(as_numpy(sent), 2 * values[rank])


@pytest.mark.parametrize("backend", BACKENDS)
def test_integer_functions(backend: str) -> None:
    xp = arrays_for(make(backend, [0.0]))
    octets = make(backend, [1, 130, 255], "uint8")
    assert as_numpy(octets << 1).tolist() == [2, 4, 254]
    assert as_numpy(octets >> 7).tolist() == [0, 1, 1]
    places = make(backend, [[0], [4]], "uint8")
    assert as_numpy(octets >> places).tolist() == [[1, 130, 255], [0, 8, 15]]
    assert as_numpy(make(backend, [-8], "int32") >> 2).tolist() == [-2]
    assert as_numpy(octets).tolist() == [1, 130, 255]
    assert as_numpy(xp.arange(3, like=octets)).tolist() == [0, 1, 2]
    assert xp.dtype_name(xp.arange(3, like=octets)) == "uint8"
    assert as_numpy(xp.bitcast(make(backend, [1.0, -2.0]), "int32")).tolist() == [0x3F800000, -0x40000000]
    assert as_numpy((make(backend, [[1.0, -1.0], [2.0, 3.0]]) > 0).sum(1, keepdims=True)).tolist() == [[1], [2]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_functions(backend: str) -> None:
    x = make(backend, [-1.5, -0.0, 2.7])
    xp = arrays_for(x)
    assert as_numpy(x.clip(-1, 2)).tolist() == [-1, 0, 2]
    assert as_numpy(abs(x)).tolist() == [1.5, 0, np.float32(2.7)]
    assert as_numpy(x).tolist() == [-1.5, 0, np.float32(2.7)]
    assert as_numpy(xp.floor(x)).tolist() == [-2, 0, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codes = xp.astype(make(backend, [0.0, 255.0, np.nan]), "uint8")
    assert as_numpy(codes)[:2].tolist() == [0, 255]


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_functions(backend: str) -> None:
    x = make(backend, [[3.0, -4.0], [0.0, 0.0], [3e30, 4e30], [3e-30, 4e-30], [np.nan, 0.0], [np.inf, 1.0]])
    xp = arrays_for(x)
    expected = np.array([[5], [0], [5e30], [5e-30], [np.nan], [np.inf]], np.float32)
    np.testing.assert_allclose(as_numpy(xp.row_norms(x)), expected, rtol=1e-6)
    largest = np.array([[4], [0], [4e30], [4e-30], [np.nan], [np.inf]], np.float32)
    np.testing.assert_array_equal(as_numpy(xp.row_largest(x)), largest)
    assert as_numpy((x != 0).any(1)).tolist() == [True, False, True, True, True, True]
    assert as_numpy((x[:, 1:] != 0).any(1)).tolist() == [True, False, True, True, False, True]
    assert as_numpy(x[:2].sum(1, keepdims=True)).tolist() == [[-1], [0]]
    for row, largest in zip(x, [4, 0, 4e30, 4e-30, np.nan, np.inf], strict=True):
        np.testing.assert_array_equal(as_numpy(xp.reshape(abs(row).max(), (1,))), np.array([largest], np.float32))


def numbers(backend: str, count: int, name: str = "w", step: int = 0, seed: int = 0, rank: int = 0) -> np.ndarray:
    like = make(backend, [0.0])
    key = rank_key(Context(name, step, seed, rank, 4), "test")
    return as_numpy(uniform(arrays_for(like), key, count, like=like))


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000, 4097])
def test_every_framework_draws_the_same_numbers(backend: str, count: int) -> None:
    assert numbers("numpy", count).shape == (count,)
    np.testing.assert_array_equal(numbers("numpy", count), numbers(backend, count), strict=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_depend_on_seed_name_step_and_rank_alone(backend: str) -> None:
    draws = [
        numbers(backend, 500),
        numbers(backend, 500, name="v"),
        numbers(backend, 500, step=1),
        numbers(backend, 500, seed=1),
        numbers(backend, 500, rank=1),
    ]
    for number, draw in enumerate(draws):
        for other in draws[:number]:
            assert abs(np.corrcoef(draw, other)[0, 1]) < 5 / np.sqrt(500)
    np.testing.assert_array_equal(numbers(backend, 500), draws[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_global_random_state_is_left_alone(backend: str) -> None:
    with random_states_untouched(backend):
        numbers(backend, 1000)


def chi_square(cells: np.ndarray, count: int) -> float:
    """How far counts of numbers in equally likely cells are from even ones, in standard deviations."""
    counts = np.bincount(cells, minlength=count)
    expected = len(cells) / count
    assert len(counts) == count
    return (((counts - expected) ** 2 / expected).sum() - (count - 1)) / np.sqrt(2 * (count - 1))


def test_numbers_are_uniform_and_pairs_of_them_independent() -> None:
    """Without the Weyl sequence in `random_words`, pairs at a distance of 1024 are beyond by hundreds."""
    drawn = numbers("numpy", 1 << 20)
    assert drawn.dtype == np.float32
    assert 0 <= drawn.min() < 1e-4
    assert 1 - 1e-4 < drawn.max() < 1
    assert abs(chi_square((drawn * 65536).astype(int), 65536)) < 5
    cells = (drawn * 32).astype(int)
    for lag in (1, 2, 3, 5, 9, 377, 512, 576, 1000, 1597, *(2**k for k in range(10, 20))):
        assert abs(chi_square(cells[:-lag] * 32 + cells[lag:], 1024)) < 5, lag


def test_words_whose_keys_have_nearly_the_same_low_half_are_independent() -> None:
    """The elements are those of one Weyl sequence, 5000 apart. With the high half added, each number would be the other
    one's and a constant."""
    rng = np.random.default_rng(5)
    for low, one, other in rng.integers(0, 2**32, (20, 3)).tolist():
        behind = (low + 5000 * 0x9E3779B9) % 2**32
        first, second = (
            uniform(numpy_arrays, key, 1 << 16, like=np.zeros(1, np.float32))
            for key in (low + (one << 32), behind + (other << 32))
        )
        assert abs(np.corrcoef(first[5000:], second[:-5000])[0, 1]) < 5 / np.sqrt(len(first) - 5000)


@pytest.mark.parametrize(("count", "below"), [(4096, 0.5), (64, 0.25), (512, 1 / 15), (4608, 0.01)])
def test_sums_of_rounded_numbers_behave_as_sums_of_independent_ones(count: int, below: float) -> None:
    """The number of heads among biased coins over 2000 steps: mean, variance and kurtosis of the binomial law."""
    steps = 2000
    heads = np.array([(numbers("numpy", count, step=step) < below).sum() for step in range(steps)])
    variance = count * below * (1 - below)
    z = (heads - count * below) / np.sqrt(variance)
    kurtosis = 3 + (1 - 6 * below * (1 - below)) / variance
    assert abs(z.mean()) < 5 / np.sqrt(steps)
    assert abs((z**2).mean() - 1) < 5 * np.sqrt((kurtosis - 1) / steps)
    assert abs((z**4).mean() - kurtosis) < 5 * np.sqrt(120 / steps)


def test_keys_of_many_tensors_are_those_of_each() -> None:
    names = [f"layer{number}.weight" for number in range(300)]
    keys = step_keys(tensor_keys(names, 3, "test"), 7, 1)
    assert keys.tolist() == [rank_key(Context(name, 7, 3, 1, 4), "test") for name in names]
    others = [
        tensor_keys(names, 4, "test"), tensor_keys(names, 3, "tent"), step_keys(tensor_keys(names, 3, "test"), 7, None),
        *(step_keys(tensor_keys(names, 3, "test"), step, rank) for step in range(20) for rank in range(4)),
    ]  # fmt: skip
    assert len(np.unique(np.concatenate(others))) == 83 * 300


def test_words_are_the_stated_ones() -> None:
    """In Python's integers: a change of them would change every run of the quantizers."""

    def word(index: int, key: int) -> int:
        word = (index * 0x9E3779B9 + key) % 2**32
        word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
        return (word ^ word >> 15 ^ key >> 32) * 0xD35A2D97 % 2**32

    drawn = random_words(numpy_arrays, 0x89ABCDEF_FEDCBA98, 1000, like=np.zeros(1, np.float32)).view(np.uint32)
    assert drawn.tolist() == [word(index, 0x89ABCDEF_FEDCBA98) for index in range(1000)]
