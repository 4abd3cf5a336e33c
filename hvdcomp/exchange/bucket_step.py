"""A bucket's way through one step: the same as a tensor's (`tensor_step`), for many tensors at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays.types import Array
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.bucket import BucketAggregation
from hvdcomp.compressors.memory import MomentumCorrection
from hvdcomp.compressors.protocol import Context, Request
from hvdcomp.exchange.buckets import Group


class Sums(NamedTuple):
    """Where the gradients of steps are added up.

    totals: the sums of tensors, given their gradients by name: in their order, in storage that may be added to.
    add: adds gradients, by name, to their sums, unless the element that it gets is NaN.
    share: gradients are multiplied by it.
    """

    totals: Callable[[Mapping[str, Array]], Sequence[Array]]
    add: Callable[[Mapping[str, Array], Array], None]
    share: float


class BucketStep:
    """The tensors of a bucket on their way through one step: made, `advance` until no request is left, `finish`.

    Args:
        xp: the array functions of the gradients.
        group: the bucket, with the gradients of the step.
        context: of the step.
        factor: what the memory multiplies gradients with; None for 1.

    Attributes:
        like: an array where the gradients are.
        found_inf_after: whether what came of the exchange holds an inf or NaN: known when no request is left.
        had_residual: whether a memory had kept something back that this step sends; known after `finish`.
        marks: start and end of each turn: the first, each of the generator's, the end.
    """

    on_device = False

    def __init__(self, xp: ModuleType, group: Group, context: Context, factor: Array | None) -> None:
        self._xp = xp
        self.group = group
        self.like = group.arrays[0]
        start = xp.mark(self.like)
        bucket = group.bucket
        bucket.context = context
        bucket.found_inf = False
        bucket.segments["source"] = 0
        bucket.segments["sent_rule"] = 0
        self._enter(group, factor)
        self._generator: BucketAggregation
        self._given: Sequence[Array] = ()
        self._results: Sequence[Array] = ()
        self._aside = self._adds = self._dense = False  # dense: results have the gradients' layout as they are
        self.found_inf_after: bool | Array = False
        self.had_residual = False
        self.marks = [(start, xp.mark(self.like))]

    def _enter(self, group: Group, factor: Array | None) -> None:
        """Tells the kernels of the step."""
        bucket, memory = group.bucket, group.bucket.memory
        settings = bucket.table.bucket
        settings.factor = 1.0 if factor is None else float(factor)
        settings.decay = memory.keeps
        if isinstance(memory, MomentumCorrection):
            settings.momentum, settings.nesterov = memory.momentum, memory.nesterov
        if bucket.keeps:
            group.residuals.enter(bucket.segments, group.numbers, memory)

    def make_x(self) -> np.ndarray:
        """Makes x now rather than while it is compressed, for those who look at it; returns ||x||^2 of each tensor."""
        start = self._xp.mark(self.like)
        energies = self.group.bucket.sums_of("make_x")
        self.marks.append((start, self._xp.mark(self.like)))
        return energies

    @property
    def addresses(self) -> list[int]:
        """Where x of each tensor lies, once it is made."""
        bucket = self.group.bucket
        return bucket.segments["x" if bucket.keeps else "gradient"].tolist()

    def x(self, place: int) -> Array:
        """x of a tensor, once it is made; it stays as it is until it is compressed."""
        group = self.group
        if not group.bucket.keeps:
            return group.arrays[place]
        _, state, number = group.tensors[place]
        return state.wrapped(group.residuals.x(number))

    def left(self) -> np.ndarray:
        """||x - C(x)||^2 of each tensor, once the generator has ended, where the memory keeps something."""
        return self.group.bucket.sums_of("measure_left")

    def open(
        self,
        gradients: Mapping[str, Array],
        in_place: bool,
        made: Mapping[str, int],
        sources: Mapping[str, Array],
        sums: Sums | None,
    ) -> None:
        """Makes the generator.

        Args:
            gradients: of the step, by name.
            in_place: whether results take the gradients' place.
            made: addresses by name of x, if it was made; else the kernels make it.
            sources: by name what is to be compressed in place of x, where that is something else.
            sums: to which the gradients are added if the step counts.
        """
        group, bucket, xp = self.group, self.group.bucket, self._xp
        start = xp.mark(self.like)
        self._given = [gradients[name] for name in group.names]
        self._results, self._adds = group.arrays, sums is not None
        self._aside = in_place and self._adds  # until the gradients are added
        if not in_place:
            self._results, bucket.segments["result"] = group.fresh_results(xp)
            self._dense = all(map(operator.is_, group.arrays, self._given))
        else:
            bucket.segments["result"] = group.aside if self._aside else bucket.segments["gradient"]
        if group.names[0] in made:
            own = [name for name in group.names if name in sources]
            self._sources, addresses = xp.hosted([sources[name] for name in own])  # kept alive until the step ends
            replaced = dict(zip(own, addresses, strict=True))
            bucket.segments["source"] = [replaced.get(name) or made[name] for name in group.names]
        if sums is not None:
            bucket.segments["total"] = xp.hosted(sums.totals(dict(zip(group.names, self._given, strict=True))))[1]
            bucket.table.bucket.share = sums.share
        if bucket.compressors[0].keeps_state:
            group.prepare_states(xp)
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
            self.found_inf_after = stop.value
            request = None
        self.marks.append((start, xp.mark(self.like)))
        return request

    @property
    def found_inf(self) -> bool | Array:
        """Whether x, or what is sent of it, holds an inf or NaN: known after the first turn."""
        return self.group.bucket.found_inf

    @property
    def compressor(self) -> Compressor:
        """Of the first tensor; those of the others differ in their level alone."""
        return self.group.bucket.compressors[0]

    def finish(self, counts: bool) -> dict[str, Array]:
        """Keeps what was not sent, unless the step does not count; returns the results by name."""
        group, xp = self.group, self._xp
        start = xp.mark(self.like)
        self.had_residual = group.had_residuals
        if counts:
            if group.bucket.keeps:
                bucket = group.bucket
                group.residuals.commit(bucket.segments, group.numbers, bucket.memory, bucket.factors)
                if bucket.factors is not None:
                    bucket.factors.commit()
            if group.bucket.compressors[0].keeps_state:
                group.keep_states(xp)
            group.end_states()
        adds = counts and self._adds
        if adds or self._aside:
            group.bucket.call("end_step", adds, self._aside)
        if not counts:
            for result in self._results:
                xp.flatten(result)[:1] = np.nan
        arrays = self._results if self._dense else xp.like_originals(self._results, self._given)
        results = dict(zip(group.names, arrays, strict=True))
        group.arrays = self._given = self._results = ()  # the bucket outlives the step; what it was given need not
        self.marks.append((start, xp.mark(self.like)))
        return results
