"""The engine: takes the gradients of each step through compression, and keeps what tensors need from step to step.

It knows no framework (array functions come with the arrays), no compressor by name, and reaches other ranks only
through a communicator. `plan` says which compressor each tensor gets, `buckets` which tensors are compressed together,
`bucket_step` and `tensor_step` what a bucket or a tensor goes through, `lockstep` how they exchange, `overlap` what
starts before all gradients are there, `fusion` what travels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import ModuleType
from typing import Any

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.communicators import Communicator
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.choice import MIN_NDIM, MIN_NUMEL, Plan
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.protocol import Context, SparseVector, TensorInfo
from hvdcomp.exchange.bucket_step import BucketStep, Sums
from hvdcomp.exchange.buckets import Buckets, Group
from hvdcomp.exchange.clock import Span
from hvdcomp.exchange.device_step import DeviceStep
from hvdcomp.exchange.ledger import Ledger, Sent, StepCost
from hvdcomp.exchange.lockstep import Lockstep, run_to_the_end
from hvdcomp.exchange.look import Look
from hvdcomp.exchange.nodes import FoundLevels
from hvdcomp.exchange.overlap import Overlap
from hvdcomp.exchange.plan import Planner
from hvdcomp.exchange.previews import Previews
from hvdcomp.exchange.tensor_step import TensorState, TensorStep, costs_of
from hvdcomp.specs.levels import Level, LevelsBySize

BeforeCompress = Callable[[Look], Mapping[str, Array]]


class Engine:
    """Compresses, exchanges and aggregates the gradients of a fixed set of tensors, step by step.

    Args:
        communicator: the ranks to exchange with.
        tensors, compressor, memory, min_numel, min_ndim: as for `Chooser`.
        seed: of all random choices; the same on all ranks.
        bytes_beside: of the number of a step's tensors, what the binding itself sends beside the engine's collectives.
        ledger: where costs are entered.
        overlap_bytes: of the gradients of a bucket that starts before all gradients of a step are there; None for no
            such buckets.

    Attributes:
        planner: chooses the compressor of each tensor.
        bytes_beside: as given.
        step_number: of the step that comes next, or is under way, from 0.
        states: of the tensors, by name.
        buckets: says which tensors are compressed together.
        before_compress: called in each step before x is compressed. It may look at it, and returns by name what is to
            be compressed in place of some.
        found_inf: of the last step: an element that is 0, or NaN if nothing of the step counts (see `step`).
        overlap: is to be told of gradients when they are there, after `expect`.
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
    ) -> None:
        self.communicator = communicator
        self.planner = Planner(tensors, compressor, memory, min_numel, min_ndim)
        self.tensors = self.planner.tensors
        self.memory = self.planner.memory
        self.seed = seed
        self.bytes_beside = bytes_beside
        self.ledger = ledger if ledger is not None else Ledger()
        self.step_number = 0
        self.states: dict[str, TensorState] = {name: TensorState() for name in self.tensors}
        self.buckets = Buckets(self.tensors, self.states, self._memory_for, says=communicator.rank == 0)
        self.previews = Previews(self.tensors, self.states)
        self.before_compress: BeforeCompress | None = None
        self.found_inf: Array | None = None
        self._drop_sent: Callable[[], None] | None = None  # what is to be done before the next step
        self.overlap = Overlap(communicator, self.tensors, self.buckets, overlap_bytes)

    # Between two steps.

    @property
    def plan(self) -> Plan:
        """The compressor of each tensor in the step that is under way."""
        return self.planner.plan

    @property
    def compressor(self) -> Compressor:
        """The user's."""
        return self.planner.compressor

    def set_plan(self, plan: Plan) -> None:
        """`Planner.set_plan`."""
        self.planner.set_plan(plan)

    def set_level(self, level: Level | str | LevelsBySize | None) -> None:
        """`Planner.set_level`."""
        self.planner.set_level(level)

    def begin(self) -> Plan:
        """`Planner.begin`. Waits for the device if the step before has sent residuals dense."""
        self.overlap.end()  # of a step that was not made
        if self._drop_sent is not None:
            self._drop_sent()
            self._drop_sent = None
        return self.planner.begin()

    def scale_residuals(self, factor: float, momentum: bool = True) -> None:
        """Multiplies every residual, as after a change of the loss scale.

        Args:
            momentum: whether a memory's momentum is multiplied too. It is not where the learning rate has changed:
                optimizers do not do so with theirs.
        """
        for state in self.states.values():
            state.scale_residual(factor, momentum)

    @property
    def holds_residuals(self) -> bool:
        """Whether any tensor has a residual to be sent."""
        return any(state.holds for state in self.states.values())

    @property
    def passthrough(self) -> bool:
        """Whether the plan needs nothing that a plain allreduce of (cast) gradients cannot do."""
        return self.planner.casts_only and (self.planner.beside_residuals or not self.holds_residuals)

    def enter_casts(self, names: Set[str], beside: bool = False) -> None:
        """Enters, as a step of its own, what somebody else allreduced because `passthrough` held.

        Args:
            beside: whether the binding has sent what it sends beside the engine's collectives too.
        """
        cost = self.planner.cost_of_casts(names)
        bytes_beside = self.bytes_beside(len(names)) if beside else 0
        sums = (cost.bytes_sent + bytes_beside, cost.dense_bytes, cost.floats_sent)
        self.ledger.record(StepCost(*sums, step=self.step_number, parts=cost.parts))
        self.step_number += 1

    def enter_alone(self, names: Set[str], bytes_beside: int = 0) -> None:
        """Enters, as a step of its own, one in which this rank kept its gradients, and the binding sent so much."""
        part = self.planner.costs_of_nothing(names)
        dense = sum(cost.dense_bytes for cost in part.values())
        self.ledger.record(StepCost(bytes_beside, dense, step=self.step_number, parts=(part,)))
        self.step_number += 1

    # A step.

    def step(
        self, gradients: Mapping[str, Array], in_place: bool = False, sums: Sums | None = None
    ) -> dict[str, Array]:
        """Aggregates the gradients of one step.

        If any gradient of any rank holds an inf or NaN, or overflows when its residual is added, when it is cast to
        half precision or when what the ranks sent is put together, every rank gets results that hold a NaN in each
        tensor (so that a loss scaler skips the step everywhere), and all residuals and compressor states stay as they
        were.

        Args:
            gradients: by name; the same names on all ranks.
            in_place: whether results may take the place of the gradients, as in Horovod's own allreduce: fresh memory
                costs as much time as several copies. Otherwise gradients are not changed.
            sums: to which gradients are added, unless the step does not count.

        Returns:
            The aggregated gradients by name, each in the shape, element type and layout of its gradient, in storage
            that the engine does not keep.
        """
        names = [name for name in self.tensors if name in gradients]
        if not names:
            return {}
        xp = arrays_for(gradients[names[0]])
        started = self.overlap.end()
        if not started:
            self.ledger.clock.begin(xp, gradients[names[0]])
        waves, tensors, look = _waves(self, xp, names, gradients, in_place, sums, started)
        run_to_the_end(waves)
        buckets = [bucket for wave in waves for bucket in wave.buckets]
        found_inf = sum((wave.found_inf() for wave in waves[1:]), waves[0].found_inf())
        if look is not None:
            look.tell(buckets, tensors)
        if sums is not None and not sums.of_results and tensors:
            sums.add({one.name: gradients[one.name] for one in tensors}, found_inf)
        counts: Any = found_inf if buckets and buckets[0].on_device else bool(buckets) and found_inf.item() == 0
        results = {}
        for one in tensors:
            with self.ledger.clock.around(one.spans.decoding):
                results[one.name] = one.finish(found_inf)
        if sums is not None and sums.of_results and tensors:
            sums.add(results, found_inf)
        for bucket in buckets:
            with self.ledger.clock.around(bucket.spans.decoding):
                results |= bucket.finish(counts)
        self._drop_sent_residuals(xp, buckets, tensors, found_inf)
        _record(self, xp, waves, tensors, len(names))
        self.step_number += 1
        self.found_inf = found_inf
        self.overlap.learn_order(gradients)
        return results

    # Overlap.

    def expect(
        self, in_place: bool = False, sums: Sums | None = None, agreed: Callable[[], bool] = lambda: True
    ) -> None:
        """Lets buckets of the step that has begun start before its `step`, as soon as `overlap.ready` was told of all
        their gradients. It does nothing where somebody looks at x before it is compressed.

        Args:
            in_place, sums: as for `step`, which is to be given the same.
            agreed: as of `Overlap.begin`.
        """
        if self.before_compress is not None or (self.memory is not None and self.memory.needs_all_gradients):
            return
        start = functools.partial(_start_early, self, in_place, sums)
        self.overlap.begin(self.plan, start, agreed)

    def _drop_sent_residuals(
        self, xp: ModuleType, buckets: Sequence[BucketStep], tensors: Sequence[TensorStep], found_inf: Array
    ) -> None:
        """Forgets residuals that a lossless compressor has just sent, or a cast that keeps no rounding error.

        On a device that is done before the next step: nobody knows yet whether this one counts.
        """
        sent = [
            (state := self.states[one.name], state.memory)
            for one in tensors
            if one.had_residual and self.planner.sends_all(one.name, one.compressor)
        ]
        groups = [
            one.group
            for one in buckets
            if one.had_residual and self.planner.sends_all(one.group.names[0], one.compressor)
        ]
        self._drop_sent = None
        if not sent and not groups:
            return
        found, released = xp.read_later(found_inf), self.buckets.released

        def drop() -> None:
            if found() == 0:
                for state, memory in sent:
                    if state.memory is memory:  # nobody has put something else there
                        state.memory = ()
                if self.buckets.released == released:
                    for group in groups:
                        self.buckets.drop(group)

        if xp.waits(found_inf) or any(one.on_device for one in buckets):
            self._drop_sent = drop
        else:
            drop()

    def preview(
        self, xp: ModuleType, xs: Mapping[str, Array], compressors: Mapping[str, Compressor]
    ) -> dict[str, Array | SparseVector]:
        """C(x) of some tensors as if this rank were the only one that sends; sends and changes nothing.

        Args:
            xs: x by name.
            compressors: by name, of these tensors at least.
        """
        return self.previews.kept(xp, xs, compressors, self.context(""))

    def _memory_for(self, name: str, compressor: Compressor) -> Memory:
        return self.states[name].memory_for(self.planner.memory_for(compressor))

    def context(self, name: str) -> Context:
        """Of a tensor in the step under way."""
        ranks = self.communicator
        return Context(name, self.step_number, self.seed, ranks.rank, ranks.world_size, self.levels)

    @functools.cached_property
    def levels(self) -> FoundLevels:
        """Where this rank is among the ranks of its node, and among nodes."""
        return FoundLevels(self.communicator, self.tensors)


