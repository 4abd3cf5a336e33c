"""Buckets of gradients of 16 bits, beside plain statements in NumPy and beside the same tensors by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdcomp import ErrorFeedback, MomentumCorrection, NoMemory
from hvdcomp.adaptation.gradient_sums import AccumulatedGradients
from hvdcomp.adaptation.look import Look, observe
from hvdcomp.bindings.checkpoint import restore, state_of
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors import COMPRESSORS
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.kernels import cuda
from tests.exchange.test_buckets import needs_kernels
from tests.harness import (
    Run,
    as_numpy,
    assert_same_on_all_ranks,
    bits,
    copy,
    infos,
    make,
    needing,
    previews_of,
    run_engines,
)
from tests.harness import states_of as bits_of
from tests.interpreted import needs_triton

ml_dtypes = pytest.importorskip("ml_dtypes")
pytestmark = needs_kernels

SHAPES = {"matrix": (6, 8), "long": (3, 22_001), "vector": (77,), "odd": (5, 7, 3), "one": (1,), "scalar": ()}
SPECS = sorted(
    spec for kind in COMPRESSORS.values() for spec in kind.examples if parse_compressor(spec).has_bucket_form
)
TYPES = [
    needing("torch", "torch", "bfloat16"),
    needing("numpy", "numpy", "float16"),
    needing("torch", "torch", "float16", thorough=True),
    needing("numpy", "numpy", "bfloat16", thorough=True),
]
MORE = (
    "fp16", "bf16", "topk:ratio=0.3", "topk:ratio=0.1,values=fp16", "randomk:ratio=0.1", "signsgd", "terngrad",
    "randomk:ratio=0.1,unbiased=True", "natural", "globalqsgd", "int8", "int4", "fp8", "chunkedtopk:chunk=4000,k=50",
    "topkc:ratio=0.1,chunk=16", "arctopk:ratio=0.3", "two_level(topk:ratio=0.1)", "two_level(int4)",
)  # fmt: skip
types = pytest.mark.parametrize(("backend", "dtype"), TYPES)


def gradients(backend: str, dtype: str, scale: float = 1.0) -> Callable[[int, int], dict[str, Any]]:
    def of(rank: int, step: int) -> dict[str, Any]:
        rng = np.random.default_rng([rank, step])
        return {name: make(backend, scale * rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()}

    return of


def run(
    backend: str, dtype: str, spec: str, ranks: int = 2, steps: int = 4, memory: Callable[[], Any] = lambda: None
) -> list[Run]:
    given = gradients(backend, dtype)
    return list(run_engines(ranks, infos(SHAPES, dtype), parse_compressor(spec), given, steps, memory=memory))


def grouped(engine: Engine) -> set[str]:
    return {name for group in engine.buckets.with_kernels for name in group.names}


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """As float32."""
    return np.asarray(values, np.float32).astype(dtype).astype(np.float32)


@types
@pytest.mark.parametrize("memory", [ErrorFeedback(), ErrorFeedback(0.5), NoMemory()], ids=str)
def test_top_k_does_what_a_plain_statement_does(memory: Memory, backend: str, dtype: str) -> None:
    """Bit for bit: float32 but what travels and what comes out, which is rounded to the gradients' type. What that
    loses, of x and of the mean, is kept."""
    ranks, steps, ratio = 2, 4, 0.1
    runs = run(backend, dtype, f"topk:ratio={ratio}", ranks, steps, lambda: memory)
    assert_same_on_all_ranks(runs)
    kept = [{name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()} for _ in range(ranks)]
    for step in range(steps):
        for name, shape in SHAPES.items():
            mean, left = np.zeros(shape, np.float32), []
            for rank in range(ranks):
                gradient = as_numpy(gradients(backend, dtype)(rank, step)[name]).astype(np.float32)
                x = gradient + kept[rank][name] * np.float32(memory.keeps)
                count = max(1, int(np.ceil(ratio * x.size - 1e-9)))
                chosen = np.argsort(-abs(x).reshape(-1), kind="stable")[:count]
                sent = np.zeros(x.size, np.float32)
                sent[chosen] = rounded(x.reshape(-1)[chosen], dtype)
                mean += sent.reshape(shape) * np.float32(1 / ranks)
                left.append(x - sent.reshape(shape))
            if isinstance(memory, NoMemory) and name == "long":
                continue  # where equal numbers of few bits are many, and which of them are sent is open
            result = rounded(mean, dtype)
            np.testing.assert_array_equal(as_numpy(runs[0].results[step][name]), result, err_msg=f"{name} {step}")
            for rank in range(ranks):
                kept[rank][name] = left[rank] + (mean - result)
    if memory.keeps:
        for rank, one in enumerate(runs):
            for name, state in one.engine.states.items():
                np.testing.assert_array_equal(as_numpy(state.memory[0]), kept[rank][name], err_msg=name)


@types
@pytest.mark.parametrize("spec", SPECS)
def test_a_bucket_does_what_its_tensors_do_by_themselves(
    spec: str, backend: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    """In the first step, but for the last bits; and in each step as many bytes travel. Later, tensors by themselves
    round x before they compress it."""
    found = run(backend, dtype, spec)
    assert_same_on_all_ranks(found)
    assert grouped(found[0].engine) == SHAPES.keys()
    assert {one.bucket.dtype for one in found[0].engine.buckets.with_kernels} == {dtype}
    request.getfixturevalue("without_kernels")
    plain = run(backend, dtype, spec)
    assert not plain[0].engine.buckets.with_kernels
    last_bit = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    for name, right in plain[0].results[0].items():
        mine, other = as_numpy(found[0].results[0][name]).astype(float), as_numpy(right).astype(float)
        apart = abs(mine - other) > 2 * last_bit * abs(other).max()
        assert apart.mean() <= (0.01 if "topk" in spec or "ratio" in spec else 0), name  # which of equal ones is open
    for mine, other in zip(found, plain, strict=True):
        assert mine.engine.ledger.last is not None
        assert other.engine.ledger.last is not None
        for name, cost in other.engine.ledger.last.tensors.items():
            own = mine.engine.ledger.last.tensors[name]
            assert (own.bytes_sent, own.dense_bytes) == (cost.bytes_sent, cost.dense_bytes), name


@types
@pytest.mark.parametrize(
    "spec", ["none", "fp16", "bf16", "natural", "int8", "signsgd", "globalqsgd", "topkc:ratio=0.1"]
)
def test_what_keeps_nothing_gives_the_same_bits(
    spec: str, backend: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    found = run(backend, dtype, spec, memory=NoMemory)
    request.getfixturevalue("without_kernels")
    for mine, plain in zip(found, run(backend, dtype, spec, memory=NoMemory), strict=True):
        for one, other in zip(mine.results, plain.results, strict=True):
            assert {name: bits(x) for name, x in one.items()} == {name: bits(x) for name, x in other.items()}


@types
@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "efsignsgd", "onebit", "powersgd:rank=4", "int4"])
def test_the_error_is_no_larger_than_that_of_tensors_by_themselves(
    spec: str, backend: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    """Of what has arrived after some steps. PowerSGD's factors go other ways when a last bit differs."""
    steps = 10

    def error() -> float:
        runs = run(backend, dtype, spec, steps=steps)
        given = gradients(backend, dtype)
        squares = 0.0
        for name in SHAPES:
            wanted = sum(as_numpy(given(rank, step)[name]).astype(float) for rank in range(2) for step in range(steps))
            arrived = sum(as_numpy(result[name]).astype(float) for result in runs[0].results)
            squares += float(((wanted / 2 - arrived) ** 2).sum())
        return float(np.sqrt(squares))

    mine = error()
    request.getfixturevalue("without_kernels")
    assert mine <= (1.1 if spec.startswith("powersgd") else 1.01) * error()


