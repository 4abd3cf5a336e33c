"""What the model says is exchanged, against what the engine really hands to the communicator."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcomp import kernels
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.errors import SpecError
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.fusion import part_bytes
from hvdcomp.perfmodel import exchange_of
from hvdcomp.perfmodel.shapes import tensors_of
from tests.harness import DTYPES, EXAMPLES

ROUTED = '{"embed*": "topk:ratio=0.1", "numel<800": "none", "*": "powersgd:rank=2"}'
SHAPES = {"conv": (13, 5, 3, 3), "embedding": (41, 30), "linear": (50, 37), "bias": (50,), "small": (3, 4), "flat": ()}
PADDING = 7
FLAG_AND_PADDING = 8 + PADDING  # of an element of the widest type


class Recorder(LoopbackCommunicator):
    """Writes down the collectives of each round, by kind and bytes."""

    def __init__(self, size: int = 1) -> None:
        super().__init__(size)
        self.rounds: dict[str, list[tuple[str, int]]] = {}

    def start_allreduce(self, array: Array, op: str, name: str) -> Array:
        self._note("allreduce", array, name)
        return super().start_allreduce(array, op, name)

    def start_allgather(self, array: Array, name: str) -> Array:
        self._note("allgather", array, name)
        return super().start_allgather(array, name)

    def start_alltoall(self, array: Array, name: str) -> Array:
        self._note("alltoall", array, name)
        return super().start_alltoall(array, name)

    def _note(self, kind: str, array: Array, name: str) -> None:
        number = name.split(".")[1]  # hvdcomp.round0.1.allreduce...
        self.rounds.setdefault(number, []).append((kind, part_bytes(arrays_for(array), array)))


def steps_of(
    spec: str, shapes: dict[str, tuple[int, ...]], dtype: str, steps: int, ranks: int = 1
) -> list[list[list[tuple[str, int]]]]:
    """The collectives of each round of each step of an engine on NumPy arrays."""
    communicator = Recorder(ranks)
    tensors = [TensorInfo(name, shape, dtype) for name, shape in shapes.items()]
    engine = Engine(communicator, tensors, parse_compressor(spec), min_numel=20)
    found = []
    for step in range(steps):
        generator = np.random.default_rng(step)
        engine.begin()
        engine.step({name: generator.standard_normal(shape).astype(dtype) for name, shape in shapes.items()})
        found.append([sorted(one) for one in communicator.rounds.values()])
        communicator.rounds = {}
    return found


@pytest.mark.parametrize(
    ("spec", "dtype"), [*((spec, "float32") for spec in EXAMPLES), *((ROUTED, dtype) for dtype in DTYPES["numpy"])]
)
def test_the_rounds_are_those_of_the_engine(spec: str, dtype: str) -> None:
    """Two steps, since an alternating method sends another factor in each; the model holds their mean."""
    tensors = [TensorInfo(name, shape, dtype) for name, shape in SHAPES.items()]
    modeled = exchange_of(parse_compressor(spec), tensors, 1, min_numel=20).rounds
    first, second = steps_of(spec, SHAPES, dtype, 2)
    assert [[kind for kind, _ in one] for one in first] == [[kind for kind, _ in one] for one in second]
    assert len(first) == len(modeled)
    for number, (seen, again, expected) in enumerate(zip(first, second, modeled, strict=True)):
        assert [kind for kind, _ in seen] == sorted(one.kind for one in expected)
        bytes_seen = sum(size for _, size in seen + again) / 2
        spare = FLAG_AND_PADDING if number == 0 else PADDING
        assert 0 <= bytes_seen - sum(one.bytes for one in expected) <= spare


SCATTERED = [
    *(f"{spec}{',' if ':' in spec else ':'}exchange=scatter"
      for spec in ("qsgd:bits=4,bucket=64", "qsgd:bits=1,bucket=3", "terngrad", "natural", "onebit", "efsignsgd",
                   "int8", "int4:block=24", "fp8:format=e5m2,block=100", "fp16", "bf16:rounding=stochastic",
                   "eden:bits=1,back=4,block=512")),
    "qsgd:bits=4,bucket=32,exchange=auto",
    '{"embed*": "topk:ratio=0.1", "numel<800": "none", "*": "natural:exchange=scatter"}',
]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "dtype"), [(2, "float32"), (3, "float32"), (5, "float32"), (3, "float16"), (3, "float64")]
)
@pytest.mark.parametrize("spec", SCATTERED)
def test_the_rounds_of_scattered_payloads_are_those_of_the_engine(spec: str, ranks: int, dtype: str) -> None:
    """Buckets of float32 and float16, where there are kernels, and tensors one by one. Rows to each rank are padded."""
    if dtype != "float64" and not kernels.available():
        pytest.skip("needs the compiled kernels")
    tensors = [TensorInfo(name, shape, dtype) for name, shape in SHAPES.items()]
    exchange = exchange_of(parse_compressor(spec), tensors, ranks, min_numel=20)
    (seen,) = steps_of(spec, SHAPES, dtype, 1, ranks)
    assert len(seen) == len(exchange.rounds)
    for number, (each, expected) in enumerate(zip(seen, exchange.rounds, strict=True)):
        assert [kind for kind, _ in each] == sorted(one.kind for one in expected)
        for (kind, size), one in zip(each, sorted(expected), strict=True):
            spare = PADDING * (ranks if kind == "alltoall" else 1) + (8 if number == 0 else 0)
            assert 0 <= size - one.bytes <= spare
    if "auto" in spec:
        assert ("alltoall" in str(exchange)) == (ranks >= 4)


def test_where_all_is_scattered_the_flag_goes_alone() -> None:
    shapes = {"one": (40, 50), "other": (64, 64)}
    tensors = [TensorInfo(name, shape) for name, shape in shapes.items()]
    exchange = exchange_of(parse_compressor("natural:exchange=scatter"), tensors, 4)
    assert [[one.kind for one in each] for each in exchange.rounds] == [["alltoall", "allgather"], ["allgather"]]
    (seen,) = steps_of("natural:exchange=scatter", shapes, "float32", 1, 4)
    assert [[kind for kind, _ in each] for each in seen] == [["allgather", "alltoall"], ["allgather"]]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 1024])
def test_bytes_and_decoding_of_scattered_payloads_do_not_grow_with_the_ranks(ranks: int) -> None:
    tensors = tensors_of("resnet50")
    gathered = exchange_of(parse_compressor("qsgd:bits=4"), tensors, ranks)
    scattered = exchange_of(parse_compressor("qsgd:bits=4,exchange=scatter"), tensors, ranks)
    assert float(gathered.decoded(ranks)) == ranks
    assert float(scattered.decoded(ranks)) == pytest.approx(2 - 1 / ranks)
    payload = next(one.bytes for one in gathered.rounds[0] if one.kind == "allgather")
    (alltoall,) = (one.bytes for one in scattered.rounds[0] if one.kind == "alltoall")
    (means,) = scattered.rounds[1]
    # Chunks are of whole units, and all as long as the longest.
    assert payload <= alltoall < 1.05 * payload
    assert means.bytes == pytest.approx(alltoall / ranks)


def test_means_of_more_bits_count_in_bytes_and_not_in_decoding() -> None:
    """The time to decode a block hardly depends on its bits."""
    ranks, tensors = 16, tensors_of("resnet50")
    alike, finer = (
        exchange_of(parse_compressor(f"eden:bits=1,back={back},exchange=scatter"), tensors, ranks) for back in (1, 3)
    )
    assert finer.rounds[0] == alike.rounds[0]
    assert finer.rounds[1][0].bytes == pytest.approx(alike.rounds[1][0].bytes * (4 + 3 * 128) / (4 + 128))
    assert float(finer.decoded(ranks)) == pytest.approx(float(alike.decoded(ranks))) == pytest.approx(2 - 1 / ranks)


def test_of_a_mixture_what_is_gathered_is_decoded_as_often_as_there_are_ranks() -> None:
    mixture = parse_compressor('{"small": "natural", "*": "natural:exchange=scatter"}')
    tensors = [TensorInfo("large", (600, 512)), TensorInfo("small", (200, 512))]
    # Payloads of 9 bits an element: a quarter of them decoded eight times, three quarters 15/8 times.
    assert float(exchange_of(mixture, tensors, 8).decoded(8)) == pytest.approx(8 / 4 + 15 / 8 * 3 / 4, rel=1e-3)


def test_published_sizes_of_the_models() -> None:
    """97, 170 and 418 MB in section 3: MiB, rounded."""
    sizes = {model: exchange_of(parse_compressor("none"), tensors_of(model), 8).bytes for model in MODEL_SIZES}
    assert {model: round(size / 2**20) for model, size in sizes.items()} == MODEL_SIZES


MODEL_SIZES = {"resnet50": 97, "resnet101": 170, "bert-base": 418}


def test_only_casts_are_overlapped() -> None:
    tensors = tensors_of("resnet50")
    overlapped = {spec for spec in EXAMPLES if exchange_of(parse_compressor(spec), tensors, 8).overlapped}
    assert overlapped == {"none", "fp16"}


LEVELS = [
    "two_level(topk:ratio=0.1)",
    "two_level(qsgd:bits=4,bucket=64)",
    "two_level(qsgd:bits=4,bucket=64,exchange=scatter)",
    "two_level(efsignsgd)",
    "two_level(randomk:ratio=0.1)",
    "two_level(powersgd:rank=2)",
    'two_level({"embed*": "topk:ratio=0.1", "numel<800": "none", "*": "powersgd:rank=2"})',
    '{"embed*": "natural", "numel<800": "none", "*": "two_level(topk:ratio=0.1)"}',
]


class NodesRecorder(Recorder):
    """The same for ranks of nodes: kinds end with "@node" or "@across"."""

    def __init__(self, size: int, ranks_per_node: int, rank: int) -> None:
        super().__init__(size)
        self._inside, self._mine = ranks_per_node, rank

    def part(self, group: str) -> LoopbackCommunicator:
        if group == "all":
            return self
        made = _Part(self, group, self._inside if group == "node" else self.world_size // self._inside)
        made.rank = self._mine if group == "node" else 0
        return made


class _Part(Recorder):
    def __init__(self, whole: NodesRecorder, group: str, size: int) -> None:
        super().__init__(size)
        self.rounds, self._group = whole.rounds, group

    def start_reducescatter(self, array: Array, op: str, name: str) -> Array:
        self._note("reducescatter", array, name)
        return array[: array.shape[0] // self.world_size]

    def _note(self, kind: str, array: Array, name: str) -> None:
        super()._note(f"{kind}@{self._group}", array, name)


@pytest.mark.skipif(not kernels.available(), reason="needs the compiled kernels")
@pytest.mark.parametrize(
    ("ranks", "per_node", "dtype"),
    [(4, 2, "float32"), (6, 2, "float32"), (6, 3, "float32"), (2, 2, "float32"), (12, 4, "float32"), (6, 3, "float16")],
)
@pytest.mark.parametrize("spec", LEVELS)
def test_the_rounds_of_two_levels_are_those_of_the_engine(spec: str, ranks: int, per_node: int, dtype: str) -> None:
    """Of each rank of a node; between nodes the model has their mean."""
    tensors = [TensorInfo(name, shape, dtype) for name, shape in SHAPES.items()]
    exchange = exchange_of(parse_compressor(spec), tensors, ranks, per_node, min_numel=20)
    seen = []
    for rank in range(per_node):
        communicator = NodesRecorder(ranks, per_node, rank)
        engine = Engine(communicator, tensors, parse_compressor(spec), min_numel=20)
        engine.begin()
        generator = np.random.default_rng(0)
        engine.step({name: generator.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()})
        seen.append([sorted(one) for one in communicator.rounds.values()])
    assert {len(rounds) for rounds in seen} == {len(exchange.rounds)}
    for number, expected in enumerate(exchange.rounds):
        named = sorted((one.kind + ("" if one.among == "all" else f"@{one.among}"), one.bytes) for one in expected)
        kinds = [kind for kind, _ in named]
        assert all([kind for kind, _ in rounds[number]] == kinds for rounds in seen)
        for place, (kind, size) in enumerate(named):
            sizes = [rounds[number][place][1] for rounds in seen]
            if kind.endswith("@across"):
                # Each piece of a tensor is rounded up for itself, and a rank without a part sends a zero.
                assert np.mean(sizes) == pytest.approx(size, rel=0.05, abs=4 * PADDING)
            else:
                assert len(set(sizes)) == 1
                assert 0 <= sizes[0] - size <= PADDING + (8 if number == 0 else 0)


def test_in_two_levels_a_rank_sends_its_share_between_nodes_and_decodes_one_of_each_node() -> None:
    tensors = tensors_of("resnet50")
    flat, levels = (exchange_of(parse_compressor(spec), tensors, 64, 8) for spec in ("natural", "two_level(natural)"))
    gathered = next(one.bytes for one in flat.rounds[0] if one.kind == "allgather")
    (between,) = levels.rounds[1]
    assert between == ("allgather", pytest.approx(gathered / 8), "", "across")
    assert float(flat.decoded(64)) == 64
    assert float(levels.decoded(64)) == 8
    scattered = exchange_of(parse_compressor("two_level(natural:exchange=scatter)"), tensors, 64, 8)
    assert float(scattered.decoded(64)) == pytest.approx(2 - 1 / 8)
    # What stays in the node does not count, as the slow link does not see it.
    assert levels.compression_factor == pytest.approx(levels.dense_bytes / (levels.bytes - levels.bytes_in_node))
    assert levels.bytes_in_node == pytest.approx(levels.dense_bytes * (1 + 1 / 8), rel=0.01)
    one_node = exchange_of(parse_compressor("two_level(natural)"), tensors, 8, 8)
    assert one_node.compression_factor == pytest.approx(1 / (1 + 1 / 8), rel=0.01)


def test_with_one_rank_a_node_two_levels_are_one() -> None:
    tensors = tensors_of("resnet50")
    flat, levels = (exchange_of(parse_compressor(spec), tensors, 8, 1) for spec in ("natural", "two_level(natural)"))
    assert flat == levels


def test_two_levels_need_to_know_nodes() -> None:
    with pytest.raises(SpecError, match=r"two_level\(topk:ratio=0.01\) needs the number of ranks on each node"):
        exchange_of(parse_compressor("two_level(topk:ratio=0.01)"), tensors_of("resnet50"), 8)


def test_nothing_to_exchange_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to exchange"):
        exchange_of(parse_compressor("none"), [TensorInfo("empty", (0, 3))], 2)
