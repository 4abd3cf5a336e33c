"""A tensor group: tensors that no kernel compresses. Array functions compress them one by one, on their device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.types import AllFunctions, AnyArray, Array, wide_dtype
from hvdcomp.compressors import Compressor, checked
from hvdcomp.compressors.inside import Inside, inside_of, numbers_may_overflow
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.compressors.protocol import Aggregation, AllReduce, Context, Outcome, Request, SparseVector
from hvdcomp.compressors.sizes import bytes_of
from hvdcomp.exchange.clock import Clock, Spans
from hvdcomp.exchange.engine_bucket import Sums
from hvdcomp.exchange.fusion import part_bytes
from hvdcomp.exchange.ledger import Cost, Part
from hvdcomp.exchange.residuals import KNOWN_TO_KERNELS
from hvdcomp.exchange.tensor_state import TensorState
from hvdcomp.kernels.limits import LARGEST


class Member(NamedTuple):
    """One tensor of a tensor group, with its compressor, memory and state.

    Attributes:
        name: the name of the tensor.
        compressor, memory: the compressor and the memory in the plan.
        floats: number of values that the compressor sends, as returned by `Compressor.payload_floats`.
        state: the state of the tensor, which every step replaces.
    """

    name: str
    compressor: Compressor
    memory: Memory
    floats: float
    state: TensorState


class TensorGroup:
    """Tensors that no kernel compresses. The engine calls the same methods of a tensor group and of an `EngineBucket`.

    Args:
        members: the tensors of the tensor group, at least one.

    Attributes:
        names, number, gathered, keeps_x, when_compressed: as in `EngineBucket`.
        addresses: always empty, because no kernel reads x.
    """

    on_device = False  # even if the gradients are on a device, because array functions may wait for the device
    keeps_x = True
    addresses: Mapping[str, int] = MappingProxyType({})

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.names = [member.name for member in members]
        self.number: int | None = None
        self.gathered = 0.0
        # Of the step.
        self._xp: AllFunctions
        self._clock: Clock
        self.spans: Spans
        self._tensors: dict[str, _TensorExchange] = {}
        self._asked: dict[str, Request] = {}
        self._in_place = False
        self._sums: Sums | None = None
        self.when_compressed: list[Callable[[], None]] = []
        self.costs: Part = {}
        # The tensors whose residuals were sent, each with its new residual.
        self._sent: list[tuple[Member, tuple[Array, ...]]] = []

    @property
    def like(self) -> Array:
        """An array on the device of the gradients. It does not exist after `finish`."""
        return self._tensors[self.names[0]].gradient

    # The step.

    def begin(
        self, xp: AllFunctions, gradients: Mapping[str, Array], context: Context, factor: Array | None, clock: Clock
    ) -> None:
        """Begins a step, and computes x; arguments as for `EngineBucket.begin`."""
        self._xp, self._clock, self.spans = xp, clock, Spans([], [])
        self._tensors, self._asked, self.when_compressed = {}, {}, []
        clock.enter()
        with numbers_may_overflow():
            self._tensors = {
                member.name: _TensorExchange(xp, member, gradients[member.name], context, factor)
                for member in self.members
            }
        clock.leave(self.spans.encoding)

    def open(self, in_place: bool, sums: Sums | None, sources: Mapping[str, Array] = MappingProxyType({})) -> None:
        """Makes the generators; arguments as for `EngineBucket.open`."""
        self._in_place, self._sums = in_place, sums
        with numbers_may_overflow():
            for name, tensor in self._tensors.items():
                tensor.open(sources.get(name))
        self._clock.leave(self.spans.encoding)

    def advance(self, answers: Sequence[Any]) -> list[Request]:
        """Sends the generators the answers to their last requests, and returns their next requests.

        Args:
            answers: the answers, in the order of the requests; empty at the start.

        Returns:
            One request of each generator that has not ended.
        """
        waiting = dict(zip(self._asked, answers, strict=True)) if answers else dict.fromkeys(self.names)
        with numbers_may_overflow():
            asked = {name: self._tensors[name].advance(answer) for name, answer in waiting.items()}
        self._asked = {name: request for name, request in asked.items() if request is not None}
        self._clock.lap(self.spans.encoding if self._asked else self.spans.decoding)
        return list(self._asked.values())

    @property
    def found_inf(self) -> bool | Array:
        """Whether x, or the part of x that is sent, contains an inf or NaN. The result is an argument for `flag_of`.
        Read it after the first `advance`.

        It is not enough to check the gradient. The sum of gradient and residual may overflow, and residuals must stay
        finite.
        """
        arrays = [array for tensor in self._tensors.values() for array in tensor.sent_arrays()]
        return _found_inf(self._xp, arrays)

    @property
    def found_inf_after(self) -> bool | Array:
        """Whether the results or the methods' new states contain an inf or NaN. The answer is the same on all ranks.

        Sums in a method, or over the ranks, may overflow even if all their terms are finite.
        """
        arrays = [array for tensor in self._tensors.values() for array in tensor.new_arrays()]
        return _found_inf(self._xp, arrays)

    def finish(self, found_inf: AnyArray) -> dict[str, Array]:
        """Ends the step of the tensor group, as `EngineBucket.finish` does for a bucket."""
        for function in self.when_compressed:
            function()
        sums, tensors = self._sums, self._tensors
        if sums is not None and not sums.of_results:
            sums.add({name: tensor.gradient for name, tensor in tensors.items()}, found_inf)
        on_host = not self._xp.waits(found_inf)  # on a device the host does not know yet whether the step counts
        counts = on_host and found_inf.item() == 0
        self._clock.enter()
        with numbers_may_overflow():
            if counts or not on_host:
                for tensor in tensors.values():
                    tensor.keep(None if counts else found_inf)
            results = {
                name: tensor.result(self._in_place, None if counts else found_inf) for name, tensor in tensors.items()
            }
        self._clock.leave(self.spans.decoding)
        if sums is not None and sums.of_results:
            sums.add(results, found_inf)
        self.costs = {name: tensor.cost for name, tensor in tensors.items()}
        members = [tensor.member for tensor in tensors.values() if tensor.sends_residual]
        self._sent = [(member, member.state.memory) for member in members]
        # The tensor group is used again in the next step, but should not keep these arrays in memory.
        self._tensors, self._asked, self._sums, self.when_compressed = {}, {}, None, []
        return results

    def forget_sent(self, sends_all: Callable[[str, Compressor], bool]) -> Callable[[], None] | None:
        """Forgets the residuals of tensors that were sent completely, as `EngineBucket.forget_sent` does for a bucket.
        Call it once."""
        sent = [(member.state, memory) for member, memory in self._sent if sends_all(member.name, member.compressor)]
        self._sent = []

        def forget() -> None:
            for state, memory in sent:
                if state.memory is memory:  # otherwise the residual was replaced in the meantime
                    state.memory = ()

        return forget if sent else None

    # For observers that look at x before it is compressed.

    def make_x(self) -> None:
        """Does nothing, because `begin` has computed x."""

    def x(self, name: str) -> Array:
        """x of a tensor."""
        return self._tensors[name].x

    def gradient(self, name: str) -> Array:
        """Gradient of a tensor."""
        return self._tensors[name].gradient

    def sent(self, name: str) -> Array | SparseVector:
        """What this rank sent of the tensor `name` in this step, decoded. Call it only in a function of
        `when_compressed`."""
        return self._tensors[name].sent


class _TensorExchange:
    """One tensor in one step: its memory, and its generator `aggregate`. The constructor computes x.

    If the memory keeps anything, x has at least single precision, like all residuals.

    Attributes:
        member, gradient: the tensor, and its gradient in this step.
        cost: the cost of the tensor in the step.
    """

    def __init__(
        self, framework: AllFunctions, member: Member, gradient: Array, context: Context, factor: Array | None
    ) -> None:
        self.member, self.gradient = member, gradient
        # If there is a residual of an earlier plan, it must still be sent, and only the memory that made it can do so.
        self._memory = memory = member.state.memory_for(member.memory)
        self._inside = inside = inside_of(framework, gradient)
        self._context = dataclasses.replace(context, name=member.name)
        self._gradient: AnyArray = inside.enter(gradient)
        known = type(memory) in KNOWN_TO_KERNELS and not memory.rounds_to
        # Other memories may need types that NumPy lacks.
        remembering = inside if known else Inside(framework, framework, gradient)
        self._memory_xp, enter = remembering.xp, remembering.enter
        xp = remembering.xp
        x = xp.reshape(xp.flatten(enter(gradient)), gradient.shape)
        self._dtype = xp.dtype_name(x)
        if not isinstance(memory, NoMemory):
            x = xp.astype(x, wide_dtype(self._dtype))
        if factor is not None:
            x = x * xp.astype(enter(factor), xp.dtype_name(x))
        # The memory's arrays before the step. They are kept if the step does not count. In the same way,
        # `_state_before` below has the method's arrays before the step.
        self._kept_before = memory.prepare(xp, x, tuple(map(enter, member.state.memory)))
        self._x, self._compensated = memory.compensate(xp, x, self._kept_before)
        self.cost = Cost(dense_bytes=part_bytes(xp, self._gradient), floats_sent=member.floats)
        self._state_before: tuple[Array, ...] = ()
        self._generator: Aggregation
        self._compressed: Array
        self._asked: Request | None = None
        self._outcome: Outcome
        self._mean: Array  # the outcome's mean, in the gradient's element type and layout

    @property
    def x(self) -> Array:
        """x, an array of the framework. It is compressed, unless an observer replaces it."""
        return self._inside.leave(self._x)

    @property
    def sent(self) -> Array | SparseVector:
        """The part of x that was sent, after the end of the generator; an array of the framework."""
        return self._inside.sent(self._outcome.sent)

    def open(self, source: Array | None) -> None:
        """Makes the generator. It compresses in the gradient's element type, so that a wider residual does not make the
        payload larger. The memory keeps the rounding error.

        Args:
            source: an array of the framework that is compressed instead of x; None for x.
        """
        xp, compressor, enter = self._inside.xp, self.member.compressor, self._inside.enter
        compressed = enter(self._x if source is None else source)
        if xp.dtype_name(compressed) != self._dtype:
            bound = LARGEST[self._dtype]
            compressed = xp.astype(compressed.clip(-bound, bound), self._dtype)
        self._compressed = compressed
        kept = tuple(map(enter, self.member.state.kept_for(compressor)))
        self._state_before = checked.prepare(compressor, xp, compressed, kept, self._context)
        self._generator = checked.aggregate(compressor, xp, compressed, self._state_before, self._context)

    def advance(self, answer: Any) -> Request | None:
        """Sends the generator the answer to its last request; returns its next request, or None at its end."""
        try:
            self._asked = request = self._generator.send(answer)
        except StopIteration as stop:
            self._outcome = outcome = stop.value
            # The mean must not share storage with x or the new state: memories may change x in place, and users may
            # change the mean.
            mean = checked.without_sharing(outcome.mean, (self._compressed, *outcome.state))
            self._mean = self._inside.xp.like_original(mean, self._gradient)
            return None
        sent = bytes_of(request)
        self.cost.bytes_sent += sent
        if request.group == "node" and self._context.has_other_nodes:
            self.cost.bytes_in_node += sent
        return request

    def sent_arrays(self) -> list[Array]:
        """x, and the cast of x to float16 if this cast is sent: large values become infinite in a cast."""
        if isinstance(self._asked, AllReduce):
            sent = arrays_for(self._asked.array).dtype_name(self._asked.array)
            if sent == "float16" != self._memory_xp.dtype_name(self._x):
                return [self._x, self._asked.array]
        return [self._x]

    def new_arrays(self) -> list[Array]:
        """Returns the mean gradient of the tensor, and the new state of the method."""
        return [self._mean, *self._outcome.state]

    def keep(self, found_inf: Array | None) -> None:
        """Keeps the residual, and the method's new state.

        Args:
            found_inf: one element on a device: if it is NaN, the old residual and state are kept. None if the host
                knows that the step counts.
        """
        xp, x, memory, state = self._memory_xp, self._x, self._memory, self.member.state
        mean, sent, new_state = self._outcome
        if xp is self._inside.framework:
            sent = self.sent
        if (wide := xp.dtype_name(x)) != self._dtype:
            # The mean is rounded to a narrower type, with the same rounding error on all ranks. If every rank adds this
            # error to its residual, the mean of a later step contains it.
            x = x + (xp.astype(xp.reshape(mean, x.shape), wide) - xp.astype(self._mean, wide))
        kept = memory.update(xp, x, sent, self._compensated)
        state.memory = self._select(found_inf, kept, self._kept_before)
        state.keeper = memory
        if not self.member.compressor.lossless:  # a lossless method does not replace the warm start of another method
            state.method = self.member.compressor.name
            state.compressor = self._select(found_inf, new_state, self._state_before)

    def _select(
        self, found_inf: Array | None, after: tuple[Array, ...], before: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        if found_inf is None:
            return tuple(map(self._inside.leave, after))
        select = self._inside.framework.select
        return tuple(select(found_inf, new, old) for new, old in zip(after, before, strict=True))

    def result(self, in_place: bool, found_inf: Array | None) -> Array:
        """The mean, an array of the framework. Call it after `keep`.

        Args:
            in_place: whether the mean overwrites the gradient.
            found_inf: one element, 0 or NaN, that is added to one element of the mean; None to add nothing.
        """
        mean, inside = self._mean, self._inside
        if found_inf is not None:
            mean = inside.framework.spoil(inside.leave(mean), found_inf)
        if not in_place:
            return inside.leave(mean)
        self._gradient[...] = inside.enter(mean)
        return self.gradient

    @property
    def sends_residual(self) -> bool:
        """Whether x contains a residual. A momentum is no residual: it stays after it was sent."""
        return bool(self._kept_before) and not self._memory.is_momentum


def _found_inf(xp: AllFunctions, arrays: Sequence[Array]) -> bool | Array:
    """Whether arrays of the framework or of NumPy contain an inf or NaN. The result is an argument for `flag_of`."""
    in_numpy = [array for array in arrays if isinstance(array, np.ndarray | np.generic)]
    others = [array for array in arrays if not isinstance(array, np.ndarray | np.generic)]
    found = bool(in_numpy) and bool(numpy_arrays.found_inf(in_numpy)[0] != 0)
    return xp.found_inf(others) + (np.nan if found else 0.0) if others else found
