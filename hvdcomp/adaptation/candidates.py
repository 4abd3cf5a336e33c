"""Candidates for the policy `auto`: other ways to send a training's gradients, with the predicted time of a step.

The performance model predicts a step's time for a handful of ways to send this training's gradients on this many ranks:
everything dense, everything in half precision, everything compressed, and the most worthwhile tensors compressed with
the rest dense or in half precision. If the compressor leaves its exchange open, compressed tensors are gathered in some
of these ways and scattered in others. Rank 0 alone reads the calibration; the other ranks receive the result.
"""

from __future__ import annotations

from typing import NamedTuple

from hvdcomp.adaptation.plans import Plans, levelled_tensors
from hvdcomp.compressors.choice import Plan
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.perfmodel import (
    Calibration,
    CalibrationError,
    EncodeTime,
    ModelFacts,
    Setting,
    exchange_of_plan,
    load,
    model_of,
)
from hvdcomp.perfmodel import predict as predict_step
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

_CUTS = 16  # mixtures that are predicted for each way to send the rest


def candidates_of(
    engine: Engine, source: str, model: str | None = None, batch: int | None = None, overlaps: bool = True
) -> Candidates:
    """The candidates of a training, with their predicted times.

    Args:
        engine: with the training's tensors, compressor, memory and ranks.
        source: a calibration file, or the name of a preset.
        model: of the calibration; None for the one whose tensors have the shapes of the training's.
        batch: size on one rank; None for the calibration's.
        overlaps: whether Horovod carries casts itself, during the backward pass.

    Raises:
        CalibrationError: if the calibration cannot be read, is of another model, or lacks what is needed.
    """
    calibration = load(source)
    facts = model_of(calibration, engine.tensors.values(), source, model)
    try:
        setting = Setting(engine.communicator.world_size, batch_size=batch)
        return _Model(engine, calibration, facts, setting, overlaps).candidates(source)
    except ValueError as error:
        if isinstance(error, CalibrationError):
            raise
        raise CalibrationError(f"{source}: {error}") from None


class _Tensor(NamedTuple):
    """A tensor that the training's compressor does compress."""

    name: str
    weight: float  # its share of the time to encode
    saved: float  # bytes


class _Model:
    """The performance model of one training."""

    def __init__(
        self, engine: Engine, calibration: Calibration, facts: ModelFacts, setting: Setting, overlaps: bool
    ) -> None:
        self.engine = engine
        self.facts = facts
        self._calibration = calibration
        self._setting = setting
        self._overlaps = overlaps
        self._plans = Plans(engine, levelled_tensors(engine))
        self._own = engine.planner.plan_for(engine.compressor)

    def candidates(self, source: str) -> Candidates:
        """All candidates. Those that are another one under a second name are left out."""
        exchange_of_plan(self.engine.tensors.values(), self._own, False, 1)  # refuses what the model does not know
        worthwhile = self._worthwhile()
        order = tuple(tensor.name for tensor in worthwhile)
        found: dict[str, Candidate] = {}
        sent: list[dict[str, object]] = []

        def offer(name: str, candidate: Candidate, plan: Plan) -> None:
            if (sends := self._sends(plan)) not in sent:
                found[name] = candidate
                sent.append(sends)

        for name, rest in _RESTS:
            plan = self._plans.with_methods({}, rest)
            offer(name, Candidate(self._seconds(plan, self.facts.compute.encode.get(rest)), 0, rest), plan)
        for compressed, method in self._methods().items():
            encode = self._encode(source, method) if worthwhile else None
            plan = self._plans.with_methods({}, method)
            offer(compressed, Candidate(self._seconds(plan, encode), 0, method), plan)
            for name, rest in _RESTS:
                if encode is not None and (mixed := self._best_mixture(worthwhile, method, rest, encode)) is not None:
                    plan = self._plans.with_methods(dict.fromkeys(order[: mixed.compressed], method), rest)
                    offer(f"{compressed} and {name}", mixed, plan)
        others = tuple(name for name in self._plans.names if name not in order)
        return Candidates((*order, *others), found)

    def _methods(self) -> dict[str, str | None]:
        """By name the compressors to look at: the training's own or, if it leaves the exchange open, each way."""
        compressor = self.engine.compressor
        several = self.engine.communicator.world_size > 1
        if not several or not isinstance(compressor, Gathering) or compressor.exchange != "auto":
            return {COMPRESSED: None}
        return {f"{way}ed": str(one) for way, one in zip(WAYS, in_each_way(compressor), strict=True)}

    def _sends(self, plan: Plan) -> dict[str, object]:
        """By tensor what is sent: the element type of a cast, or the compressor."""
        return {name: one.wire_dtype(self.engine.tensors[name].dtype) or one for name, one in plan.items()}

    def _encode(self, source: str, method: str | None) -> EncodeTime:
        known = self.facts.compute.encode
        found = encode_time_of(self.engine.compressor if method is None else parse_compressor(method), known)
        if found is None:
            raise CalibrationError(
                f"{source} has no encode time of {str(self.engine.compressor)!r} for this model; it has: "
                f"{', '.join(known) or 'none'}. Calibrate with this compressor, or use one of these"
            )
        return found

    def _worthwhile(self) -> list[_Tensor]:
        """The compressed tensors, those first that save most bytes for their time to encode."""
        found = []
        uncompressed = self._plans.with_methods({}, "none")
        for name, compressor in self._own.items():
            tensor = self.engine.tensors[name]
            if compressor.wire_dtype(tensor.dtype) is None:
                dense = uncompressed[name].payload_bytes(tensor.shape, dtype=tensor.dtype)
                saved = dense - compressor.payload_bytes(tensor.shape, dtype=tensor.dtype)
                found.append(_Tensor(name, tensor.size + _STARTING, saved))
        return sorted(found, key=lambda one: (-one.saved / one.weight, one.name))

    def _best_mixture(
        self, tensors: list[_Tensor], method: str | None, rest: str, encode: EncodeTime
    ) -> Candidate | None:
        """The fastest of some mixtures of compressed tensors and others; None if there are no two tensors to mix."""
        count = len(tensors)
        total = sum(tensor.weight for tensor in tensors)
        best = None
        for number in sorted({round(count * cut / (_CUTS + 1)) for cut in range(1, _CUTS + 1)} - {0, count}):
            share = sum(tensor.weight for tensor in tensors[:number]) / total
            plan = self._plans.with_methods(dict.fromkeys((tensor.name for tensor in tensors[:number]), method), rest)
            seconds = self._seconds(plan, encode.part(share))
            if best is None or seconds < best.seconds:
                best = Candidate(seconds, number, rest, method)
        return best

    def _seconds(self, plan: Plan, encode: EncodeTime | None) -> float:
        overlapped = self._overlaps and self.engine.planner.casts(plan)
        ranks = self.engine.communicator.world_size
        exchange = exchange_of_plan(self.engine.tensors.values(), plan, overlapped, ranks)
        network, compute = self._calibration.network, self.facts.compute
        early = self.engine.overlap.least_bytes
        parts = predict_step(network, compute, exchange, self.facts.bucket_bytes, self._setting, encode, early)
        return float(parts.total)