@types
@pytest.mark.parametrize("added", ["nothing", "gradients", "results"])
@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.1", "efsignsgd", "powersgd:rank=2", "qsgd:bits=4"])
def test_results_may_take_the_gradients_place(spec: str, added: str, backend: str, dtype: str) -> None:
    """And a step that does not count leaves everything as it was, and a NaN in each result."""

    def work(communicator: Any) -> None:
        engines = [
            Engine(communicator, infos(SHAPES, dtype), parse_compressor(spec), min_numel=0, min_ndim=0)
            for _ in range(2)
        ]
        totals = [AccumulatedGradients(), AccumulatedGradients()]
        right = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for step in range(4):
            found: list[dict[str, Any]] = []
            given = [gradients(backend, dtype)(communicator.rank, step) for _ in range(2)]
            if step == 2 and communicator.rank == 1:
                for one in given:
                    one["odd"][0, 0, 0] = float("inf")
            own = {name: as_numpy(x).astype(np.float32) for name, x in given[0].items()}
            for engine, sums, one, in_place in zip(engines, totals, given, (False, True), strict=True):
                before = bits_of(engine)
                adds = None if added == "nothing" else sums.of_step(0.25, added == "results")
                engine.begin()
                found.append(engine.step(one, in_place, adds))
                assert (bits_of(engine) == before) == (step == 2 or (spec in ("none", "qsgd:bits=4")))
            assert all(found[1][name] is given[1][name] for name in SHAPES)
            for name in SHAPES:
                assert np.isnan(as_numpy(found[0][name])).any() == (step == 2)
                np.testing.assert_array_equal(as_numpy(found[0][name]), as_numpy(found[1][name]), err_msg=name)
                if step != 2:
                    right[name] += (as_numpy(found[0][name]) if added == "results" else own[name]) * np.float32(0.25)
        for sums in totals:
            assert sums.sums.keys() == (set() if added == "nothing" else SHAPES.keys())
            for name, total in sums.sums.items():
                np.testing.assert_array_equal(as_numpy(total), right[name], err_msg=name)

    run_ranks(2, work)


