"""The engine: takes the gradients of each step through compression, and keeps what tensors need from step to step.

It knows no framework (array functions come with the arrays), no compressor by name, and reaches other ranks only
through a communicator. `plan` says which compressor each tensor gets, `buckets` which tensors are compressed together,
`bucket_step` and `tensor_step` what a bucket or a tensor goes through, `lockstep` how all of them exchange, `fusion`
what travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import ModuleType
from typing import Any

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.communicators import Communicator
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.choice import Plan
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.protocol import Context, SparseVector, TensorInfo
from hvdcomp.exchange.bucket_step import BucketStep, Sums
from hvdcomp.exchange.buckets import Buckets
from hvdcomp.exchange.clock import Span
from hvdcomp.exchange.device_step import DeviceStep
from hvdcomp.exchange.ledger import Ledger, StepCost
from hvdcomp.exchange.lockstep import run_in_lockstep
from hvdcomp.exchange.look import Look
from hvdcomp.exchange.plan import Planner
from hvdcomp.exchange.previews import Previews
from hvdcomp.exchange.tensor_step import TensorState, TensorStep
from hvdcomp.specs.levels import Level

BeforeCompress = Callable[[Look], Mapping[str, Array]]


class Engine:
    """Compresses, exchanges and aggregates the gradients of a fixed set of tensors, step by step.

    Args:
        communicator: the ranks to exchange with.
        tensors, compressor, memory, min_numel, min_ndim: as for `Chooser`.
        seed: of all random choices; the same on all ranks.
        bytes_beside: of the number of a step's tensors, what the binding itself sends beside the engine's collectives.
        ledger: where costs are entered.

    Attributes:
        planner: chooses the compressor of each tensor.
        step_number: of the step that comes next, or is under way, from 0.
        states: of the tensors, by name.
        buckets: says which tensors are compressed together.
        before_compress: called in each step before x is compressed. It may look at it, may replace the plan by
            `set_plan` and `begin`, and returns by name what is to be compressed in place of some.
        found_inf: of the last step: an element that is 0, or NaN if nothing of the step counts (see `step`).
    """

    def __init__(
        self,
        communicator: Communicator,
        tensors: Iterable[TensorInfo],
        compressor: Compressor,
        memory: Memory | None = None,
        seed: int = 0,
        min_numel: int = 1024,
        min_ndim: int = 2,
        bytes_beside: Callable[[int], int] = lambda tensors: 0,
        ledger: Ledger | None = None,
    ) -> None:
        self.communicator = communicator
        self.planner = Planner(tensors, compressor, memory, min_numel, min_ndim)
        self.tensors = self.planner.tensors
        self.compressor = compressor
        self.memory = self.planner.memory
        self.seed = seed
        self._bytes_beside = bytes_beside
        self.ledger = ledger if ledger is not None else Ledger()
        self.step_number = 0
        self.states: dict[str, TensorState] = {name: TensorState() for name in self.tensors}
        self.buckets = Buckets(self.tensors, self.states, self._memory_for)
        self._previews = Previews(self.tensors, self.states)
        self.before_compress: BeforeCompress | None = None
        self.found_inf: Array | None = None
        self._drop_sent: Callable[[], None] | None = None  # what is to be done before the next step

    # Between two steps.

    @property
    def plan(self) -> Plan:
        """The compressor of each tensor in the step that is under way."""
        return self.planner.plan

    def set_plan(self, plan: Plan) -> None:
        """`Planner.set_plan`."""
        self.planner.set_plan(plan)

    def set_level(self, level: Level | str | None) -> None:
        """`Planner.set_level`."""
        self.planner.set_level(level)

    def begin(self) -> Plan:
        """`Planner.begin`. Waits for the device if the step before has sent residuals dense."""
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
        return self.planner.casts_only and not self.holds_residuals

    def enter_casts(self, names: Set[str]) -> None:
        """Enters, as a step of its own, what somebody else allreduced because `passthrough` held."""
        cost = self.planner.cost_of_casts(names)
        sums = (cost.bytes_sent, cost.dense_bytes, cost.floats_sent)
        self.ledger.record(StepCost(*sums, step=self.step_number, parts=cost.parts))
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
        self.ledger.clock.begin(xp, gradients[names[0]])
        buckets, tensors, look = self._steps(xp, names, gradients, in_place, sums)
        found_inf, rounds, bytes_sent = run_in_lockstep(xp, self.communicator, self.ledger.clock, buckets, tensors)
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
        self._record(xp, buckets, tensors, rounds, bytes_sent + self._bytes_beside(len(names)))
        self.step_number += 1
        self.found_inf = found_inf
        return results

    def _steps(
        self, xp: ModuleType, names: Sequence[str], gradients: Mapping[str, Array], in_place: bool, sums: Sums | None
    ) -> tuple[list[BucketStep], list[TensorStep], Look | None]:
        """All tensors of a step, those in buckets and the others, with generators that are ready to start."""
        factor = None
        if self.memory is not None:
            factor = self.memory.gradient_factor(xp, [gradients[name] for name in names], self.communicator.world_size)
        context = self._context("")

        buckets, tensors = _make_steps(self, xp, names, gradients, context, factor)
        look: Look | None = None
        made: Mapping[str, int] = {}
        sources: Mapping[str, Array] = {}
        if self.before_compress is not None:
            plan = self.plan
            look = Look(xp, buckets, tensors, plan, self._previews, context)
            sources = self.before_compress(look)
            if any(not bucket.group.places.keys().isdisjoint(sources) for bucket in buckets):
                look.make()
            made = look.made
            if self.plan is not plan and buckets:
                names = [name for bucket in buckets for name in bucket.group.names]
                buckets, others = _make_steps(self, xp, names, gradients, context, factor)
                tensors += others
        for bucket in buckets:
            with self.ledger.clock.around(bucket.spans.encoding):
                bucket.open(gradients, in_place, made, sources, sums)
        for one in tensors:
            with self.ledger.clock.around(one.spans.encoding):
                one.open(self.plan[one.name], sources.get(one.name, one.x), self._context(one.name))
        return buckets, tensors, look

    def _drop_sent_residuals(
        self, xp: ModuleType, buckets: Sequence[BucketStep], tensors: Sequence[TensorStep], found_inf: Array
    ) -> None:
        """Forgets residuals that a lossless compressor has just sent, or a cast that keeps no rounding error.

        On a device that is done before the next step: nobody knows yet whether this one counts.
        """
        sent = [
            (state := self.states[one.name], state.memory)
            for one in tensors
            if one.had_residual and self._sends_all(one.name, one.compressor)
        ]
        groups = [
            one.group for one in buckets if one.had_residual and self._sends_all(one.group.names[0], one.compressor)
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

    def _sends_all(self, name: str, compressor: Compressor) -> bool:
        return compressor.lossless or self.planner.is_cast(name, compressor)

    def _record(
        self,
        xp: ModuleType,
        buckets: Sequence[BucketStep],
        tensors: Sequence[TensorStep],
        rounds: Sequence[Span],
        bytes_sent: int,
    ) -> None:
        parts = [bucket.group.costs(self.step_number, self.communicator.world_size) for bucket in buckets]
        parts += [{one.name: one.cost} for one in tensors]
        step = self.ledger.step_cost(self.step_number, parts, bytes_sent)
        spans = [*(one.spans for one in buckets), *(one.spans for one in tensors)]
        self.ledger.record_timed(step, spans, rounds, xp.seconds_between)

    def preview(
        self, xp: ModuleType, xs: Mapping[str, Array], compressors: Mapping[str, Compressor]
    ) -> dict[str, Array | SparseVector]:
        """C(x) of some tensors as if this rank were the only one that sends; sends and changes nothing.

        Args:
            xs: x by name.
            compressors: by name, of these tensors at least.
        """
        return self._previews.kept(xp, xs, compressors, self._context(""))

    def _memory_for(self, name: str, compressor: Compressor) -> Memory:
        return self.states[name].memory_for(self.planner.memory_for(compressor))

    def _context(self, name: str) -> Context:
        return Context(name, self.step_number, self.seed, self.communicator.rank, self.communicator.world_size)


def _make_steps(
    engine: Engine,
    xp: ModuleType,
    names: Sequence[str],
    gradients: Mapping[str, Array],
    context: Context,
    factor: Array | None,
) -> tuple[list[BucketStep], list[TensorStep]]:
    """The buckets of a step, and the tensors that go one by one. factor: what the memory multiplies gradients with."""
    clock, plan = engine.ledger.clock, engine.plan
    groups, rest = engine.buckets.groups(xp, names, gradients, plan)
    clock.turns_only &= all(group.bucket.device is not None for group in groups) and not rest
    buckets, tensors = [], []
    spans: list[Span]
    for group in groups:
        with clock.around(spans := []):
            kind = BucketStep if group.bucket.device is None else DeviceStep
            buckets.append(kind(xp, group, context, factor, clock))
        buckets[-1].spans.encoding.extend(spans)
    for name in rest:
        with clock.around(spans := []):
            memory = engine.planner.memory_for(plan[name])
            tensors.append(TensorStep(xp, name, gradients[name], factor, engine.states[name], memory))
        tensors[-1].spans.encoding.extend(spans)
    return buckets, tensors
