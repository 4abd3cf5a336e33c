"""The most memory that gathered payloads take within a step: those of all ranks together, and nothing for decoding."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from hvdcomp import NoMemory
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from tests.exchange.test_buckets import needs_kernels
from tests.harness import infos

SHAPE = (1_000, 1_000)


def peak_of(spec: str, ranks: int) -> tuple[int, int]:
    """Bytes: the most that a step takes beside what was there before it, and the payload of one rank."""
    engine = Engine(LoopbackCommunicator(ranks), infos({"w": SHAPE}), parse_compressor(spec), NoMemory(), 0, 0, 0)
    given = {"w": np.ones(SHAPE, np.float32)}
    for _ in range(2):
        engine.begin()
        engine.step(given, in_place=True)
    engine.begin()
    tracemalloc.start()
    try:
        engine.step(given, in_place=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert engine.ledger.last is not None
    return peak, int(engine.ledger.last.tensors["w"].bytes_sent)


@needs_kernels
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "int4", "efsignsgd"])
def test_a_step_takes_the_payloads_of_all_ranks(spec: str) -> None:
    for ranks in (4, 16, 64):
        peak, payload = peak_of(spec, ranks)
        assert peak == pytest.approx(ranks * payload, abs=10_000 + 400 * ranks), ranks  # and small objects


@needs_kernels
def test_what_is_scattered_takes_three_payloads_at_most() -> None:
    """Those of the mean's chunks, and twice one rank's chunk: less with more ranks."""
    for ranks in (4, 16, 64):
        peak, payload = peak_of("int4:exchange=scatter", ranks)
        assert peak < 3 * payload, ranks
