"""A bucket's way through one step: in compiled code, for many tensors at once, on the host or on a device."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays.types import Array
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.protocol import Context, Request
from hvdcomp.exchange.buckets import EngineBucket
from hvdcomp.exchange.clock import Clock, Spans
from hvdcomp.exchange.energies import Energies
from hvdcomp.exchange.ledger import Part
from hvdcomp.kernels.tables import NOTHING, PRODUCT


class Sums(NamedTuple):
    """Sums to which the gradients of steps are added.

    totals: sums of tensors, given their gradients by name: in their order, in storage that may be added to.
    add: function that adds gradients, by name, to their sums, unless the element that it gets is NaN.
    share: factor of the gradients.
    of_results: whether the aggregated gradients are added, and not this rank's own.
    """

    totals: Callable[[Mapping[str, Array]], Sequence[Array]]
    add: Callable[[Mapping[str, Array], Array], None]
    share: float
    of_results: bool = False


class BucketStep:
    """The tensors of a bucket on their way through one step: made, `advance` until no request is left, `finish`.

    Args:
        xp: the array functions of the gradients.
        held: the bucket, with the gradients of the step.
        context: of the step.
        factor: what the memory multiplies gradients with; None for 1.
        clock: of the engine.

    Attributes:
        found_inf_after: whether what came of the exchange holds an inf or NaN: known when no request is left.
    """

    def __init__(
        self, xp: ModuleType, held: EngineBucket, context: Context, factor: Array | None, clock: Clock
    ) -> None:
        self._xp = xp
        self.held = held
        self._clock = clock
        self._spans = Spans([], [])
        with clock.around(self._spans.encoding):
            held.bucket.begin(context, factor)
            if held.bucket.keeps:
                held.residuals.enter(held.bucket, held.numbers)
            held.widen(xp)
        self._energies: Array | None = None  # of x, once it is made
        self._generator: Generator[Request, Any, bool | Array]
        self._given: Sequence[Array] = ()
        self._results: Sequence[Array] = ()
        self._sums: Sums | None = None
        self._aside = False  # whether results lie aside until gradients are added up
        self._dense = False  # whether results have the gradients' layout as they are
        self.found_inf_after: bool | Array = False
        self._had_residual = False

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return self.held.names

    @property
    def number(self) -> int | None:
        """Among what does not wait for all gradients of a step; None for the others."""
        return self.held.number

    @property
    def gathered(self) -> float:
        """Bytes that this rank gathers of the payloads, as `EngineBucket.gathered`."""
        return self.held.gathered

    @property
    def like(self) -> Array:
        """An array where the gradients are, until `finish`."""
        return self.held.arrays[0]

    @property
    def on_device(self) -> bool:
        """Whether nothing waits for what is computed. There what says whether something is not finite, `found_inf` and
        `found_inf_after` too, is an element on the device that is NaN or 0."""
        return self.held.on_device

    # For those who look at x before it is compressed.

    @property
    def keeps_x(self) -> bool:
        """Whether the step's loss of x is known in the end."""
        return self.held.bucket.keeps

    def make_x(self) -> Array:
        """Makes x now rather than while it is compressed, unless it is made; ||x||^2 of each tensor, float64
        (tensors,)."""
        if self._energies is None:
            self._clock.start()
            self._energies = self._sums_of("make_x")
            self._clock.lap(self._spans.encoding)
        return self._energies

    @property
    def addresses(self) -> dict[str, int]:
        """Address of x of each tensor, by name; x is made if it was not."""
        self.make_x()
        bucket = self.held.bucket
        return dict(zip(self.names, bucket.segments[bucket.x].tolist(), strict=True))

    def x(self, name: str) -> Array:
        """x of a tensor, which is made if it was not; it stays as it is until it is compressed."""
        self.make_x()
        return self.held.x(self.held.places[name])

    def gradient(self, name: str) -> Array:
        """The gradient of a tensor."""
        return self.held.arrays[self.held.places[name]]

    def energies(self, names: Set[str]) -> Energies:
        """||x||^2 of those of the tensors that have these names."""
        return self._of_names(names, self.make_x)

    def lost(self, names: Set[str]) -> Energies:
        """||x - C(x)||^2 of the same, once the generator has ended, where the memory keeps something."""
        return self._of_names(names, lambda: self._sums_of("measure_left"))

    def _of_names(self, names: Set[str], sums: Callable[[], Array]) -> Energies:
        energies, own = Energies(), [name for name in self.names if name in names]
        if own:
            energies.add(own, sums(), places=[self.held.places[name] for name in own])
        return energies

    def _sums_of(self, kernel: str) -> Array:
        sums = self.held.bucket.sums_of(kernel)
        return self._xp.from_numpy(sums, like=self.like) if isinstance(sums, np.ndarray) else sums

    # The step.

    def open(
        self,
        gradients: Mapping[str, Array],
        in_place: bool,
        sums: Sums | None,
        sources: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        """Makes the generator.

        Args:
            gradients: of the step, by name.
            in_place: whether results take the gradients' place.
            sums: to which gradients are added if the step counts.
            sources: by name what is to be compressed in place of x, where that is something else.
        """
        own = [name for name in self.names if name in sources]
        if own:
            self.make_x()
        with self._clock.around(self._spans.encoding):
            self._fill_table(gradients, in_place, sums)
            if self._energies is not None:
                self._sources, addresses = self.held.placed(self._xp, [sources[name] for name in own])
                replaced = self.addresses | dict(zip(own, addresses, strict=True))
                self.held.bucket.segments["source"] = list(replaced.values())
            self.held.prepare_states(self._xp)
            self._generator = self._run()

    def _run(self) -> Generator[Request, Any, bool | Array]:
        """The bucket form, and what gradients of 16 bits need after it."""
        bucket = self.held.bucket
        found_inf: bool | Array = yield from bucket.compressors[0].aggregate_bucket(bucket)
        if not bucket.widens:
            return found_inf
        if self.on_device:  # on the host, decoding has narrowed the results
            found_inf = found_inf + bucket.call("narrow_results")
        rules = bucket.segments["sent_rule"]
        rules[rules != PRODUCT] = NOTHING
        return found_inf

    def _fill_table(self, gradients: Mapping[str, Array], in_place: bool, sums: Sums | None) -> None:
        held, bucket, xp = self.held, self.held.bucket, self._xp
        self._given = [gradients[name] for name in held.names]
        self._results, self._sums = held.arrays, sums
        self._aside = in_place and sums is not None and not sums.of_results
        if not in_place:
            self._results, places = held.fresh_results(xp)
            self._dense = all(map(operator.is_, held.arrays, self._given))
        else:
            places = held.aside() if self._aside else bucket.segments["gradient"]
        held.put(places)
        if sums is not None:
            totals = sums.totals(dict(zip(held.names, self._given, strict=True)))
            bucket.segments["total"] = held.placed(xp, totals)[1]
            bucket.table.bucket.share = sums.share

    def advance(self, answers: Sequence[Any]) -> list[Request]:
        """Gives the generator the answer to its last request, at first none; its next request, none at its end. Both
        are in NumPy on the host."""
        try:
            asked = self._generator.send(answers[0] if answers else None)
        except StopIteration as stop:
            self.found_inf_after = stop.value
            self._clock.lap(self._spans.decoding)
            return []
        self._clock.lap(self._spans.encoding)
        return [asked]

    @property
    def found_inf(self) -> bool | Array:
        """Whether x, or what is sent of it, holds an inf or NaN: known after the first turn."""
        return self.held.bucket.found_inf

    @property
    def part(self) -> tuple[Part, Spans]:
        """Costs of the tensors, once the generator has ended, and times when they were under way."""
        return self.held.costs(), self._spans

    def finish(self, found_inf: Array) -> dict[str, Array]:
        """Keeps what was not sent, unless the element `found_inf` is NaN; returns the results by name."""
        held, xp = self.held, self._xp
        with self._clock.around(self._spans.decoding):
            self._had_residual = held.had_residuals
            self._settle(found_inf)
            arrays = self._results if self._dense else xp.like_originals(self._results, self._given)
            results = dict(zip(held.names, arrays, strict=True))
            held.let_go()
            self._given = self._results = ()
        return results

    def forget_sent(self, sends_all: Callable[[str, Compressor], bool]) -> Callable[[], None] | None:
        """After `finish`, of a step that sent residuals whole: what forgets them, if it counts; None if there are none.

        Args:
            sends_all: as of `Chooser`.
        """
        held, residuals = self.held, self.held.residuals
        if not self._had_residual or not sends_all(held.names[0], held.bucket.compressors[0]):
            return None
        released = residuals.released

        def forget() -> None:
            if residuals.released == released:
                residuals.drop(held.numbers)

        return forget

    def _settle(self, found_inf: Array) -> None:
        if self.on_device:
            self.held.bucket.call("settle", found_inf, self._adds(), self._aside)
            self._keep(found_inf)
            return
        counts = found_inf.item() == 0
        if counts:
            self._keep()
        adds = counts and self._adds()
        if adds or self._aside:
            self.held.bucket.call("end_step", adds, self._aside)
        if not counts:
            for result in self._results:
                self._xp.flatten(result)[:1] = np.nan

    def _adds(self) -> bool:
        """Whether what the table calls gradients, which are those that are to be added up then, are added up."""
        segments = self.held.bucket.segments
        if self._sums is not None and self._sums.of_results:
            segments["gradient"] = segments["narrowed" if self.held.bucket.widens else "result"]
        return self._sums is not None

    def _keep(self, found_inf: Array | None = None) -> None:
        """Keeps the new residuals and the method's new state; on a device the state only if the step counts."""
        held = self.held
        if held.bucket.keeps:
            held.residuals.commit(held.bucket, held.numbers)
        held.keep_states(self._xp, found_inf)