def test_a_mean_beyond_half_precision_lets_no_rank_count_the_step() -> None:
    """Each rank's payload is finite, in float32; and what the type does not hold is infinite on all of them."""
    given = np.float16([60000, 60000, 60000, 1])
    (one, *_) = run_engines(
        2, infos({"w": (4,)}, "float16"), parse_compressor("onebit"), lambda rank, step: {"w": given * (step < 2)}, 3,
        memory=ErrorFeedback,
    )  # fmt: skip
    assert np.isfinite(one.results[0]["w"]).all()
    (kept,) = one.engine.states["w"].memory
    assert np.isfinite(kept).all()
    (large, *_) = run_engines(
        2, infos({"w": (4,)}, "float16"), parse_compressor("bf16"),
        lambda rank, step: {"w": np.float16([65504, 1, 2, 3])}, 1, memory=NoMemory,
    )  # fmt: skip  # which bfloat16 rounds up to 65536
    assert np.isnan(large.results[0]["w"]).any()


@types
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2", "efsignsgd"])
def test_a_checkpoint_goes_on_bit_for_bit(spec: str, backend: str, dtype: str) -> None:
    """As does an engine whose residuals nobody reads, and nobody makes real by that."""

    def work(communicator: Any) -> None:
        def engine() -> Engine:
            return Engine(communicator, infos(SHAPES, dtype), parse_compressor(spec), min_numel=0, min_ndim=0)

        unread, first, second = engine(), engine(), engine()
        for step in range(4):
            if step == 2:
                restore(state_of(first, None, copy), second, None, lambda array, name: copy(array))
            given = gradients(backend, dtype)(communicator.rank, step)
            found = []
            for one in (unread, first, second)[: 2 + (step >= 2)]:
                one.begin()
                found.append({name: bits(x) for name, x in one.step(given).items()})
            assert all(results == found[0] for results in found)
        assert bits_of(unread) == bits_of(first) == bits_of(second)
        assert {as_numpy(one).dtype.name for state in first.states.values() for one in state.memory} == {"float32"}

    run_ranks(2, work)


