"""Measures, between memory and compression, how much of the gradients compression would keep.

Both classes are stages of the engine (`Engine.stage`): they see x = g + r of every tensor. What they compress for
measuring is not sent; `Engine.preview` compresses as if the rank were alone, so that no other rank has to join in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from hvdcomp.arrays import arrays_for
from hvdcomp.collectives import Array, dtype_bytes
from hvdcomp.engine import Engine
from hvdcomp.levels import plan_at_factor
from hvdcomp.policies.base import Gains
from hvdcomp.policies.decisions import MultiLevel, Probe
from hvdcomp.policies.gravac import error_gain
from hvdcomp.statistics import densified, error_energy


class TwoLevels:
    """The two compressions of GraVAC (Tyagi and Swany 2023, arXiv:2305.12201, algorithm 1).

    Args:
        engine: whose tensors are measured.
        names: of the tensors that are compressed.
        decision: to which factors, and what is sent.
        measuring: whether this rank is to learn the gains.
        decide: called when the gains are known, if the decision leaves open what is sent; returns the one that says.
    """

    def __init__(
        self,
        engine: Engine,
        names: tuple[str, ...],
        decision: MultiLevel,
        measuring: bool,
        decide: Callable[[], MultiLevel] | None,
    ) -> None:
        self._engine = engine
        self._names = names
        self._decision = decision
        self._measuring = measuring
        self._decide = decide
        self._minimum = plan_at_factor(engine, names, decision.minimum)
        self._candidate = decision.candidate and plan_at_factor(engine, names, decision.candidate)
        self._energies: list[Array] = []  # one vector (3,) for each tensor: of x, and of what each compression loses
        self._marks: list[tuple[Any, Any, Any]] = []  # before, between and after the two compressions
        self._sends_twice_compressed = False

    def __call__(self, xp: ModuleType, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self._energies, self._marks = [], []
        compressed = [name for name in self._names if name in inputs]
        kept = {name: self._measure(xp, name, inputs[name]) for name in compressed if self._measuring}
        decision = self._decision if self._decide is None else self._decide()
        self._sends_twice_compressed = decision.send == "candidate"
        if not self._sends_twice_compressed:
            return {}
        if decision.minimum != self._decision.minimum:  # rank 0 has found another one meanwhile
            self._minimum = plan_at_factor(self._engine, self._names, decision.minimum)
        # What is sent is compressed twice: the first time is part of it on every rank.
        return kept or {name: self._first(xp, name, inputs[name]) for name in compressed}

    def _first(self, xp: ModuleType, name: str, x: Array) -> Array:
        return densified(xp, x, self._engine.preview(xp, name, x, self._minimum[name]))

    def _measure(self, xp: ModuleType, name: str, x: Array) -> Array:
        """Notes the energies of one tensor; returns what the first compression keeps."""
        start = xp.mark(x)
        sent = self._engine.preview(xp, name, x, self._minimum[name])
        first = densified(xp, x, sent)
        between = xp.mark(x)
        energy = xp.norm([x]) ** 2
        lost = lost_twice = error_energy(xp, x, energy, sent)
        if self._candidate:
            again = self._engine.preview(xp, name, first, self._candidate[name])
            lost_twice = error_energy(xp, x, energy, again)
        self._energies.append(xp.stack([energy, lost, lost_twice]))
        self._marks.append((start, between, xp.mark(x)))
        return first

    def gains(self) -> Gains:
        """The gains of the whole model in the last step; 1.0 if there was nothing to compress. Waits for the device."""
        energy, lost, lost_twice = _sums(self._energies) or [0.0, 0.0, 0.0]
        candidate = error_gain(energy, lost_twice) if self._candidate else None
        return Gains(error_gain(energy, lost), candidate, self._engine.communicator.size)

    def seconds(self) -> float:
        """What the last step spent only to learn gains."""
        if not self._energies:
            return 0.0
        xp = arrays_for(self._energies[0])
        # What is compressed twice and sent needs the first compression anyway.
        spans = [(between if self._sends_twice_compressed else start, end) for start, between, end in self._marks]
        return sum(xp.seconds_between(start, end) or 0.0 for start, end in spans)


class LevelProbe:
    """Measures, in some steps, what each of several compression factors would keep of each tensor.

    Args:
        engine: whose tensors are measured.
        names: of the tensors that are compressed.
        probe: what to measure, and how often.
    """

    def __init__(self, engine: Engine, names: tuple[str, ...], probe: Probe) -> None:
        self._engine = engine
        self._every = probe.every
        self._plans = {factor: plan_at_factor(engine, names, factor) for factor in probe.factors}
        self._names = names
        self._steps = 0
        self._energies: dict[str, dict[float, Array]] = {}  # (2,): of x, and of what compression loses

    def __call__(self, xp: ModuleType, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        if self._steps % self._every == 0:
            for name in self._names:
                if name in inputs:
                    self._measure(xp, name, inputs[name])
        self._steps += 1
        return {}

    def _measure(self, xp: ModuleType, name: str, x: Array) -> None:
        energy = xp.norm([x]) ** 2
        sums_of_tensor = self._energies.setdefault(name, {})
        for factor, plan in self._plans.items():
            lost = error_energy(xp, x, energy, self._engine.preview(xp, name, x, plan[name]))
            both = xp.stack([energy, lost])
            sums_of_tensor[factor] = sums_of_tensor[factor] + both if factor in sums_of_tensor else both

    def state(self, copy: Callable[[Array], Array]) -> dict[str, Any]:
        """What was measured so far, for `restore`."""
        energies = {
            name: {factor: copy(both) for factor, both in by_factor.items()}
            for name, by_factor in self._energies.items()
        }
        return {"steps": self._steps, "energies": energies}

    def restore(self, state: Mapping[str, Any], place: Callable[[Array, str], Array]) -> None:
        """Goes on from what `state` returned."""
        self._steps = state["steps"]
        self._energies = {
            name: {factor: place(both, name) for factor, both in by_factor.items()}
            for name, by_factor in state["energies"].items()
        }

    def gains(self) -> dict[str, dict[float, float]]:
        """By tensor name and factor; NaN for a tensor of zeros, of which nothing is known. Waits for the device."""
        sums = {
            name: {factor: _sums([both]) for factor, both in by_factor.items()}
            for name, by_factor in self._energies.items()
        }
        return {
            name: {factor: error_gain(*both) if both[0] else math.nan for factor, both in by_factor.items()}
            for name, by_factor in sums.items()
        }

    def clear(self) -> None:
        """Starts anew, as a period does."""
        self._steps = 0
        self._energies = {}

    def costs(self) -> dict[str, dict[float, float]]:
        """By tensor name and factor, sent bytes / dense bytes."""
        tensors = self._engine.tensors
        return {
            name: {
                factor: plan[name].payload_bytes(tensors[name].shape, dtype=tensors[name].dtype)
                / (tensors[name].size * dtype_bytes(tensors[name].dtype))
                for factor, plan in self._plans.items()
            }
            for name in self._names
        }


def _sums(vectors: Sequence[Array]) -> list[float]:
    """The sum of vectors, as numbers. Waits for the device."""
    if not vectors:
        return []
    return arrays_for(vectors[0]).to_list(sum(vectors[1:], start=vectors[0]))
