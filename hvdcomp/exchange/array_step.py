"""The way through one step of the tensors that no kernel takes: in array functions, where the gradients are."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType, ModuleType
from typing import Any

from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import Array, wide_dtype
from hvdcomp.compressors import Compressor, checked
from hvdcomp.compressors.choice import Plan
from hvdcomp.compressors.each_tensor import numbers_may_overflow
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.compressors.protocol import Aggregation, AllReduce, Context, Outcome, Request
from hvdcomp.compressors.sizes import bytes_of
from hvdcomp.exchange.bucket_step import BucketStep, Sums
from hvdcomp.exchange.clock import Clock, Spans
from hvdcomp.exchange.energies import Energies, of_arrays, of_errors
from hvdcomp.exchange.fusion import part_bytes
from hvdcomp.exchange.ledger import Cost, Part
from hvdcomp.exchange.tensor_state import TensorState
from hvdcomp.kernels.limits import LARGEST


class ArrayStep:
    """Tensors on their way through one step, to be used as a `BucketStep`: the memory and `aggregate` of each.

    Args:
        xp: the array functions of the gradients.
        gradients: of these tensors, by name; they are not changed.
        plan: the compressors, by name.
        states: of the tensors, by name; `finish` writes what they keep next.
        memory_for: of a compressor, the memory that goes with it.
        context, factor, clock: as of `BucketStep`.

    Attributes:
        names, like, number, keeps_x: as of `BucketStep`.
        gathered: 0, as nobody counts it.
        addresses: none, as no kernel looks at x.
    """

    on_device = False
    number = None
    gathered = 0.0
    keeps_x = True
    addresses: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self,
        xp: ModuleType,
        gradients: Mapping[str, Array],
        plan: Plan,
        states: Mapping[str, TensorState],
        memory_for: Callable[[Compressor], Memory],
        context: Context,
        factor: Array | None,
        clock: Clock,
    ) -> None:
        self._xp = xp
        self._gradients = gradients
        self._plan = plan
        self._context = context
        self._clock = clock
        self.names = list(gradients)
        self.like = gradients[self.names[0]]
        self._states = {name: states[name] for name in self.names}
        # What an earlier plan left is still to be sent, and only the memory that kept it knows how.
        self._memories = {name: states[name].memory_for(memory_for(plan[name])) for name in self.names}
        self._spans = Spans([], [])
        self._costs = {name: Cost(dense_bytes=part_bytes(xp, gradient)) for name, gradient in gradients.items()}
        self._x: dict[str, Array] = {}
        self._before: dict[str, tuple[Array, ...]] = {}  # of memories: where a step that does not count goes back to
        self._compensated: dict[str, tuple[Array, ...]] = {}
        with clock.around(self._spans.encoding), numbers_may_overflow():
            for name in self.names:
                self._compensate(name, factor)
        self._started: dict[str, tuple[Array, ...]] = {}  # the same of methods
        self._generators: dict[str, Aggregation] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._means: dict[str, Array] = {}  # of the outcomes, like gradients
        self._asked: dict[str, Request] = {}
        self._sums: Sums | None = None

    def _compensate(self, name: str, factor: Array | None) -> None:
        """Makes x. If the memory keeps anything, x is at least of single precision, as all that is kept."""
        xp, gradient, memory = self._xp, self._gradients[name], self._memories[name]
        x = xp.reshape(xp.flatten(gradient), gradient.shape)
        if not isinstance(memory, NoMemory):
            x = xp.astype(x, wide_dtype(xp.dtype_name(x)))
        if factor is not None:
            x = x * xp.astype(factor, xp.dtype_name(x))
        self._before[name] = memory.prepare(xp, x, self._states[name].memory)
        self._x[name], self._compensated[name] = memory.compensate(xp, x, self._before[name])

    # For those who look at x before it is compressed.

    def make_x(self) -> None:
        """x is there already."""

    def x(self, name: str) -> Array:
        """x of a tensor."""
        return self._x[name]

    def gradient(self, name: str) -> Array:
        """Gradient of a tensor."""
        return self._gradients[name]

    def energies(self, names: Set[str]) -> Energies:
        """||x||^2 of those of the tensors that have these names."""
        return of_arrays(self._xp, {name: x for name, x in self._x.items() if name in names})

    def lost(self, names: Set[str]) -> Energies:
        """||x - C(x)||^2 of the same, once the generators have ended."""
        return of_errors(
            self._xp, {name: (x, self._outcomes[name].sent) for name, x in self._x.items() if name in names}
        )

    # The step.

    def open(
        self,
        gradients: Mapping[str, Array],
        in_place: bool,
        sums: Sums | None,
        sources: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        """Makes the generators; arguments as of `BucketStep.open`. No result takes a gradient's place."""
        self._sums = sums
        with self._clock.around(self._spans.encoding), numbers_may_overflow():
            for name in self.names:
                self._start(name, sources.get(name, self._x[name]))

    def _start(self, name: str, source: Array) -> None:
        """Makes a generator. It gets what it compresses in the gradient's element type, so that no more travels because
        more is kept. What that type does not hold stays in the memory."""
        xp, compressor, context = self._xp, self._plan[name], dataclasses.replace(self._context, name=name)
        dtype = xp.dtype_name(self._gradients[name])
        if xp.dtype_name(source) != dtype:
            source = xp.astype(source.clip(-LARGEST[dtype], LARGEST[dtype]), dtype)
        kept = self._states[name].kept_for(compressor)
        self._started[name] = checked.prepare(compressor, xp, source, kept, context)
        self._generators[name] = checked.aggregate(compressor, xp, source, self._started[name], context)
        self._costs[name].floats_sent = compressor.payload_floats(tuple(source.shape))

    def advance(self, answers: Sequence[Any]) -> list[Request]:
        """Gives the generators the answers to their last requests, at first none; their next requests, none at the end
        of the last."""
        asked: dict[str, Request] = {}
        with numbers_may_overflow():
            for name, answer in zip(self._asked or self.names, answers or itertools.repeat(None), strict=False):
                try:
                    asked[name] = self._generators[name].send(answer)
                except StopIteration as stop:
                    self._outcomes[name] = stop.value
                    self._means[name] = self._xp.like_original(stop.value.mean, self._gradients[name])
                else:
                    sent, in_node = bytes_of(asked[name]), asked[name].group == "node"
                    self._costs[name].bytes_sent += sent
                    self._costs[name].bytes_in_node += sent if in_node and self._context.has_other_nodes else 0
        self._clock.lap(self._spans.encoding if asked else self._spans.decoding)
        self._asked = asked
        return list(asked.values())

    @property
    def found_inf(self) -> bool | Array:
        """Whether x, or what is sent of it, holds an inf or NaN, as of `Bucket.call`; after the first turn.

        Not whether the gradient does: the sum with what was kept back may overflow, and an infinity must not be kept.
        """
        xp = self._xp
        casts = [
            request.array
            for name, request in self._asked.items()
            if isinstance(request, AllReduce)
            and xp.dtype_name(request.array) == "float16"  # for the wire: large values become infinite
            and xp.dtype_name(self._x[name]) != "float16"
        ]
        return self._found_inf([*self._x.values(), *casts])

    @property
    def found_inf_after(self) -> bool | Array:
        """Whether what compressors made of the exchange, results and states, holds an inf or NaN: on all ranks alike.

        Sums overflow within a method, or over the ranks, although all that was put in is finite.
        """
        made = [[self._means[name], *outcome.state] for name, outcome in self._outcomes.items()]
        return self._found_inf([array for arrays in made for array in arrays])

    def _found_inf(self, arrays: Sequence[Array]) -> bool | Array:
        flag = self._xp.found_inf(arrays)
        return bool(flag[0] != 0) if self._xp is numpy_arrays else flag

    @property
    def part(self) -> tuple[Part, Spans]:
        """Costs of the tensors, once the generators have ended, and times when they were under way."""
        return self._costs, self._spans

    def finish(self, found_inf: Array) -> dict[str, Array]:
        """As `BucketStep.finish`."""
        results, sums = {}, self._sums
        if sums is not None and not sums.of_results:
            sums.add(dict(self._gradients), found_inf)
        with self._clock.around(self._spans.decoding), numbers_may_overflow():
            for name in self.names:
                self._keep(name, found_inf)
                results[name] = self._xp.spoil(self._means[name], found_inf)
        if sums is not None and sums.of_results:
            sums.add(results, found_inf)
        return results

    def _keep(self, name: str, found_inf: Array) -> None:
        """Keeps what was not sent, or everything as it was if `found_inf` is NaN."""
        xp, x, memory, state = self._xp, self._x[name], self._memories[name], self._states[name]
        mean, sent, made = self._outcomes[name]
        rounded = self._means[name]
        if (wide := xp.dtype_name(x)) != xp.dtype_name(rounded):
            # What a narrower element type takes off the mean is the same on all ranks. If each keeps it, it is in the
            # mean of what they send later.
            x = x + (xp.astype(xp.reshape(mean, x.shape), wide) - xp.astype(rounded, wide))
        kept = memory.update(xp, x, sent, self._compensated[name])
        state.memory = self._select(found_inf, kept, self._before[name])
        state.keeper = memory
        if not self._plan[name].lossless:  # a dense step keeps the warm start of the method it interrupts
            state.method = self._plan[name].name
            state.compressor = self._select(found_inf, made, self._started[name])

    def forget_sent(self, sends_all: Callable[[str, Compressor], bool]) -> Callable[[], None] | None:
        """As `BucketStep.forget_sent`."""
        sent = [
            (self._states[name], self._states[name].memory)
            for name, memory in self._memories.items()
            if self._before[name] and not memory.is_momentum and sends_all(name, self._plan[name])
        ]

        def forget() -> None:
            for state, memory in sent:
                if state.memory is memory:  # nobody has put something else there
                    state.memory = ()

        return forget if sent else None

    def _select(self, found_inf: Array, after: tuple[Array, ...], before: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(
            self._xp.select(found_inf, new, old) for new, old in zip(after, before, strict=True)
        )


Step = BucketStep | ArrayStep
"""Tensors that go through a step together: those of a bucket, or those that no kernel takes."""
