"""The engine: steps the compressors of all tensors in lockstep, and keeps their state by parameter name.

Every round it collects one request from each tensor's generator, fuses them into few collectives and hands the
answers back. It knows no framework (array functions come with the arrays), no compressor by name, and reaches other
ranks only through a communicator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array, dtype_bytes
from hvdcomp.communicators import Communicator
from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.compressors.protocol import Aggregation, Context, Outcome, Request, SparseVector, TensorInfo
from hvdcomp.exchange.finiteness import flag_of, flag_of_outcomes, flag_request, found_inf_of
from hvdcomp.exchange.fusion import exchange, part_bytes, request_bytes
from hvdcomp.exchange.ledger import Cost, Ledger, StepCost
from hvdcomp.specs.levels import Level

Plan = Mapping[str, Compressor]
BeforeCompress = Callable[[ModuleType, Mapping[str, Array]], Mapping[str, Array | SparseVector]]
AfterSent = Callable[[ModuleType, Mapping[str, tuple[Array, Array | SparseVector]]], None]


@dataclass
class TensorState:
    """What outlives a step for one tensor: the memory's arrays, and those of the method that last compressed it."""

    memory: tuple[Array, ...] = ()
    keeper: Memory = field(default_factory=NoMemory)  # whose arrays `memory` are
    method: str = ""
    compressor: tuple[Array, ...] = ()


@dataclass
class _Task:
    """One tensor on its way through one step."""

    name: str
    gradient: Array
    x: Array
    memory: Memory
    memory_state: tuple[Array, ...]  # between compensate and update
    before: TensorState
    cost: Cost
    marks: list[tuple[Any, Any]]  # start and end of each turn of the generator
    compressor: Compressor = field(default_factory=NoCompression)
    generator: Aggregation = field(init=False)
    outcome: Outcome | None = None
    result: Array | None = None  # the outcome's mean, like the gradient


