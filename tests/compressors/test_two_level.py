"""Two levels: dense within a node, compressed between nodes, shard by shard."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hvdcomp import Compressor, ErrorFeedback, kernels
from hvdcomp.adaptation.look import observe
from hvdcomp.arrays import numpy_arrays
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.compressors.two_level import TwoLevel
from hvdcomp.errors import SpecError
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.ledger import StepCost
from tests.harness import BACKENDS, as_numpy, bits, densify, infos, make
from tests.lockstep import run_lockstep

METHODS = ["topk:ratio=0.1", "randomk:ratio=0.2", "qsgd:bits=4,bucket=64", "efsignsgd", "fp16"]
WHOLE = ["powersgd:rank=2", "powersgd:rank=2,alternating=True", "atomo:rank=2", "signsgd", "onebit:per_row=True"]
SHAPE = (37, 29)


def gradient(rank: int, step: int = 0) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=SHAPE).astype(np.float32)


def stated(spec: str, nodes: int, ranks_per_node: int, xs: list[np.ndarray], step: int) -> np.ndarray:
    """The result in NumPy: of each shard, what the compressor makes of the nodes' means, a rank for each node."""
    if ranks_per_node == 1:
        return as_numpy(run_lockstep(parse_compressor(spec), xs, step).outcomes[0].mean)
    size = math.prod(SHAPE)
    length = -(-size // (ranks_per_node * 8)) * 8
    padded = [np.pad(x.reshape(-1), (0, ranks_per_node * length - size)) for x in xs]
    shards = []
    for own in range(ranks_per_node):
        part = slice(own * length, (own + 1) * length)
        means = [
            np.mean([padded[node * ranks_per_node + rank][part] for rank in range(ranks_per_node)], axis=0)
            for node in range(nodes)
        ]
        done = run_lockstep(parse_compressor(spec), means, step, name=f"w@{own}")
        shards.append(as_numpy(done.outcomes[0].mean))
    return np.concatenate(shards)[:size].reshape(SHAPE)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (3, 2), (1, 3), (3, 1)])
def test_it_is_what_was_stated(spec: str, nodes: int, ranks_per_node: int, backend: str) -> None:
    def work(communicator: InProcessCommunicator) -> np.ndarray:
        engine = Engine(communicator, infos({"w": SHAPE}), TwoLevel(parse_compressor(spec)))
        return as_numpy(engine.step({"w": make(backend, gradient(communicator.rank))})["w"])

    results = run_ranks(nodes * ranks_per_node, work, ranks_per_node)
    expected = stated(spec, nodes, ranks_per_node, [gradient(rank) for rank in range(nodes * ranks_per_node)], 0)
    for result in results:
        assert bits(result) == bits(results[0])
    np.testing.assert_allclose(results[0], expected, rtol=2e-3 if spec == "fp16" else 2e-5, atol=1e-6)


@pytest.mark.parametrize("spec", ["signsgd", "efsignsgd", "topk:ratio=0.01", "chunkedtopk", "int4"])
def test_optimizers_are_told_of_the_compressor_within(spec: str) -> None:
    inner = parse_compressor(spec)
    outer = TwoLevel(inner)
    assert outer.in_units == inner.in_units == (spec != "signsgd")


SHAPES = {"a": (3, 5), "b": (40, 30), "c": (1,), "d": (257,), "e": (2, 3, 4)}


