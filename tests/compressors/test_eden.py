"""EDEN against a plain statement with the matrix written out, and the errors that are known before the gradient is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from hvdcomp import EDEN, ByName, SpecError, kernels
from hvdcomp.arrays import numpy_arrays
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors.memory import ErrorFeedback, Memory, NoMemory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.compressors.quantization_rotated import ERRORS, LEVELS
from hvdcomp.compressors.randomness import random_words, shared_key
from hvdcomp.compressors.scattering import payloads_of_chunks
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.ledger import StepCost
from hvdcomp.exchange.shards import averages_vectors
from hvdcomp.perfmodel.compute import EncodeTime
from hvdcomp.perfmodel.ways import encode_time_of, in_each_way
from tests.compressors.test_scatter import stated_of_bucket
from tests.exchange.test_shards import run as run_sharded
from tests.harness import INSTALLED, CountingCommunicator, as_numpy, infos, make
from tests.kernel_calls import instruction_set  # noqa: F401
from tests.lockstep import run_lockstep


def signs_of(context: Context, count: int) -> np.ndarray:
    """The diagonal of D: word i holds the signs of elements 32 i to 32 i + 31, the first in its lowest bit."""
    key = shared_key(context, "eden")
    words = random_words(numpy_arrays, key, count // 32, np.zeros(1, np.float32)).view(np.uint32)
    return np.array([-1.0 if word >> place & 1 else 1.0 for word in words.tolist() for place in range(32)])


def hadamard_matrix(size: int) -> np.ndarray:
    return np.ones((1, 1)) if size == 1 else np.kron([[1, 1], [1, -1]], hadamard_matrix(size // 2))


def stated(method: EDEN, x: np.ndarray, context: Context) -> np.ndarray:
    """C(x) of a vector as section 3 of the paper has it, in float64."""
    padded = np.zeros(-(-len(x) // method.block) * method.block)
    padded[: len(x)] = x
    signs, matrix = signs_of(context, len(padded)), hadamard_matrix(method.block) / math.sqrt(method.block)
    levels = np.array([*(-level for level in LEVELS[method.bits]), *LEVELS[method.bits]])
    result = np.zeros_like(padded)
    for start in range(0, len(padded), method.block):
        part = slice(start, start + method.block)
        z = matrix @ (signs[part] * padded[part])
        if not z.any():
            continue
        nearest = np.abs(z[:, None] / math.sqrt(np.mean(z**2)) - levels).argmin(1)
        q = levels[nearest]
        result[part] = signs[part] * (matrix @ (z @ z / (z @ q) * q))
    return result[: len(x)]


@pytest.mark.parametrize("size", [1, 31, 512, 1024, 1500, 4096])
@pytest.mark.parametrize("spec", ["eden:bits=1", "eden", "eden:bits=3,block=512", "eden:bits=4"])
def test_it_does_what_the_paper_says(spec: str, size: int) -> None:
    method = parse_compressor(spec)
    assert isinstance(method, EDEN)
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    expected = stated(method, x.astype(np.float64), Context("w", 5, 0, 0, 1))
    for backend in INSTALLED:
        exchanged = run_lockstep(method, [make(backend, x)], step=5)
        blocks = -(-size // method.block)
        assert exchanged.bytes_sent() == blocks * (4 + method.bits * method.block // 8) == method.payload_bytes((size,))
        np.testing.assert_allclose(as_numpy(exchanged.outcomes[0].sent), expected, rtol=1e-4, atol=1e-5)


def sent(method: EDEN, x: np.ndarray, step: int = 0) -> np.ndarray:
    return as_numpy(run_lockstep(method, [x], step=step).outcomes[0].sent).astype(np.float64)


@pytest.mark.parametrize("bits", ERRORS)
def test_the_error_is_known_beforehand(bits: int) -> None:
    x = np.random.default_rng(bits).standard_normal(300 * 1024).astype(np.float32)
    error = np.sum((sent(EDEN(bits=bits), x) - x) ** 2) / np.sum(x.astype(np.float64) ** 2)
    assert error == pytest.approx(ERRORS[bits], rel=0.01)


KINDS = {
    "normal": lambda rng: rng.standard_normal(1024),
    "equal": lambda rng: np.full(1024, 0.3),
    "heavy tails": lambda rng: rng.standard_t(3, 1024),
    "one large": lambda rng: np.where(np.arange(1024) == 77, 10.0, rng.standard_normal(1024)),
    "a short tail": lambda rng: rng.standard_normal(100),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", ERRORS)
def test_the_mean_of_many_draws_is_the_gradient(bits: int, kind: str) -> None:
    """The error of the mean of n independent draws is the error of one over sqrt(n). With one bit the scale is unbiased
    for rotations drawn from all there are: with these the bias may be a few per cent of the error of a draw."""
    x = KINDS[kind](np.random.default_rng(0)).astype(np.float32)
    draws = np.array([sent(EDEN(bits=bits), x, step) for step in range(400)])
    one = np.sqrt(np.mean(np.sum((draws - x) ** 2, 1)))
    of_mean = np.sqrt(np.sum((draws.mean(0) - x) ** 2))
    assert of_mean <= one * (1.1 / math.sqrt(len(draws)) + (0.05 if bits == 1 else 0.01)) + 1e-6 * np.abs(x).max()


@pytest.mark.parametrize(("bits", "least", "most"), [(1, -0.02, 0.02), (2, 1.3, 1.5), (3, 0.97, 1.03)])
def test_what_an_element_a_hundred_times_as_large_leaves_of_the_others(bits: int, least: float, most: float) -> None:
    """In the mean of many draws, as docs/compressors.md says."""
    x = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
    x[77] = 0
    mean = np.mean([sent(EDEN(bits=bits), np.where(np.arange(1024) == 77, 100, x), step) for step in range(400)], 0)
    assert least < mean @ x / (x @ x) < most


def test_a_single_spike_is_exact() -> None:
    x = np.zeros(2048, np.float32)
    x[[5, 2000]] = 3.25, -1e20
    np.testing.assert_allclose(sent(EDEN(bits=1), x), x, rtol=1e-6)


def test_blocks_of_zeros_stay_zeros() -> None:
    x = np.zeros(4096, np.float32)
    x[1024:2048] = np.random.default_rng(0).standard_normal(1024)
    result = sent(EDEN(), x)
    assert not result[:1024].any()
    assert not result[2048:].any()
    assert np.count_nonzero(result[1024:2048]) > 1000


def test_all_ranks_rotate_alike_and_the_mean_is_rotated_back_once() -> None:
    """What ranks with opposite gradients send cancels, which other rotations on each rank would not do."""
    x = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    outcomes = run_lockstep(EDEN(bits=1), [x, -x, x]).outcomes
    assert len({as_numpy(outcome.mean).tobytes() for outcome in outcomes}) == 1
    np.testing.assert_allclose(as_numpy(outcomes[0].mean), as_numpy(outcomes[0].sent) / 3, rtol=1e-4, atol=1e-5)


def test_sums_that_overflow_do_not_count() -> None:
    """Of finite numbers, whose rotation is not."""
    engine = Engine(LoopbackCommunicator(), [TensorInfo("w", (1024,))], EDEN(), min_numel=0, min_ndim=0)
    with np.errstate(all="ignore"):
        result = engine.step({"w": np.full(1024, 3e38, np.float32) * signs_of(Context("w", 0, 0, 0, 1), 1024)})["w"]
    assert not np.isfinite(result).all()


@pytest.mark.parametrize("spec", ["eden:bits=0", "eden:bits=5", "eden:block=1000", "eden:block=4096"])
def test_what_is_not_allowed_is_said(spec: str) -> None:
    with pytest.raises(SpecError, match="is not allowed; it must be"):
        parse_compressor(spec)


# Scattered, with other bits for the means.

BACKS = ["bits=1", "bits=2", "bits=4", "bits=1,back=3", "bits=2,back=2", "bits=3,back=1,block=512"]


def scattering(settings: str) -> EDEN:
    method = parse_compressor(f"eden:{settings},exchange=scatter")
    assert isinstance(method, EDEN)
    return method


@pytest.mark.parametrize(
    ("settings", "of_levels"),
    [("bits=2", {1: 2, 2: 3, 3: 4, 4: 4}), ("bits=2,back=3", dict.fromkeys(range(1, 5), 3)), ("bits=3,back=3", {3: 3})],
)
def test_the_bits_of_means(settings: str, of_levels: dict[int, int]) -> None:
    """By default one more than those of the level, whatever that is; else they stay when the level changes."""
    method = scattering(settings)
    assert parse_compressor(str(method)) == eval(repr(method), {"EDEN": EDEN}) == method
    for bits, expected in of_levels.items():
        at_level = method.at_level(bits)
        assert isinstance(at_level, EDEN)
        assert (at_level.bits, at_level.of_means.bits) == (bits, expected)
        assert (at_level.of_means is at_level) == (bits == expected)


def test_means_have_bits_only_if_they_are_scattered() -> None:
    said = r"back=\d with exchange=gather is not allowed, because .*; set exchange=scatter, or omit back"
    for spec in ("eden:back=3", "eden:bits=1,back=1,exchange=gather"):
        with pytest.raises(SpecError, match=said):
            parse_compressor(spec)
    with pytest.raises(SpecError, match="back=5 is not allowed; it must be a whole number from 1 to 4"):
        scattering("back=5")
    in_each = [str(way) for way in in_each_way(parse_compressor("eden:bits=1,back=4,exchange=auto"))]
    assert in_each == ["eden:bits=1", "eden:bits=1,back=4,exchange=scatter"]
    time = EncodeTime(1.0)
    assert encode_time_of(scattering("bits=1,back=4"), {"eden:bits=1": time}) is not None


def stated_scattered(method: EDEN, xs: list[np.ndarray], step: int) -> np.ndarray:
    """The result of ranks with vectors of whole blocks for each: chunk by chunk, as `stated`."""
    ranks, length = len(xs), len(xs[0]) // len(xs)
    back = dataclasses.replace(method, bits=method.back or min(method.bits + 1, 4))
    result = []
    for owner in range(ranks):
        chunks = [x[owner * length : (owner + 1) * length].astype(np.float64) for x in xs]
        sent = [stated(method, chunk, Context(f"w#{owner}", step, 0, rank, ranks)) for rank, chunk in enumerate(chunks)]
        sent[owner] = chunks[owner]
        result.append(stated(back, np.mean(sent, 0), Context("w#mean", step, 0, owner, ranks)))
    return np.concatenate(result)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("settings", BACKS)
def test_means_are_compressed_with_their_own_bits(settings: str, ranks: int) -> None:
    method, blocks = scattering(settings), 2
    size = ranks * blocks * method.block
    xs = [np.random.default_rng([ranks, rank]).standard_normal(size).astype(np.float32) for rank in range(ranks)]
    expected = stated_scattered(method, xs, step=3)
    for backend in INSTALLED:
        done = run_lockstep(method, [make(backend, x) for x in xs], step=3)
        assert len({as_numpy(outcome.mean).tobytes() for outcome in done.outcomes}) == 1
        # A last bit of a mean may turn the level of an element, and so move all of its block.
        close = np.isclose(as_numpy(done.outcomes[0].mean), expected, rtol=1e-4, atol=1e-5)
        assert close.mean() > 0.9
        block_bytes = [4 + bits * method.block // 8 for bits in (method.bits, method.of_means.bits)]
        assert done.bytes_sent() == ranks * blocks * block_bytes[0] + blocks * block_bytes[1]
        assert done.bytes_sent() == method.payload_bytes((size,), ranks=ranks)


SHAPES = {"a": (4, 1024), "b": (3, 1024), "c": (1, 1024), "d": (8, 1024)}  # of whole blocks
LEVELS_OF_STEPS = [1, 1, 3, 4, None, 2]


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def train(settings: str, ranks: int) -> list[list[tuple[dict[str, np.ndarray], StepCost, list[int]]]]:
    """Of each rank and step: the results, the costs, and the bytes of its alltoall and its allgather of means."""

    def work(communicator: InProcessCommunicator) -> list[tuple[dict[str, np.ndarray], StepCost, list[int]]]:
        counting = CountingCommunicator(communicator)
        engine = Engine(counting, infos(SHAPES), scattering(settings), min_numel=0, min_ndim=0)
        steps = []
        for step, level in enumerate(LEVELS_OF_STEPS):
            engine.set_level(level)
            engine.begin()
            counting.started.clear()
            results = {name: x.copy() for name, x in engine.step(gradients(communicator.rank, step)).items()}
            assert engine.ledger.last is not None
            steps.append((results, engine.ledger.last, [size for *_, size in counting.started if size > 8]))
        assert len(engine.buckets.with_kernels) == 1
        return steps

    return run_ranks(ranks, work)


@pytest.mark.skipif(not kernels.available(), reason="needs the compiled kernels")
@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("settings", ["bits=1", "bits=2,back=1", "bits=1,back=4"])
def test_in_a_bucket_all_ranks_get_the_same_and_every_byte_counts(settings: str, ranks: int) -> None:
    """When levels change, too. With two ranks the means are exact, and the results have the bits of the array form."""
    runs = train(settings, ranks)
    for step, level in enumerate(LEVELS_OF_STEPS):
        method = scattering(settings).at_level(level)
        assert isinstance(method, EDEN)
        assert len({b"".join(x.tobytes() for x in run[step][0].values()) for run in runs}) == 1
        chunk, of_mean = (4 + 128 * bits for bits in (method.bits, method.of_means.bits))
        blocks = 16 // ranks  # of a chunk, whose bytes are rounded up to a multiple of 8
        for run in runs:
            _, cost, sizes = run[step]
            assert sizes == [ranks * -(-blocks * chunk // 8) * 8, -(-blocks * of_mean // 8) * 8]
            for name, (rows, _) in SHAPES.items():
                assert cost.tensors[name].bytes_sent == int(rows * (chunk + of_mean / ranks))
        members = [(TensorInfo(name, shape), method) for name, shape in SHAPES.items()]
        assert [sent.bytes for sent in payloads_of_chunks(members, ranks)] == [16 * chunk, blocks * of_mean]
        if ranks == 2:
            expected, _ = stated_of_bucket(method, [gradients(rank, step) for rank in range(ranks)], step, SHAPES)
            for name, x in expected.items():
                np.testing.assert_array_equal(runs[0][step][0][name].reshape(-1), x)


@pytest.mark.skipif(not kernels.available(), reason="needs the compiled kernels")
def test_tensors_of_a_bucket_may_have_means_of_other_bits() -> None:
    """Of four bits, which are as many as those of the chunks, or of three."""
    methods = {name: scattering("bits=4" if name in ("a", "c") else "bits=2") for name in SHAPES}

    def work(communicator: InProcessCommunicator) -> dict[str, np.ndarray]:
        engine = Engine(communicator, infos(SHAPES), ByName(list(methods.items())), min_numel=0, min_ndim=0)
        results = engine.step(gradients(communicator.rank, 0))
        assert len(engine.buckets.with_kernels) == 1
        return results

    found = run_ranks(2, work)
    for name, method in methods.items():
        expected, _ = stated_of_bucket(method, [gradients(rank, 0) for rank in range(2)], 0, SHAPES)
        for results in found:
            np.testing.assert_array_equal(results[name].reshape(-1), expected[name])


def test_a_bit_for_means_is_worth_more_than_a_bit_for_chunks() -> None:
    """Most where ranks agree in part; docs/compressors.md has the table."""
    common = np.random.default_rng(0).standard_normal(1 << 16)
    own = np.random.default_rng(1).standard_normal((16, 1 << 16))
    for shared, least in ((0.0, 0.97), (0.1, 1.5), (0.5, 2.0)):
        xs = list((math.sqrt(shared) * common + math.sqrt(1 - shared) * own).astype(np.float32))
        mean = np.mean(xs, 0, dtype=np.float64)
        there, back = (
            np.sum((run_lockstep(scattering(settings), xs).outcomes[0].mean - mean) ** 2)
            for settings in ("bits=2,back=1", "bits=1,back=2")
        )
        assert there / back > least, shared


@pytest.mark.parametrize("in_kernels", [True, False])
def test_a_sharded_training_has_no_means_that_travel_back(in_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank adds up there stays with it: `back` changes nothing."""
    monkeypatch.setattr(kernels, "available", lambda: in_kernels)
    for backend in INSTALLED:
        specs = "eden:bits=1", "eden:bits=1,back=4,exchange=scatter"
        plain, other = (run_sharded(spec, 2, 2, backend=backend) for spec in specs)
        for (rows, _, ledger), (of_other, _, other_ledger) in zip(plain, other, strict=True):
            np.testing.assert_array_equal(rows, of_other)
            assert ledger.totals.bytes_sent == other_ledger.totals.bytes_sent