def _waves(
    engine: Engine,
    xp: ModuleType,
    names: Sequence[str],
    gradients: Mapping[str, Array],
    in_place: bool,
    sums: Sums | None,
    started: Sequence[Lockstep],
) -> tuple[list[Lockstep], list[TensorStep], Look | None]:
    """Starts what has not started of a step; returns all that is under way, and the tensors in no bucket.

    What could have started early goes on by itself, in the same order, so that all ranks have the same collectives.
    Everything else goes together, as the last.
    """
    factor = None
    if engine.memory is not None:
        arrays = [gradients[name] for name in names]
        factor = engine.memory.gradient_factor(xp, arrays, engine.communicator.world_size)
    context, clock = engine.context(""), engine.ledger.clock
    groups = [bucket.group for wave in started for bucket in wave.buckets]
    buckets, tensors = _make_steps(engine, xp, names, gradients, context, factor, groups)
    look: Look | None = None
    made: Mapping[str, int] = {}
    sources: Mapping[str, Array] = {}
    if engine.before_compress is not None:
        look = Look(xp, buckets, tensors, engine.plan, engine.previews, context, factor)
        sources = engine.before_compress(look)
        if any(not bucket.group.places.keys().isdisjoint(sources) for bucket in buckets):
            look.make()
        made = look.made
    for bucket in buckets:
        with clock.around(bucket.spans.encoding):
            bucket.open(gradients, in_place, made, sources, sums)
    for one in tensors:
        with clock.around(one.spans.encoding):
            one.open(engine.plan[one.name], sources.get(one.name, one.x), engine.context(one.name))
    last = [bucket for bucket in buckets if bucket.group.number is None]
    waves = [_early_wave(engine, xp, bucket) for bucket in buckets if bucket.group.number is not None]
    if last or tensors:
        alone = not started and not waves
        waves.append(Lockstep(xp, engine.communicator, clock, "round", last, tensors, alone))
    for wave in waves:
        wave.start()
    return [*started, *waves], tensors, look


