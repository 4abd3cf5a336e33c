"""The kernels of the sparsifiers, against a few lines of NumPy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdcomp import DGC, ErrorFeedback, MomentumCorrection, MSTopK, NoMemory, RedSync, SIDCo, TopK, kernels
from hvdcomp.arrays import numpy_arrays
from hvdcomp.compressors import sparse_payload
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.protocol import AllGather, Context, SparseVector, TensorInfo
from hvdcomp.compressors.sparse_payload import elements_kept
from hvdcomp.compressors.sparsification import Sparsifier
from tests.kernel_calls import instruction_set  # noqa: F401

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}")

GUARD = np.float32(-12345.0)


@dataclass
class Rank:
    """One rank's step of a bucket, with a guard around everything that kernels write to."""

    compressor: Sparsifier
    gradients: list[np.ndarray]
    memory: Memory = field(default_factory=ErrorFeedback)
    threads: int = 1
    start: int = 0  # elements by which everything is out of line

    def __post_init__(self) -> None:
        sizes = [len(one) for one in self.gradients]
        self.bucket = Bucket(
            [TensorInfo(str(i), (size,)) for i, size in enumerate(sizes)], [self.compressor] * len(sizes), self.memory
        )
        self.storage = {name: self._room(sizes) for name in ("gradient", "result", "x", "velocity", "next_velocity")}
        for own, gradient in zip(self.parts("gradient"), self.gradients, strict=True):
            own[:] = gradient
        self.bucket.table.bucket.threads = self.threads
        self.bucket.context = Context("", 0, 0, 0, 1)
        names = ["gradient", "result"]
        names += [] if isinstance(self.memory, NoMemory) else ["x"]
        names += ["next_velocity"] if self.memory.is_momentum else []
        for name in names:
            self.bucket.segments[name] = [part.ctypes.data for part in self.parts(name)]

    def _room(self, sizes: list[int]) -> list[np.ndarray]:
        return [np.full(self.start + size + 3, GUARD, np.float32) for size in sizes]

    def parts(self, name: str) -> list[np.ndarray]:
        return [room[self.start : -3] for room in self.storage[name]]

    def encode(self) -> AllGather:
        self.generator = self.compressor.aggregate_bucket(self.bucket)
        request = next(self.generator)
        assert isinstance(request, AllGather)
        self.check_guards()
        return request

    def sent(self, place: int) -> SparseVector:
        """What this rank's payload says of a tensor."""
        payload = self.bucket.layout.places.payload.vector
        segment = self.bucket.segments[place]
        size, count = int(segment["size"]), int(segment["count"])
        values_at, counts_at, indices_at, width = (
            int(segment[name]) for name in ("values", "block_counts", "indices", "index_bytes")
        )

        def part(start: int, count: int, dtype: str) -> np.ndarray:
            return payload[start : start + count * np.dtype(dtype).itemsize].view(dtype)

        values = part(values_at, count, "f2" if self.compressor.values == "fp16" else "f4").astype(np.float32)
        parts = [values, part(indices_at, count, f"i{width}").copy()]
        if counts_at >= 0:
            parts.append(part(counts_at, sparse_payload.counted_blocks(count, size), "i4"))
        return SparseVector(sparse_payload.decode_indices(numpy_arrays, parts, size), values)

    def decode(self, payloads: np.ndarray) -> bool:
        """Whether a mean is not finite."""
        with pytest.raises(StopIteration) as stop:
            self.generator.send(payloads)
        self.check_guards()
        return bool(stop.value.value)

    def check_guards(self) -> None:
        for rooms in self.storage.values():
            for room in rooms:
                assert (room[: self.start] == GUARD).all()
                assert (room[-3:] == GUARD).all()


def step(ranks: list[Rank]) -> list[bool]:
    payloads = np.stack([rank.encode().parts[0].copy() for rank in ranks])
    return [rank.decode(payloads) for rank in ranks]


KINDS = ["normal", "heavy", "ties", "signs", "zeros", "few", "denormal", "constant", "block", "sorted"]


def vector(kind: str, size: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    x = random.normal(size=size)
    values = {
        "normal": lambda: x,
        "heavy": lambda: random.standard_t(1.5, size),
        "ties": lambda: np.round(4 * x) / 4,
        "signs": lambda: np.sign(x),
        "zeros": lambda: np.zeros(size) * np.sign(x),
        "few": lambda: x * (random.random(size) < 0.003),
        "denormal": lambda: x * 1e-42,
        "constant": lambda: np.full(size, -0.5),
        "block": lambda: x * np.where(np.arange(size) // 1000 == size // 2000, 1e6, 1e-6),  # not seen by a sample
        "ends of pieces": lambda: x + 50 * np.isin(np.arange(size) % 65_536, [0, 65_535]),
        "sorted": lambda: np.sort(np.abs(x)),
    }
    return values[kind]().astype(np.float32)


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """The places of the k largest magnitudes, of equal ones the first, in ascending order."""
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:k])


def rounded(values: np.ndarray, how: str) -> np.ndarray:
    return values if how == "same" else np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)