@pytest.mark.skipif(not kernels.available(), reason="needs the compiled kernels")
@pytest.mark.parametrize("spec", [*METHODS, "efsignsgd:exchange=scatter", "eden:bits=1,back=3,exchange=scatter"])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (3, 2), (2, 3), (1, 3), (3, 1)])
def test_a_bucket_is_dealt_out_as_one_vector(spec: str, nodes: int, ranks_per_node: int) -> None:
    """What the ranks that hold a shard make of it is what they would make of its pieces as tensors of their own."""
    inner, steps = parse_compressor(spec), 3
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    length = -(-sum(sizes.values()) // (ranks_per_node * 8)) * 8

    def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([rank, step])
        return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}

    def work(communicator: InProcessCommunicator) -> list[np.ndarray]:
        engine = Engine(communicator, infos(SHAPES), TwoLevel(inner), ErrorFeedback(), min_numel=0, min_ndim=0)
        results = [engine.step(gradients(communicator.rank, step)) for step in range(steps)]
        assert len(engine.buckets.with_kernels) == 1
        return [np.concatenate([one[name].reshape(-1) for name in SHAPES]) for one in results]

    def of_shard(own: int) -> list[np.ndarray]:
        """What the ranks of this shard come to: a training of its pieces, with the nodes' means for gradients."""
        start, end = own * length, (own + 1) * length
        pieces, place = {}, 0
        for name, size in sizes.items():
            if min(end, place + size) > max(start, place):
                pieces[f"{name}@{own}" if ranks_per_node > 1 else name] = (max(start, place), min(end, place + size))
            place += size
        if not pieces:
            return [np.zeros(0, np.float32)] * steps

        def node_work(communicator: InProcessCommunicator) -> list[np.ndarray]:
            shapes = {name: (b - a,) for name, (a, b) in pieces.items()}
            engine = Engine(communicator, infos(shapes), inner, ErrorFeedback(), min_numel=0, min_ndim=0)
            results = []
            for step in range(steps):
                node = range(communicator.rank * ranks_per_node, (communicator.rank + 1) * ranks_per_node)
                flat = [np.concatenate([x.reshape(-1) for x in gradients(rank, step).values()]) for rank in node]
                mean = np.mean(flat, axis=0)
                done = engine.step({name: mean[a:b].copy() for name, (a, b) in pieces.items()})
                results.append(np.concatenate([done[name] for name in pieces]))
            return results

        return list(run_ranks(nodes, node_work)[0])

    runs = run_ranks(nodes * ranks_per_node, work, ranks_per_node)
    shards = [of_shard(own) for own in range(ranks_per_node)]
    for step in range(steps):
        expected = np.concatenate([shard[step] for shard in shards])
        assert len({bits(run[step]) for run in runs}) == 1
        # A last bit of a mean may turn the choice or the rounding of an element.
        close = np.isclose(runs[0][step], expected, rtol=2e-3 if spec == "fp16" else 1e-4, atol=1e-5)
        assert close.mean() > 0.995, (step, close.mean())