def _start_early(
    engine: Engine, in_place: bool, sums: Sums | None, group: Group, gradients: Mapping[str, Array]
) -> Lockstep | None:
    """Starts a bucket, given the gradients that have come; None if it cannot take them."""
    like = gradients[group.names[0]]
    xp, clock = arrays_for(like), engine.ledger.clock
    if not engine.overlap.started:
        clock.begin(xp, like)
    if not engine.buckets.take(xp, group, gradients):
        return None
    clock.turns_only &= group.bucket.device is not None
    bucket = _bucket_step(engine, xp, group, engine.context(""), None)
    with clock.around(bucket.spans.encoding):
        bucket.open(gradients, in_place, {}, {}, sums)
    wave = _early_wave(engine, xp, bucket)
    wave.start()
    return wave


def _early_wave(engine: Engine, xp: ModuleType, bucket: BucketStep) -> Lockstep:
    name = engine.overlap.name_of(bucket.group)
    return Lockstep(xp, engine.communicator, engine.ledger.clock, name, [bucket])


def _make_steps(
    engine: Engine,
    xp: ModuleType,
    names: Sequence[str],
    gradients: Mapping[str, Array],
    context: Context,
    factor: Array | None,
    started: Sequence[Group],
) -> tuple[list[BucketStep], list[TensorStep]]:
    """The buckets of a step that have not started, and the tensors that go one by one. factor: what the memory
    multiplies gradients with."""
    clock, plan = engine.ledger.clock, engine.plan
    aside = engine.planner.beside_residuals  # such steps are rare: one by one, and buckets stay as they are
    groups, rest = ([], names) if aside else engine.buckets.groups(xp, names, gradients, plan, started)
    clock.turns_only &= all(group.bucket.device is not None for group in groups) and not rest
    buckets = [_bucket_step(engine, xp, group, context, factor) for group in groups]
    tensors = []
    for name in rest:
        spans: list[Span]
        with clock.around(spans := []):
            memory = engine.planner.memory_for(plan[name])
            state = TensorState() if aside else engine.states[name]
            tensors.append(TensorStep(xp, name, gradients[name], factor, state, memory))
        tensors[-1].spans.encoding.extend(spans)
    return buckets, tensors


def _bucket_step(
    engine: Engine, xp: ModuleType, group: Group, context: Context, factor: Array | None
) -> BucketStep:
    clock = engine.ledger.clock
    spans: list[Span] = []
    with clock.around(spans):
        kind = BucketStep if group.bucket.device is None else DeviceStep
        bucket = kind(xp, group, context, factor, clock)
    bucket.spans.encoding.extend(spans)
    return bucket


def _record(
    engine: Engine, xp: ModuleType, waves: Sequence[Lockstep], tensors: Sequence[TensorStep], number_of_tensors: int
) -> None:
    """Enters the costs of a step that has ended."""
    buckets = [bucket for wave in waves for bucket in wave.buckets]
    rounds = [span for wave in waves for span in wave.rounds]
    sent = sum((wave.sent for wave in waves), Sent(engine.bytes_beside(number_of_tensors)))
    parts = [bucket.group.costs() for bucket in buckets]
    parts += costs_of(tensors, sent)
    step = engine.ledger.step_cost(engine.step_number, parts, sent)
    spans = [*(one.spans for one in buckets), *(one.spans for one in tensors)]
    engine.ledger.record_timed(step, spans, rounds, xp.seconds_between)
