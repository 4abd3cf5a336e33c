"""From a policy's decision to the compressor of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.routing import Router
from hvdcomp.exchange.engine import Engine, Plan
from hvdcomp.policies.decisions import BatchSize, Decision, Factors, Levels, LevelsAndBatch, Methods, MultiLevel, Probe


def levelled_tensors(engine: Engine) -> tuple[str, ...]:
    """The names of the tensors whose level a policy may set: all but those that are too small to be compressed."""
    return tuple(
        name
        for name, tensor in engine.tensors.items()
        if tensor.size >= max(1, engine.min_numel) and len(tensor.shape) >= engine.min_ndim
    )


class Plans:
    """The plans that decisions ask for; each compression factor's is made once.

    Args:
        engine: whose plans they are.
        names: of the tensors whose level is decided. All others are sent as they are without a policy.
    """

    def __init__(self, engine: Engine, names: tuple[str, ...]) -> None:
        self.engine = engine
        self.names = names
        self._own = engine.plan_for(engine.compressor)
        self._at_factors: dict[float, Plan] = {}

    def of(self, decision: Decision) -> Plan:
        """The plan of one decision."""
        if isinstance(decision, LevelsAndBatch):
            return self.of(decision.levels)
        if isinstance(decision, Levels):
            return self._with({name: self.engine.compressor.at_level(at) for name, at in decision.levels.items()})
        if isinstance(decision, Factors):
            return self._with({name: at_factor(self.engine, name, at) for name, at in decision.factors.items()})
        if isinstance(decision, Methods):
            return self._by_method(decision)
        if isinstance(decision, Probe):
            return self.at_factor(decision.send)
        if isinstance(decision, MultiLevel):
            # Before it is known what is sent, the plan only says which memory goes with it.
            return self.at_factor(decision.minimum if decision.sent is None else decision.sent)
        return self._own

    def at_factor(self, factor: float) -> Plan:
        """The plan that compresses all of `names` to one factor."""
        if factor not in self._at_factors:
            self._at_factors[factor] = self._with({name: at_factor(self.engine, name, factor) for name in self.names})
        return self._at_factors[factor]

    def _by_method(self, decision: Methods) -> Plan:
        compressors = {
            spec: self.engine.compressor if spec is None else parse_compressor(spec)
            for spec in {decision.others, *decision.methods.values()}
        }
        unknown = decision.methods.keys() - self.engine.tensors.keys()
        if unknown:
            raise ValueError(f"methods of tensors that there are not: {', '.join(sorted(unknown))}")
        return MappingProxyType(
            {
                name: self.engine.choose(compressors[decision.methods.get(name, decision.others)], tensor)
                for name, tensor in self.engine.tensors.items()
            }
        )

    def _with(self, chosen: Mapping[str, Compressor]) -> Plan:
        tensors = self.engine.tensors
        routed = {name: self.engine.choose(compressor, tensors[name]) for name, compressor in chosen.items()}
        return MappingProxyType({**self._own, **routed})


def at_factor(engine: Engine, name: str, factor: float) -> Compressor:
    """The compressor whose payload for a tensor is nearest to dense bytes / `factor`; none at all for 1."""
    if factor <= 1:
        return NoCompression()
    tensor, compressor = engine.tensors[name], engine.compressor
    while isinstance(compressor, Router):  # not `route`: what saves nothing at its own level may do so at another
        compressor = compressor.choose(tensor)
    level, least = compressor.level_for(factor, tensor.shape), compressor.least_level(engine.communicator.world_size)
    return compressor.at_level(level if level is None or least is None else max(level, least))


def batch_of(decision: Decision) -> BatchSize:
    """The part of a decision that is about the batch; the starting batch if there is none."""
    if isinstance(decision, LevelsAndBatch):
        return decision.batch_size
    return decision if isinstance(decision, BatchSize) else BatchSize(accumulation=1, learning_rate_factor=1.0)
