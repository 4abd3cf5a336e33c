"""A bucket's way through one step: the same as a tensor's (`tensor_step`), for many tensors at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays.types import Array
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.each_tensor import step_of
from hvdcomp.compressors.protocol import Context, Request
from hvdcomp.exchange.buckets import Group
from hvdcomp.exchange.clock import Clock, Spans


class Sums(NamedTuple):
    """Where the gradients of steps are added up.

    totals: the sums of tensors, given their gradients by name: in their order, in storage that may be added to.
    add: adds gradients, by name, to their sums, unless the element that it gets is NaN.
    share: gradients are multiplied by it.
    of_results: whether it is the aggregated gradients that are added, and not this rank's own.
    """

    totals: Callable[[Mapping[str, Array]], Sequence[Array]]
    add: Callable[[Mapping[str, Array], Array], None]
    share: float
    of_results: bool = False


class BucketStep:
    """The tensors of a bucket on their way through one step: made, `advance` until no request is left, `finish`.

    Args:
        xp: the array functions of the gradients.
        group: the bucket, with the gradients of the step.
        context: of the step.
        factor: what the memory multiplies gradients with; None for 1.
        clock: of the engine.

    Attributes:
        like: an array where the gradients are.
        found_inf_after: whether what came of the exchange holds an inf or NaN: known when no request is left.
        had_residual: whether a memory had kept something back that this step sends; known after `finish`.
        spans: when it was under way. Who calls its methods marks that, but for `make_x`.
    """

    on_device = False

    def __init__(self, xp: ModuleType, group: Group, context: Context, factor: Array | None, clock: Clock) -> None:
        self._xp = xp
        self.group = group
        self.like = group.arrays[0]
        self._clock = clock
        self.spans = Spans([], [])
        group.bucket.begin(context, factor)
        if group.bucket.keeps:
            group.residuals.enter(group.bucket, group.numbers)
        self._generator: Generator[Request | list[Request], Any, bool | Array]
        self._asks_for_many = False
        self._given: Sequence[Array] = ()
        self._results: Sequence[Array] = ()
        self._sums: Sums | None = None
        self._aside = False  # whether results lie aside until gradients are added up
        self._dense = False  # whether results have the gradients' layout as they are
        self.found_inf_after: bool | Array = False
        self.had_residual = False

    def make_x(self) -> Array:
        """Makes x now rather than while it is compressed, for those who look at it; ||x||^2 of each tensor, float64
        (tensors,)."""
        self._clock.start()
        energies = self._sums_of("make_x")
        self._clock.lap(self.spans.encoding)
        return energies

    def left(self) -> Array:
        """||x - C(x)||^2 of each tensor, float64 (tensors,), once the generator has ended, where the memory keeps
        something."""
        return self._sums_of("measure_left")

    def _sums_of(self, kernel: str) -> Array:
        sums = self.group.bucket.sums_of(kernel)
        return self._xp.from_numpy(sums, like=self.like) if isinstance(sums, np.ndarray) else sums

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
            sums: to which gradients are added if the step counts.
        """
        group, bucket, xp = self.group, self.group.bucket, self._xp
        self._given = [gradients[name] for name in group.names]
        self._results, self._sums = group.arrays, sums
        self._aside = in_place and sums is not None and not sums.of_results
        if not in_place:
            self._results, bucket.segments["result"] = group.fresh_results(xp)
            self._dense = all(map(operator.is_, group.arrays, self._given))
        else:
            bucket.segments["result"] = group.aside() if self._aside else bucket.segments["gradient"]
        if group.names[0] in made:
            own = [name for name in group.names if name in sources]
            self._sources, addresses = group.placed(xp, [sources[name] for name in own])  # kept until the step ends
            replaced = dict(zip(own, addresses, strict=True))
            bucket.segments["source"] = [replaced.get(name) or made[name] for name in group.names]
        if sums is not None:
            totals = sums.totals(dict(zip(group.names, self._given, strict=True)))
            bucket.segments["total"] = group.placed(xp, totals)[1]
            bucket.table.bucket.share = sums.share
        group.prepare_states(xp)
        self._generator = step_of(bucket)

    def advance(self, answers: Sequence[Any]) -> list[Request]:
        """Gives the generator the answers to its last requests, at first none; its next requests, none at its end. All
        are in NumPy."""
        try:
            asked = self._generator.send(answers if self._asks_for_many else answers[0] if answers else None)
        except StopIteration as stop:
            self.found_inf_after = stop.value
            return []
        self._asks_for_many = isinstance(asked, list)
        return asked if isinstance(asked, list) else [asked]

    @property
    def found_inf(self) -> bool | Array:
        """Whether x, or what is sent of it, holds an inf or NaN: known after the first turn."""
        return self.group.bucket.found_inf

    @property
    def compressor(self) -> Compressor:
        """Of the first tensor; those of the others differ in their level alone."""
        return self.group.bucket.compressors[0]

    def finish(self, counts: Any) -> dict[str, Array]:
        """Keeps what was not sent, unless the step does not count; returns the results by name.

        Args:
            counts: whether it counts; on a device, an element that is NaN if not, and else 0.
        """
        group, xp = self.group, self._xp
        self.had_residual = group.had_residuals
        self._settle(counts)
        arrays = self._results if self._dense else xp.like_originals(self._results, self._given)
        results = dict(zip(group.names, arrays, strict=True))
        group.let_go()
        self._given = self._results = ()
        return results

    def _settle(self, counts: bool) -> None:
        if counts:
            self._keep()
        adds = counts and self._adds()
        if adds or self._aside:
            self.group.bucket.call("end_step", adds, self._aside)
        if not counts:
            for result in self._results:
                self._xp.flatten(result)[:1] = np.nan

    def _adds(self) -> bool:
        """Whether what the table calls gradients, which are those that are to be added up then, are added up."""
        segments = self.group.bucket.segments
        if self._sums is not None and self._sums.of_results:
            segments["gradient"] = segments["result"]
        return self._sums is not None

    def _keep(self, found_inf: Array | None = None) -> None:
        """What is left is what is kept; on a device, of what the method keeps, if the step counts."""
        group = self.group
        if group.bucket.keeps:
            group.residuals.commit(group.bucket, group.numbers)
        if group.keeps_states:
            group.keep_states(self._xp, found_inf)
        group.end_states()