class Engine:
    """Compresses, exchanges and aggregates the gradients of a fixed set of tensors, step by step.

    Args:
        communicator: the ranks to exchange with.
        tensors: all tensors that may have a gradient; the same on all ranks.
        compressor: how to compress; each tensor gets what the compressor's `route` gives for it.
        memory: None for the default: error feedback for biased compressors, nothing for the others; but for all
            tensors the momentum correction of a compressor that comes with it.
        seed: of all random choices; the same on all ranks.
        min_numel, min_ndim: tensors with fewer elements or dimensions are sent dense.
        bytes_per_tensor: what the binding itself sends for each tensor and step, beside the engine's collectives.
        ledger: where costs are entered.

    Attributes:
        step_number: of the step that comes next, or is under way, from 0.
        level: as `set_level` was last told.
        plan: the compressor of each tensor in the step that is under way.
        before_compress: called in each step with x of every tensor, by name, before they are compressed. It may look at
            them, may replace the plan by `set_plan` and `begin`, and returns what is to be compressed in place of some.
            A `SparseVector`, for a nested compressor, stands for nothing of x but the elements at its indices.
        after_sent: called in each step with x and C(x) of every tensor, by name, as soon as all are known and before
            memories are updated. It may look at them, not change or keep them.
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
        bytes_per_tensor: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        self.communicator = communicator
        # Sorted, because the order of named parameters is up to the user and must not differ between ranks.
        self.tensors = {tensor.name: tensor for tensor in sorted(tensors, key=lambda tensor: tensor.name)}
        self.memory = memory
        self.seed = seed
        self.min_numel = min_numel
        self.min_ndim = min_ndim
        self.bytes_per_tensor = bytes_per_tensor
        self.ledger = ledger if ledger is not None else Ledger()
        self.step_number = 0
        self.states: dict[str, TensorState] = {name: TensorState() for name in self.tensors}
        self.compressor = compressor
        self.plan: Plan = self.plan_for(compressor)
        if memory is None:  # momentum is for all tensors or for none
            defaults = [kind.default_memory for kind in (compressor, *self.plan.values())]
            self.memory = next((default for default in defaults if default.is_momentum), None)
        self._next_plan = self.plan
        # What follows from the plan; None where it is not computed yet.
        self._digest: int | None = None
        self._plan_casts: bool | None = None
        self._cast_cost: StepCost | None = None  # of the tensors that were last exchanged so
        self.level: Level | str | None = None
        self.before_compress: BeforeCompress | None = None
        self.after_sent: AfterSent | None = None
        self.found_inf: Array | None = None

    def plan_for(self, compressor: Compressor) -> Plan:
        """What each tensor gets from a compressor: small and low-dimensional ones go dense, unless it is a cast."""
        return MappingProxyType({name: self.choose(compressor, tensor) for name, tensor in self.tensors.items()})

    def choose(self, compressor: Compressor, tensor: TensorInfo) -> Compressor:
        """What one tensor gets from a compressor."""
        chosen = compressor.route(tensor) if tensor.size else NoCompression()
        small = tensor.size < self.min_numel or len(tensor.shape) < self.min_ndim
        return NoCompression() if small and chosen.wire_dtype(tensor.dtype) is None else chosen

    def set_plan(self, plan: Plan) -> None:
        """Replaces the plan from the next step on; a step that has begun keeps the one it began with.

        Every rank must do the same between the same two steps.
        """
        if set(plan) != set(self.tensors):
            raise ValueError(f"a plan needs exactly these tensors: {', '.join(self.tensors)}")
        self._next_plan = MappingProxyType(dict(plan))

    def set_level(self, level: Level | str | None) -> None:
        """Sets how hard all tensors are compressed from the next step on.

        Args:
            level: in the compressor's terms, `DENSE` for uncompressed, or None for the compressor's own.
        """
        if level == self.level:
            return
        self.level = level
        compressor = NoCompression() if isinstance(level, str) else self.compressor.at_level(level)
        self.set_plan(self.plan_for(compressor))

    @property
    def digest(self) -> int:
        """48 bits that stand for the plan of the step under way."""
        if self._digest is None:  # plans change seldom, and every step asks
            text = "\n".join(f"{name} {compressor}" for name, compressor in self.plan.items())
            self._digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
        return self._digest

    def begin(self) -> Plan:
        """Fixes the plan of the step that is about to begin, and returns it."""
        if self.plan is not self._next_plan:
            self.plan = self._next_plan
            self._digest = self._plan_casts = self._cast_cost = None
        return self.plan

    def scale_residuals(self, factor: float, momentum: bool = True) -> None:
        """Multiplies every residual, as after a change of the loss scale.

        Args:
            momentum: whether a memory's momentum is multiplied too. It is not where the learning rate has changed:
                optimizers do not do so with theirs.
        """
        for state in self.states.values():
            first = 0 if momentum else len(state.memory) - 1  # the residual is the last of a memory's arrays
            state.memory = tuple(
                arrays_for(array).finite_or_zero(array * factor) if place >= first else array
                for place, array in enumerate(state.memory)
            )

    @property
    def holds_residuals(self) -> bool:
        """Whether any tensor has a residual to be sent."""
        return any(state.memory for state in self.states.values())

    def step(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Exchanges the gradients of one step.

        If any gradient of any rank holds an inf or NaN, or overflows when its residual is added, when it is cast to
        half precision or when what the ranks sent is put together, every rank gets results that hold a NaN in each
        tensor (so that a loss scaler skips the step everywhere), and all residuals and compressor states stay as they
        were.

        Args:
            gradients: by name; the same names on all ranks. They are not changed.

        Returns:
            The aggregated gradients by name, each in the shape, element type and layout of its gradient, in storage
            that the engine does not keep.
        """
        names = [name for name in self.tensors if name in gradients]
        if not names:
            return {}
        xp = arrays_for(gradients[names[0]])
        factor = None
        if self.memory is not None:
            factor = self.memory.gradient_factor(xp, [gradients[name] for name in names], self.communicator.world_size)
        tasks = [self._start(xp, name, gradients[name], factor) for name in names]
        replaced: Mapping[str, Array | SparseVector] = {}
        if self.before_compress is not None:
            replaced = self.before_compress(xp, {task.name: task.x for task in tasks})
        for task in tasks:
            self._open(xp, task, replaced.get(task.name, task.x))
        found_inf, rounds, overhead = self._run(xp, tasks)
        if self.after_sent is not None:
            self.after_sent(xp, {task.name: (task.x, task.outcome.sent) for task in tasks if task.outcome is not None})
        results = {task.name: self._finish(xp, task, found_inf) for task in tasks}
        self._drop_flushed(xp, tasks, found_inf)
        self._enter(xp, tasks, rounds, overhead)
        self.step_number += 1
        self.found_inf = found_inf
        return results

    def preview(
        self, xp: ModuleType, name: str, x: Array, compressor: Compressor, among: Array | None = None
    ) -> Array | SparseVector:
        """C(x) of one tensor as if this rank were the only one that sends; sends and changes nothing.

        Args:
            among: as in `Context`.
        """
        context = self._context(name, among)
        return compressor.preview(xp, x, self._prepare(xp, name, x, compressor, context), context)

    def _context(self, name: str, among: Array | None = None) -> Context:
        return Context(name, self.step_number, self.seed, self.communicator.rank, self.communicator.world_size, among)

    def _prepare(
        self, xp: ModuleType, name: str, x: Array, compressor: Compressor, context: Context
    ) -> tuple[Array, ...]:
        state = self.states[name]
        kept = state.compressor if state.method == compressor.name else ()
        return compressor.prepare(xp, x, kept, context)

    @property
    def passthrough(self) -> bool:
        """Whether the plan needs nothing that a plain allreduce of (cast) gradients cannot do."""
        if self._plan_casts is None:
            self._plan_casts = self.casts(self.plan)
        return self._plan_casts and not self.holds_residuals

    def casts(self, plan: Plan) -> bool:
        """Whether a plan is nothing but casts that keep nothing back."""
        return all(self._is_cast(name, compressor) for name, compressor in plan.items())

    def _is_cast(self, name: str, compressor: Compressor) -> bool:
        cast = compressor.wire_dtype(self.tensors[name].dtype) is not None
        return cast and isinstance(self.memory_for(compressor), NoMemory)

    def enter_casts(self, names: Set[str]) -> None:
        """Enters, as a step of its own, an exchange that somebody else did because `passthrough` held."""
        known = self._cast_cost
        if known is None or known.tensors.keys() != names:
            known = StepCost(tensors={name: self._cost_of_cast(name) for name in self.tensors if name in names})
            for cost in known.tensors.values():
                known.add(cost)
            self._cast_cost = known
        sums = (known.bytes_sent, known.dense_bytes, known.floats_sent)
        self.ledger.record(StepCost(*sums, step=self.step_number, tensors=known.tensors))
        self.step_number += 1

    def _cost_of_cast(self, name: str) -> Cost:
        tensor, compressor = self.tensors[name], self.plan[name]
        return Cost(
            bytes_sent=compressor.payload_bytes(tensor.shape, dtype=tensor.dtype),
            dense_bytes=tensor.size * dtype_bytes(tensor.dtype),
            floats_sent=compressor.payload_floats(tensor.shape),
        )

    def memory_for(self, compressor: Compressor) -> Memory:
        """The memory of a tensor that is sent by a compressor."""
        memory = compressor.default_memory if self.memory is None else self.memory
        return NoMemory() if compressor.lossless and not memory.is_momentum else memory

    def _start(self, xp: ModuleType, name: str, gradient: Array, factor: Array | None) -> _Task:
        state = self.states[name]
        start = xp.mark(gradient)
        x = xp.reshape(xp.flatten(gradient), gradient.shape)
        if factor is not None:
            x = x * xp.astype(factor, xp.dtype_name(x))
        # What an earlier plan left is still to be sent, and only the memory that kept it knows how.
        memory = self.memory_for(self.plan[name])
        if state.memory and type(memory) is not type(state.keeper):
            memory = state.keeper
        before = TensorState(memory.prepare(xp, x, state.memory), memory)
        x, memory_state = memory.compensate(xp, x, before.memory)
        return _Task(
            name=name,
            gradient=gradient,
            x=x,
            memory=memory,
            memory_state=memory_state,
            before=before,
            cost=Cost(dense_bytes=part_bytes(xp, gradient)),
            marks=[(start, xp.mark(gradient))],
        )

    def _open(self, xp: ModuleType, task: _Task, source: Array | SparseVector) -> None:
        """Makes the generator that compresses `source`, which is x, or stands for it."""
        start = xp.mark(task.gradient)
        name, compressor = task.name, self.plan[task.name]
        among = None
        if isinstance(source, SparseVector):
            source, among = task.x, source.indices
        context = self._context(name, among)
        task.compressor = compressor
        task.before.method = compressor.name
        task.before.compressor = self._prepare(xp, name, source, compressor, context)
        task.generator = compressor.aggregate(xp, source, task.before.compressor, context)
        task.cost.floats_sent = compressor.payload_floats(tuple(task.gradient.shape))
        task.marks.append((start, xp.mark(task.gradient)))

    def _run(self, xp: ModuleType, tasks: list[_Task]) -> tuple[Array, list[tuple[Any, Any]], int]:
        """Steps all generators to their end.

        Returns:
            The element that is NaN if what any rank would send, or what came of it, is not finite, the marks around
            each round of collectives, and the bytes that belong to no tensor.
        """
        like = tasks[0].gradient
        overhead = self.bytes_per_tensor * len(tasks)
        rounds: list[tuple[Any, Any]] = []
        waiting = [(task, self._advance(xp, task, None)) for task in tasks]
        found_inf = flag = flag_of(xp, [(task.x, request) for task, request in waiting])
        while waiting := [(task, request) for task, request in waiting if request is not None]:
            requests = [request for _, request in waiting]
            if not rounds:
                requests.append(flag_request(xp, requests, flag))
                overhead += request_bytes(xp, requests[-1])
            start = xp.mark(like)
            name = f"hvdcomp.round{len(rounds)}"
            answers, padding = exchange(xp, self.communicator, requests, name)
            if not rounds:
                found_inf = found_inf_of(xp, requests[-1], answers.pop())
            rounds.append((start, xp.mark(like)))
            overhead += padding
            waiting = [
                (task, self._advance(xp, task, answer))
                for (task, _), answer in zip(waiting, answers, strict=True)
            ]
        kept = [(task.result, task.outcome.state) for task in tasks if task.outcome is not None]
        return found_inf + flag_of_outcomes(xp, kept), rounds, overhead

    def _advance(self, xp: ModuleType, task: _Task, answer: Any) -> Request | None:
        start = xp.mark(task.gradient)
        try:
            request = task.generator.send(answer)
            task.cost.bytes_sent += request_bytes(xp, request)
        except StopIteration as stop:
            task.outcome = stop.value
            task.result = xp.like_original(stop.value.mean, task.gradient)
            request = None
        task.marks.append((start, xp.mark(task.gradient)))
        return request

    def _finish(self, xp: ModuleType, task: _Task, found_inf: Array) -> Array:
        outcome = task.outcome
        assert outcome is not None
        start = xp.mark(task.gradient)
        result = xp.spoil(task.result, found_inf)
        memory_state = task.memory.update(xp, task.x, outcome.sent, task.memory_state)
        state = self.states[task.name]
        state.memory = _select(xp, found_inf, memory_state, task.before.memory)
        state.keeper = task.memory
        if not task.compressor.lossless:  # a dense step keeps the warm start of the method it interrupts
            state.method = task.before.method
            state.compressor = _select(xp, found_inf, outcome.state, task.before.compressor)
        task.marks.append((start, xp.mark(task.gradient)))
        return result

    def _drop_flushed(self, xp: ModuleType, tasks: list[_Task], found_inf: Array) -> None:
        """Forgets residuals that a lossless compressor has just sent, or a cast that keeps no rounding error."""
        flushed = [
            task
            for task in tasks
            if (task.compressor.lossless or self._is_cast(task.name, task.compressor))
            and task.before.memory
            and not task.memory.is_momentum
        ]
        if flushed and xp.is_zero(found_inf):
            for task in flushed:
                self.states[task.name].memory = ()

    def _enter(self, xp: ModuleType, tasks: list[_Task], rounds: list[tuple[Any, Any]], overhead: int) -> None:
        step = StepCost(step=self.step_number, tensors={task.name: task.cost for task in tasks}, bytes_sent=overhead)
        for task in tasks:
            step.add(task.cost)
        # The turns before the last collective are encoding; the last turn and the memory's update are decoding.
        encode = {task.name: task.marks[:-2] for task in tasks}
        decode = {task.name: task.marks[-2:] for task in tasks}
        self.ledger.record_timed(step, encode, rounds, decode, xp.seconds_between)


def _select(xp: ModuleType, found_inf: Array, after: tuple[Array, ...], before: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(xp.select(found_inf, new, old) for new, old in zip(after, before, strict=True))