@pytest.mark.skipif(not kernels.available(), reason="without kernels tensors of 16 bits go one by one")
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("spec", [*METHODS, "powersgd:rank=2"])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (1, 3)])
def test_gradients_of_16_bits_are_exchanged_in_float32(spec: str, nodes: int, ranks_per_node: int, dtype: str) -> None:
    """Results are rounded, and every rank adds what that takes off to its next gradient. As many bytes travel."""
    pytest.importorskip("ml_dtypes")

    def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([rank, step])
        return {name: make("numpy", rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}

    def work(communicator: InProcessCommunicator) -> list[tuple[np.ndarray, np.ndarray]]:
        narrow, wide = (
            Engine(communicator, infos(SHAPES, kind), TwoLevel(parse_compressor(spec)), ErrorFeedback(), 0, 0, 0)
            for kind in (dtype, "float32")
        )
        taken_off: dict[str, Any] = dict.fromkeys(SHAPES, 0.0)
        found = []
        for step in range(3):
            given = gradients(communicator.rank, step)
            right = wide.step({name: x.astype(np.float32) + taken_off[name] for name, x in given.items()})
            results = narrow.step(given)
            rounded = {name: x.astype(results[name].dtype) for name, x in right.items()}
            taken_off = {name: x - rounded[name].astype(np.float32) for name, x in right.items()}
            names = [name for name, method in narrow.plan.items() if isinstance(method, TwoLevel)]  # not dense ones
            found.append(tuple(np.concatenate([of[name].reshape(-1) for name in names]) for of in (results, rounded)))
            assert narrow.ledger.last is not None
            assert wide.ledger.last is not None
            sent = [[engine.ledger.last.tensors[name].bytes_sent for name in names] for engine in (narrow, wide)]
            assert sent[0] == sent[1]
            for name in names:
                for kept, other in zip(narrow.states[name].memory, wide.states[name].memory, strict=True):
                    apart = ~np.isclose(kept, other + taken_off[name], rtol=1e-3, atol=1e-4)
                    assert apart.mean() < 0.01, (name, step)
        assert {name for group in narrow.buckets.with_kernels for name in group.names} == SHAPES.keys()
        return found

    for steps in zip(*run_ranks(nodes * ranks_per_node, work, ranks_per_node), strict=True):
        assert len({bits(result) for result, _ in steps}) == 1
        result, right = steps[0]
        assert (result == right).mean() > 0.98  # a last bit may turn the choice or the rounding of an element


MATRICES = {"a": (40, 30), "b": (24, 50), "c": (33, 9), "d": (30, 30), "e": (2, 3, 4), "f": (257, 3)}


def matrices(rank: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in MATRICES.items()}


def check_matrices(spec: str, nodes: int, ranks_per_node: int, backend: str) -> None:
    """The results are those of a training of one rank a node, with the nodes' means for gradients."""
    inner, tensors = parse_compressor(spec), infos(MATRICES)
    steps = 1 if "atomo" in spec else 4  # whose residuals grow, and with them what a last bit comes to

    def train(communicator: InProcessCommunicator, compressor: Compressor, ranks: int) -> tuple[Engine, list]:
        engine = Engine(communicator, tensors, compressor, ErrorFeedback(), min_numel=0, min_ndim=0)
        results = []
        for step in range(steps):
            each = [matrices(communicator.rank * ranks + one, step) for one in range(ranks)]
            means = {name: np.mean([one[name] for one in each], axis=0) for name in MATRICES}
            done = engine.step({name: make(backend, mean) for name, mean in means.items()})
            results.append({name: as_numpy(array) for name, array in done.items()})
        return engine, results

    runs = run_ranks(nodes * ranks_per_node, lambda one: train(one, TwoLevel(inner), 1), ranks_per_node)
    _, expected = run_ranks(nodes, lambda one: train(one, inner, ranks_per_node))[0]
    for engine, results in runs:
        for step in range(steps):
            for name in MATRICES:
                assert bits(results[step][name]) == bits(runs[0][1][step][name])
                largest = np.abs(expected[step][name]).max()
                np.testing.assert_allclose(results[step][name], expected[step][name], rtol=0, atol=1e-3 * largest)
        for name, state in engine.states.items():
            theirs = runs[0][0].states[name].compressor
            assert [bits(one) for one in state.compressor] == [bits(one) for one in theirs]
    for node in range(nodes):  # of each tensor, one rank of a node has kept something
        for name in MATRICES:
            mine = runs[node * ranks_per_node : (node + 1) * ranks_per_node]
            kept = [np.any([as_numpy(one) for one in engine.states[name].memory]) for engine, _ in mine]
            dense = TwoLevel(inner).route(TensorInfo(name, MATRICES[name])).lossless
            assert sum(kept) == (not dense), (name, kept)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("spec", WHOLE)
@pytest.mark.parametrize(("nodes", "ranks_per_node", "backend"), [(2, 2, "numpy"), (2, 3, "torch"), (1, 2, "torch")])
def test_matrices_have_owners(spec: str, nodes: int, ranks_per_node: int, backend: str) -> None:
    check_matrices(spec, nodes, ranks_per_node, backend)


@pytest.mark.skipif(not kernels.available(), reason="needs the compiled kernels")
@pytest.mark.parametrize("spec", [spec for spec in WHOLE if parse_compressor(spec).has_bucket_form])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (3, 1), (2, 3), (1, 8)])
def test_a_bucket_of_matrices_is_dealt_out(spec: str, nodes: int, ranks_per_node: int) -> None:
    """To eight ranks as well, of which two get none of the six."""
    check_matrices(spec, nodes, ranks_per_node, "numpy")


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "qsgd:bits=6,bucket=64", "efsignsgd"])
def test_with_error_feedback_nothing_is_lost_over_many_steps(spec: str) -> None:
    """The results' sum, and the mean of what all ranks keep, are the sum of the mean gradients."""
    ranks, steps = 6, 40

    def work(communicator: InProcessCommunicator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        engine = Engine(communicator, infos({"w": SHAPE}), TwoLevel(parse_compressor(spec)), ErrorFeedback())
        got, given = np.zeros(SHAPE), np.zeros(SHAPE)
        for step in range(steps):
            x = gradient(communicator.rank, step)
            given += x
            got += engine.step({"w": x})["w"]
        return got, given, np.array(engine.states["w"].memory[0], np.float64)

    done = run_ranks(ranks, work, 2)
    kept = sum(left for _, _, left in done) / ranks
    expected = sum(given for _, given, _ in done) / ranks
    for got, _, _ in done:
        np.testing.assert_allclose(got + kept, expected, atol=1e-3)
    for rank, (_, _, left) in enumerate(done):  # of its own shard alone
        assert np.count_nonzero(np.abs(left) > 1e-4) <= -(-left.size // 16) * 8, rank


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2"])
def test_what_is_compressed_in_place_of_x_leaves_the_rest_of_it(spec: str, backend: str) -> None:
    """As where a policy has x compressed twice; of two tensors, the other is compressed as it is."""
    ranks, shapes = 4, {"v": (30, 20), "w": SHAPE}

    def work(communicator: InProcessCommunicator) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        engine = Engine(communicator, infos(shapes), TwoLevel(parse_compressor(spec)), ErrorFeedback(), min_numel=0)
        observe(engine, lambda look: {"w": look["w"] * 0.5})
        rng = np.random.default_rng(communicator.rank)
        given = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        got = engine.step({name: make(backend, x) for name, x in given.items()})
        return {name: (x, as_numpy(got[name]), as_numpy(engine.states[name].memory[0])) for name, x in given.items()}

    done = run_ranks(ranks, work, 2)
    for name in shapes:
        given, got, kept = (np.mean([one[name][place] for one in done], axis=0) for place in range(3))
        np.testing.assert_allclose(got + kept, given, atol=1e-5)


@pytest.mark.parametrize("inner", ["efsignsgd", "powersgd:rank=2"])
def test_between_nodes_each_rank_sends_a_share_of_the_payload(inner: str) -> None:
    def work(communicator: InProcessCommunicator) -> tuple[dict[str, int], StepCost]:
        sent = {"all": 0, "node": 0, "across": 0}

        class Counting:
            """Counts what is handed to collectives of each group."""

            def __init__(self, inner: Any, group: str) -> None:
                self._inner, self._group = inner, group
                self.rank, self.world_size = inner.rank, inner.world_size

            def part(self, group: str) -> Any:
                return self if group == "all" else Counting(self._inner.part(group), group)

            def __getattr__(self, name: str) -> Any:
                found = getattr(self._inner, name)
                if not name.startswith("start_"):
                    return found

                def start(array: Any, *rest: Any) -> Any:
                    sent[self._group] += array.nbytes
                    return found(array, *rest)

                return start

        compressor = parse_compressor(f"two_level({inner})")
        engine = Engine(Counting(communicator, "all"), infos({"w": (512, 512)}), compressor)
        engine.step({"w": np.ones((512, 512), np.float32)})
        assert engine.ledger.last is not None
        return sent, engine.ledger.last

    flat, dense = parse_compressor(inner).payload_bytes((512, 512)), 512 * 512 * 4
    for nodes in (2, 1):
        found = run_ranks(4 * nodes, work, 4)
        between = [sent["across"] for sent, _ in found]
        if nodes == 1:
            assert between == [0] * 4
        elif inner == "efsignsgd":
            assert between == pytest.approx([flat / 4] * 8, rel=0.01)
        else:  # one rank of each node owns the matrix, and the others send 8 bytes
            assert sorted(between) == [8] * 6 + [flat] * 2
        for sent, cost in found:
            assert cost.bytes_sent == sum(sent.values())
            assert cost.bytes_in_node == (sent["node"] if nodes > 1 else 0)
            assert sent["all"] <= 8  # the flag
            counted = sent["all"] + sent["across"] if nodes > 1 else cost.bytes_sent
            assert cost.compression_factor == dense / counted
            if inner == "efsignsgd":
                assert sent["node"] == pytest.approx(dense * (1 + 1 / 4), rel=0.01)
                own = cost.tensors["w"]
                assert own.bytes_in_node == (dense * (1 + 1 / 4) if nodes > 1 else 0)
                assert own.bytes_sent == dense * (1 + 1 / 4) + (flat // 4 if nodes > 1 else 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])  # in a bucket and by itself
def test_bytes_in_a_node_are_told_apart_where_there_are_others(dtype: str) -> None:
    def work(communicator: InProcessCommunicator) -> StepCost:
        engine = Engine(communicator, infos({"w": (64, 64)}, dtype), parse_compressor("two_level(topk:ratio=0.1)"))
        engine.step({"w": np.ones((64, 64), dtype)})
        assert engine.ledger.last is not None
        return engine.ledger.last

    for nodes in (1, 2):
        for step in run_ranks(2 * nodes, work, 2):
            for cost in (step, step.tensors["w"]):
                assert (cost.bytes_in_node > 64 * 64 * 4) == (nodes > 1)
                assert cost.compression_factor is not None
                assert (cost.compression_factor > 4) == (nodes > 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_with_an_infinity_counts_on_no_rank(backend: str) -> None:
    def work(communicator: InProcessCommunicator) -> list[np.ndarray]:
        engine = Engine(communicator, infos({"w": SHAPE}), TwoLevel(parse_compressor("topk:ratio=0.1")))
        results = []
        for step in range(3):
            x = gradient(communicator.rank, step)
            if step == 1 and communicator.rank == 3:
                x[0, 0] = np.nan
            results.append(as_numpy(engine.step({"w": make(backend, x)})["w"]).copy())
        return results

    runs = run_ranks(4, work, 2)
    for place in (0, 2):
        assert len({bits(run[place]) for run in runs}) == 1
        assert np.isfinite(runs[0][place]).all()
    assert all(np.isnan(run[1]).any() for run in runs)


def test_levels_change_on_all_shards() -> None:
    def work(communicator: InProcessCommunicator) -> list[int]:
        engine = Engine(communicator, infos({"w": SHAPE}), parse_compressor("two_level(topk:ratio=0.5)"))
        counts = []
        for step, level in enumerate((None, 0.1, None)):
            engine.set_level(level)
            engine.begin()
            counts.append(int(np.count_nonzero(engine.step({"w": gradient(communicator.rank, step)})["w"])))
        return counts

    (first, lower, again), *_ = run_ranks(4, work, 2)
    assert lower < first / 2
    assert again > 2 * lower


def test_specs_name_it() -> None:
    two = parse_compressor("two_level(topk:ratio=0.01)")
    assert str(two) == "two_level(topk:ratio=0.01)"
    assert parse_compressor(str(two)) == two
    assert two.at_level(0.5) == parse_compressor("two_level(topk:ratio=0.5)")
    routed = parse_compressor('two_level({"numel<100": "none", "*": "qsgd:bits=4"})')
    chosen = [str(routed.route(info)) for info in infos({"a": (3, 3), "b": (50, 50)})]
    assert chosen == ["none", "two_level(qsgd:bits=4)"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("two_level(dgc:ratio=0.01)", "it corrects the momentum of each rank's own gradient"),
        ("two_level(two_level(qsgd:bits=4))", "there are only two levels"),
        *(
            (spec, r"like this: 'two_level\(topk:ratio=0.01\)'")
            for spec in ("two_level", "two_level:topk", "two_level(topk")
        ),
        pytest.param("two_level(" * 5000 + ")" * 5000, "there are only two levels", id="many"),
    ],
)
def test_what_has_no_two_levels_is_refused(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_compressor(spec)


def test_a_preview_is_what_one_rank_of_one_node_would_send() -> None:
    x = gradient(0)
    compressor = TwoLevel(parse_compressor("topk:ratio=0.1"))
    sent = compressor.preview(numpy_arrays, x, (), Context("w", 0, 0, 3, 8))
    top = parse_compressor("topk:ratio=0.1").preview(numpy_arrays, x, (), Context("w", 0, 0, 0, 1))
    np.testing.assert_allclose(densify(sent, SHAPE), densify(top, SHAPE))
