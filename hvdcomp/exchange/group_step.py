"""A group's way through one step: tensor by tensor, in array functions, where the gradients are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.types import Array, wide_dtype
from hvdcomp.compressors import Compressor, checked, inside
from hvdcomp.compressors.bucket import any_found_inf
from hvdcomp.compressors.inside import numbers_may_overflow
from hvdcomp.compressors.memory import NoMemory
from hvdcomp.compressors.protocol import Aggregation, AllReduce, Context, Outcome, Request
from hvdcomp.compressors.sizes import bytes_of
from hvdcomp.exchange.bucket_step import BucketStep, Sums
from hvdcomp.exchange.buckets import EngineBucket, Member, TensorGroup
from hvdcomp.exchange.clock import Clock, Spans
from hvdcomp.exchange.energies import Energies, of_arrays, of_errors
from hvdcomp.exchange.fusion import part_bytes
from hvdcomp.exchange.ledger import Cost, Part
from hvdcomp.kernels.limits import LARGEST


class GroupStep:
    """The tensors of a group on their way through one step, to be used as a `BucketStep`.

    Args:
        xp: the array functions of the gradients.
        group: the group.
        gradients: of the step, by name.
        context, factor, clock: as of `BucketStep`.

    Attributes:
        names, number, gathered, like, keeps_x: as of `BucketStep`.
        addresses: none, as no kernel looks at x.
    """

    on_device = False
    keeps_x = True
    addresses: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self,
        xp: ModuleType,
        group: TensorGroup,
        gradients: Mapping[str, Array],
        context: Context,
        factor: Array | None,
        clock: Clock,
    ) -> None:
        self._xp = xp
        self._clock = clock
        self._spans = Spans([], [])
        self.names, self.number, self.gathered = group.names, group.number, group.gathered
        with clock.around(self._spans.encoding), numbers_may_overflow():
            self._tensors = {
                member.name: _TensorStep(xp, member, gradients[member.name], context, factor)
                for member in group.members
            }
        self.like = gradients[self.names[0]]
        self._asked: dict[str, Request] = {}
        self._in_place = False
        self._sums: Sums | None = None

    # For those who look at x before it is compressed.

    def make_x(self) -> None:
        """x is there already."""

    def x(self, name: str) -> Array:
        """x of a tensor."""
        return self._tensors[name].x

    def gradient(self, name: str) -> Array:
        """Gradient of a tensor."""
        return self._tensors[name].gradient

    def energies(self, names: Set[str]) -> Energies:
        """||x||^2 of those of the tensors that have these names."""
        return of_arrays(self._xp, {name: tensor.x for name, tensor in self._tensors.items() if name in names})

    def lost(self, names: Set[str]) -> Energies:
        """||x - C(x)||^2 of the same, once the generators have ended."""
        tensors = {name: tensor for name, tensor in self._tensors.items() if name in names}
        return of_errors(self._xp, {name: (tensor.x, tensor.outcome.sent) for name, tensor in tensors.items()})

    # The step.

    def open(
        self,
        gradients: Mapping[str, Array],
        in_place: bool,
        sums: Sums | None,
        sources: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        """Makes the generators; arguments as of `BucketStep.open`."""
        self._in_place, self._sums = in_place, sums
        with self._clock.around(self._spans.encoding), numbers_may_overflow():
            for name, tensor in self._tensors.items():
                tensor.open(sources.get(name, tensor.x))

    def advance(self, answers: Sequence[Any]) -> list[Request]:
        """Gives the generators the answers to their last requests, at first none; their next requests, none at the end
        of the last. A tensor that has ended keeps no other one waiting."""
        waiting = dict(zip(self._asked, answers, strict=True)) if answers else dict.fromkeys(self.names)
        with numbers_may_overflow():
            asked = {name: self._tensors[name].advance(answer) for name, answer in waiting.items()}
        self._asked = {name: request for name, request in asked.items() if request is not None}
        self._clock.lap(self._spans.encoding if self._asked else self._spans.decoding)
        return list(self._asked.values())

    @property
    def found_inf(self) -> bool | Array:
        """Whether x, or what is sent of it, holds an inf or NaN, as of `Bucket.call`; after the first turn.

        Not whether the gradient does: the sum with what was kept back may overflow, and an infinity must not be kept.
        """
        xs = {name: tensor.x for name, tensor in self._tensors.items()}
        sums = [(request.array, xs[name]) for name, request in self._asked.items() if isinstance(request, AllReduce)]
        casts = [sent for sent, x in sums if _dtype_of(sent) == "float16" != _dtype_of(x)]  # for the wire
        return _found_inf(self._xp, [*xs.values(), *casts])

    @property
    def found_inf_after(self) -> bool | Array:
        """Whether what compressors made of the exchange, results and states, holds an inf or NaN: on all ranks alike.

        Sums overflow within a method, or over the ranks, although all that was put in is finite.
        """
        made = [(tensor.mean, *tensor.outcome.state) for tensor in self._tensors.values()]
        return _found_inf(self._xp, [array for arrays in made for array in arrays])

    @property
    def part(self) -> tuple[Part, Spans]:
        """Costs of the tensors, once the generators have ended, and times when they were under way."""
        return {name: tensor.cost for name, tensor in self._tensors.items()}, self._spans

    def finish(self, found_inf: Array) -> dict[str, Array]:
        """As `BucketStep.finish`."""
        sums, tensors = self._sums, self._tensors
        if sums is not None and not sums.of_results:
            sums.add({name: tensor.gradient for name, tensor in tensors.items()}, found_inf)
        counts = self._xp.waits(found_inf) or found_inf.item() == 0  # a device chooses what it keeps
        with self._clock.around(self._spans.decoding), numbers_may_overflow():
            if counts:
                for tensor in tensors.values():
                    tensor.keep(found_inf)
            results = {name: tensor.result(self._in_place, found_inf) for name, tensor in tensors.items()}
        if sums is not None and sums.of_results:
            sums.add(results, found_inf)
        return results

    def forget_sent(self, sends_all: Callable[[str, Compressor], bool]) -> Callable[[], None] | None:
        """As `BucketStep.forget_sent`."""
        sent = [
            (tensor.member.state, tensor.member.state.memory)
            for name, tensor in self._tensors.items()
            if tensor.sends_residual and sends_all(name, tensor.member.compressor)
        ]

        def forget() -> None:
            for state, memory in sent:
                if state.memory is memory:  # nobody has put something else there
                    state.memory = ()

        return forget if sent else None


class _TensorStep:
    """One tensor on its way through a step: its memory, and `aggregate`. Making it makes x.

    Attributes:
        member, gradient: as given.
        x: what is compressed unless an observer puts something else in its place. If the memory keeps anything, x is
            at least of single precision, as all that is kept.
        cost: of the tensor in the step.
        outcome: what the generator has returned; then also `mean`, like the gradient.
    """

    def __init__(
        self, xp: ModuleType, member: Member, gradient: Array, context: Context, factor: Array | None
    ) -> None:
        self._xp = xp
        self.member, self.gradient = member, gradient
        self._context = dataclasses.replace(context, name=member.name)
        # What an earlier plan left is still to be sent, and only the memory that kept it knows how.
        self._memory = member.state.memory_for(member.memory)
        x = xp.reshape(xp.flatten(gradient), gradient.shape)
        if not isinstance(self._memory, NoMemory):
            x = xp.astype(x, wide_dtype(xp.dtype_name(x)))
        if factor is not None:
            x = x * xp.astype(factor, xp.dtype_name(x))
        # The memory's arrays, and later the method's, that a step which does not count goes back to.
        self._kept_before = self._memory.prepare(xp, x, member.state.memory)
        self.x, self._compensated = self._memory.compensate(xp, x, self._kept_before)
        self.cost = Cost(dense_bytes=part_bytes(xp, gradient))
        self._state_before: tuple[Array, ...] = ()
        self._generator: Aggregation
        self.outcome: Outcome
        self.mean: Array

    def open(self, source: Array) -> None:
        """Makes the generator. It gets what it compresses in the gradient's element type, so that no more travels
        because more is kept. What that type does not hold stays in the memory."""
        xp, compressor = self._xp, self.member.compressor
        dtype = xp.dtype_name(self.gradient)
        if xp.dtype_name(source) != dtype:
            source = xp.astype(source.clip(-LARGEST[dtype], LARGEST[dtype]), dtype)
        kept = self.member.state.kept_for(compressor)
        self._state_before, self._generator = inside.start(compressor, xp, source, kept, self._context)
        self.cost.floats_sent = compressor.payload_floats(tuple(source.shape))

    def advance(self, answer: Any) -> Request | None:
        """Gives the generator the answer to its last request; its next request, None at its end."""
        try:
            request = self._generator.send(answer)
        except StopIteration as stop:
            self.outcome = outcome = stop.value
            # Memories may change x in place, and whoever gets the mean may change it.
            mean = checked.without_sharing(outcome.mean, (self.x, *outcome.state))
            self.mean = self._xp.like_original(mean, self.gradient)
            return None
        sent = bytes_of(request)
        self.cost.bytes_sent += sent
        if request.group == "node" and self._context.has_other_nodes:
            self.cost.bytes_in_node += sent
        return request

    def keep(self, found_inf: Array) -> None:
        """Keeps what was not sent, or on a device everything as it was if `found_inf` is NaN."""
        xp, x, memory, state = self._xp, self.x, self._memory, self.member.state
        mean, sent, made = self.outcome
        if (wide := xp.dtype_name(x)) != xp.dtype_name(self.mean):
            # What a narrower element type takes off the mean is the same on all ranks. If each keeps it, it is in the
            # mean of what they send later.
            x = x + (xp.astype(xp.reshape(mean, x.shape), wide) - xp.astype(self.mean, wide))
        kept = memory.update(xp, x, sent, self._compensated)
        state.memory = self._select(found_inf, kept, self._kept_before)
        state.keeper = memory
        if not self.member.compressor.lossless:  # a dense step keeps the warm start of the method it interrupts
            state.method = self.member.compressor.name
            state.compressor = self._select(found_inf, made, self._state_before)

    def result(self, in_place: bool, found_inf: Array) -> Array:
        """The mean, which holds a NaN if the step does not count; to be called after `keep`.

        Args:
            in_place: whether the mean takes the gradient's place.
        """
        mean = self._xp.spoil(self.mean, found_inf)
        if not in_place:
            return mean
        self.gradient[...] = mean
        return self.gradient

    @property
    def sends_residual(self) -> bool:
        """Whether the memory has added something that is sent once, to x."""
        return bool(self._kept_before) and not self._memory.is_momentum

    def _select(self, found_inf: Array, after: tuple[Array, ...], before: tuple[Array, ...]) -> tuple[Array, ...]:
        if not self._xp.waits(found_inf):
            return tuple(after)
        return tuple(self._xp.select(found_inf, new, old) for new, old in zip(after, before, strict=True))


def _dtype_of(array: Array) -> str:
    name: str = arrays_for(array).dtype_name(array)
    return name


def _found_inf(xp: ModuleType, arrays: Sequence[Array]) -> bool | Array:
    """Whether arrays of the framework or of NumPy hold an inf or NaN, as of `Bucket.call`."""
    in_numpy = [array for array in arrays if isinstance(array, np.ndarray | np.generic)]
    others = [array for array in arrays if not isinstance(array, np.ndarray | np.generic)]
    flags = [functions.found_inf(own) for functions, own in ((numpy_arrays, in_numpy), (xp, others)) if own]
    return any_found_inf(*(flag if arrays_for(flag).waits(flag) else bool(flag[0] != 0) for flag in flags))


Step = BucketStep | GroupStep
"""Tensors that go through a step together: those of a bucket, or those of a group."""


def step_of(
    xp: ModuleType,
    together: EngineBucket | TensorGroup,
    gradients: Mapping[str, Array],
    context: Context,
    factor: Array | None,
    clock: Clock,
) -> Step:
    """The step of a bucket, which has its gradients, or of a group."""
    if isinstance(together, TensorGroup):
        return GroupStep(xp, together, gradients, context, factor, clock)
    return BucketStep(xp, together, context, factor, clock)
