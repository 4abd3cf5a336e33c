"""Makes the plan for a policy's decision. A plan gives each tensor a compressor."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hvdcomp.adaptation.previews import Previews
from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.compressors.choice import Plan
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.specs.levels import Level, Unit


def levelled_tensors(engine: Engine) -> tuple[str, ...]:
    """The names of the tensors whose level a policy may set. All tensors that are large enough to be compressed are
    included."""
    return tuple(name for name, tensor in engine.tensors.items() if engine.planner.may_compress(tensor))


_MOST_KEPT = 64  # number of cached plans; no policy reuses more


class Plans:
    """Makes the plans of decisions. Tensors that a decision does not name keep their own method.

    Args:
        engine: the engine of the training run.
        names: the names of the tensors whose level the policy decides. All other tensors are sent in the same way as
            without a policy.

    Attributes:
        previews: object that computes C(x) and the compression error for a plan, without sending anything.
    """

    def __init__(self, engine: Engine, names: tuple[str, ...]) -> None:
        self.engine = engine
        self.names = names
        self.previews = Previews(engine.tensors, engine.states)
        self._own = engine.planner.plan_for(engine.compressor)
        self._at_factor: dict[tuple[float, Unit], Plan] = {}

    def own(self) -> Plan:
        """The plan that the engine would use without a policy."""
        return self._own

    def at_levels(self, levels: Mapping[str, Level | None]) -> Plan:
        """The plan in which each named tensor has a level of its own method. A method without a level does not
        change."""
        own = self.engine.compressor
        chosen = {}
        for name, level in levels.items():
            method = own.method_for(self.engine.tensors[name])
            chosen[name] = method.at_level(level if method is own or method.level_name else None)
        return self._with(chosen)

    def at_factors(self, factors: Mapping[str, float]) -> Plan:
        """The plan in which each named tensor has the compression factor that `factors` has for this tensor."""
        return self._with({name: at_factor(self.engine, name, factor) for name, factor in factors.items()})

    def at_factor(self, factor: float, of: Unit = "bytes") -> Plan:
        """The plan in which all of `names` have the same compression factor. The plan is cached, because GraVAC
        requests it in every step."""
        key = factor, of
        if key not in self._at_factor:
            if len(self._at_factor) == _MOST_KEPT:
                self._at_factor.clear()
            self._at_factor[key] = self._with({name: at_factor(self.engine, name, factor, of) for name in self.names})
        return self._at_factor[key]

    def with_methods(self, methods: Mapping[str, str | None], others: str | None) -> Plan:
        """The plan in which each named tensor has the compressor of its spec, and all other tensors have the compressor
        of the spec `others`. None means the engine's own compressor."""
        compressors = {
            spec: self.engine.compressor if spec is None else parse_compressor(spec)
            for spec in {others, *methods.values()}
        }
        unknown = methods.keys() - self.engine.tensors.keys()
        if unknown:
            raise ValueError(
                f"the policy chose methods for tensors that the model does not have: {', '.join(sorted(unknown))}"
            )
        return self._with({name: compressors[methods.get(name, others)] for name in self.engine.tensors})

    def _with(self, chosen: Mapping[str, Compressor]) -> Plan:
        tensors = self.engine.tensors
        routed = {name: self.engine.planner.choose(compressor, tensors[name]) for name, compressor in chosen.items()}
        return MappingProxyType({**self._own, **routed})


def at_factor(engine: Engine, name: str, factor: float, of: Unit = "bytes") -> Compressor:
    """The compressor whose payload for a tensor is closest to the uncompressed size divided by `factor`. Sizes are
    measured in the unit `of`: bytes or elements. With factor 1, the tensor is not compressed."""
    if factor <= 1:
        return NoCompression()
    tensor = engine.tensors[name]
    compressor = engine.compressor.method_for(tensor)
    level_for = compressor.level_for if of == "bytes" else compressor.level_for_elements
    level, least = level_for(factor, tensor.shape), compressor.least_level(engine.communicator.world_size)
    return compressor.at_level(level if level is None or least is None else max(level, least))