# With scales.


def scales_of(squares: np.ndarray, block: int) -> np.ndarray:
    """1 for the largest running mean of squares in a block; for the others, powers of two near its root."""
    exponents = np.frexp(np.maximum(squares, 2.0**-126))[1]
    of_blocks = np.split(exponents, range(block, len(squares), block))
    return np.concatenate([2.0 ** -np.minimum((part.max() - part + 1) // 2, 7) for part in of_blocks])


def stated_with_scales(method: EDEN, gradients: np.ndarray) -> list[np.ndarray]:
    """The mean over the ranks in each step, in float64, of gradients (steps, ranks, elements)."""
    squares, means = np.zeros(gradients.shape[2]), []
    for step, given in enumerate(gradients):
        scales, context = scales_of(squares, method.block), Context("w", step, 0, 0, len(given))
        mean = scales * np.mean([stated(method, x / scales, context) for x in given.astype(np.float64)], 0)
        squares = 0.9 * squares + 0.1 * mean**2
        means.append(mean)
    return means


def with_scales(method: EDEN, gradients: np.ndarray, backend: str = "numpy") -> list[np.ndarray]:
    states: list[Any] | None = None
    means = []
    for step, given in enumerate(gradients):
        exchanged = run_lockstep(method, [make(backend, x) for x in given], step, states=states)
        assert len({as_numpy(outcome.mean).tobytes() for outcome in exchanged.outcomes}) == 1
        states = [outcome.state for outcome in exchanged.outcomes]
        assert len({b"".join(as_numpy(array).tobytes() for array in state) for state in states}) == 1
        means.append(as_numpy(exchanged.outcomes[0].mean))
    return means


def of_unequal_sizes(steps: int, ranks: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Gradients whose elements have very different sizes, and these sizes."""
    rng = np.random.default_rng(size)
    sizes = np.exp(3 * rng.standard_normal(size)).clip(0.1, 10)
    return (sizes * rng.standard_normal((steps, ranks, size))).astype(np.float32), sizes


@pytest.mark.parametrize("size", [31, 1024, 1500])
@pytest.mark.parametrize("spec", ["eden:bits=1,scaled=True", "eden:bits=2,block=512,scaled=True"])
def test_scales_follow_the_means(spec: str, size: int) -> None:
    method = parse_compressor(spec)
    assert isinstance(method, EDEN)
    gradients, sizes = of_unequal_sizes(5, 3, size)
    expected = stated_with_scales(method, gradients)
    for backend in INSTALLED:
        for mean, of_step in zip(with_scales(method, gradients, backend), expected, strict=True):
            np.testing.assert_allclose(mean / sizes, of_step / sizes, rtol=1e-3, atol=1e-4)


def test_the_error_of_an_element_is_in_proportion_to_its_size() -> None:
    """Without scales, small elements have errors many times their size. With scales, the errors shrink from step to
    step."""
    gradients, sizes = of_unequal_sizes(60, 2, 4096)
    small = sizes < 0.2

    def error(method: EDEN) -> float:
        last = [
            (mean - given.mean(0))[small] / sizes[small]
            for mean, given in zip(with_scales(method, gradients)[40:], gradients[40:], strict=True)
        ]
        return float(np.sqrt(np.mean(np.square(last))))

    assert error(EDEN()) > 10
    assert error(EDEN(scaled=True)) < 0.6


@pytest.mark.parametrize("times", [1e-30, 1e25])
def test_scales_of_very_small_and_very_large_gradients(times: float) -> None:
    """Their squares are zero or infinite in float32."""
    gradients, _ = of_unequal_sizes(4, 2, 2048)
    for mean, given in zip(with_scales(EDEN(scaled=True), gradients * np.float32(times)), gradients, strict=True):
        error = mean.astype(np.float64) / times - given.mean(0)
        assert np.sum(error**2) < 0.5 * np.sum(given.mean(0) ** 2)


def of_cosines(rank: int, step: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Gradients whose sizes differ by up to 400 times."""
    rng = np.random.default_rng([rank, step])
    sizes = {name: np.exp(3 * np.cos(np.arange(math.prod(shape)))) for name, shape in shapes.items()}
    return {name: (rng.normal(size=shape) * sizes[name].reshape(shape)).astype("f") for name, shape in shapes.items()}


@pytest.mark.skipif(not kernels.available(), reason="needs the compiled kernels")
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("memory", [NoMemory(), ErrorFeedback(0.9)], ids=["no memory", "residuals"])
def test_with_scales_the_bucket_form_gives_the_same_bits(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"long": (5000,), "matrix": (33, 31), "short": (7,)}

    def work(communicator: InProcessCommunicator) -> list[bytes]:
        method = EDEN(bits=1, scaled=True)
        engine = Engine(communicator, infos(shapes), method, memory, min_ndim=0, min_numel=0)
        seen = []
        for step in range(6):
            given = of_cosines(communicator.rank, step, shapes)
            if step == 3 and communicator.rank == 1:
                given["matrix"][0, 0] = np.nan  # the step is skipped, so the scales stay as they were
            engine.begin()
            results = engine.step(given)
            seen.append(b"".join(results[name].tobytes() for name in shapes))
        assert bool(engine.buckets.with_kernels) == kernels.available()
        return seen

    in_kernels = run_ranks(3, work)
    monkeypatch.setattr(kernels, "available", lambda: False)
    for there, here in zip(in_kernels, run_ranks(3, work), strict=True):
        assert there[:3] + there[4:] == here[:3] + here[4:]
        assert len(set(there)) == 6


@pytest.mark.skipif(not kernels.available(), reason="needs the compiled kernels")
def test_in_a_bucket_that_is_cut_the_scales_follow_the_means_of_all_chunks() -> None:
    method, shapes, steps = EDEN(bits=1, block=512, exchange="scatter", scaled=True), {"a": (96, 48), "b": (999,)}, 5

    def work(communicator: InProcessCommunicator) -> list[dict[str, np.ndarray]]:
        engine = Engine(communicator, infos(shapes), method, min_ndim=0, min_numel=0)
        return [engine.step(of_cosines(communicator.rank, step, shapes)) for step in range(steps)]

    squares = {name: np.zeros(math.prod(shape), np.float32) for name, shape in shapes.items()}
    for step, found in enumerate(zip(*run_ranks(2, work), strict=True)):
        scales = {name: scales_of(x, method.block).astype(np.float32) for name, x in squares.items()}
        divided = [
            {name: x.reshape(-1) / scales[name] for name, x in of_cosines(rank, step, shapes).items()}
            for rank in range(2)
        ]
        means, _ = stated_of_bucket(dataclasses.replace(method, scaled=False), divided, step, shapes)
        for name, x in means.items():
            mean = x * scales[name]
            squares[name] = squares[name] * np.float32(0.9) + mean * mean * np.float32(0.1)
            for results in found:
                np.testing.assert_array_equal(results[name].reshape(-1), mean)


def test_where_scales_do_not_work_it_is_said() -> None:
    with pytest.raises(SpecError, match="two_level cuts tensors into shards"):
        parse_compressor("two_level(eden:scaled=True)")
    assert not averages_vectors(EDEN(scaled=True))
