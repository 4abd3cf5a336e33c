"""The candidates of the policy `auto`. A candidate is a way to send the gradients of a training run, with the predicted
time of a step.

The performance model predicts the time of a step for a few candidates. In the simplest candidates, all tensors are
uncompressed, all are in half precision, or all are compressed. In mixtures, the tensors for which compression is most
worthwhile are compressed, and all other tensors are uncompressed or in half precision. There may be several
compressors. A compressor with `exchange="auto"` makes two candidates: one with "gather" and one with "scatter". If the
policy requests more compressors, this module proposes some. To limit the number of candidates, only the two fastest
compressors are used in mixtures. Only rank 0 reads the calibration, and the other ranks receive the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdcomp.adaptation.plans import Plans, levelled_tensors
from hvdcomp.adaptation.step_model import StepModel, errors_of
from hvdcomp.compressors import Compressor, needs_nodes
from hvdcomp.compressors.choice import Plan
from hvdcomp.compressors.gathering import WAYS, Gathering
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import warn_alone
from hvdcomp.exchange.engine import Engine
from hvdcomp.perfmodel import UNCOMPRESSED, Criteria, EncodeTime, propose
from hvdcomp.perfmodel.advice import BUCKET_SIZES
from hvdcomp.perfmodel.ways import encode_time_of, in_each_way
from hvdcomp.policies.auto import DENSE_CANDIDATE
from hvdcomp.policies.request import Candidate, Candidates

FP16, COMPRESSED = "fp16", "compressed"

_OTHER_METHODS = ((DENSE_CANDIDATE, "none"), (FP16, "fp16"))
"""The candidates without compression, each with its name and its method. In other candidates, tensors that are not
compressed also use one of these methods."""

_STARTING = 2**16
"""When the encode time of a tensor is estimated, this number is added to the tensor's number of elements. It accounts
for the overhead of the operations on each tensor.

