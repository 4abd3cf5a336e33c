"""The plan of a step: the compressor of each tensor. A plan changes only between steps. This file exchanges nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Set
from types import MappingProxyType

from hvdcomp.arrays.types import dtype_bytes
from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.compressors.choice import Chooser, Plan
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.ledger import Cost, StepCost
from hvdcomp.specs.levels import Level, LevelsBySize, level_of_size


class Planner(Chooser):
    """Stores the plan of the present step, and the plan of the next step. The arguments are those of `Chooser`.

    Attributes:
        plan: the compressor of each tensor in the present step, by name.
        ignores_residuals: whether the present step leaves all residuals unsent and unchanged.
        level: the last argument of `set_level`.
    """

    def __post_init__(self, described: Iterable[TensorInfo]) -> None:
        super().__post_init__(described)
        self.level: Level | str | LevelsBySize | None = None
        self.plan = self.plan_for(self.compressor)
        self._next_plan = self.plan
        self.ignores_residuals = False
        self._override: tuple[Compressor | None, bool] = None, False  # the last arguments of `compress_by`
        self._override_plan = self.plan
        # Computed from the plan when needed; None until then.
        self._digest: int | None = None
        self._casts: bool | None = None
        self._cast_cost: StepCost | None = None  # the cost of the last step with only casts

    # How the plan changes.

    def set_plan(self, plan: Plan) -> None:
        """Replaces the plan from the next step on. The present step keeps its plan.

        Call it with the same plan on every rank, between the same two steps.

        Raises:
            ValueError: if the plan lacks a tensor, or names an unknown tensor.
        """
        if set(plan) != set(self.tensors):
            raise ValueError(
                f"a plan must have a compressor for each of these tensors, and for no others: {', '.join(self.tensors)}"
            )
        self._next_plan = MappingProxyType(dict(plan))

    def set_level(self, level: Level | str | LevelsBySize | None) -> None:
        """Sets the level of all tensors from the next step on.

        Args:
            level: a level of the compressor; or several levels by the size of tensors; or `DENSE` for uncompressed; or
                None for the level that the user gave.
        """
        if level == self.level:
            return
        self.level = level
        if isinstance(level, tuple | list):
            at = {value: self.compressor.at_level(value) for _, value in level}
            chosen = {name: at[level_of_size(level, tensor.size)] for name, tensor in self.tensors.items()}
            self.set_plan({name: self.choose(compressor, self.tensors[name]) for name, compressor in chosen.items()})
        else:
            self.set_plan(self.plan_for(NoCompression() if isinstance(level, str) else self.compressor.at_level(level)))

    def compress_by(self, compressor: Compressor | None, ignores_residuals: bool = False) -> None:
        """From the next step on, compresses all tensors with one compressor, instead of the compressors in the plan.

        Args:
            compressor: the compressor of all tensors in the next steps; None to use the plan again.
            ignores_residuals: whether these steps leave all residuals unsent and unchanged. It may be True only with a
                lossless compressor.
        """
        if compressor is not None and compressor != self._override[0]:
            self._override_plan = self.plan_for(compressor)
        self._override = compressor, ignores_residuals

    def begin(self) -> Plan:
        """Begins a step, and returns its plan."""
        other, self.ignores_residuals = self._override
        plan = self._next_plan if other is None else self._override_plan
        if self.plan is not plan:
            self.plan = plan
            self._digest = self._casts = self._cast_cost = None
        return self.plan

    @property
    def digest(self) -> int:
        """A 48-bit hash of the present plan."""
        if self._digest is None:  # plans change rarely, but every step reads the digest
            text = "\n".join(f"{name} {compressor}" for name, compressor in self.plan.items())
            self._digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
        return self._digest

    # Plans that only cast.

    @property
    def casts_only(self) -> bool:
        """Whether the present plan has only casts (fp16, bf16 or none), without residuals."""
        if self._casts is None:
            self._casts = self.casts(self.plan)
        return self._casts

    def cost_of_casts(self, names: Set[str]) -> StepCost:
        """The cost of a step with these tensors, if the plan has only casts. Do not change it."""
        known = self._cast_cost
        if known is None or known.parts[0].keys() != names:
            costs = {name: self._cost_of_cast(name) for name in self.tensors if name in names}
            known = StepCost(parts=(costs,))
            for cost in costs.values():
                known.add(cost)
            self._cast_cost = known
        return known

    def costs_of_nothing(self, names: Set[str]) -> dict[str, Cost]:
        """The cost of each of these tensors, by name, in a step that does not send them."""
        sizes = {
            name: tensor.size * dtype_bytes(tensor.dtype) for name, tensor in self.tensors.items() if name in names
        }
        return {name: Cost(dense_bytes=size) for name, size in sizes.items()}

    def _cost_of_cast(self, name: str) -> Cost:
        tensor, compressor = self.tensors[name], self.plan[name]
        return Cost(
            bytes_sent=compressor.payload_bytes(tensor.shape, dtype=tensor.dtype),
            dense_bytes=tensor.size * dtype_bytes(tensor.dtype),
            floats_sent=compressor.payload_floats(tensor.shape),
        )
