"""From a policy's decision to the compressor of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.compressors.routing import Router
from hvdcomp.engine import Engine, Plan
from hvdcomp.policies.decisions import BatchSize, Decision, Factors, Joint, Levels, MultiLevel, Probe


def levelled_tensors(engine: Engine) -> tuple[str, ...]:
    """The names of the tensors whose level a policy may set: all but those that are too small to be compressed."""
    return tuple(
        name
        for name, tensor in engine.tensors.items()
        if tensor.size >= max(1, engine.min_numel) and len(tensor.shape) >= engine.min_ndim
    )


def plan_of(decision: Decision, engine: Engine, names: tuple[str, ...]) -> Plan:
    """The plan that a decision asks for; tensors other than `names` are sent as they are without a policy."""
    if isinstance(decision, Joint):
        return plan_of(decision.levels, engine, names)
    if isinstance(decision, Levels):
        chosen = {name: engine.compressor.at_level(level) for name, level in decision.levels.items()}
    elif isinstance(decision, Factors):
        chosen = {name: at_factor(engine, name, factor) for name, factor in decision.factors.items()}
    elif isinstance(decision, Probe):
        return plan_at_factor(engine, names, decision.send)
    elif isinstance(decision, MultiLevel):
        # Before it is known what is sent, the plan only says which memory goes with it.
        return plan_at_factor(engine, names, decision.minimum if decision.sent is None else decision.sent)
    else:
        chosen = {}
    return with_compressors(engine, chosen)


def plan_at_factor(engine: Engine, names: tuple[str, ...], factor: float) -> Plan:
    """The plan that compresses all of `names` to one factor."""
    return with_compressors(engine, {name: at_factor(engine, name, factor) for name in names})


def with_compressors(engine: Engine, chosen: Mapping[str, Compressor]) -> Plan:
    """The plan with these compressors for some tensors."""
    own = engine.plan_for(engine.compressor)
    routed = {name: engine.choose(compressor, engine.tensors[name]) for name, compressor in chosen.items()}
    return MappingProxyType({**own, **routed})


def at_factor(engine: Engine, name: str, factor: float) -> Compressor:
    """The compressor whose payload for a tensor is nearest to dense bytes / `factor`; none at all for 1."""
    if factor <= 1:
        return NoCompression()
    tensor, compressor = engine.tensors[name], engine.compressor
    while isinstance(compressor, Router):  # not `route`: what saves nothing at its own level may do so at another
        compressor = compressor.choose(tensor)
    level, least = compressor.level_for(factor, tensor.shape), compressor.least_level(engine.communicator.size)
    return compressor.at_level(level if level is None or least is None else max(level, least))


def batch_of(decision: Decision) -> BatchSize:
    """The part of a decision that is about the batch; the starting batch if there is none."""
    if isinstance(decision, Joint):
        return decision.batch_size
    return decision if isinstance(decision, BatchSize) else BatchSize(accumulation=1, learning_rate_factor=1.0)
