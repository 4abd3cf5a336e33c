"""What a step calls does not depend on how many tensors there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcomp import kernels
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors import TensorInfo
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange import Engine

pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs compiled kernels")

_CALL = Bucket.call


def calls_of(spec: str, count: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels and collectives of the third step, in order, with matrices and vectors in equal numbers."""
    shapes = [(32, 40) if place % 2 else (40,) for place in range(count)]
    tensors = [TensorInfo(f"tensor {place}", shape) for place, shape in enumerate(shapes)]
    random = np.random.default_rng(0)
    gradients = {one.name: random.standard_normal(one.shape, np.float32) for one in tensors}
    called: list[str] = []

    def call(self: Bucket, name: str, *arguments: Any) -> bool:
        called.append(name)
        return _CALL(self, name, *arguments)

    class Communicator(LoopbackCommunicator):
        def start_allreduce(self, array: Any, op: str, name: str) -> Any:
            called.append(f"allreduce {op}")
            return super().start_allreduce(array, op, name)

        def start_allgather(self, array: Any, name: str) -> Any:
            called.append("allgather")
            return super().start_allgather(array, name)

    monkeypatch.setattr(Bucket, "call", call)
    engine = Engine(Communicator(2), tensors, parse_compressor(spec), min_numel=0)
    for _ in range(3):
        called.clear()
        engine.begin()
        engine.step(gradients)
    return called


@pytest.mark.parametrize("spec", ["none", "fp16", "topk:ratio=0.01", "efsignsgd", "qsgd:bits=4", "powersgd:rank=4"])
def test_a_step_calls_the_same_for_any_number_of_tensors(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = calls_of(spec, 10, monkeypatch)
    assert few
    assert calls_of(spec, 100, monkeypatch) == few
    assert calls_of(spec, 1000, monkeypatch) == few
