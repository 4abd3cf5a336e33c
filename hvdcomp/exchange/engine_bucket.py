"""A bucket: tensors that kernels compress together, on the host or on a device."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import AllFunctions, AnyArray, Array, dtype_bytes
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.bucket import Bucket, BucketStates
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.protocol import Context, Request, TensorInfo
from hvdcomp.exchange.clock import Clock, Spans
from hvdcomp.exchange.ledger import Cost, Part
from hvdcomp.exchange.recycled import Recycled
from hvdcomp.exchange.residuals import FlatStorage, numbers_of
from hvdcomp.exchange.tensor_state import TensorState
from hvdcomp.kernels import cuda
from hvdcomp.kernels.tables import NOTHING, PRODUCT


class Sums(NamedTuple):
    """Sums to which the gradients of steps are added.

    Attributes:
        totals: function that gets gradients, by name, and returns the arrays of their sums, in the same order.
        add: function that adds gradients, by name, to their sums, unless the element in its second argument is NaN.
        share: number by which gradients are multiplied before they are added.
        of_results: whether to add the results of the step instead of this rank's own gradients.
    """

    totals: Callable[[Mapping[str, Array]], Sequence[Array]]
    add: Callable[[Mapping[str, Array], Array], None]
    share: float
    of_results: bool = False


class EngineBucket:
    """Tensors that kernels compress together in every step.

    In each step, the engine calls `Buckets.take`, `begin`, `open`, `advance` until there are no more requests, and
    `finish`. If a step ends with an error, `finish` is not called, and the next `begin` starts again.

    Args:
        tensors: the name of each tensor, its state, and its number in flat storage.
        compressors, memory, described: the compressor of each tensor, the memory, and the description of each tensor,
            as for `Bucket`.
        residuals: the flat storage that contains the residuals of all tensors.
        device: the device of the kernels; None for the host.
        xp: the array functions of the payloads.

    Attributes:
        names: names of the tensors in the bucket.
        key: two buckets with the same key are interchangeable.
        places: the place of each tensor in the bucket, by name.
        bucket: the part of the bucket that its compressors see.
        on_device: whether the kernels run on a device. If so, the host waits for no result: `found_inf` and
            `found_inf_after` are elements on the device, which are NaN or 0.
        number: the number of the bucket among the buckets that may start early; None if this bucket may not start
            early.
        gathered: bytes that one rank gathers for this bucket; 0 if there is no limit.
        given, arrays: the gradients of the step. In `given` they are as the caller gave them, and in `arrays` they are
            in row-major order. Both are empty after `finish`.
        spans: the times of the work on the bucket in the step.
        found_inf_after: whether the results of the exchange contain an inf or NaN. It is known after the last request.
        when_compressed: functions that `finish` of this step calls first, because x and the sent part of x still exist
            at that time.
        has_states: whether the bucket stores the method's arrays for all its tensors.
    """

    def __init__(
        self,
        tensors: tuple[tuple[str, TensorState, int], ...],
        compressors: tuple[Compressor, ...],
        memory: Memory,
        described: Sequence[TensorInfo],
        residuals: FlatStorage,
        device: Any = None,
        xp: AllFunctions = numpy_arrays,
    ) -> None:
        self.names = [name for name, _, _ in tensors]
        self.places = {name: place for place, name in enumerate(self.names)}
        self.key = (tensors, compressors, memory)
        self.bucket = Bucket(described, compressors, memory, device, xp, described[0].dtype != "float32")
        self.on_device = device is not None
        self.number: int | None = None
        self.gathered = 0.0
        self.arrays: Sequence[Array] = ()
        self.given: Sequence[Array] = ()
        self.has_states = False
        self._tensors = tensors
        self._residuals = residuals
        self._numbers = numbers_of([number for _, _, number in tensors])
        self._set_aside: tuple[list[AnyArray], Sequence[int] | np.ndarray] | None = None
        self._wide: tuple[list[AnyArray], Sequence[int] | np.ndarray] | None = None
        # The costs of the tensors. They repeat after `period` steps, so they are stored by the step number modulo
        # `period`.
        self._costs: dict[int, dict[str, Cost]] = {}
        self._wrap_state: Callable[[np.ndarray], Array]
        # Of the step.
        self._xp: AllFunctions
        self._clock: Clock
        self.spans: Spans
        self._energies: Array | None = None  # ||x||^2 of each tensor, if x is computed
        self._sources: Sequence[Array] = ()
        self._generator: Generator[Request, Any, bool | AnyArray]
        self._results: Sequence[Array] = ()
        self._sums: Sums | None = None
        self._is_aside = False  # whether results are in other memory until the gradients are added to sums
        self._is_dense = False  # whether results already have the layout of the gradients
        self._had_residuals = False
        self.found_inf_after: bool | AnyArray = False
        self.when_compressed: list[Callable[[], None]] = []

    @property
    def like(self) -> Array:
        """An array on the device of the gradients. It does not exist after `finish`."""
        return self.arrays[0]

    # The step.

    def begin(
        self, xp: AllFunctions, gradients: Mapping[str, Array], context: Context, factor: Array | None, clock: Clock
    ) -> None:
        """Begins a step, after `Buckets.take`.

        Args:
            xp: the array functions of the gradients.
            gradients: the gradients of the step, by name.
            context: the context of the step.
            factor: the factor by which the memory multiplies gradients; None for 1.
            clock: the clock of the engine.
        """
        self._xp, self._clock, self.spans = xp, clock, Spans([], [])
        self._energies, self.found_inf_after, self.when_compressed = None, False, []
        clock.enter()
        self.bucket.begin(context, factor)
        if self.bucket.keeps:
            self._residuals.enter(self.bucket, self._numbers)
        if self.bucket.widens:
            self._widen()
        clock.leave(self.spans.encoding)

    def open(self, in_place: bool, sums: Sums | None, sources: Mapping[str, Array] = MappingProxyType({})) -> None:
        """Makes the generator.

        Args:
            in_place: whether results overwrite the gradients.
            sums: sums to which gradients are added if the step counts.
            sources: arrays that are compressed instead of x, by name.
        """
        own = [name for name in self.names if name in sources] if sources else []
        if own:
            self.make_x()
        self._fill_table(in_place, sums)
        if self._energies is not None:
            self._sources, addresses = self._placed([sources[name] for name in own])
            replaced = self.addresses | dict(zip(own, addresses, strict=True))
            self.bucket.segments["source"] = list(replaced.values())
        self._prepare_states()
        self._generator = self._run()
        self._clock.leave(self.spans.encoding)

    def _run(self) -> Generator[Request, Any, bool | AnyArray]:
        """Runs the method's bucket form. If the gradients have 16 bits, it then casts the results to 16 bits."""
        bucket = self.bucket
        found_inf: bool | AnyArray = yield from bucket.compressors[0].aggregate_bucket(bucket)
        if not bucket.widens:
            return found_inf
        if self.on_device:  # on the host, decoding has already cast the results
            found_inf = found_inf + bucket.call("narrow_results")
        rules = bucket.segments["sent_rule"]
        rules[rules != PRODUCT] = NOTHING
        return found_inf

    def advance(self, answers: Sequence[Any]) -> list[Request]:
        """Sends the generator the answer to its last request, and returns its next request. On the host, both contain
        NumPy arrays.

        Args:
            answers: the answer to the last request; empty at the start.

        Returns:
            A list of one request; an empty list at the end of the generator.
        """
        try:
            asked = self._generator.send(answers[0] if answers else None)
        except StopIteration as stop:
            self.found_inf_after = stop.value
            self._clock.lap(self.spans.decoding)
            return []
        self._clock.lap(self.spans.encoding)
        return [asked]

    @property
    def found_inf(self) -> bool | AnyArray:
        """Whether x, or the part of x that is sent, contains an inf or NaN. Read it after the first `advance`."""
        return self.bucket.found_inf

    def finish(self, found_inf: Array) -> dict[str, Array]:
        """Ends a step; returns the results by name. Keeps the new residuals, unless the element `found_inf` is NaN."""
        if self.when_compressed:
            for function in self.when_compressed:
                function()
            self._clock.enter()
        sends = self.bucket.keeps and not self.bucket.memory.is_momentum
        self._had_residuals = sends and True in self._residuals.has_residual[self._numbers]
        self._settle(found_inf)
        arrays = self._results if self._is_dense else self._xp.like_originals(self._results, self.given)
        results = dict(zip(self.names, arrays, strict=True))
        # The bucket is used again in the next step, but should not keep these arrays in memory.
        self.arrays = self.given = self._results = self._sources = ()
        self._energies, self._sums, self.when_compressed = None, None, []
        if self.on_device:  # on a device, new memory takes no time; on the host, the system must clear it
            self._set_aside = self._wide = None
        self._clock.leave(self.spans.decoding)
        return results

    def forget_sent(self, sends_all: Callable[[str, Compressor], bool]) -> Callable[[], None] | None:
        """A function that forgets the residuals that the step sent completely; None if there are no such residuals.
        Call this method after `finish`.

        Args:
            sends_all: function that returns whether a compressor sends a tensor completely, as in `Chooser`.
        """
        residuals = self._residuals
        if not self._had_residuals or not sends_all(self.names[0], self.bucket.compressors[0]):
            return None
        released = residuals.released

        def forget() -> None:
            if residuals.released == released:
                residuals.drop(self._numbers)

        return forget

    def _fill_table(self, in_place: bool, sums: Sums | None) -> None:
        """Writes the addresses of results and of sums to the table."""
        bucket = self.bucket
        self._results, self._sums = self.arrays, sums
        self._is_aside = in_place and sums is not None and not sums.of_results
        self._is_dense = not in_place and all(map(operator.is_, self.arrays, self.given))
        if not in_place:
            self._results, addresses = self._fresh_results()
        elif self._is_aside:
            if self._set_aside is None or self.on_device:
                # These arrays are stored for later steps. As long as they exist, `_fresh` does not use their storage.
                self._set_aside = self._fresh_arrays()
            addresses = self._set_aside[1]
        else:
            addresses = bucket.segments["gradient"]
        # Results of 16 bits are rounded from means in float32. `_widen` has written the addresses of these means to
        # `result`.
        bucket.segments["narrowed" if bucket.widens else "result"] = addresses
        if sums is not None:
            totals = sums.totals(dict(zip(self.names, self.given, strict=True)))
            bucket.segments["total"] = self._placed(totals)[1]
            bucket.table.bucket.share = sums.share

    def _widen(self) -> None:
        """Provides float32 memory for the means of 16-bit gradients, and for x if the bucket keeps no residual."""
        if self._wide is None and self.on_device:
            self._wide = cuda.split_like(self.arrays, wide=True)
        elif self._wide is None:
            arrays, places = Recycled([tensor.shape for tensor in self.bucket.tensors]).arrays()
            self._wide = [self._xp.from_numpy(array, like=self.arrays[0]) for array in arrays], places
        self.bucket.segments["result"] = self._wide[1]
        if not self.bucket.keeps:
            self.bucket.segments["x"] = self._wide[1]

    def _fresh_results(self) -> tuple[list[AnyArray], Sequence[int] | np.ndarray]:
        """New arrays for the results of a step, and their addresses."""
        arrays, addresses = self._fresh_arrays()
        if self.on_device:
            return arrays, addresses
        results = [self._xp.from_numpy(array, like=self.arrays[0]) for array in arrays]
        if self.bucket.widens:
            results = [self._xp.bitcast(result, self.bucket.dtype) for result in results]
        return results, addresses

    def _fresh_arrays(self) -> tuple[list[AnyArray], Sequence[int] | np.ndarray]:
        return cuda.split_like(self.arrays) if self.on_device else self._fresh.arrays()

    @cached_property
    def _fresh(self) -> Recycled:
        dtype = "int16" if self.bucket.widens else "float32"
        return Recycled([tensor.shape for tensor in self.bucket.tensors], dtype)

    def _placed(self, arrays: Sequence[Array]) -> tuple[Sequence[Array], Sequence[int]]:
        """The arrays as float32 in row-major order on the bucket's device, and their addresses."""
        placed = (cuda.placed if self.on_device else self._xp.hosted)(arrays) if arrays else ([], [])
        assert placed is not None
        return placed

    def _settle(self, found_inf: AnyArray) -> None:
        if self.on_device:
            self.bucket.call("settle", found_inf, self._adds(), self._is_aside)
            self._keep(found_inf)
            return
        counts = found_inf.item() == 0
        if counts:
            self._keep()
        adds = counts and self._adds()
        if adds or self._is_aside:
            self.bucket.call("end_step", adds, self._is_aside)
        if not counts:
            for result in self._results:
                elements: AnyArray = self._xp.flatten(result)
                elements[:1] = np.nan

    def _adds(self) -> bool:
        """Whether this step adds gradients or results to sums. If it adds results, this method writes their addresses
        to the table's column `gradient`."""
        segments = self.bucket.segments
        if self._sums is not None and self._sums.of_results:
            segments["gradient"] = segments["narrowed" if self.bucket.widens else "result"]
        return self._sums is not None

    def _keep(self, found_inf: Array | None = None) -> None:
        """Keeps the new residuals and the method's new state. On a device, the new state is kept only if the step
        counts."""
        if self.bucket.keeps:
            self._residuals.commit(self.bucket, self._numbers)
        self._keep_states(found_inf)

    @property
    def costs(self) -> Part:
        """The cost of each tensor in the step, by name. Read it after `finish`."""
        step = self.bucket.context.step % self.bucket.compressors[0].period
        if step not in self._costs:
            costs = self._costs[step] = {}
            for tensor, compressor in zip(self.bucket.tensors, self.bucket.compressors, strict=True):
                sent, in_node = compressor.bytes_in_bucket(tensor, self.bucket.context)
                floats = compressor.payload_floats(tensor.shape)
                dense = tensor.size * dtype_bytes(tensor.dtype)
                costs[tensor.name] = Cost(int(sent), dense, floats, bytes_in_node=int(in_node))
        return self._costs[step]

    # For observers that look at x before it is compressed.

    @property
    def keeps_x(self) -> bool:
        """Whether `measure_left` may be called."""
        return self.bucket.keeps

    def make_x(self) -> Array:
        """Computes x now, and not together with compression; returns ||x||^2 of each tensor, float64 (tensors,)."""
        if self._energies is None:
            self._clock.start()
            self._energies = self._sums_of("make_x")
            self._clock.lap(self.spans.encoding)
        return self._energies

    @property
    def addresses(self) -> dict[str, int]:
        """The address of x of each tensor, by name; computes x."""
        self.make_x()
        return dict(zip(self.names, self.bucket.segments[self.bucket.x].tolist(), strict=True))

    def x(self, name: str) -> Array:
        """x of a tensor. This method computes x. Afterwards, x does not change until it is compressed."""
        self.make_x()
        place = self.places[name]
        if self.bucket.keeps:
            _, state, number = self._tensors[place]
            return state.wrapped(self._residuals.x(number))
        return self.arrays[place] if self._wide is None else self._wide[0][place]

    def gradient(self, name: str) -> Array:
        """The gradient of a tensor."""
        return self.arrays[self.places[name]]

    def measure_left(self) -> Array:
        """The squared compression error of each tensor, ||x - C(x)||^2, float64 (tensors,). Call this method in
        `when_compressed`, if `keeps_x` is True."""
        return self._sums_of("measure_left")

    def _sums_of(self, kernel: str) -> Array:
        sums = self.bucket.sums_of(kernel)
        return self._xp.from_numpy(sums, like=self.like) if isinstance(sums, np.ndarray) else sums

    # The method's states, from step to step.

    def _prepare_states(self) -> None:
        """Copies the method's arrays to the bucket, unless the bucket already has them. The arrays are adapted to the
        levels of the compressors."""
        if not self.has_states and self.bucket.compressors[0].keeps_state:
            states = [state for _, state, _ in self._tensors]
            self.bucket.states = prepared_states(self._xp, self.bucket, states, self.arrays)

    def _keep_states(self, found_inf: Array | None) -> None:
        """Keeps the method's new arrays for the next step. If a tensor still has arrays of another method, the new
        arrays replace them. On a device, the arrays change only if the element `found_inf` is not NaN."""
        states, method = self.bucket.states, self.bucket.compressors[0]
        if states is not None:
            states.commit() if found_inf is None else states.settle(found_inf)
        if self.has_states or method.lossless:  # a lossless method does not replace the warm start of another method
            return
        like = self._xp.zeros((0,), like=self.arrays[0])
        self._wrap_state = _itself if self.on_device else functools.partial(self._xp.from_numpy, like=like)
        for place, (_, state, _) in enumerate(self._tensors):
            state.method = method.name
            if states is None:
                state.compressor = ()
            else:
                state.leave_to_bucket(self, place)
        self.has_states = True

    def state(self, place: int) -> tuple[Array, ...]:
        """The method's arrays of the tensor at a place of the bucket, as in `TensorState.compressor`."""
        assert self.bucket.states is not None
        return tuple(self._wrap_state(array) for array in self.bucket.states.arrays(place))


def prepared_states(
    xp: AllFunctions, bucket: Bucket, states: Sequence[TensorState], arrays: Sequence[Array]
) -> BucketStates | None:
    """The method's arrays of a bucket's tensors, adapted to the compressors' levels; None if the method keeps no
    arrays.

    Args:
        states: the states of the tensors before the step.
        arrays: arrays with the shapes of the tensors, on the bucket's device.
    """
    if not bucket.compressors[0].keeps_state:
        return None
    context, each = bucket.context, zip(states, bucket.tensors, bucket.compressors, arrays, strict=True)
    if bucket.device is None:
        on_host = [state.prepare_on_host(xp, tensor, compressor, context) for state, tensor, compressor, _ in each]
        return BucketStates(on_host)
    on_device = [
        state.prepare(xp, x, compressor, dataclasses.replace(context, name=tensor.name))
        for state, tensor, compressor, x in each
    ]
    return BucketStates(on_device, xp)


def _itself(array: Array) -> Array:
    return array