The calibration has only the encode time of the whole model. This time is divided among the tensors in proportion to
their numbers of elements, each increased by this constant. The estimates only determine which mixtures of methods are
tried. The trials measure the real times.
"""

_MIXED = 2  # number of compressors that are used in mixtures; these are the fastest according to the model
_CUTS = 16  # number of mixtures that are tried for each pair of a compressor and a method of `_OTHER_METHODS`


def candidates_of(
    engine: Engine,
    source: str,
    model: str | None = None,
    batch: int | None = None,
    overlaps: bool = True,
    others: Sequence[str] = (),
    criteria: Criteria | None = None,
) -> Candidates:
    """The candidates of a training run, with their predicted times.

    Args:
        engine: the engine, with the tensors, compressor, memory and ranks of the training run.
        source: a calibration file, or the name of a preset.
        model: the model in the calibration; None for the model whose tensors have the same shapes as in this training
            run.
        batch: the batch size of one rank; None for the batch size of the calibration.
        overlaps: whether Horovod itself exchanges the tensors that are only cast, and does so during the backward pass.
        others: the specs of further compressors, in addition to the compressor of the training run.
        criteria: the criteria for proposed compressors; None for no proposals. A warning lists the compressors that
            cannot be proposed.

    Raises:
        CalibrationError: if the calibration cannot be read, belongs to another model, or lacks a time that is needed.
    """
    with errors_of(source):
        candidates = _CandidateModel(StepModel(engine, source, model, batch, overlaps))
        if criteria is not None:
            others = (*others, *candidates.proposed(others, criteria))
        return candidates.all(others)


class _SingleMethod(NamedTuple):
    """A candidate with one compressor for all tensors that are large enough to be compressed.

    Attributes:
        candidate: the candidate, with the predicted time of a step and the spec of the compressor.
        encode: the time to encode all tensors that the candidate compresses; None if it compresses none.
        weights: a weight for each compressed tensor, by tensor name. `encode` is divided among the tensors in
            proportion to these weights. The tensors for which compression is most worthwhile come first.
    """

    candidate: Candidate
    encode: EncodeTime | None
    weights: Mapping[str, float]


class _CandidateModel:
    """Makes the candidates of one training run with its performance model."""

    def __init__(self, steps: StepModel) -> None:
        self.engine = steps.engine
        self._steps = steps
        self._plans = Plans(self.engine, levelled_tensors(self.engine))

    def all(self, specs: Sequence[str]) -> Candidates:
        """All candidates. If two names refer to the same candidate, only the first is kept."""
        self._choose_buckets(specs)
        candidates: dict[str, Candidate] = {}
        sent: list[dict[str, object]] = []

        def offer(name: str, candidate: Candidate, plan: Plan) -> bool:
            if (sends := self._sends(plan)) in sent:
                return False
            candidates[name] = candidate
            sent.append(sends)
            return True

        for name, spec in _OTHER_METHODS:
            plan = self._plans.with_methods({}, spec)
            offer(name, Candidate(self._steps.seconds(plan, self._cast_time(spec, plan)), 0, spec), plan)
        ways: dict[str, _SingleMethod] = {}
        for name, method in self._methods(specs).items():
            plan = self._plans.with_methods({}, method)
            way = self._way(method, plan)
            if offer(name, way.candidate, plan) and way.encode is not None:
                ways[name] = way
        fastest = sorted(ways, key=lambda name: ways[name].candidate.seconds)[:_MIXED]
        order = tuple(dict.fromkeys(tensor for name in fastest for tensor in ways[name].weights))
        for name in (name for name in ways if name in fastest):
            method = ways[name].candidate.rest
            for other_name, other_method in _OTHER_METHODS:
                if (mixed := self._best_mixture(order, ways[name], other_method)) is not None:
                    plan = self._plans.with_methods(dict.fromkeys(order[: mixed.compressed], method), other_method)
                    offer(f"{name} and {other_name}", mixed, plan)
        return Candidates((*order, *(name for name in self._plans.names if name not in order)), candidates)

    def proposed(self, specs: Sequence[str], criteria: Criteria) -> tuple[str, ...]:
        """The specs of proposed compressors. Two-level compressors are proposed only if the user has specified one.
        Otherwise it is not certain that all nodes have the same number of ranks."""
        methods = self._methods(specs).values()
        ways = [self._way(method, self._plans.with_methods({}, method)) for method in methods]
        free = [(self._plans.with_methods({}, method), method) for _, method in _OTHER_METHODS]
        times = [self._steps.seconds(plan, self._cast_time(method, plan)) for plan, method in free]
        least = min([*times, *(way.candidate.seconds for way in ways)])
        fixed = [self.engine.compressor, *map(parse_compressor, specs)]

        def seconds_of(compressor: Compressor) -> float | None:
            encode = self._steps.known_encode(compressor)
            plan = self._plans.with_methods({}, str(compressor))
            return None if encode is None else self._steps.seconds(plan, encode)

        proposals = propose(criteria, fixed, seconds_of, least, any(map(needs_nodes, fixed)))
        if (missing := proposals.missing(criteria, self._steps.source)) is not None:
            warn_alone(missing)
        return proposals.specs

    def _methods(self, specs: Sequence[str]) -> dict[str, str | None]:
        """The specs of the compressors to consider, by name. A compressor with `exchange="auto"` is listed twice, with
        "gather" and with "scatter".

        The name is the spec, unless the compressor of the training run is the only compressor.
        """
        own = self.engine.compressor
        methods: dict[str, str | None] = {str(compressor): str(compressor) for compressor in self._in_each_way(own)}
        if len(methods) == 1:
            methods = {str(own): None}
        if not specs:
            names = [COMPRESSED] if len(methods) == 1 else [f"{way}ed" for way in WAYS]
            return dict(zip(names, methods.values(), strict=True))
        for spec in specs:
            for compressor in self._in_each_way(parse_compressor(spec)):
                methods.setdefault(str(compressor), str(compressor))
        return methods

    def _in_each_way(self, compressor: Compressor) -> tuple[Compressor, ...]:
        several = self.engine.communicator.world_size > 1
        open_ = several and isinstance(compressor, Gathering) and compressor.exchange == "auto"
        return in_each_way(compressor) if open_ else (compressor,)

    def _way(self, method: str | None, plan: Plan) -> _SingleMethod:
        """The candidate that uses the compressor `method` for all tensors. `plan` is the plan with this compressor."""
        self._steps.exchange(plan, overlapped=False)  # raises an error for methods that are unknown to the model
        weights = self._worthwhile(plan)
        encode = self._steps.encode(self._compressor(method)) if weights else None
        return _SingleMethod(Candidate(self._steps.seconds(plan, encode), 0, method), encode, weights)

    def _sends(self, plan: Plan) -> dict[str, object]:
        """For each tensor, the element type if the tensor is only cast, otherwise the compressor."""
        tensors = self.engine.tensors
        return {name: method.wire_dtype(tensors[name].dtype) or method for name, method in plan.items()}

    def _cast_time(self, spec: str, plan: Plan) -> EncodeTime | None:
        """The time to cast all tensors to the type that is sent. If Horovod exchanges the tensors itself, the time is
        an estimate. Otherwise it is the measured time."""
        known = self._steps.facts.compute.encode
        if self._steps.carried(plan):
            return encode_time_of(parse_compressor(spec), known)
        return known.get(spec) if spec != UNCOMPRESSED else None

    def _compressor(self, method: str | None) -> Compressor:
        """The compressor of a spec. For None, the result is the compressor of the training run."""
        return self.engine.compressor if method is None else parse_compressor(method)

    def _worthwhile(self, plan: Plan) -> dict[str, float]:
        """The weights of the tensors that a plan compresses, by name. The tensors are sorted by the number of bytes
        that compression saves, divided by the weight of the tensor. The largest quotient comes first."""
        savings = []
        uncompressed = self._plans.with_methods({}, "none")
        for name, compressor in plan.items():
            tensor = self.engine.tensors[name]
            if compressor.wire_dtype(tensor.dtype) is None:
                dense = uncompressed[name].payload_bytes(tensor.shape, dtype=tensor.dtype)
                saved = dense - compressor.payload_bytes(tensor.shape, dtype=tensor.dtype)
                weight = tensor.size + _STARTING
                savings.append((-saved / weight, name, weight))
        return {name: weight for _, name, weight in sorted(savings)}

    def _best_mixture(self, order: Sequence[str], way: _SingleMethod, other_method: str) -> Candidate | None:
        """The fastest of several mixtures. A mixture sends the first tensors of `order` with one compressor, and all
        other tensors with `other_method`. The result is None if there are fewer than two tensors."""
        assert way.encode is not None
        places = [place for place, name in enumerate(order) if name in way.weights]
        first, count, total = places[0], places[-1] + 1, sum(way.weights.values())
        best = None
        for number in sorted({round(count * cut / (_CUTS + 1)) for cut in range(1, _CUTS + 1)}):
            if not first < number < count:
                continue
            share = sum(way.weights.get(name, 0) for name in order[:number]) / total
            plan = self._plans.with_methods(dict.fromkeys(order[:number], way.candidate.rest), other_method)
            seconds = self._steps.seconds(plan, way.encode.part(share))
            if best is None or seconds < best.seconds:
                best = Candidate(seconds, number, other_method, way.candidate.rest)
        return best

    def _choose_buckets(self, specs: Sequence[str]) -> None:
        """Chooses the bucket size, if the user has not set it. The performance model finds the fastest compressor, and
        then the best bucket size for this compressor. The size changes only if the gain exceeds the noise of the
        calibration."""
        overlap = self.engine.overlap
        if overlap.least_bytes is None or not overlap.from_rank_0 or self._steps.facts.early_bytes is not None:
            return
        plans = [(self._plans.with_methods({}, method), method) for method in self._methods(specs).values()]
        ways = [(self._way(method, plan), plan) for plan, method in plans]
        way, plan = min(ways, key=lambda entry: entry[0].candidate.seconds)
        times = {size: self._steps.seconds(plan, way.encode, size) for size in BUCKET_SIZES}
        best = min(times, key=lambda size: times[size])
        if way.candidate.seconds / times[best] - 1 > self._steps.calibration.noise:
            overlap.least_bytes = best
