"""The engine compresses and exchanges the gradients of each step, and keeps the states of tensors from step to step.

It knows no framework and no compressor by name: the array functions follow from the arrays. It reaches other ranks only
through a communicator. These modules are its parts:

- `plan` chooses the compressor of each tensor.
- `buckets` decides which tensors are together in an `engine_bucket`, and which are in a `tensor_group`.
- `wave` runs buckets and tensor groups in rounds. In a round, each of them may request collectives.
- `fusion` makes few collectives from all requests of a round.
- `overlap` starts buckets before all gradients are ready.

In this file, "bucket" also means a tensor group.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import AllFunctions, AnyArray, Array
from hvdcomp.communicators import Communicator
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.checked import require_sound
from hvdcomp.compressors.choice import MIN_NDIM, MIN_NUMEL, Plan
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.compressors.two_level import within
from hvdcomp.exchange.buckets import BucketOrGroup, Buckets, in_parts
from hvdcomp.exchange.clock import Span, Spans
from hvdcomp.exchange.engine_bucket import Sums
from hvdcomp.exchange.ledger import Cost, Ledger, Part, Sent, StepCost
from hvdcomp.exchange.nodes import FoundLevels
from hvdcomp.exchange.overlap import Overlap
from hvdcomp.exchange.plan import Planner
from hvdcomp.exchange.tensor_state import TensorState
from hvdcomp.exchange.wave import Wave, run_to_the_end
from hvdcomp.specs.levels import Level, LevelsBySize

BeforeCompress = Callable[[Sequence[BucketOrGroup], Array | None], Mapping[str, Array]]
"""A function that is called between `begin` and `open` of buckets. Its arguments are the buckets, and the factor by
which the memory multiplies gradients (None for 1). The function may read x, the gradient plus the residual. For some
tensors, it may return an array, by tensor name, that is compressed instead of x."""


class Engine:
    """Compresses, exchanges and aggregates the gradients of a fixed set of tensors, step by step.

    Args:
        communicator: the communicator of the ranks that exchange gradients.
        tensors, compressor, memory, min_numel, min_ndim: the arguments of `Chooser`, which chooses the compressor of
            each tensor.
        seed: seed of all random choices; the same on all ranks.
        bytes_beside: function that gets the number of tensors in a step, and returns the number of bytes that the
            binding itself sends.
        ledger: the ledger that records the costs of steps.
        overlap_bytes: least bytes of gradients in a bucket that starts before all gradients of a step are ready; None
            if no bucket is to start early.
        gathered_bytes: largest number of bytes that a rank gathers at a time, as in `hvdcomp.Compression`.

    Attributes:
        planner: the object that makes the plan of each step.
        bytes_beside: the argument `bytes_beside`.
        step_number: number of the present step, from 0. Between two steps, it is the number of the next step.
        states: state of each tensor, by name.
        buckets: the object that makes buckets and tensor groups.
        before_compress: function called in each step before x is compressed; None for no function.
        found_inf: an array of one element. It is NaN if the last step does not count (see `step`), otherwise 0.
        overlap: the object that starts buckets early. Call `expect`, and then `overlap.ready` for each gradient.
    """

    def __init__(
        self,
        communicator: Communicator,
        tensors: Iterable[TensorInfo],
        compressor: Compressor,
        memory: Memory | None = None,
        seed: int = 0,
        min_numel: int = MIN_NUMEL,
        min_ndim: int = MIN_NDIM,
        bytes_beside: Callable[[int], int] = lambda tensors: 0,
        ledger: Ledger | None = None,
        overlap_bytes: int | None = None,
        gathered_bytes: int | None = None,
    ) -> None:
        self.communicator = communicator
        self.planner = Planner(tensors, compressor, memory, min_numel, min_ndim)
        self.tensors = self.planner.tensors
        for name, method in self.planner.plan.items():
            require_sound(within(method), self.tensors[name], max(0, communicator.rank), communicator.world_size)
        self.memory = self.planner.memory
        self.seed = seed
        self.bytes_beside = bytes_beside
        self.ledger = ledger if ledger is not None else Ledger()
        self.step_number = 0
        self.states: dict[str, TensorState] = {name: TensorState() for name in self.tensors}
        self._gathered_bytes = gathered_bytes
        warns, ranks = communicator.rank == 0, communicator.world_size
        self.buckets = Buckets(self.tensors, self.states, self.planner.memory_for, warns, gathered_bytes, ranks)
        self.before_compress: BeforeCompress | None = None
        self.found_inf: AnyArray | None = None
        self._elsewhere: dict[str, Cost] = {}  # tensors of the present step that the binding exchanges itself
        self._forget_sent: Callable[[], None] | None = None  # a function that must be called before the next step
        self.overlap = Overlap(communicator, self.tensors, self.buckets, self.ledger.clock, overlap_bytes)

    # Between two steps.

    @property
    def plan(self) -> Plan:
        """The compressor of each tensor in the present step."""
        return self.planner.plan

    @property
    def compressor(self) -> Compressor:
        """The compressor that the user chose for the training."""
        return self.planner.compressor

    def set_plan(self, plan: Plan) -> None:
        """Sets the compressor of each tensor from the next step on, as `Planner.set_plan` does."""
        self.planner.set_plan(plan)

    def set_level(self, level: Level | str | LevelsBySize | None) -> None:
        """Sets the level from the next step on, as `Planner.set_level` does."""
        self.planner.set_level(level)

    def begin(self) -> Plan:
        """Begins a step and fixes its plan, as `Planner.begin` does. Waits for the device if the previous step sent
        residuals completely."""
        self.overlap.end()  # needed if the previous step ended with an error
        self._elsewhere = {}
        if self._forget_sent is not None:
            self._forget_sent()
            self._forget_sent = None
        return self.planner.begin()

    def scale_residuals(self, factor: float, momentum: bool = True) -> None:
        """Multiplies every residual by a factor, for example after a change of the loss scale.

        Args:
            factor: the number by which residuals are multiplied.
            momentum: whether to multiply a memory's momentum too. Pass False after a change of the learning rate:
                optimizers leave their own momentum as it is.
        """
        for state in self.states.values():
            state.scale_residual(factor, momentum)

    @property
    def has_residuals(self) -> bool:
        """Whether any tensor has a residual to be sent."""
        return any(state.has_residual for state in self.states.values())

    @property
    def passthrough(self) -> bool:
        """Whether the step needs only an all-reduce of gradients, perhaps cast to 16 bits, and sends no residual."""
        return self.planner.casts_only and (self.planner.ignores_residuals or not self.has_residuals)

    def enter_casts(self, names: Set[str], beside: bool = False) -> None:
        """Enters a step in the ledger. Call this if the caller has all-reduced the gradients itself, because
        `passthrough` is True.

        Args:
            names: names of the tensors that had a gradient in the step.
            beside: whether to add `bytes_beside`.
        """
        cost = self.planner.cost_of_casts(names)
        bytes_beside = self.bytes_beside(len(names)) if beside else 0
        elsewhere, sent = self._take_elsewhere()
        parts = (*cost.parts, elsewhere) if elsewhere else cost.parts
        sent += Sent(cost.bytes_sent + bytes_beside)
        self.ledger.record(self.ledger.step_cost(self.step_number, parts, sent))
        self.step_number += 1

    def enter_alone(self, names: Set[str], bytes_beside: int = 0) -> None:
        """Enters a step in the ledger. Call this if the gradients of this rank were not exchanged, and the binding
        itself sent only `bytes_beside` bytes."""
        part = self.planner.costs_of_nothing(names)
        dense = sum(cost.dense_bytes for cost in part.values())
        self.ledger.record(StepCost(bytes_beside, dense, step=self.step_number, parts=(part,)))
        self.step_number += 1

    def count_elsewhere(self, name: str, nbytes: int) -> None:
        """Counts the bytes of a gradient that the binding itself exchanges, uncompressed, in the present step."""
        self._elsewhere[name] = Cost(nbytes, nbytes, nbytes / 4)

    def _take_elsewhere(self) -> tuple[Part, Sent]:
        """The costs that `count_elsewhere` has counted in the present step, and the sum of their bytes."""
        part, self._elsewhere = self._elsewhere, {}
        return part, Sent(sum(cost.bytes_sent for cost in part.values()))

    # A step.

    def step(
        self, gradients: Mapping[str, Array], in_place: bool = False, sums: Sums | None = None
    ) -> dict[str, AnyArray]:
        """Aggregates the gradients of one step.

        A step does not count if a gradient of any rank contains an inf or NaN. It also does not count if a gradient
        overflows when its residual is added, when it is cast to half precision, or when the ranks' payloads are
        combined. If a step does not count, every rank gets a NaN in each result, so that a loss scaler skips the step
        on all ranks. All residuals and compressor states stay as they were.

        Args:
            gradients: the gradients of this rank, by name. All ranks must have the same names.
            in_place: whether results may overwrite gradients, as in Horovod's own allreduce. This saves the time of
                several copies.
            sums: sums to which the gradients are added if the step counts; None for no sums.

        Returns:
            The aggregated gradients by name, each in the shape, element type and layout of its gradient, in storage
            that the engine does not keep.
        """
        if not any(map(gradients.__contains__, self.tensors)):
            return {}
        results = self.finish(self.start(gradients, in_place, sums, alone=True))
        self.overlap.review(gradients)
        return results

    def start(
        self, gradients: Mapping[str, Array], in_place: bool = False, sums: Sums | None = None, alone: bool = False
    ) -> list[Wave]:
        """Begins a step, which `finish` ends. Starts the first collectives, and waits for nothing.

        Do not start another step before `finish`. Until then, you may enter steps without an exchange.

        Args:
            gradients, in_place, sums: the arguments of `step`. There must be at least one gradient, and no gradient may
                change before `finish`.
            alone: whether the caller calls `finish` immediately after this method.

        Returns:
            The waves of the step, which the caller must pass to `finish`. A wave is a set of buckets that exchange
            their payloads together. If ranks would gather more than `gathered_bytes` at a time, the last waves have not
            started yet.
        """
        names = list(filter(gradients.__contains__, self.tensors))
        first = gradients[names[0]]
        xp = arrays_for(first)
        # A bucket that has started early on one rank may not have started on another rank. On this other rank, the
        # bucket starts now. On both ranks, the bucket forms a wave alone, and buckets start in the same order, so that
        # all ranks start the same collectives. All other buckets follow together in one wave.
        started = self.overlap.end(first)
        if not started:
            self.ledger.clock.begin(xp, first)
        factor = None
        if self.memory is not None:
            in_order = list(map(gradients.__getitem__, names))
            factor = self.memory.gradient_factor(xp, in_order, self.communicator.world_size)
        under_way = {name for wave in started for name in wave.names}
        waiting = self._begin_buckets(xp, names, gradients, factor, under_way)
        sources: Mapping[str, Array] = {}
        if self.before_compress is not None:
            sources = self.before_compress(waiting, factor)
            self.ledger.clock.enter()
        waves, all_last = [], []
        for bucket in waiting:
            bucket.open(in_place, sums, sources)
            if bucket.number is None:
                all_last.append(bucket)
            else:
                waves.append(self.overlap.new_wave(xp, [bucket], bucket.number))
        before = sum([bucket.gathered for wave in [*started, *waves] for bucket in wave.buckets])
        last, *parts = in_parts(all_last, operator.attrgetter("gathered"), self._gathered_bytes, before)
        if last:
            alone = alone and not started and not waves and not parts
            waves.append(self.overlap.new_wave(xp, last, None, alone=alone))
        for wave in waves:
            wave.start()
        later = [self.overlap.new_wave(xp, part, None, part=place) for place, part in enumerate(parts, 1)]
        return [*started, *waves, *later]

    def finish(self, waves: Sequence[Wave], kept: Set[str] = frozenset()) -> dict[str, AnyArray]:
        """Ends a step that `start` began, and enters it in the ledger; returns the results, as `step` does.

        Args:
            waves: the waves that `start` returned.
            kept: the names of tensors whose gradients this rank does not exchange in this step.
        """
        run_to_the_end(waves)
        buckets = [bucket for wave in waves for bucket in wave.buckets]
        xp = arrays_for(buckets[0].like)
        found_inf = waves[0].found_inf()
        for wave in waves[1:]:
            found_inf = found_inf + wave.found_inf()
        results: dict[str, Array] = {}
        for bucket in buckets:
            results |= bucket.finish(found_inf)
        self.overlap.free(results[buckets[0].names[0]])
        self._forget_sent = _forget_sent_residuals(xp, buckets, self.planner.sends_all, found_inf)
        self._record(xp, waves, len(results), kept)
        self.step_number += 1
        self.found_inf = found_inf
        return results

    def _begin_buckets(
        self,
        xp: AllFunctions,
        names: list[str],
        gradients: Mapping[str, Array],
        factor: Array | None,
        under_way: Set[str],
    ) -> list[BucketOrGroup]:
        """Calls `begin` of the buckets that have not started, and returns these buckets.

        Args:
            names: the names of the tensors that have a gradient, in the order of the training's tensors.
            factor: the factor by which the memory multiplies gradients; None for 1.
            under_way: names of the tensors whose buckets have started.
        """
        clock, plan, context = self.ledger.clock, self.plan, self.context("")
        if self.planner.ignores_residuals:  # such steps are rare, so later steps should find the buckets unchanged
            waiting: list[BucketOrGroup] = [self.buckets.tensor_group(names, plan, defaultdict(TensorState))]
        else:
            waiting = self.buckets.of_step(xp, names, gradients, plan, under_way)
        for bucket in waiting:
            clock.marks_only_turns &= bucket.on_device
        for bucket in waiting:
            bucket.begin(xp, gradients, context, factor, clock)
        return waiting

    def _record(self, xp: AllFunctions, waves: Sequence[Wave], number_of_tensors: int, kept: Set[str]) -> None:
        """Enters the costs of a step in the ledger, after its end."""
        rounds: list[Span] = []
        parts: list[Part] = []
        spans: list[Spans] = []
        sent, in_node = self.bytes_beside(number_of_tensors), 0
        for wave in waves:
            rounds += wave.rounds
            for of_round in wave.sent:
                sent += of_round.bytes
                in_node += of_round.in_node
            for bucket in wave.buckets:
                parts.append(bucket.costs)
                spans.append(bucket.spans)
        if self._elsewhere:
            elsewhere, of_elsewhere = self._take_elsewhere()
            sent += of_elsewhere.bytes
            parts.append(elsewhere)
            spans.append(Spans([], []))
        if kept:
            parts.append(self.planner.costs_of_nothing(kept))
            spans.append(Spans([], []))
        cost = self.ledger.step_cost(self.step_number, parts, Sent(sent, in_node))
        self.ledger.record_timed(cost, spans, rounds)

    # Overlap.

    def expect(
        self, in_place: bool = False, sums: Sums | None = None, agreed: Callable[[], bool] = lambda: True
    ) -> None:
        """Allows buckets of this step to start as soon as `overlap.ready` was called for all their gradients.

        Does nothing if `before_compress` needs x, or if the memory needs all gradients.

        Args:
            in_place, sums: the arguments that `step` will get.
            agreed: function that returns whether this rank knows that all ranks make this step with the same plan, as
                for `Overlap.begin`.
        """
        if self.before_compress is not None or (self.memory is not None and self.memory.needs_all_gradients):
            return
        self.overlap.begin(self.plan, self.context(""), in_place, sums, agreed)

    def context(self, name: str) -> Context:
        """Context of a tensor in the present step."""
        ranks = self.communicator
        return Context(name, self.step_number, self.seed, ranks.rank, ranks.world_size, self.levels)

    @functools.cached_property
    def levels(self) -> FoundLevels:
        """Place of this rank among the ranks of its node, and among nodes."""
        return FoundLevels(self.communicator, self.tensors)


def _forget_sent_residuals(
    xp: AllFunctions, buckets: Sequence[BucketOrGroup], sends_all: Callable[[str, Compressor], bool], found_inf: Array
) -> Callable[[], None] | None:
    """Forgets residuals that were sent completely: by a lossless compressor, or by a cast without error feedback.

    On a device, the host does not know yet whether the step counts. So this function returns another function, which
    forgets the residuals if the step counts. Call it before the next step.
    """
    of_buckets = [one for bucket in buckets if (one := bucket.forget_sent(sends_all)) is not None]
    if not of_buckets:
        return None
    flag = xp.read_later(found_inf)

    def forget() -> None:
        if flag() == 0:
            for forget_one in of_buckets:
                forget_one()

    if xp.waits(found_inf) or any(bucket.on_device for bucket in buckets):
        return forget
    forget()
    return None
