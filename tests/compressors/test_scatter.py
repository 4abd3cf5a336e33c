"""Scatter-reduce-allgather: each rank averages a chunk for all, and compresses the mean again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import ErrorFeedback, NoMemory, kernels
from hvdcomp.adaptation.look import Look, observe
from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import Array
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import AllGather, AllToAll, Context
from hvdcomp.compressors.scattering import _pieces
from hvdcomp.errors import SpecError
from hvdcomp.exchange.engine import Engine
from tests.harness import BACKENDS, CountingCommunicator, as_numpy, bits, infos, make, previews_of, some_of
from tests.lockstep import Exchanged, run_lockstep

METHODS = [
    "qsgd:bits=4,bucket=64", "qsgd:bits=1,bucket=3", "terngrad", "natural", "onebit", "efsignsgd", "int4:block=12",
    "eden", "eden:bits=1,block=512",
    "fp8:rounding=stochastic", "bf16", "bf16:rounding=stochastic", "fp16", "fp16:rounding=stochastic,exchange=scatter",
]  # fmt: skip


def scattering(spec: str) -> Gathering:
    compressor = parse_compressor(spec)
    assert isinstance(compressor, Gathering)
    return dataclasses.replace(compressor, exchange="scatter")


def exchange(spec: str, xs: Sequence[Array], step: int = 0) -> Exchanged:
    return run_lockstep(scattering(spec), xs, step)


def stated(method: Gathering, xs: Sequence[np.ndarray], step: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    """The result, and what each rank did not send, in NumPy: ALGORITHMS' two residuals, of which the owner's counts as
    often as there are ranks."""
    ranks, size = len(xs), xs[0].size
    length = -(-size // (ranks * method.unit)) * method.unit
    whole = np.zeros((ranks, ranks, length), np.float32)  # by rank and chunk
    for rank, x in enumerate(xs):
        whole[rank].reshape(-1)[:size] = x.reshape(-1)

    def lossy(x: np.ndarray, rank: int, name: str, method: Gathering = method) -> np.ndarray:
        context = Context(f"w#{name}", step, 0, rank, ranks)
        return method.decoded(numpy_arrays, method.encode(numpy_arrays, x, context), x.shape, context)

    result = np.zeros((ranks, length), np.float32)
    left = np.zeros_like(whole)
    for owner in range(ranks):
        total = whole[owner, owner].copy()
        for rank in range(ranks):
            if rank != owner:
                seen = lossy(whole[rank, owner], rank, str(owner))
                left[rank, owner] = whole[rank, owner] - seen
                total += seen
        mean = total * np.float32(1 / ranks)
        result[owner] = lossy(mean, owner, "mean", method.of_means)
        left[owner, owner] = (mean - result[owner]) * ranks
    shape = xs[0].shape
    return result.reshape(-1)[:size].reshape(shape), [one.reshape(-1)[:size].reshape(shape) for one in left]


def gradients(ranks: int, shape: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    return [np.random.default_rng([seed, rank]).normal(size=shape).astype(np.float32) for rank in range(ranks)]


@pytest.mark.parametrize("spec", METHODS)
@given(st.integers(2, 5), st.sampled_from([(1,), (7,), (64,), (13, 11), (3, 5, 40)]), st.integers(0, 99), st.data())
def test_it_is_what_was_stated(spec: str, ranks: int, shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    backend = data.draw(st.sampled_from(["numpy", "torch"]))
    xs = gradients(ranks, shape, seed)
    done = exchange(spec, [make(backend, x) for x in xs], step=seed)
    mean, left = stated(scattering(spec), xs, step=seed)
    for rank, outcome in enumerate(done.outcomes):
        assert bits(outcome.mean) == bits(done.outcomes[0].mean)
        np.testing.assert_allclose(as_numpy(outcome.mean), mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(xs[rank] - as_numpy(outcome.sent), left[rank], rtol=1e-4, atol=1e-5)


SHAPES = {"long": (70, 101), "bias": (5,), "matrix": (64, 32), "one": (1,), "odd": (3, 5, 7)}


def stated_of_bucket(
    method: Gathering, xs: Sequence[dict[str, np.ndarray]], step: int, shapes: Iterable[str] = SHAPES
) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """The same of a bucket, which is cut elsewhere: piece by piece."""
    ranks, names = len(xs), sorted(shapes)
    result = {name: np.zeros(x.size, np.float32) for name, x in xs[0].items()}
    left = [{name: np.zeros(x.size, np.float32) for name, x in one.items()} for one in xs]

    def lossy(x: np.ndarray, rank: int, name: str, method: Gathering = method) -> np.ndarray:
        context = Context(name, step, 0, rank, ranks)
        return method.decoded(numpy_arrays, method.encode(numpy_arrays, x, context), x.shape, context)

    for owner, piece in _pieces([xs[0][name].size for name in names], method.unit, ranks):
        name, part = names[piece.tensor], slice(piece.start, piece.start + piece.length)
        of_ranks = [one[name].reshape(-1)[part] for one in xs]
        total = of_ranks[owner].copy()
        for rank in range(ranks):
            if rank != owner:
                seen = lossy(of_ranks[rank], rank, f"{name}#{owner}")
                left[rank][name][part] = of_ranks[rank] - seen
                total += seen
        mean = total * np.float32(1 / ranks)
        result[name][part] = lossy(mean, owner, f"{name}#{owner}#mean", method.of_means)
        left[owner][name][part] = (mean - result[name][part]) * ranks
    return result, left


@pytest.mark.skipif(not kernels.available(), reason="needs the compiled kernels")
@pytest.mark.parametrize(("spec", "memory", "ranks"), some_of(3, METHODS, [ErrorFeedback(), NoMemory()], [2, 3, 16]))
def test_a_bucket_is_cut_as_a_whole(spec: str, memory: Memory, ranks: int) -> None:
    steps = 3

    def work(communicator: Any) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        engine = Engine(communicator, infos(SHAPES), scattering(spec), memory, min_numel=0, min_ndim=0)
        seen = []
        for step in range(steps):
            results = engine.step(gradients_of(communicator.rank, step))
            kept = {name: state.memory[0].copy() for name, state in engine.states.items() if state.has_residual}
            seen.append((results, kept))
        assert len(engine.buckets.with_kernels) == 1
        return seen

    def gradients_of(rank: int, step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([rank, step])
        return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}

    runs = run_ranks(ranks, work)
    kept = [{name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()} for _ in range(ranks)]
    for step in range(steps):
        xs = [{name: x + kept[rank][name] for name, x in gradients_of(rank, step).items()} for rank in range(ranks)]
        results, left = stated_of_bucket(scattering(spec), xs, step)
        for rank, run in enumerate(runs):
            got, own = run[step]
            assert {name: bits(x) for name, x in got.items()} == {name: bits(x) for name, x in runs[0][step][0].items()}
            for name, expected in results.items():
                # A last bit of a norm, or of a mean, may turn the rounding of an element.
                close = np.isclose(got[name].reshape(-1), expected, rtol=1e-4, atol=1e-5)
                assert close.mean() > 0.999, (step, name)
            if isinstance(memory, ErrorFeedback):
                for name, expected in left[rank].items():
                    close = np.isclose(own[name].reshape(-1), expected, rtol=1e-3, atol=1e-4)
                    assert close.mean() > 0.998, (step, name)
                kept[rank] = own


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_all_ranks_sent_is_what_all_got(spec: str, backend: str) -> None:
    ranks = 4
    done = exchange(spec, [make(backend, x) for x in gradients(ranks, (40, 30))])
    total = sum(as_numpy(outcome.sent).astype(np.float64) for outcome in done.outcomes)
    np.testing.assert_allclose(total, ranks * as_numpy(done.outcomes[0].mean).astype(np.float64), atol=1e-5)


@pytest.mark.parametrize("spec", ["qsgd:bits=6,bucket=64", "efsignsgd"])
def test_with_error_feedback_nothing_is_lost_over_many_steps(spec: str) -> None:
    """The results' sum, and what all ranks keep divided by their number, are the sum of the mean gradients; what is
    kept does not grow."""
    ranks, steps, shape = 3, 60, (16, 48)

    def work(communicator: Any) -> tuple[np.ndarray, np.ndarray, list[float]]:
        engine = Engine(communicator, infos({"w": shape}), scattering(spec), ErrorFeedback(), min_numel=1)
        total, kept = np.zeros(shape), []
        for step in range(steps):
            gradient = np.random.default_rng([step, communicator.rank]).normal(1, 1, shape).astype(np.float32)
            total += engine.step({"w": gradient})["w"]
            kept.append(float(np.linalg.norm(engine.states["w"].memory[0])))
        return total, np.array(engine.states["w"].memory[0], np.float64), kept

    done = run_ranks(ranks, work)
    expected = sum(
        np.random.default_rng([step, rank]).normal(1, 1, shape).astype(np.float32).astype(np.float64)
        for step in range(steps)
        for rank in range(ranks)
    )
    for total, _, kept in done:
        np.testing.assert_allclose(ranks * total + sum(left for _, left, _ in done), expected, rtol=1e-4, atol=1e-3)
        assert max(kept[steps // 2 :]) < 2 * max(kept[: steps // 2])


@pytest.mark.parametrize("dtype", ["float32", "float64"])  # as a bucket, and by itself
def test_what_is_compressed_in_place_of_x_leaves_the_rest_of_it(dtype: str) -> None:
    def work(communicator: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        engine = Engine(communicator, infos({"w": (40, 30)}, dtype), scattering("int8"), ErrorFeedback(), min_numel=0)
        observe(engine, lambda look: {"w": look["w"] * 0.5})
        given = gradients(3, (40, 30))[communicator.rank].astype(dtype)
        return given, engine.step({"w": given.copy()})["w"], np.array(engine.states["w"].memory[0])

    given, got, kept = (np.mean(each, axis=0) for each in zip(*run_ranks(3, work), strict=True))
    np.testing.assert_allclose(got + kept, given, atol=1e-5)


def test_without_a_residual_a_quantizer_stays_unbiased() -> None:
    xs = gradients(3, (48,))
    means = np.array([exchange("qsgd:bits=3,bucket=16", xs, step).outcomes[0].mean for step in range(800)])
    error = means.mean(0) - np.mean(xs, 0)
    assert np.all(np.abs(error) < 5 * means.std(0) / np.sqrt(len(means)) + 1e-6)


@pytest.mark.parametrize("spec", ["qsgd:bits=4,bucket=64", "efsignsgd", "bf16", "fp16"])
@pytest.mark.parametrize("ranks", [2, 4, 16, 64])
def test_bytes_do_not_grow_with_the_number_of_ranks(spec: str, ranks: int) -> None:
    """What a rank sends to others and gets of them, in all; gathered, it gets as many payloads as there are others."""
    shape = (64, 1024)
    payload = parse_compressor(spec).payload_bytes(shape)
    sent, gathered = exchange(spec, gradients(ranks, shape)).requests[0]
    assert isinstance(sent, AllToAll)
    assert isinstance(gathered, AllGather)
    through = sum(part.nbytes for part in sent.parts) * (ranks - 1) / ranks
    through += sum(part.nbytes for part in gathered.parts) * (ranks - 1)
    # A sign's chunk has a magnitude of its own, 4 bytes each of 16 chunks of 512 bytes with 16 ranks.
    assert through == pytest.approx(2 * payload * (ranks - 1) / ranks, rel=0.04 if spec == "efsignsgd" else 0.01)


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
@pytest.mark.parametrize("ranks", [2, 4, 16, 64])
def test_bytes_of_a_bucket_of_casts_are_those_of_an_allreduce_of_16_bits(spec: str, ranks: int) -> None:
    """2 b (N - 1) / N of b bytes with N ranks; and a flag."""
    shapes = {"w": (64, 96), "v": (32, 64)}

    def work(communicator: Any) -> float:
        counting = CountingCommunicator(communicator)
        engine = Engine(counting, infos(shapes), scattering(spec), min_numel=0, min_ndim=0)
        engine.step({name: np.ones(shape, np.float32) for name, shape in shapes.items()})
        share = {"alltoall": (ranks - 1) / ranks, "allgather": ranks - 1}
        started = [(kind, size) for kind, _, _, size in counting.started if size > 8]
        assert [kind for kind, _ in started] == ["alltoall", "allgather"]
        return sum(share[kind] * size for kind, size in started)

    payload = 2 * (64 * 96 + 32 * 64)
    assert run_ranks(ranks, work) == [pytest.approx(2 * payload * (ranks - 1) / ranks, rel=0.01)] * ranks


@pytest.mark.parametrize("exchanged", ["gather", "scatter", "auto"])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_which_way_is_taken(exchanged: str, ranks: int) -> None:
    def work(communicator: Any) -> list[str]:
        counting = CountingCommunicator(communicator)
        compressor = parse_compressor(f"qsgd:bits=4,exchange={exchanged}")
        Engine(counting, infos({"w": (40, 30)}), compressor).step({"w": np.ones((40, 30), np.float32)})
        return [kind for kind, *_ in counting.started]

    scattered = ranks > 1 and (exchanged == "scatter" or (exchanged == "auto" and ranks == 4))
    for kinds in run_ranks(ranks, work):
        assert ("alltoall" in kinds) == scattered


@pytest.mark.parametrize("kernels_are", ["on", "off"])
@pytest.mark.parametrize("spec", METHODS)
def test_a_preview_is_what_this_rank_would_send_if_it_gathered(
    spec: str, kernels_are: str, request: pytest.FixtureRequest
) -> None:
    """As often as the policy asks, and with no trace in what is sent."""
    if kernels_are == "off":
        request.getfixturevalue("without_kernels")

    def work(communicator: Any, looks: bool) -> list[np.ndarray]:
        engine = Engine(communicator, infos({"w": (40, 30)}), scattering(spec), ErrorFeedback())
        seen = []

        def look(x_of: Look) -> dict[str, Array]:
            gathering = {"w": dataclasses.replace(scattering(spec), exchange="gather")}
            of_both = [previews_of(engine).kept(x_of, plan, ["w"])["w"] for plan in (engine.plan, gathering)]
            np.testing.assert_array_equal(*of_both)
            seen.append(of_both[0])
            return {}

        observe(engine, look if looks else None)
        results = [engine.step({"w": gradients(3, (40, 30), step)[communicator.rank]})["w"].copy() for step in range(3)]
        assert len(seen) == 3 * looks
        return results

    runs = [run_ranks(3, functools.partial(work, looks=looks)) for looks in (True, False)]
    for with_looks, without in zip(*runs, strict=True):
        np.testing.assert_array_equal(with_looks, without)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_with_an_infinity_counts_on_no_rank(backend: str) -> None:
    def work(communicator: Any) -> list[Any]:
        engine = Engine(communicator, infos({"w": (40, 30)}), scattering("efsignsgd"))
        results = []
        for step in range(3):
            gradient = gradients(3, (40, 30), step)[communicator.rank]
            if step == 1 and communicator.rank == 2:
                gradient[0, 0] = np.inf
            results.append(engine.step({"w": make(backend, gradient)})["w"])
        return results

    runs = run_ranks(3, work)
    for place in (0, 2):
        assert len({bits(run[place]) for run in runs}) == 1
        assert np.isfinite(as_numpy(runs[0][place])).all()
    assert all(np.isnan(as_numpy(run[1])).any() for run in runs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])  # as a bucket, and by itself
@pytest.mark.parametrize("spec", METHODS)
def test_all_ranks_learn_that_the_owner_of_a_chunk_cannot_keep_what_its_mean_lacks(spec: str, dtype: str) -> None:
    """Elements of the first chunk alone are so large that a sum overflows, or a residual that counts for all ranks."""

    def work(communicator: Any) -> list[tuple[bool, bytes]]:
        found = []
        for magnitude in (1.0, 1e30, 1e36, 1e37, 1e38, 3e38):
            engine = Engine(communicator, infos({"w": (40, 30)}, dtype), scattering(spec), min_numel=0)
            gradient = np.abs(gradients(4, (40, 30))[communicator.rank])
            gradient[:10] *= np.float32(magnitude) / gradient.max()
            with np.errstate(all="ignore"):
                result = engine.step({"w": gradient.astype(dtype)})["w"]
            counts = engine.found_inf.item() == 0
            assert not counts or np.isfinite(result).all()
            assert all(np.isfinite(as_numpy(kept)).all() for kept in engine.states["w"].memory)
            found.append((counts, bits(result)))
        assert found[0][0], "a step of usual gradients must count"
        assert not found[-1][0]
        return found

    first, *others = run_ranks(4, work)
    assert all(other == first for other in others)


def test_sums_of_halves_in_single_precision_do_not_lose_more_with_more_ranks() -> None:
    common = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)

    def error(spec: str, ranks: int) -> float:
        xs = [common + own for own in gradients(ranks, common.shape)]
        exact = np.mean(xs, 0, dtype=np.float64)
        mean = run_lockstep(parse_compressor(spec), xs).outcomes[0].mean
        return float(np.linalg.norm(mean - exact) / np.linalg.norm(exact))

    added = {ranks: error("fp16", ranks) for ranks in (2, 64)}
    scattered = {ranks: error("fp16:exchange=scatter", ranks) for ranks in (2, 64)}
    assert scattered[64] < 1.1 * scattered[2] < 3e-4
    assert added[64] > 2.5 * added[2]
    assert added[64] > 4 * scattered[64]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])  # as a bucket, and by itself
def test_halves_that_are_scattered_are_added_in_single_precision(backend: str, dtype: str) -> None:
    """A sum beyond 65504 counts. In half precision it would not, and would lose what is small beside it."""
    ranks = 4

    def work(communicator: Any) -> tuple[np.ndarray, bool]:
        engine = Engine(communicator, infos({"w": (40, 30)}, dtype), scattering("fp16"), min_numel=0)
        gradient = np.full((40, 30), 2.0**-14 if communicator.rank else 0.125)
        gradient[5:] = 60000
        result = engine.step({"w": make(backend, gradient, dtype)})["w"]
        return as_numpy(result), bool(engine.found_inf.item() == 0)

    for result, counts in run_ranks(ranks, work):
        assert counts
        np.testing.assert_array_equal(result[5:], 60000)
        np.testing.assert_array_equal(result[:5], np.float16((0.125 + 3 * 2.0**-14) / 4))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_with_a_number_that_half_precision_cannot_send_counts_on_no_rank(
    backend: str, dtype: str, rounding: str
) -> None:
    """As of the allreduce. Not sent as it is, but as part of a mean, is what a rank has of its own chunk."""
    ranks, spec = 3, f"fp16:rounding={rounding},exchange=scatter"

    def work(communicator: Any) -> list[tuple[bool, bytes]]:
        engine = Engine(communicator, infos({"w": (40, 30)}, dtype), parse_compressor(spec), min_numel=0)
        found = []
        for largest, place in ((65519, -1), (65520, -1), (1e5, 0), (4e5, 0), (1, 0)):
            gradient = np.ones((40, 30))
            if communicator.rank == 0:  # it averages the first elements
                gradient.reshape(-1)[place] = largest
            with np.errstate(all="ignore"):
                result = engine.step({"w": make(backend, gradient, dtype)})["w"]
            counts = engine.found_inf.item() == 0
            assert np.isfinite(as_numpy(result)).all() == counts
            found.append((counts, bits(result) if counts else b""))
        return found

    first, *others = run_ranks(ranks, work)
    assert [counts for counts, _ in first] == [True, False, True, False, True]
    assert all(other == first for other in others)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(SpecError, match=r'exchange=.ring. is not allowed; it must be "gather", "scatter" or "auto"'):
        parse_compressor("qsgd:bits=4,exchange=ring")
    with pytest.raises(SpecError, match=r'exchange=.ring. is not allowed; it must be "allreduce", "gather", "scatter"'):
        parse_compressor("fp16:exchange=ring")
    with pytest.raises(SpecError, match="rounding=stochastic with exchange=allreduce is not allowed"):
        parse_compressor("fp16:rounding=stochastic")
    with pytest.raises(SpecError, match=r'rounding=.up. is not allowed; it must be "nearest" or "stochastic"'):
        parse_compressor("bf16:rounding=up")
    with pytest.raises(SpecError, match="per_row=True with exchange=scatter"):
        parse_compressor("onebit:per_row=True,exchange=scatter")
