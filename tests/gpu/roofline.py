"""The bytes a second that each kernel moves, beside those of a copy.

Bytes are what a kernel has to move at least: what it reads of the gradients, of x and of what was kept, what it writes
of x and of the results, and the payload. Kernels that work on a few elements of each tensor have no such number.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from tests.gpu.ranks import synchronize

SPECS = (
    "none", "fp16", "bf16", "signsgd", "efsignsgd", "onebit", "qsgd:bits=4", "terngrad", "natural", "globalqsgd",
    "int8", "fp8", "eden", "topk:ratio=0.01", "redsync:ratio=0.01", "powersgd:rank=4", "randomk:ratio=0.01",
)  # fmt: skip
LEAST_SHARE = 0.7
"""Of the copy's bandwidth, that a kernel should reach."""

_WARM = 3  # steps, in which kernels are compiled


@dataclass(frozen=True)
class Moved:
    """What a launch knows of the bytes of an element.

    Attributes:
        made: to make x, or to read what is compressed where nothing is kept.
        payload: of what one rank sends.
        keeps: whether something is kept.
        makes_x: whether this launch makes x, where a kernel does it or does not.
    """

    made: float
    payload: float
    keeps: bool
    makes_x: bool


BYTES: dict[str, Callable[[Moved], float]] = {
    "dense_encode": lambda one: one.made + one.payload,
    "dense_decode": lambda one: one.payload + 4,
    "cast_encode": lambda one: one.made + one.payload,
    "cast_decode": lambda one: one.payload + 4,
    "two_values_encode": lambda one: one.made + one.payload,
    "two_values_decode": lambda one: one.payload + 4,
    "votes_encode": lambda one: one.made + one.payload,
    "votes_close": lambda one: 2 * one.payload,
    "votes_decode": lambda one: one.payload + 4,
    "votes_keep": lambda one: one.payload + 8,
    "find_scales": lambda one: one.made,
    "terngrad_measure": lambda one: one.made,
    "codes_encode": lambda one: 4 + one.payload + 4 * one.keeps,
    "codes_decode": lambda one: one.payload + 4,
    "plane_decode": lambda one: one.payload + 4,
    "natural_encode": lambda one: one.made + one.payload,
    "natural_decode": lambda one: one.payload + 4,
    "global_measure": lambda one: one.made,
    "global_encode": lambda one: 4 + one.payload + 4 * one.keeps,
    "global_decode": lambda one: one.payload + 4,
    "eden_encode": lambda one: one.made + one.payload,
    "eden_decode": lambda one: one.payload + 4,
    "note_candidates": lambda one: one.made,
    "zero_results": lambda one: 4,
    "sparse_decode": lambda one: one.payload + 4,
    "multiply": lambda one: one.made if one.makes_x else 4,
    "lowrank_decode": lambda one: 4 + 8 * one.keeps,
}
"""Of each kernel that passes over all elements, the bytes of an element."""


@dataclass(frozen=True)
class Timed:
    """A launch of one step, over several steps.

    Attributes:
        kernel: its name.
        ms: the median.
        bytes: what it has to move; None if that is not known.
    """

    kernel: str
    ms: float
    bytes: float | None

    @property
    def bytes_a_second(self) -> float | None:
        """What it moves."""
        return None if self.bytes is None else self.bytes / self.ms * 1000


def _mark(place: str) -> Any:
    if place != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms_between(start: Any, end: Any) -> float:
    return 1000 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def _get_ahead(place: str) -> None:
    if place == "cuda":
        from hvdcomp.tools.bench.encode.device_time import head_start

        head_start()


@contextmanager
def _marked(place: str) -> Iterator[list[tuple[str, Mapping[str, Any], Any, Any]]]:
    """Within it, each launch is noted: the kernel, its constants, and marks before and after it."""
    from hvdcomp.kernels.cuda.device import DeviceKernels

    found: list[tuple[str, Mapping[str, Any], Any, Any]] = []
    before = DeviceKernels.launch

    def launch(self: Any, kernel: Any, *arguments: Any, **constants: Any) -> None:
        start = _mark(place)
        before(self, kernel, *arguments, **constants)
        if (aside := getattr(self, "_aside", None)) is not None:
            aside.join()  # what runs on another stream ends before the mark
        found.append((kernel.__name__, constants, start, _mark(place)))

    DeviceKernels.launch = launch  # type: ignore[method-assign]
    try:
        yield found
    finally:
        DeviceKernels.launch = before  # type: ignore[method-assign]


def copy_ms(elements: int, place: str, turns: int = 20) -> float:
    """Milliseconds of one copy of so many float32 numbers, which moves 8 bytes of each: the median."""
    source, target = torch.zeros(2, elements, device=place)
    found = []
    for turn in range(turns + 2):
        if turn == 2:
            _get_ahead(place)
        start = _mark(place)
        target.copy_(source)
        found.append((start, _mark(place)))
    synchronize(place)
    return statistics.median(_ms_between(*marks) for marks in found[2:])


def measure(spec: str, tensors: Sequence[TensorInfo], place: str, turns: int = 10) -> list[Timed]:
    """Times each launch of a step of a method, in their order.

    Args:
        tensors: float32; matrices, of which all go into one bucket.
    """
    elements = sum(tensor.size for tensor in tensors)
    engine = Engine(LoopbackCommunicator(), tensors, parse_compressor(spec), min_numel=0, min_ndim=0)
    gradients = {tensor.name: torch.randn(tensor.shape, device=place) for tensor in tensors}
    steps = []
    for turn in range(_WARM + turns):
        with _marked(place) as found:
            _get_ahead(place)
            engine.begin()
            engine.step(gradients)
        if turn >= _WARM:
            steps.append(found)
    synchronize(place)
    (group,) = engine.buckets.with_kernels
    assert group.bucket.device is not None
    assert engine.ledger.last is not None
    payload = engine.ledger.last.bytes_sent / elements
    keeps = group.bucket.keeps
    timed = []
    for same in zip(*steps, strict=True):
        name, constants, *_ = same[0]
        ms = statistics.median(_ms_between(start, end) for _, _, start, end in same)
        one = Moved(12 if keeps else 4, payload, keeps, bool(constants.get("MAKES_X", True)))
        if name == "dense_encode" and not constants["COPIES"]:
            one = Moved(one.made, 0, keeps, True)
        timed.append(Timed(name, ms, elements * BYTES[name](one) if name in BYTES else None))
    return timed
