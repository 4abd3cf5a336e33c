"""Advice before training: the predicted step time of each method, the fastest method, and the bandwidths at which a
method is faster than dense training."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from hvdcomp.compressors import Compressor, needs_nodes
from hvdcomp.compressors.bucket import BUCKET_BYTES, LEAST_BYTES
from hvdcomp.compressors.choice import Chooser
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.routing import require_matches
from hvdcomp.perfmodel.by_size import encode_times
from hvdcomp.perfmodel.calibration import Calibration, ModelFacts
from hvdcomp.perfmodel.compute import EncodeTime
from hvdcomp.perfmodel.exchanges import Exchange, exchange_of, sharded_exchange_of
from hvdcomp.perfmodel.fields import CalibrationError
from hvdcomp.perfmodel.predict import (
    UNCOMPRESSED,
    Setting,
    least_compression_factor,
    limited_by,
    local_step_s,
    predict,
)
from hvdcomp.perfmodel.quality import why_not
from hvdcomp.perfmodel.schedule import Parts
from hvdcomp.perfmodel.ways import encode_time_of, in_each_way, in_two_levels, reduces_shards

FREE = (UNCOMPRESSED, "fp16")
"""The free methods: dense gradients and fp16, which Horovod and PyTorch send without hvdcomp. These methods need no
encode time in the calibration. If the calibration has a time for the cast to fp16, this time is used."""
STOCK = {"horovod": ("none", "hvd.fp16"), "ddp": ("none", "ddp.fp16")}
"""The names of each library's own free methods: dense gradients, and the library's cast to float16. The keys are the
backends of `hvdcomp.tools.train.ranks.Ranks`."""
STOCK_SPECS = {name: spec for names in STOCK.values() for name, spec in zip(names, FREE, strict=True)}
"""For each name in `STOCK`, the spec of hvdcomp's method with the same exchange."""

MODEL_ERROR = 0.1
"""A method counts as faster than another only if their predicted step times differ by at least this relative amount. If
the calibration's noise is larger, the noise is used instead. 210 of 240 predictions were within 10 % of the measured
step (docs/exchange/steps-measured.md)."""

_BANDWIDTHS = np.geomspace(1e-3, 1e4, 1401) * 1.25e8  # bytes/s: from 1 Mb/s to 10 Tb/s, 200 per decade
BUCKET_SIZES = (50_000_000, BUCKET_BYTES, 10_000_000, 5_000_000, 2_500_000, LEAST_BYTES)
"""The sizes, in bytes of gradients, that `Advice.bucket_bytes` is chosen from. Among equally fast sizes, the advice
takes the first."""

Range = tuple[float | None, float | None]

# Cached because presets share models, and because a map needs each model's exchange at several rates.
_exchange_of = lru_cache(maxsize=4096)(exchange_of)
_sharded_exchange_of = lru_cache(maxsize=4096)(sharded_exchange_of)


@dataclass(frozen=True)
class Method:
    """The prediction for one method in one setting.

    Attributes:
        spec: spec of the method.
        exchange: the collectives of a step and their bytes.
        encode: the time to encode and decode the gradients of a step. It is None if Horovod or PyTorch sends the
            gradients without hvdcomp and the time is unknown.
        parts: the predicted time of a step, by parts such as computation and transfer, in seconds.
        at_end_s: predicted seconds of a step that sends all gradients after the backward pass; None if `parts` already
            describes such a step.
        limited_by: the name of the largest part of the step's time: "compute", "encode", "network" or "latency".
        wins: the ranges of the link's bandwidth in which the method is faster than dense gradients. Each range is a
            pair: its lower and its upper end in bytes/s. An end is None if the range is open at that end.
        why_not: the reason why the method is not recommended, as a clause; None if it may be recommended.
    """

    spec: str
    exchange: Exchange
    encode: EncodeTime | None
    parts: Parts
    at_end_s: float | None
    limited_by: str
    wins: tuple[Range, ...]
    why_not: str | None = None

    @property
    def step_s(self) -> float:
        """Predicted time of a step, in seconds."""
        return float(self.parts.total)

    @property
    def wins_below(self) -> float | None:
        """The bandwidth, in bytes/s, below which the method is faster than dense gradients; None if there is none."""
        return self.wins[0][1] if self.wins and self.wins[0][0] is None else None


