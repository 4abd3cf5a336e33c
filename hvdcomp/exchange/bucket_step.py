"""A bucket's way through one step: the same as a tensor's (`tensor_step`), for many tensors at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np

from hvdcomp.arrays.types import Array
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.bucket import BucketAggregation, BucketOutcome
from hvdcomp.compressors.memory import MomentumCorrection
from hvdcomp.compressors.protocol import Context, Request, SparseVector
from hvdcomp.exchange.buckets import Group


class Results(Enum):
    """Where a bucket's results go: to fresh memory, to the gradients' place, or there when the step ends, and until
    then to memory that is kept for that."""

    FRESH, IN_PLACE, ASIDE = range(3)


class BucketStep:
    """The tensors of a bucket on their way through one step: made, `advance` until no request is left, `finish`.

    Args:
        xp: the array functions of the gradients.
        group: the bucket, with the gradients of the step.
        context: of the step.
        factor: what the memory multiplies gradients with; None for 1.

    Attributes:
        like: an array where the gradients are.
        outcome: what the generator came to; None while it waits for a collective.
        had_residual: whether a memory had kept something back that this step sends; known after `finish`.
        marks: start and end of each turn: the first, each of the generator's, the end.
    """

    def __init__(self, xp: ModuleType, group: Group, context: Context, factor: Array | None) -> None:
        self._xp = xp
        self.group = group
        self.like = group.arrays[0]
        start = xp.mark(self.like)
        bucket, memory = group.bucket, group.bucket.memory
        bucket.context = context
        bucket.found_inf = False
        bucket.segments["source"] = 0
        bucket.segments["sent_rule"] = 0
        settings = bucket.table.bucket
        settings.factor = 1.0 if factor is None else float(factor)
        settings.decay = memory.keeps
        if isinstance(memory, MomentumCorrection):
            settings.momentum, settings.nesterov = memory.momentum, memory.nesterov
        if group.bucket.keeps:
            group.residuals.enter(bucket.segments, group.numbers, memory)
        self._generator: BucketAggregation
        self._given: Sequence[Array] = ()
        self._results: Sequence[Array] = ()
        self._where = Results.FRESH
        self.outcome: BucketOutcome | None = None
        self.had_residual = False
        self.marks = [(start, xp.mark(self.like))]

    @property
    def x(self) -> dict[str, Array]:
        """x by name, made now rather than while it is compressed, for those who look at it; it stays as it is until
        the step ends."""
        group = self.group
        if not group.bucket.keeps:
            return dict(zip(group.names, group.arrays, strict=True))
        start = self._xp.mark(self.like)
        group.bucket.call("make_x")
        found = {}
        for (name, state, number), aside in zip(group.tensors, group.x_aside, strict=True):
            np.copyto(aside, group.residuals.x(number))  # where a compressor leaves the residual
            found[name] = state.wrapped(aside)
        self.marks.append((start, self._xp.mark(self.like)))
        return found

    def open(self, gradients: Mapping[str, Array], where: Results, sources: Mapping[str, Array] | None) -> None:
        """Makes the generator.

        Args:
            gradients: of the step, by name.
            where: results go.
            sources: by name what is to be compressed, where that is known: x, or what stands for it. None where the
                kernels are to make x.
        """
        group, bucket, xp = self.group, self.group.bucket, self._xp
        start = xp.mark(self.like)
        self._given = [gradients[name] for name in group.names]
        self._results, self._where = group.arrays, where
        if where is Results.FRESH:
            self._results = xp.split_like(group.arrays)
            bucket.segments["result"] = xp.hosted(self._results)[1]
        else:
            bucket.segments["result"] = bucket.segments["gradient"] if where is Results.IN_PLACE else group.aside
        if sources is not None:
            self._sources, bucket.segments["source"] = xp.hosted([sources[name] for name in group.names])
        if bucket.compressors[0].keeps_state:
            group.prepare_states(xp)
        bucket.x = self._x
        bucket.compressed = self._x if sources is None else self._source
        self._generator = bucket.compressors[0].aggregate_bucket(bucket)
        self.marks.append((start, xp.mark(self.like)))

    def advance(self, answer: Any) -> Request | None:
        """Gives the generator the answer to its last request, at first None; its next request, or None at its end. Both
        are in NumPy."""
        xp = self._xp
        start = xp.mark(self.like)
        try:
            request: Request | None = self._generator.send(answer)
        except StopIteration as stop:
            self.outcome = stop.value
            request = None
        self.marks.append((start, xp.mark(self.like)))
        return request

    @property
    def found_inf(self) -> bool:
        """Whether x, or what is sent of it, holds an inf or NaN: known after the first turn."""
        return self.group.bucket.found_inf

    @property
    def found_inf_after(self) -> bool:
        """Whether what came of the exchange holds an inf or NaN: known at the end."""
        return self.outcome is not None and self.outcome.found_inf

    @property
    def compressor(self) -> Compressor:
        """Of the first tensor; those of the others differ in their level alone."""
        return self.group.bucket.compressors[0]

    def sent(self) -> dict[str, Array | SparseVector]:
        """C(x) by name, once the generator has ended."""
        assert self.outcome is not None
        found: dict[str, Array | SparseVector] = {}
        for place, (name, state, _) in enumerate(self.group.tensors):
            sent = self.outcome.sent(place)
            if isinstance(sent, SparseVector):
                found[name] = SparseVector(*(self._xp.from_numpy(part, like=self.like) for part in sent))
            else:
                found[name] = state.wrapped(sent)
        return found

    def finish(self, counts: bool) -> dict[str, Array]:
        """Keeps what was not sent, unless the step does not count; returns the results by name."""
        assert self.outcome is not None
        group, xp = self.group, self._xp
        start = xp.mark(self.like)
        self.had_residual = group.had_residuals
        if counts:
            if group.bucket.keeps:
                if self.outcome.keep is not None:
                    self.outcome.keep()
                bucket = group.bucket
                group.residuals.commit(bucket.segments, group.numbers, bucket.memory, bucket.factors)
            if group.bucket.compressors[0].keeps_state:
                group.keep_states(xp)
            group.end_states()
        if self._where is Results.ASIDE:
            group.bucket.call("put_results")
        if not counts:
            for result in self._results:
                xp.flatten(result)[:1] = np.nan
        results = dict(zip(group.names, xp.like_originals(self._results, self._given), strict=True))
        self.marks.append((start, xp.mark(self.like)))
        return results

    def _x(self, place: int) -> np.ndarray:
        group = self.group
        if group.bucket.keeps:
            return group.residuals.x(group.numbers[place])
        return self._xp.to_numpy(self._xp.flatten(group.arrays[place]))

    def _source(self, place: int) -> np.ndarray:
        return self._xp.to_numpy(self._xp.flatten(self._sources[place]))
