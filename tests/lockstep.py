"""Runs a compressor on any number of ranks without an engine, and records the requested collectives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays import arrays_for
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.protocol import AllGather, AllToAll, Context, Outcome, Request
from tests.harness import as_numpy, bits, framework_of, make


class Exchanged(NamedTuple):
    """outcomes: of each rank. requests: of each rank, in order."""

    outcomes: list[Outcome]
    requests: list[list[Request]]

    def bytes_sent(self, rank: int = 0) -> int:
        return sum(len(payload) for payload in self.payloads(rank))

    def payloads(self, rank: int = 0) -> list[bytes]:
        """The bytes of each array that a rank passed to collectives."""
        return [bits(array) for request in self.requests[rank] for array in request.arrays]


def run_lockstep(
    compressor: Compressor,
    xs: Sequence[Any],
    step: int = 0,
    seed: int = 0,
    name: str = "w",
    states: Sequence[tuple[Any, ...]] | None = None,
) -> Exchanged:
    """One step of a compressor on `len(xs)` ranks; sums of integers must fit their type. states: the state of each
    rank after the step before; None for a first step."""
    xp = arrays_for(xs[0])
    contexts = [Context(name, step, seed, rank, len(xs)) for rank in range(len(xs))]
    states = [()] * len(xs) if states is None else states
    generators = [
        compressor.aggregate(xp, x, compressor.prepare(xp, x, state, context), context)
        for x, state, context in zip(xs, states, contexts, strict=True)
    ]
    requests: list[list[Request]] = [[] for _ in xs]
    outcomes: list[Outcome] = []
    answers: list[Any] = [None] * len(xs)
    while not outcomes:
        requested = []
        for rank, generator in enumerate(generators):
            try:
                requested.append(generator.send(answers[rank]))
                requests[rank].append(requested[-1])
            except StopIteration as stop:
                outcomes.append(stop.value)
        assert len(requested) in (0, len(xs))
        answers = [_answer(requested, rank) for rank in range(len(requested))]
    return Exchanged(outcomes, requests)


def last_of_many(compressor: Compressor, xs: Sequence[Any]) -> Outcome:
    """The last rank's outcome of a stateless compressor that gathers once; other ranks only send."""
    xp = arrays_for(xs[0])
    generators = [compressor.aggregate(xp, x, (), Context("w", 0, 0, rank, len(xs))) for rank, x in enumerate(xs)]
    answer = _answer([next(generator) for generator in generators], len(xs) - 1)
    try:
        generators[-1].send(answer)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the compressor requested a second collective")


def _answer(requested: list[Any], rank: int) -> Any:
    """The answer of a collective to a rank."""
    assert len({(type(request), *[tuple(array.shape) for array in request.arrays]) for request in requested}) == 1
    if isinstance(requested[0], AllGather):
        return [request.parts for request in requested]
    if isinstance(requested[0], AllToAll):
        return [tuple(part[rank] for part in request.parts) for request in requested]
    stacked = np.stack([as_numpy(request.array) for request in requested])
    wide = np.int64 if stacked.dtype.kind == "i" else np.float64
    assert requested[0].op in ("sum", "max", "mean")
    if requested[0].op == "mean":  # in the element type, in rank order
        mean = functools.reduce(np.add, stacked) * stacked.dtype.type(1 / len(stacked))
        return make(framework_of(requested[0].array), mean, str(stacked.dtype))
    combined = stacked.astype(wide).sum(0) if requested[0].op == "sum" else stacked.max(0)
    narrow = combined.astype(stacked.dtype)
    if wide is np.int64:
        np.testing.assert_array_equal(narrow, combined, err_msg="an integer sum overflowed")
    return make(framework_of(requested[0].array), narrow, str(stacked.dtype))
