"""Candidates for the policy `auto`: other ways to send a training's gradients, with the predicted time of a step.

The performance model predicts a step's time for a handful of ways to send this training's gradients on this many ranks:
everything dense, everything in half precision, everything compressed, and the most worthwhile tensors compressed with
the rest dense or in half precision. There may be several compressors; if one leaves its exchange open, it is gathered
in some of these ways and scattered in others. Some are proposed here, if the policy asks for that. Only the two fastest
of all compressed ways are mixed with others, so that candidates stay few. Rank 0 alone reads the calibration; the other
ranks receive the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdcomp.adaptation.plans import Plans, levelled_tensors
from hvdcomp.adaptation.step_model import StepModel, errors_of
from hvdcomp.compressors import Compressor, needs_nodes
from hvdcomp.compressors.choice import Plan
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import warn_alone
from hvdcomp.exchange.engine import Engine
from hvdcomp.perfmodel import UNCOMPRESSED, Asked, EncodeTime, propose
from hvdcomp.perfmodel.advice import BUCKET_SIZES
from hvdcomp.perfmodel.ways import WAYS, encode_time_of, in_each_way
from hvdcomp.policies.auto import DENSE_CANDIDATE
from hvdcomp.policies.request import Candidate, Candidates

FP16, COMPRESSED = "fp16", "compressed"

_RESTS = ((DENSE_CANDIDATE, "none"), (FP16, "fp16"))
"""How tensors travel that are not compressed: the candidate's name and the method."""

_STARTING = 2**16
"""Elements that a tensor seems to have beside its own, for the time to start the operations that encode it.

The calibration knows the time of the whole model alone. This says how it is shared out among its tensors, and so only
which mixtures are worth a trial; what they really take is measured.
"""

_MIXED = 2  # compressed ways, the fastest by the model, that are mixed with others
_CUTS = 16  # mixtures that are predicted for each way to send the rest


def candidates_of(
    engine: Engine,
    source: str,
    model: str | None = None,
    batch: int | None = None,
    overlaps: bool = True,
    others: Sequence[str] = (),
    asked: Asked | None = None,
) -> Candidates:
    """The candidates of a training, with their predicted times.

    Args:
        engine: with the training's tensors, compressor, memory and ranks.
        source: a calibration file, or the name of a preset.
        model: of the calibration; None for the one whose tensors have the shapes of the training's.
        batch: size on one rank; None for the calibration's.
        overlaps: whether Horovod carries casts itself, during the backward pass.
        others: specs of compressors beside that of the training.
        asked: what more compressors are to be proposed by; None for none. What cannot be proposed is said in a warning.

    Raises:
        CalibrationError: if the calibration cannot be read, is of another model, or lacks what is needed.
    """
    with errors_of(source):
        made = _Model(StepModel(engine, source, model, batch, overlaps))
        if asked is not None:
            others = (*others, *made.proposed(others, asked))
        return made.candidates(others)


class _Way(NamedTuple):
    """One compressor for all tensors.

    Attributes:
        candidate: that it is.
        encode: time to encode all that it compresses; None if that is nothing.
        weights: by name the share of that time of each tensor that it compresses, the most worth it first.
    """

    candidate: Candidate
    encode: EncodeTime | None
    weights: Mapping[str, float]


