"""The most memory that gathered payloads take within a step: those of all ranks together, and nothing for decoding."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdcomp import NoMemory
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from tests.driven import SHAPES, gradients_of
from tests.exchange.test_buckets import needs_kernels
from tests.harness import BACKENDS, as_numpy, bits, infos, make
from tests.interpreted import needs_triton

SHAPE = (1_000, 1_000)


def stepping(
    spec: str, ranks: int, tensors: int, gathered_bytes: int | None, backend: str = "numpy"
) -> tuple[Engine, Callable[[], Any]]:
    """An engine that has made two steps, and what makes another."""
    shapes = {f"w{number}": (SHAPE[0] // tensors, SHAPE[1]) for number in range(tensors)}
    engine = Engine(
        LoopbackCommunicator(ranks), infos(shapes), parse_compressor(spec), NoMemory(), 0, 0, 0,
        gathered_bytes=gathered_bytes,
    )  # fmt: skip
    given = {name: make(backend, np.ones(shape, np.float32)) for name, shape in shapes.items()}
    for _ in range(2):
        engine.begin()
        engine.step(given, in_place=True)
    engine.begin()
    return engine, lambda: engine.step(given, in_place=True)


def payload_of(engine: Engine) -> int:
    assert engine.ledger.last is not None
    return int(sum(cost.bytes_sent for cost in engine.ledger.last.tensors.values()))


def peak_of(spec: str, ranks: int, tensors: int = 1, gathered_bytes: int | None = None) -> tuple[int, int]:
    """Bytes: the most that a step takes beside what was there before it, and the payload of one rank."""
    engine, step = stepping(spec, ranks, tensors, gathered_bytes)
    tracemalloc.start()
    try:
        step()
        return tracemalloc.get_traced_memory()[1], payload_of(engine)
    finally:
        tracemalloc.stop()


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


@needs_kernels
def test_means_of_more_bits_keep_no_storage_for_what_is_only_decoded() -> None:
    """Of the payloads of means, a rank keeps storage of the one that it sends."""
    for ranks in (4, 16):
        kept = []
        for back in (1, 3):
            tracemalloc.start()
            engine, _ = stepping(f"eden:bits=1,back={back},exchange=scatter", ranks, 1, None)
            kept.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
            del engine
        assert kept[1] - kept[0] < 3 / 8 * SHAPE[0] * SHAPE[1] / ranks + 50_000, ranks


@needs_kernels
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "int4", "efsignsgd"])
def test_gathered_in_parts_they_take_what_is_allowed(spec: str) -> None:
    """Or a tensor's, where these are more."""
    for ranks, allowed in ((16, 1_000_000), (64, 1_000_000), (64, 1)):
        peak, payload = peak_of(spec, ranks, 20, allowed)
        assert peak < max(allowed, ranks * payload / 20) + 50_000 + 400 * ranks, (ranks, allowed)
        assert peak < ranks * payload / 2


@needs_triton
@pytest.mark.parametrize(
    "spec", ["efsignsgd", *(pytest.param(spec, marks=pytest.mark.thorough) for spec in ("topk:ratio=0.05", "int4"))]
)
def test_on_a_device_it_is_the_same(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads of all ranks, or the largest part of them that is allowed; before that, what choosing elements takes."""
    pytest.importorskip("torch")
    from tests.device_streams import Stream, streams

    allowed = 1_000_000

    def peak(ranks: int, gathered_bytes: int | None) -> tuple[int, int]:
        with streams(monkeypatch, Stream("main")) as noted:
            engine, step = stepping(spec, ranks, 20, gathered_bytes, "torch")
            noted.most = before = noted.taken
            step()
            return noted.most - before, payload_of(engine)

    least, payload = peak(1, None)
    for ranks in (4, 16, 64):
        gathered = ranks * payload
        assert peak(ranks, None)[0] == pytest.approx(max(least, gathered), abs=5_000), ranks
        in_parts = min(gathered, max(allowed, gathered / 20))
        assert peak(ranks, allowed)[0] < max(least, in_parts) + 5_000, ranks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", [
    "topk:ratio=0.1", "terngrad", "chunkedtopk:chunk=50,k=5", "powersgd:rank=2", "qsgd:bits=4,exchange=scatter",
])  # fmt: skip
def test_results_are_the_same_in_parts(spec: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one tensor each, as the names of collectives tell; the bias, which is added up, goes first. What is scattered
    or added up is not parted."""
    started: set[str] = set()
    start = InProcessCommunicator.start_allgather

    def noted(self: Any, array: Any, name: str) -> Any:
        started.add(name.split("round")[0])
        return start(self, array, name)

    def run(gathered_bytes: int | None) -> Any:
        def work(communicator: InProcessCommunicator) -> Any:
            compressor = parse_compressor(spec)
            engine = Engine(communicator, infos(SHAPES), compressor, min_numel=16, gathered_bytes=gathered_bytes)
            results = []
            for step in range(3):
                engine.begin()
                found = engine.step(gradients_of(backend, communicator.rank, step))
                results.append({name: bits(as_numpy(x)) for name, x in found.items()})
            return results, {name: [bits(as_numpy(x)) for x in one.memory] for name, one in engine.states.items()}

        started.clear()
        return run_ranks(3, work)

    monkeypatch.setattr(InProcessCommunicator, "start_allgather", noted)
    whole = run(None)
    together = set(started)
    assert run(1) == whole
    parted = spec not in ("powersgd:rank=2", "qsgd:bits=4,exchange=scatter")
    assert started == ({"hvdcomp.part1.", "hvdcomp.part2."} if parted else together)