@dataclass(frozen=True)
class Advice:
    """The advice for one setting.

    Attributes:
        methods: the prediction for each method, by spec, dense first. Two-level methods are left out if nodes would
            have different numbers of ranks.
        winner: spec of the fastest method that may be recommended; None for one rank, which exchanges nothing.
        free: spec of the faster of the two methods that do not need hvdcomp: dense or fp16 gradients.
        take: spec of the recommended method: the winner if its lead over `free` exceeds the model's error, otherwise
            `free`.
        alike: specs of all methods that may be recommended and whose predicted step times are too close to that of
            `take` to tell them apart, fastest first.
        bucket_bytes: the bucket size, in bytes of gradients, that would make the winner's step faster by more than the
            calibration's noise; None if there is no such size, or if the library chooses the buckets.
        error: largest relative difference at which two step times count as equal.
        least_factor: the compression factor that an ideal compressor would need (`least_compression_factor`); None if
            no factor suffices.
    """

    methods: dict[str, Method] = field(default_factory=dict)
    winner: str | None = None
    free: str | None = None
    take: str | None = None
    alike: tuple[str, ...] = ()
    bucket_bytes: int | None = None
    error: float = 0.0
    least_factor: float | None = None

    def beaten_by(self, spec: str) -> tuple[str, ...]:
        """The specs in `FREE` whose steps are slower than those of the given method by more than the model's error."""
        own = self.methods[spec].step_s
        return tuple(free for free in FREE if self.methods[free].step_s / own - 1 >= self.error)


