"""What the model says is exchanged, against what the engine really hands to the communicator."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
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

    def _note(self, kind: str, array: Array, name: str) -> None:
        number = name.split(".")[1]  # hvdcomp.round0.1.allreduce...
        self.rounds.setdefault(number, []).append((kind, part_bytes(arrays_for(array), array)))


def steps_of(
    spec: str, shapes: dict[str, tuple[int, ...]], dtype: str, steps: int
) -> list[list[list[tuple[str, int]]]]:
    """The collectives of each round of each step of an engine on NumPy arrays."""
    communicator = Recorder()
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
    modelled = exchange_of(parse_compressor(spec), tensors, min_numel=20).rounds
    first, second = steps_of(spec, SHAPES, dtype, 2)
    assert [[kind for kind, _ in one] for one in first] == [[kind for kind, _ in one] for one in second]
    assert len(first) == len(modelled)
    for number, (seen, again, expected) in enumerate(zip(first, second, modelled, strict=True)):
        assert [kind for kind, _ in seen] == sorted(one.kind for one in expected)
        bytes_seen = sum(size for _, size in seen + again) / 2
        spare = FLAG_AND_PADDING if number == 0 else PADDING
        assert 0 <= bytes_seen - sum(one.bytes for one in expected) <= spare


def test_published_sizes_of_the_models() -> None:
    """97, 170 and 418 MB in section 3: MiB, rounded."""
    sizes = {model: exchange_of(parse_compressor("none"), tensors_of(model)).bytes for model in MODEL_SIZES}
    assert {model: round(size / 2**20) for model, size in sizes.items()} == MODEL_SIZES


MODEL_SIZES = {"resnet50": 97, "resnet101": 170, "bert-base": 418}


def test_only_casts_are_overlapped() -> None:
    overlapped = {spec for spec in EXAMPLES if exchange_of(parse_compressor(spec), tensors_of("resnet50")).overlapped}
    assert overlapped == {"none", "fp16"}


def test_nothing_to_exchange_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to exchange"):
        exchange_of(parse_compressor("none"), [TensorInfo("empty", (0, 3))])