def check(rank: Rank, place: int, expected: np.ndarray) -> SparseVector:
    """What was sent of a tensor, and what is left of it."""
    x = rank.gradients[place]
    sent = rank.sent(place)
    np.testing.assert_array_equal(sent.indices, expected)
    np.testing.assert_array_equal(sent.values, rounded(x[expected], rank.compressor.values))
    if not isinstance(rank.memory, NoMemory):
        left = x.copy()
        left[expected] -= sent.values
        np.testing.assert_array_equal(rank.parts("x")[place], left)
    return sent


SIZES = st.sampled_from([1, 2, 15, 64, 65, 511, 513, 1000, 4096, 4097, 20_000, 65_535, 65_536, 65_537, 200_003])


def check_topk(sizes: list[int], kinds: list[str], compressor: TopK, ranks: int, seed: int, **options: Any) -> None:
    """A step of a bucket, with the options of `Rank`."""
    all_ranks = [
        Rank(compressor, [vector(kinds[i], size, seed + 7 * rank + i) for i, size in enumerate(sizes)], **options)
        for rank in range(ranks)
    ]
    found_inf = step(all_ranks)
    assert not any(rank.bucket.found_inf for rank in all_ranks)
    assert not any(found_inf)
    for place, size in enumerate(sizes):
        mean = np.zeros(size, np.float32)
        for rank in all_ranks:
            expected = largest(rank.gradients[place], elements_kept(compressor.ratio, size))
            sent = check(rank, place, expected)
            mean[sent.indices] += sent.values * np.float32(1 / ranks)
        for rank in all_ranks:
            np.testing.assert_array_equal(rank.parts("result")[place], mean)


@settings(max_examples=150)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4),
    kinds=st.lists(st.sampled_from(KINDS), min_size=4, max_size=4),
    ratio=st.sampled_from([1e-6, 1e-4, 1e-3, 0.01, 0.03, 0.2, 0.9, 1.0]),
    values=st.sampled_from(["same", "fp16"]),
    memory=st.sampled_from([NoMemory(), ErrorFeedback()]),
    ranks=st.sampled_from([1, 2, 3]),
    threads=st.sampled_from([1, 3]),
    start=st.integers(0, 3),
    isa=st.sampled_from(kernels.instruction_sets()),
    seed=st.integers(0, 2**32 - 1),
)
def test_topk_sends_the_k_largest_and_adds_up_what_the_ranks_sent(
    sizes: list[int], kinds: list[str], ratio: float, values: str, memory: Memory, ranks: int, threads: int,
    start: int, isa: str, seed: int,
) -> None:  # fmt: skip
    before = kernels.instruction_set()
    kernels.use(isa)
    try:
        check_topk(sizes, kinds, TopK(ratio, values=values), ranks, seed, memory=memory, threads=threads, start=start)
    finally:
        kernels.use(before or "plain")


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("kind", ["normal", "ties", "ends of pieces"])
@pytest.mark.parametrize("ratio", [1e-6, 3e-5, 1e-3, 0.03, 0.2, 0.9])
def test_tensors_of_several_pieces(ratio: float, kind: str) -> None:
    check_topk([65_537, 200_003, 131_072], [kind] * 3, TopK(ratio), 2, 5, threads=3)


@pytest.mark.usefixtures("instruction_set")
def test_a_piece_may_have_more_candidates_than_room() -> None:
    """One more, many more or less; and those of its neighbors stay."""
    rank = Rank(TopK(0.001), [np.zeros(200_003, np.float32)])
    rank.encode()
    room = int(rank.bucket.layout._candidates["room"][1])
    assert 300 < room < 60_000
    for more in (-1, 0, 1, 16, 300):
        x = vector("normal", 200_003, more + 1)
        places = np.random.default_rng(more + 1).permutation(65_536)[: room + more]
        x[65_536 + places] += np.float32(50)
        step([rank := Rank(TopK(0.001), [x])])
        check(rank, 0, largest(x, 201))
        candidates = rank.bucket.layout._candidates
        assert (candidates["stored"] <= candidates["room"]).all()


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("size", [1, 100, 4097, 70_001, 200_003])
def test_a_sample_is_of_elements_at_equal_distances(size: int) -> None:
    x = vector("normal", size, 4)
    rank = Rank(DGC(0.01), [np.ones(3, np.float32), x])
    rank.encode()
    choice = rank.bucket.layout._choices[1]
    sample = rank.bucket.layout._sample[choice["sample"] :][: choice["sampled"]]
    np.testing.assert_array_equal(sample, np.abs(x[:: choice["stride"]]))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("size", [1000, 70_000])
@pytest.mark.parametrize("compressor", [MSTopK(0.02), SIDCo(0.02)])
def test_magnitudes_whose_sum_overflows(compressor: Sparsifier, size: int) -> None:
    """Float32, by hundreds of times; a threshold between their mean and the largest is found all the same."""
    x = np.full(size, 1e38, np.float32)
    x[7::50] = 3e38
    step([rank := Rank(compressor, [x])])
    check(rank, 0, np.arange(size)[7::50])