@types
def test_a_bucket_holds_elements_of_one_type(backend: str, dtype: str) -> None:
    """Of norms of float32, matrices of 16 bits, and a tensor of float64, which goes by itself."""
    of = {"norm": "float32", "matrix": dtype, "other": dtype, "double": "float64", "bias": "float32"}
    tensors = [TensorInfo(name, (12, 5), one) for name, one in of.items()]

    def given(rank: int, step: int) -> dict[str, Any]:
        rng = np.random.default_rng([rank, step])
        return {name: make(backend, rng.standard_normal((12, 5)), one) for name, one in of.items()}

    runs = run_engines(2, tensors, parse_compressor("topk:ratio=0.2"), given, 3)
    assert_same_on_all_ranks(runs)
    assert [group.names for group in runs[0].engine.buckets.with_kernels] == [["bias", "norm"], ["matrix", "other"]]
    for name, one in of.items():
        assert str(runs[0].results[0][name].dtype).removeprefix("torch.") == one
        alone = run_engines(
            2, [TensorInfo(name, (12, 5), one)], parse_compressor("topk:ratio=0.2"),
            lambda rank, step, name=name: {name: given(rank, step)[name]}, 3,
        )  # fmt: skip
        for mine, right in zip(runs[0].results, alone[0].results, strict=True):
            assert bits(mine[name]) == bits(right[name])


@types
@pytest.mark.parametrize("memory", [ErrorFeedback(), NoMemory(), MomentumCorrection(0.5)], ids=str)
def test_who_looks_at_x_sees_it_in_float32_and_may_replace_it(memory: Memory, backend: str, dtype: str) -> None:
    """And changes nothing by looking."""

    def work(communicator: Any) -> None:
        watched, plain = (
            Engine(communicator, infos(SHAPES, dtype), parse_compressor("topk:ratio=0.1"), memory, 0, 0, 0)
            for _ in range(2)
        )
        seen: dict[str, np.ndarray] = {}
        replaces = False

        def look(look: Look) -> dict[str, Any]:
            seen.update({name: as_numpy(x).copy() for name, x in look.items()})
            told = look.energies(list(look))
            look.lost_when_sent(list(look))
            previews_of(watched).kept(look, watched.plan, list(look))
            assert told.numbers().keys() == SHAPES.keys()
            return {name: x * 0 for name, x in look.items()} if replaces else {}

        observe(watched, look)
        for step in range(3):
            found = []
            for engine in (watched, plain):
                engine.begin()
                result = engine.step(gradients(backend, dtype)(communicator.rank, step))
                found.append({name: bits(x) for name, x in result.items()})
            assert found[0] == found[1]
            assert {x.dtype.name for x in seen.values()} == {"float32"}
        replaces = True
        watched.begin()
        result = watched.step(gradients(backend, dtype)(communicator.rank, 3))
        assert not any(as_numpy(x).any() for x in result.values())
        if memory.keeps and not memory.is_momentum:
            for name, state in watched.states.items():
                np.testing.assert_array_equal(as_numpy(state.memory[0]), seen[name], err_msg=name)

    run_ranks(2, work)


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of numbers that overflow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("memory", [ErrorFeedback, pytest.param(NoMemory, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "spec", ["none", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("qsgd:bits=4", *MORE))]
)
def test_the_bits_on_a_device_are_those_of_the_kernels_in_c(
    spec: str, memory: Any, dtype: str, in_interpreter: None
) -> None:
    """Of steps in place and aside, with gradients added up, and of one that does not count."""
    torch = pytest.importorskip("torch")
    shapes = {"piece": (3, 2_732), "odd": (5, 23), "vector": (129,)}

    def work(communicator: Any) -> list[Any]:
        engine = Engine(communicator, infos(shapes, dtype), parse_compressor(spec), memory(), min_numel=0, min_ndim=0)
        sums, found = AccumulatedGradients(), []
        for step in range(4):
            rng = np.random.default_rng([communicator.rank, step])
            given = {name: make("torch", rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
            if step == 2 and communicator.rank == 1:
                given["odd"][0, 0] = float("inf")
            engine.begin()
            result = engine.step(given, step % 2 == 0, sums.of_step(0.5))
            found += [torch.isnan(x).any().item() if step == 2 else bits(x) for x in result.values()]
            found += [bits_of(engine), {name: bits(x) for name, x in sums.sums.items()}]
        assert grouped(engine) == shapes.keys()
        found.append({group.bucket.device is None for group in engine.buckets.with_kernels})
        return found

    ranks, *nodes = (4, 2) if spec.startswith("two_level") else (2,)  # of two ranks each
    device = run_ranks(ranks, work, *nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_serves_host", False)
        host = run_ranks(ranks, work, *nodes)
    for mine, right in zip(device, host, strict=True):
        assert (mine.pop(), right.pop()) == ({False}, {True})
        assert mine == right