class Adviser:
    """Predicts step times for one model of a calibration, and recommends methods.

    Args:
        calibration: the measured times of the network and of the models.
        model: name of a model of the calibration; None if the calibration has only one.
        specs: specs of the compressors to compare; None for all compressors whose encode time is known or can be
            estimated (`encode_times`). Each of these compressors is compared with the exchanges "gather" and "scatter"
            if it supports both, and also with a two-level exchange if the calibration has nodes of several ranks. Dense
            and fp16 gradients are always compared.
        early_bytes: the smallest bucket that is sent during the backward pass, in bytes of gradients (`bucket_bytes` of
            `hvdcomp.Compression`). Use 0 if all gradients are sent after the backward pass, as in TensorFlow. With
            None, the size comes from the calibration. If the calibration has no size, hvdcomp's default is used. The
            argument matters only if the calibration records when gradients are ready.
        optimizer: the kind of optimizer that the training uses, as in `hvdcomp.compressors.evidence.Evidence`. The
            adviser recommends only compressors that suit this optimizer (`hvdcomp.perfmodel.quality.why_not`). None if
            the optimizer is unknown. The adviser may then recommend every compressor in `specs` or, without `specs`,
            every compressor that `why_not` allows.

    Attributes:
        compressors: the compared compressors, by spec.
        why_not: the reasons why compressors are not recommended, by spec. Compressors that may be recommended have no
            entry.
        encode: the time to encode and decode the gradients of a step, by spec of the method. A time is None if Horovod
            or PyTorch sends the gradients without hvdcomp and the time is unknown.

    Raises:
        CalibrationError: if the model is not in the calibration, or a compressor has no encode time.
        SpecError: if a compressor is unknown, if a pattern of a router matches no tensor of the model, or if a method
            needs a two-level exchange and the calibration has no nodes of several ranks.
    """

    def __init__(
        self,
        calibration: Calibration,
        model: str | None = None,
        specs: Sequence[str] | None = None,
        early_bytes: float | None = None,
        optimizer: str | None = None,
    ) -> None:
        self.calibration = calibration
        self.model = _model_name(calibration, model)
        self.facts: ModelFacts = calibration.models[self.model]
        self._early_bytes = (self.facts.early_bytes or BUCKET_BYTES) if early_bytes is None else early_bytes
        known = encode_times(calibration, self.model)
        compressors = list(map(parse_compressor, [*FREE, *(known if specs is None else specs)]))
        for compressor in compressors if specs is not None else ():
            require_matches(compressor, [tensor.name for tensor in self.facts.tensors])
        if self.facts.sharded:
            if specs is None:
                compressors = [one for one in compressors if str(one) in FREE or reduces_shards(one)]
            elif refused := [str(one) for one in compressors if str(one) not in FREE and not reduces_shards(one)]:
                raise CalibrationError(
                    f"the model {self.model} is sharded (FSDP2), and the reduce-scatter of FSDP2 does not work with "
                    f"{', '.join(refused)}; use a quantizer, such as int8 or int4"
                )
        elif specs is None:
            compressors = [way for compressor in compressors for way in (compressor, *in_each_way(compressor))]
            if self.ranks_per_node is not None:
                compressors += [
                    two_level for compressor in compressors if (two_level := in_two_levels(compressor)) is not None
                ]
        self.compressors: dict[str, Compressor] = {str(compressor): compressor for compressor in compressors}
        self.why_not: dict[str, str] = {}
        if specs is None or optimizer is not None:
            reasons = {spec: why_not(one, optimizer) for spec, one in self.compressors.items() if spec not in FREE}
            self.why_not = {spec: reason for spec, reason in reasons.items() if reason is not None}
        of_nodes = (self.facts.tensors, self.ranks_per_node)
        self.encode = {
            spec: encode_time_of(compressor, known, *of_nodes) for spec, compressor in self.compressors.items()
        }
        self._exchanges: dict[tuple[str, int], Exchange] = {}
        for spec, encode in self.encode.items():
            if encode is None and not self.exchange(spec, 1).overlapped:
                raise CalibrationError(
                    f"the calibration {calibration.name} has no encode time of {spec!r} for {self.model}; it has "
                    f"encode times of: {', '.join(known) or 'none'}. The encode time is the time to compress and "
                    "decompress the gradients on a rank. Measure it with hvdcomp calibrate, or leave this compressor "
                    "out"
                )

    @cached_property
    def bytes_per_s(self) -> float:
        """The calibrated bandwidth of a link in an allreduce, in bytes/s."""
        return self.calibration.network.allreduce.bytes_per_s

    @cached_property
    def error(self) -> float:
        """Largest relative difference at which two step times count as equal."""
        return max(self.calibration.noise, MODEL_ERROR)

    @cached_property
    def ranks_per_node(self) -> int | None:
        """Number of ranks of a node; None if unknown."""
        return self.calibration.network.ranks_per_node

    @property
    def recommended(self) -> list[str]:
        """The specs of all methods that may be recommended: dense, fp16, and the allowed compressors."""
        return [spec for spec in self.compressors if spec not in self.why_not]

    def exchange(self, spec: str, ranks: int) -> Exchange:
        """The collectives of a step with one method, and their bytes, for this number of ranks."""
        key = spec, self._equivalent_ranks(spec, ranks)
        if key not in self._exchanges:
            known = (self.compressors[spec], self.facts.tensors, key[1], self.ranks_per_node)
            self._exchanges[key] = _sharded_exchange_of(*known) if self.facts.sharded else _exchange_of(*known)
        return self._exchanges[key]

    def _equivalent_ranks(self, spec: str, ranks: int) -> int:
        """A smaller number of ranks for which the exchange is the same. The exchange depends on the number of ranks for
        only a few methods, so the cache needs few entries."""
        compressor = self.compressors[spec]
        if self.facts.sharded or any(leaf.scatters(ranks) for leaf in compressor.leaves()):
            return ranks
        if not needs_nodes(compressor):
            return 1
        return min(ranks, 2 * (self.ranks_per_node or 1))

    def possible(self, spec: str, ranks: int) -> bool:
        """Whether a method can be used with this number of ranks. A two-level exchange needs the same number of ranks
        on every node."""
        return not needs_nodes(self.compressors[spec]) or ranks % min(ranks, self.ranks_per_node or 1) == 0

    def parts(self, spec: str, setting: Setting, early: bool = True) -> Parts:
        """The predicted time of a step with one method, by parts, in seconds.

        Args:
            spec: spec of the method.
            setting: the conditions of the training, such as the number of ranks.
            early: whether buckets are sent during the backward pass, if the method allows it.
        """
        groups: dict[Exchange, list[float]] = {}
        for ranks in np.unique(setting.world_size).tolist():
            groups.setdefault(self.exchange(spec, int(ranks)), []).append(ranks)
        first, *further = groups
        parts = self._parts_of(spec, first, setting, early)
        for exchange in further:
            mask = np.isin(setting.world_size, groups[exchange])
            world_size = np.where(mask, setting.world_size, groups[exchange][0])
            part = self._parts_of(spec, exchange, replace(setting, world_size=world_size), early)
            parts = Parts(*(np.where(mask, new, old) for new, old in zip(part, parts, strict=True)))
        return parts

    def _parts_of(self, spec: str, exchange: Exchange, setting: Setting, early: bool) -> Parts:
        network, facts = self.calibration.network, self.facts
        times = (facts.bucket_bytes, setting, self.encode[spec], (self._early_bytes if early else 0) or None)
        return predict(network, facts.compute, exchange, *times)

    def kept_bytes(self, spec: str) -> float:
        """The bytes per parameter that a method keeps on a device between steps, for example for residuals. If the
        model is sharded, a rank keeps these bytes only for its share of the gradients that its node sends."""
        tensors = self.facts.tensors
        kept = Chooser(tensors, self.compressors[spec]).kept_bytes(self.compressors[spec])
        share = 1 / (self.ranks_per_node or 1) if self.facts.sharded else 1.0
        return share * kept / sum(tensor.size for tensor in tensors)

    def step_s(self, spec: str, setting: Setting) -> Any:
        """Predicted seconds of a step with one method."""
        return self.parts(spec, setting).total

    def local_step_s(self, spec: str, setting: Setting, every: int) -> float | None:
        """Predicted seconds of a step with one method if the ranks exchange only once every `every` steps. The result
        is None for methods that `hvdcomp.torch.LocalSteps` refuses, and for sharded models. The values in `setting`
        must be numbers, not arrays."""
        if self.facts.sharded or not all(leaf.in_units for leaf in self.compressors[spec].leaves()):
            return None
        exchange = self.exchange(spec, int(np.asarray(setting.world_size)))
        known = self.calibration.network, self.facts.compute
        return float(local_step_s(*known, exchange, setting, self.encode[spec], every))

    def least_factor(self, setting: Setting, efficiency: float = 0.95) -> Any:
        """The compression factor that an ideal compressor would need (`least_compression_factor`). The result is NaN
        for a sharded model, because its ranks also exchange weights."""
        facts = self.facts
        if facts.sharded:
            return np.full(np.broadcast_shapes(*(np.shape(value) for value in vars(setting).values())), np.nan)
        dense = self.exchange(UNCOMPRESSED, 1)
        return least_compression_factor(
            self.calibration.network, facts.compute, dense, facts.bucket_bytes, setting, efficiency
        )

    def wins(self, spec: str, setting: Setting, dense_s: Any = None) -> tuple[Range, ...]:
        """The ranges of bandwidth, in bytes/s, in which a method is faster than dense gradients. All other conditions
        are as in `setting`.

        Steps are predicted at bandwidths from 1 Mb/s to 10 Tb/s, 200 per decade. A range that reaches the lowest or the
        highest of these bandwidths is assumed to be open at that end.

        Args:
            spec: spec of the method.
            setting: the conditions of the training, such as the number of ranks.
            dense_s: predicted seconds of a dense step at each of these bandwidths, (bandwidths,); None to compute them.
        """
        faster = _faster(self, spec, setting, _BANDWIDTHS, dense_s)
        changes = np.flatnonzero(np.diff(faster.astype(int)))
        bounds = [_change(self, spec, setting, _BANDWIDTHS[at], _BANDWIDTHS[at + 1]) for at in changes]
        ends: list[float | None] = [*([None] if faster[0] else []), *bounds, *([None] if faster[-1] else [])]
        return tuple(zip(ends[::2], ends[1::2], strict=True))

    def advise(self, setting: Setting) -> Advice:
        """The advice for one setting. The values in `setting` must be numbers, not arrays."""
        methods = {}
        ranks = int(np.asarray(setting.world_size))
        dense_s = self.step_s(UNCOMPRESSED, replace(setting, bytes_per_s=_BANDWIDTHS))
        for spec in self.compressors:
            if not self.possible(spec, ranks):
                continue
            parts, at_end = self.parts(spec, setting), self.parts(spec, setting, early=False)
            at_end_s = float(at_end.total) if at_end != parts else None
            wins = () if spec == UNCOMPRESSED else self.wins(spec, setting, dense_s)
            exchange, encode = self.exchange(spec, ranks), self.encode[spec]
            known = (spec, exchange, encode, parts, at_end_s, str(limited_by(parts)), wins)
            methods[spec] = Method(*known, self.why_not.get(spec))
        if setting.world_size == 1:
            return Advice(methods)
        compared = [method for method in methods.values() if method.why_not is None]
        first, *slower = sorted(compared, key=lambda method: method.step_s)
        free = first if first.spec in FREE else next(method for method in slower if method.spec in FREE)
        error = self.error
        take = first if free.step_s / first.step_s - 1 >= error else free
        rivals = [method for method in (first, *slower) if method != take]
        alike = [method.spec for method in rivals if abs(method.step_s / take.step_s - 1) < error]
        least = float(self.least_factor(setting))
        return Advice(
            methods,
            winner=first.spec,
            free=free.spec,
            take=take.spec,
            alike=tuple(alike),
            bucket_bytes=self._better_buckets(first, setting),
            error=error,
            least_factor=None if np.isnan(least) else least,
        )

    def _better_buckets(self, method: Method, setting: Setting) -> int | None:
        """Computes `Advice.bucket_bytes`."""
        if method.at_end_s is None or self.facts.early_bytes is not None:
            return None
        times = {size: float(self._with(size).step_s(method.spec, setting)) for size in BUCKET_SIZES}
        best = min(times, key=lambda size: times[size])
        return best if method.step_s / times[best] - 1 > self.calibration.noise else None

    def _with(self, early_bytes: float) -> Adviser:
        adviser = copy(self)
        adviser._early_bytes = early_bytes  # noqa: SLF001
        return adviser