@settings(max_examples=100)
@given(
    size=SIZES,
    kind=st.sampled_from(KINDS),
    ratio=st.sampled_from([1e-4, 1e-3, 0.01, 0.03, 0.2, 0.9, 1.0]),
    method=st.sampled_from([MSTopK, RedSync, DGC, SIDCo]),
    rounds=st.sampled_from([1, 3, 25]),
    threads=st.sampled_from([1, 3]),
    isa=st.sampled_from(kernels.instruction_sets()),
    seed=st.integers(0, 2**32 - 1),
)
def test_threshold_sparsifiers_choose_what_they_choose_by_themselves(
    size: int, kind: str, ratio: float, method: type[Sparsifier], rounds: int, threads: int, isa: str, seed: int
) -> None:
    settings = {MSTopK: {"rounds": rounds}, SIDCo: {"stages": rounds}}
    compressor = method(ratio, **settings.get(method, {}))
    # Whole eighths have the same sum in any order.
    x = vector(kind, size, seed)
    x = np.round(x * 8) / 8 if kind not in ("heavy", "denormal", "block") else x
    before = kernels.instruction_set()
    kernels.use(isa)
    try:
        rank = Rank(compressor, [x], threads=threads)
        step([rank])
    finally:
        kernels.use(before or "plain")
    k = elements_kept(ratio, size)
    expected = np.sort(compressor.choose(numpy_arrays, x, k))
    sent = rank.sent(0)
    check(rank, 0, sent.indices)
    assert len(np.unique(sent.indices)) == k
    if kind == "denormal" and method in (MSTopK, SIDCo):
        return  # many elements lie on the last bit of a threshold; NumPy adds up floats of few bits, kernels doubles
    if kind in ("heavy", "denormal", "block"):  # where the mean's last bit may differ, and with it a threshold
        assert np.abs(np.sort(np.abs(sent.values)) - np.sort(np.abs(x[expected]))).max() <= np.abs(x).max() * 2**-20
    else:
        np.testing.assert_array_equal(np.sort(np.abs(sent.values)), np.sort(np.abs(x[expected])))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    "compressor", [TopK(0.01), TopK(0.3, values="fp16"), MSTopK(0.01), RedSync(0.02), DGC(0.01), SIDCo(0.01)]
)
@pytest.mark.parametrize("bad", [[np.inf], [-np.inf], [np.nan], [-np.nan] * 900 + [np.inf, 3e38]])
def test_what_is_not_finite_is_found_and_does_no_harm(compressor: Sparsifier, bad: list[float]) -> None:
    for size in (1000, 4096, 70_000):
        for place in (0, (size - len(bad)) // 2, size - len(bad)):
            x = vector("normal", size, 1)
            x[place : place + len(bad)] = bad
            rank = Rank(compressor, [vector("normal", 300, 2), x, np.ones(1, np.float32)])
            step([rank])
            assert rank.bucket.found_inf
            sent = rank.sent(1)
            assert len(sent.indices) == elements_kept(compressor.ratio, size)
            assert 0 <= sent.indices.min() <= sent.indices.max() < size


@pytest.mark.usefixtures("instruction_set")
def test_a_mean_that_overflows_is_found() -> None:
    """Three thirds of the largest float are above it where each is rounded up."""
    x = np.full(10, np.finfo(np.float32).max)
    ranks = [Rank(TopK(1.0), [x]) for _ in range(3)]
    found_inf = step(ranks)
    found = not np.isfinite(ranks[0].parts("result")[0]).all()
    assert found_inf == [found] * 3
    payload = ranks[0].encode().parts[0].copy()
    payload[:40].view(np.float32)[3] = np.inf
    assert ranks[0].decode(payload[None])


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_ends_where_an_element_was_sent(masking: bool, nesterov: bool) -> None:
    memory = MomentumCorrection(0.9, nesterov, masking=masking)
    gradient = vector("normal", 70_000, 3)
    rank = Rank(TopK(0.01), [gradient], memory)
    rank.bucket.table.bucket.momentum = 0.9
    rank.bucket.table.bucket.nesterov = nesterov
    step([rank])
    x, state = memory.compensate(numpy_arrays, gradient, memory.prepare(numpy_arrays, gradient, ()))
    sent = rank.sent(0)
    np.testing.assert_array_equal(sent.indices, largest(x, 700))
    velocity, residual = memory.update(numpy_arrays, x, sent, state)
    np.testing.assert_array_equal(rank.parts("x")[0], residual)
    np.testing.assert_array_equal(rank.parts("next_velocity")[0], velocity)


def test_values_in_half_precision_are_those_of_numpy() -> None:
    """All that lies between two numbers of half precision, and each of them, is rounded as NumPy does it."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[1:] + halves[:-1]) / 2
    x = np.concatenate([halves, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(9e9))])
    x = np.concatenate([x, -x, np.float32([65519, 65520, 7e4, 3e38, 1e-45])])
    step([rank := Rank(TopK(1.0, values="fp16"), [x])])
    check(rank, 0, np.arange(len(x)))
