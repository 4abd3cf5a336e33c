"""The way through one step of the tensors that are in no bucket: each by itself, in the framework's array functions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType, ModuleType
from typing import Any

from hvdcomp.arrays.types import Array
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.choice import Plan
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.protocol import AllReduce, Context, Request
from hvdcomp.exchange.bucket_step import BucketStep, Sums
from hvdcomp.exchange.clock import Clock, Spans
from hvdcomp.exchange.energies import Energies, of_arrays, of_errors
from hvdcomp.exchange.ledger import Part
from hvdcomp.exchange.tensor_step import TensorState, TensorStep


class SeparateStep:
    """The tensors in no bucket on their way through one step; to be used as a `BucketStep`.

    Args:
        xp: the array functions of the gradients.
        gradients: of these tensors, by name.
        plan: the compressors, by name.
        states: of the tensors, by name.
        memory_for: of a compressor, the memory that goes with it.
        context, factor, clock: as of `BucketStep`.

    Attributes:
        names, like, number, keeps_x: as of `BucketStep`.
    """

    on_device = False
    number = None
    keeps_x = True

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
        self._clock = clock
        self.names = list(gradients)
        self.like = gradients[self.names[0]]
        self._spans = {name: Spans([], []) for name in gradients}
        self._tensors: dict[str, TensorStep] = {}
        for name, gradient in gradients.items():
            own, compressor = dataclasses.replace(context, name=name), plan[name]
            with clock.around(self._spans[name].encoding):
                self._tensors[name] = TensorStep(
                    xp, gradient, factor, states[name], compressor, memory_for(compressor), own
                )
        self._asked: dict[str, Request] = {}
        self._sums: Sums | None = None

    # For those who look at x before it is compressed.

    @property
    def addresses(self) -> dict[str, int]:
        """None: no kernel looks at x."""
        return {}

    def make_x(self) -> None:
        """x is there already."""

    def x(self, name: str) -> Array:
        """x of a tensor."""
        return self._tensors[name].x

    def gradient(self, name: str) -> Array:
        """Of a tensor."""
        return self._tensors[name].gradient

    def energies(self, names: Set[str]) -> Energies:
        """||x||^2 of those of the tensors that have these names."""
        return of_arrays(self._xp, {name: tensor.x for name, tensor in self._tensors.items() if name in names})

    def lost(self, names: Set[str]) -> Energies:
        """||x - C(x)||^2 of the same, once the generators have ended."""
        pairs = {name: (tensor.x, tensor.sent) for name, tensor in self._tensors.items() if name in names}
        return of_errors(self._xp, pairs)

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
        for name, tensor in self._tensors.items():
            with self._clock.around(self._spans[name].encoding):
                tensor.open(sources.get(name, tensor.x))

    def advance(self, answers: Sequence[Any]) -> list[Request]:
        """Gives the generators the answers to their last requests, at first none; their next requests, none at the end
        of the last."""
        turns = zip(self._asked or self._tensors, answers or itertools.repeat(None), strict=False)
        asked: dict[str, Request] = {}
        for name, answer in turns:
            request = self._tensors[name].advance(answer)
            self._clock.lap(self._spans[name].decoding if request is None else self._spans[name].encoding)
            if request is not None:
                asked[name] = request
        self._asked = asked
        return list(asked.values())

    @property
    def found_inf(self) -> Array:
        """Whether x, or what is sent of it, holds an inf or NaN, as of `Bucket.call` on a device; after the first turn.

        Not whether the gradient does: the sum with what was kept back may overflow, and an infinity must not be kept.
        """
        xp = self._xp
        casts = [
            request.array
            for name, request in self._asked.items()
            if isinstance(request, AllReduce)
            and xp.dtype_name(request.array) == "float16"  # for the wire: large values become infinite
            and xp.dtype_name(self.x(name)) != "float16"
        ]
        return xp.found_inf([tensor.x for tensor in self._tensors.values()] + casts)

    @property
    def found_inf_after(self) -> Array:
        """Whether what compressors made of the exchange, results and states, holds an inf or NaN: on all ranks alike.

        Sums overflow within a method, or over the ranks, although all that was put in is finite.
        """
        outcomes = [tensor.made for tensor in self._tensors.values()]
        return self._xp.found_inf([array for result, state in outcomes for array in (result, *state)])

    def parts(self) -> list[tuple[Part, Spans]]:
        """What each tensor cost, once its generator has ended, and when it was under way."""
        return [({name: tensor.cost}, self._spans[name]) for name, tensor in self._tensors.items()]

    def finish(self, found_inf: Array) -> dict[str, Array]:
        """As `BucketStep.finish`."""
        results, sums = {}, self._sums
        if sums is not None and not sums.of_results:
            sums.add({name: tensor.gradient for name, tensor in self._tensors.items()}, found_inf)
        for name, one in self._tensors.items():
            with self._clock.around(self._spans[name].decoding):
                results[name] = one.finish(found_inf)
        if sums is not None and sums.of_results:
            sums.add(results, found_inf)
        return results

    def forget_sent(self, sends_all: Callable[[str, Compressor], bool]) -> Callable[[], None] | None:
        """As `BucketStep.forget_sent`."""
        sent = [
            (tensor.state, tensor.state.memory)
            for name, tensor in self._tensors.items()
            if tensor.had_residual and sends_all(name, tensor.compressor)
        ]

        def forget() -> None:
            for state, memory in sent:
                if state.memory is memory:  # nobody has put something else there
                    state.memory = ()

        return forget if sent else None


Step = BucketStep | SeparateStep
"""What goes through a step together: the tensors of a bucket, or all that are in none."""