def _model_name(calibration: Calibration, model: str | None) -> str:
    names = list(calibration.models)
    if model is None and len(names) == 1:
        return names[0]
    if model is None or model not in names:
        problem = "no model was named" if model is None else f"{model!r} is not one of them"
        raise CalibrationError(
            f"{calibration.name} has the models {', '.join(names)}, but {problem}; choose one of them"
        )
    return model


def _faster(adviser: Adviser, spec: str, setting: Setting, bytes_per_s: Any, dense_s: Any = None) -> Any:
    """Whether a method is faster than dense gradients at each bandwidth, (bandwidths,). Differences that may be
    rounding errors do not count."""
    at_bandwidth = replace(setting, bytes_per_s=bytes_per_s)
    if dense_s is None:
        dense_s = adviser.step_s(UNCOMPRESSED, at_bandwidth)
    return np.broadcast_to(adviser.step_s(spec, at_bandwidth) < dense_s * (1 - 1e-12), np.shape(bytes_per_s))


def _change(adviser: Adviser, spec: str, setting: Setting, low: float, high: float) -> float:
    """The bandwidth between `low` and `high` at which the method becomes faster or slower than dense gradients,
    accurate to 7 digits."""
    for _ in range(2):
        between = np.geomspace(low, high, 256)
        faster = _faster(adviser, spec, setting, between)
        at = max(1, int(np.argmax(faster != faster[0])))  # the first change, seen from the lowest bandwidth
        low, high = between[at - 1], between[at]
    return float(low)
