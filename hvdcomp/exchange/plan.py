"""The plan of a step: which compressor each tensor gets. It changes between steps only.

Nothing here communicates, or needs an array: names, shapes and element types are all that a plan depends on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Set
from types import MappingProxyType

from hvdcomp.arrays.types import dtype_bytes
from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.ledger import Cost, StepCost
from hvdcomp.specs.levels import Level

Plan = Mapping[str, Compressor]
"""The compressor of each tensor, by name. Nobody changes a plan once it is made."""


class Planner:
    """Chooses the compressor of each tensor.

    Args:
        tensors: all tensors that may have a gradient; the same on all ranks.
        compressor: how to compress; each tensor gets what the compressor's `route` gives for it.
        memory: None for the default: error feedback for biased compressors, nothing for the others; but for all
            tensors the momentum correction of a compressor that comes with it.
        min_numel, min_ndim: tensors with fewer elements or dimensions are sent dense.

    Attributes:
        tensors: by name, sorted.
        memory: of all tensors; None where each compressor's default counts.
        plan: of the step that is under way.
        level: as `set_level` was last told.
    """

    def __init__(
        self,
        tensors: Iterable[TensorInfo],
        compressor: Compressor,
        memory: Memory | None = None,
        min_numel: int = 1024,
        min_ndim: int = 2,
    ) -> None:
        # Sorted, because the order of named parameters is up to the user and must not differ between ranks.
        self.tensors = {tensor.name: tensor for tensor in sorted(tensors, key=lambda tensor: tensor.name)}
        self.compressor = compressor
        self.min_numel = min_numel
        self.min_ndim = min_ndim
        self.level: Level | str | None = None
        self.plan = self.plan_for(compressor)
        if memory is None:  # momentum is for all tensors or for none
            defaults = [kind.default_memory for kind in (compressor, *self.plan.values())]
            memory = next((default for default in defaults if default.is_momentum), None)
        self.memory = memory
        self._next_plan = self.plan
        # What follows from the plan; None where it is not computed yet.
        self._digest: int | None = None
        self._casts: bool | None = None
        self._cast_cost: StepCost | None = None  # of the tensors that were last sent so

    def plan_for(self, compressor: Compressor) -> Plan:
        """What each tensor gets from a compressor: small and low-dimensional ones go dense, unless it is a cast."""
        return MappingProxyType({name: self.choose(compressor, tensor) for name, tensor in self.tensors.items()})

    def choose(self, compressor: Compressor, tensor: TensorInfo) -> Compressor:
        """What one tensor gets from a compressor."""
        chosen = compressor.route(tensor) if tensor.size else NoCompression()
        small = tensor.size < self.min_numel or len(tensor.shape) < self.min_ndim
        return NoCompression() if small and chosen.wire_dtype(tensor.dtype) is None else chosen

    def memory_for(self, compressor: Compressor) -> Memory:
        """The memory of a tensor that is sent by a compressor."""
        memory = compressor.default_memory if self.memory is None else self.memory
        return NoMemory() if compressor.lossless and not memory.is_momentum else memory

    # How the plan changes.

    def set_plan(self, plan: Plan) -> None:
        """Replaces the plan from the next step on; a step that has begun keeps the one it began with.

        Every rank must do the same between the same two steps.

        Raises:
            ValueError: if the plan is of other tensors.
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

    def begin(self) -> Plan:
        """Fixes the plan of the step that is about to begin, and returns it."""
        if self.plan is not self._next_plan:
            self.plan = self._next_plan
            self._digest = self._casts = self._cast_cost = None
        return self.plan

    @property
    def digest(self) -> int:
        """48 bits that stand for the plan of the step under way."""
        if self._digest is None:  # plans change seldom, and every step asks
            text = "\n".join(f"{name} {compressor}" for name, compressor in self.plan.items())
            self._digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
        return self._digest

    # Plans that are nothing but casts.

    @property
    def casts_only(self) -> bool:
        """Whether the plan of the step under way is nothing but casts that keep nothing back."""
        if self._casts is None:
            self._casts = self.casts(self.plan)
        return self._casts

    def casts(self, plan: Plan) -> bool:
        """Whether a plan is nothing but casts that keep nothing back."""
        return all(self.is_cast(name, compressor) for name, compressor in plan.items())

    def is_cast(self, name: str, compressor: Compressor) -> bool:
        """Whether a compressor does no more to this tensor than cast it, and keeps nothing back."""
        cast = compressor.wire_dtype(self.tensors[name].dtype) is not None
        return cast and isinstance(self.memory_for(compressor), NoMemory)

    def cost_of_casts(self, names: Set[str]) -> StepCost:
        """What the plan, one of casts, costs for some tensors; nothing may change what is returned."""
        known = self._cast_cost
        if known is None or known.tensors.keys() != names:
            known = StepCost(tensors={name: self._cost_of_cast(name) for name in self.tensors if name in names})
            for cost in known.tensors.values():
                known.add(cost)
            self._cast_cost = known
        return known

    def _cost_of_cast(self, name: str) -> Cost:
        tensor, compressor = self.tensors[name], self.plan[name]
        return Cost(
            bytes_sent=compressor.payload_bytes(tensor.shape, dtype=tensor.dtype),
            dense_bytes=tensor.size * dtype_bytes(tensor.dtype),
            floats_sent=compressor.payload_floats(tensor.shape),
        )