class _Model:
    """The candidates of one training, by its performance model."""

    def __init__(self, steps: StepModel) -> None:
        self.engine = steps.engine
        self._steps = steps
        self._plans = Plans(self.engine, levelled_tensors(self.engine))

    def candidates(self, others: Sequence[str]) -> Candidates:
        """All candidates. Those that are another one under a second name are left out."""
        self._choose_buckets(others)
        candidates: dict[str, Candidate] = {}
        sent: list[dict[str, object]] = []

        def offer(name: str, candidate: Candidate, plan: Plan) -> bool:
            if (sends := self._sends(plan)) in sent:
                return False
            candidates[name] = candidate
            sent.append(sends)
            return True

        for name, rest in _RESTS:
            plan = self._plans.with_methods({}, rest)
            offer(name, Candidate(self._steps.seconds(plan, self._cast_time(rest, plan)), 0, rest), plan)
        ways: dict[str, _Way] = {}
        for name, method in self._methods(others).items():
            plan = self._plans.with_methods({}, method)
            way = self._way(method, plan)
            if offer(name, way.candidate, plan) and way.encode is not None:
                ways[name] = way
        fastest = sorted(ways, key=lambda name: ways[name].candidate.seconds)[:_MIXED]
        order = tuple(dict.fromkeys(tensor for name in fastest for tensor in ways[name].weights))
        for name in (name for name in ways if name in fastest):
            method = ways[name].candidate.rest
            for other, rest in _RESTS:
                if (mixed := self._best_mixture(order, ways[name], rest)) is not None:
                    plan = self._plans.with_methods(dict.fromkeys(order[: mixed.compressed], method), rest)
                    offer(f"{name} and {other}", mixed, plan)
        return Candidates((*order, *(name for name in self._plans.names if name not in order)), candidates)

    def proposed(self, others: Sequence[str], asked: Asked) -> tuple[str, ...]:
        """Specs of compressors that nobody named. Two levels are among them if they are among those that were named:
        whether nodes have as many ranks is known only then."""
        methods = self._methods(others).values()
        ways = [self._way(method, self._plans.with_methods({}, method)) for method in methods]
        free = [(self._plans.with_methods({}, rest), rest) for _, rest in _RESTS]
        times = [self._steps.seconds(plan, self._cast_time(rest, plan)) for plan, rest in free]
        least = min([*times, *(way.candidate.seconds for way in ways)])
        fixed = [self.engine.compressor, *map(parse_compressor, others)]

        def seconds_of(compressor: Compressor) -> float | None:
            encode = self._steps.known_encode(compressor)
            plan = self._plans.with_methods({}, str(compressor))
            return None if encode is None else self._steps.seconds(plan, encode)

        proposals = propose(asked, fixed, seconds_of, least, any(map(needs_nodes, fixed)))
        if (missing := proposals.missing(asked, self._steps.source)) is not None:
            warn_alone(missing)
        return proposals.specs

    def _methods(self, others: Sequence[str]) -> dict[str, str | None]:
        """By name the compressors to look at, each that leaves its exchange open in both ways.

        They have their specs for names. If the training has one compressor alone, the names say what is done with it.
        """
        own = self.engine.compressor
        methods: dict[str, str | None] = {str(compressor): str(compressor) for compressor in self._in_each_way(own)}
        if len(methods) == 1:
            methods = {str(own): None}
        if not others:
            names = [COMPRESSED] if len(methods) == 1 else [f"{way}ed" for way in WAYS]
            return dict(zip(names, methods.values(), strict=True))
        for spec in others:
            for compressor in self._in_each_way(parse_compressor(spec)):
                methods.setdefault(str(compressor), str(compressor))
        return methods

    def _in_each_way(self, compressor: Compressor) -> tuple[Compressor, ...]:
        several = self.engine.communicator.world_size > 1
        open_ = several and isinstance(compressor, Gathering) and compressor.exchange == "auto"
        return in_each_way(compressor) if open_ else (compressor,)

    def _way(self, method: str | None, plan: Plan) -> _Way:
        """A compressor for all tensors; `plan` is what comes of it."""
        self._steps.exchange(plan, overlapped=False)  # refuses what the model does not know
        weights = self._worthwhile(plan)
        encode = self._steps.encode(self._compressor(method)) if weights else None
        return _Way(Candidate(self._steps.seconds(plan, encode), 0, method), encode, weights)

    def _sends(self, plan: Plan) -> dict[str, object]:
        """By tensor what is sent: the element type of a cast, or the compressor."""
        tensors = self.engine.tensors
        return {name: method.wire_dtype(tensors[name].dtype) or method for name, method in plan.items()}

    def _cast_time(self, spec: str, plan: Plan) -> EncodeTime | None:
        """The time of a cast of all tensors: estimated where the framework carries it, else as it was measured."""
        known = self._steps.facts.compute.encode
        if self._steps.carried(plan):
            return encode_time_of(parse_compressor(spec), known)
        return known.get(spec) if spec != UNCOMPRESSED else None

    def _compressor(self, method: str | None) -> Compressor:
        """The compressor of a spec; that of the training for None."""
        return self.engine.compressor if method is None else parse_compressor(method)

    def _worthwhile(self, plan: Plan) -> dict[str, float]:
        """By name the weights of the tensors that a plan compresses, those first that save most bytes for it."""
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

    def _best_mixture(self, order: Sequence[str], way: _Way, rest: str) -> Candidate | None:
        """The fastest of some mixtures of compressed tensors and others; None if there are no two tensors to mix."""
        assert way.encode is not None
        places = [place for place, name in enumerate(order) if name in way.weights]
        first, count, total = places[0], places[-1] + 1, sum(way.weights.values())
        best = None
        for number in sorted({round(count * cut / (_CUTS + 1)) for cut in range(1, _CUTS + 1)}):
            if not first < number < count:
                continue
            share = sum(way.weights.get(name, 0) for name in order[:number]) / total
            plan = self._plans.with_methods(dict.fromkeys(order[:number], way.candidate.rest), rest)
            seconds = self._steps.seconds(plan, way.encode.part(share))
            if best is None or seconds < best.seconds:
                best = Candidate(seconds, number, rest, way.candidate.rest)
        return best

    def _choose_buckets(self, others: Sequence[str]) -> None:
        """Chooses how much of the gradients is sent by itself, where that is left to rank 0: what is best for the
        compressor that is fastest by the model, if that makes a difference."""
        overlap = self.engine.overlap
        if overlap.least_bytes is None or not overlap.from_rank_0 or self._steps.facts.early_bytes is not None:
            return
        plans = [(self._plans.with_methods({}, method), method) for method in self._methods(others).values()]
        ways = [(self._way(method, plan), plan) for plan, method in plans]
        way, plan = min(ways, key=lambda entry: entry[0].candidate.seconds)
        times = {size: self._steps.seconds(plan, way.encode, size) for size in BUCKET_SIZES}
        best = min(times, key=lambda size: times[size])
        if way.candidate.seconds / times[best] - 1 > self._steps.calibration.noise:
            overlap.least_bytes = best
