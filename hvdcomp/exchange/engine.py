"""The engine: steps the compressors of all tensors in lockstep, and keeps their state by parameter name.

Every round it collects one request from each tensor's generator, fuses them into few collectives and hands the
answers back. It knows no framework (array functions come with the arrays), no compressor by name, and reaches other
ranks only through a communicator. `plan` says which compressor each tensor gets, `tensor_step` what one tensor goes
through, `fusion` what travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from types import ModuleType
from typing import Any

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.communicators import Communicator
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.choice import Plan
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.protocol import Context, SparseVector, TensorInfo
from hvdcomp.exchange.finiteness import flag_of, flag_of_outcomes, flag_request, found_inf_of
from hvdcomp.exchange.fusion import communicate, request_bytes
from hvdcomp.exchange.ledger import Ledger, Marks, StepCost
from hvdcomp.exchange.plan import Planner
from hvdcomp.exchange.tensor_step import TensorState, TensorStep
from hvdcomp.specs.levels import Level

BeforeCompress = Callable[[ModuleType, Mapping[str, Array]], Mapping[str, Array | SparseVector]]
AfterSent = Callable[[ModuleType, Mapping[str, tuple[Array, Array | SparseVector]]], None]


class Engine:
    """Compresses, exchanges and aggregates the gradients of a fixed set of tensors, step by step.

    Args:
        communicator: the ranks to exchange with.
        tensors, compressor, memory, min_numel, min_ndim: as for `Chooser`.
        seed: of all random choices; the same on all ranks.
        bytes_per_tensor: what the binding itself sends for each tensor and step, beside the engine's collectives.
        ledger: where costs are entered.

    Attributes:
        planner: chooses the compressor of each tensor.
        step_number: of the step that comes next, or is under way, from 0.
        states: of the tensors, by name.
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
        self.planner = Planner(tensors, compressor, memory, min_numel, min_ndim)
        self.tensors = self.planner.tensors
        self.compressor = compressor
        self.memory = self.planner.memory
        self.seed = seed
        self.bytes_per_tensor = bytes_per_tensor
        self.ledger = ledger if ledger is not None else Ledger()
        self.step_number = 0
        self.states: dict[str, TensorState] = {name: TensorState() for name in self.tensors}
        self.before_compress: BeforeCompress | None = None
        self.after_sent: AfterSent | None = None
        self.found_inf: Array | None = None

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
        """`Planner.begin`."""
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
        return any(state.memory for state in self.states.values())

    @property
    def passthrough(self) -> bool:
        """Whether the plan needs nothing that a plain allreduce of (cast) gradients cannot do."""
        return self.planner.casts_only and not self.holds_residuals

    def enter_casts(self, names: Set[str]) -> None:
        """Enters, as a step of its own, what somebody else allreduced because `passthrough` held."""
        cost = self.planner.cost_of_casts(names)
        sums = (cost.bytes_sent, cost.dense_bytes, cost.floats_sent)
        self.ledger.record(StepCost(*sums, step=self.step_number, tensors=cost.tensors))
        self.step_number += 1

    # A step.

    def step(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Aggregates the gradients of one step.

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
        tensors = [
            TensorStep(
                xp, name, gradients[name], factor, self.states[name], self.planner.memory_for(self.plan[name])
            )
            for name in names
        ]
        replaced: Mapping[str, Array | SparseVector] = {}
        if self.before_compress is not None:
            replaced = self.before_compress(xp, {one.name: one.x for one in tensors})
        for one in tensors:
            source, among = replaced.get(one.name, one.x), None
            if isinstance(source, SparseVector):
                source, among = one.x, source.indices
            one.open(self.plan[one.name], source, self._context(one.name, among))
        found_inf, rounds, overhead = self._run(xp, tensors)
        if self.after_sent is not None:
            self.after_sent(xp, {one.name: (one.x, one.sent) for one in tensors})
        results = {one.name: one.finish(found_inf) for one in tensors}
        self._drop_sent_residuals(xp, tensors, found_inf)
        self._record(xp, tensors, rounds, overhead)
        self.step_number += 1
        self.found_inf = found_inf
        return results

    def _run(self, xp: ModuleType, tensors: list[TensorStep]) -> tuple[Array, Marks, int]:
        """Steps all generators to their end.

        Returns:
            The element that is NaN if what any rank would send, or what came of it, is not finite, the marks around
            each round of collectives, and the bytes that belong to no tensor.
        """
        like = tensors[0].x
        overhead = self.bytes_per_tensor * len(tensors)
        rounds: list[tuple[Any, Any]] = []
        waiting = [(one, one.advance(None)) for one in tensors]
        found_inf = flag = flag_of(xp, [(one.x, request) for one, request in waiting])
        while waiting := [(one, request) for one, request in waiting if request is not None]:
            requests = [request for _, request in waiting]
            if not rounds:
                requests.append(flag_request(xp, requests, flag))
                overhead += request_bytes(xp, requests[-1])
            start = xp.mark(like)
            answers, padding = communicate(xp, self.communicator, requests, f"hvdcomp.round{len(rounds)}")
            if not rounds:
                found_inf = found_inf_of(xp, requests[-1], answers.pop())
            rounds.append((start, xp.mark(like)))
            overhead += padding
            waiting = [(one, one.advance(answer)) for (one, _), answer in zip(waiting, answers, strict=True)]
        return found_inf + flag_of_outcomes(xp, [one.made for one in tensors]), rounds, overhead

    def _drop_sent_residuals(self, xp: ModuleType, tensors: list[TensorStep], found_inf: Array) -> None:
        """Forgets residuals that a lossless compressor has just sent, or a cast that keeps no rounding error."""
        sent = [
            one.name
            for one in tensors
            if one.had_residual and (one.compressor.lossless or self.planner.is_cast(one.name, one.compressor))
        ]
        if sent and xp.is_zero(found_inf):
            for name in sent:
                self.states[name].memory = ()

    def _record(self, xp: ModuleType, tensors: list[TensorStep], rounds: Marks, overhead: int) -> None:
        step = StepCost(step=self.step_number, tensors={one.name: one.cost for one in tensors}, bytes_sent=overhead)
        for one in tensors:
            step.add(one.cost)
        # The turns before the last collective are encoding; the last turn and the memory's update are decoding.
        encode = {one.name: one.marks[:-2] for one in tensors}
        decode = {one.name: one.marks[-2:] for one in tensors}
        self.ledger.record_timed(step, encode, rounds, decode, xp.seconds_between)

    def preview(
        self, xp: ModuleType, name: str, x: Array, compressor: Compressor, among: Array | None = None
    ) -> Array | SparseVector:
        """C(x) of one tensor as if this rank were the only one that sends; sends and changes nothing.

        Args:
            among: as in `Context`.
        """
        context = self._context(name, among)
        return compressor.preview(xp, x, self.states[name].prepare(xp, x, compressor, context), context)

    def _context(self, name: str, among: Array | None) -> Context:
        return Context(name, self.step_number, self.seed, self.communicator.rank, self.communicator.world_size, among)
