"""The performance model of one training run. The model predicts the time of a step for a plan, with a calibration.

Only rank 0 reads the calibration. The other ranks get the results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvdcomp.compressors import Compressor
from hvdcomp.compressors.choice import Plan
from hvdcomp.exchange.engine import Engine
from hvdcomp.perfmodel import CalibrationError, EncodeTime, Exchange, Setting, exchange_of_plan, load, model_of
from hvdcomp.perfmodel import predict as predict_step
from hvdcomp.perfmodel.predict import passes
from hvdcomp.perfmodel.ways import encode_time_at, encode_time_of


class StepModel:
    """Predicts the steps of one training run.

    Args:
        engine: the engine, with the tensors, compressor, memory and ranks of the training run.
        source: a calibration file, or the name of a preset.
        model: the model in the calibration; None for the model whose tensors have the same shapes as in this training
            run.
        batch: the batch size of one rank; None for the batch size of the calibration.
        overlaps: whether Horovod itself exchanges the tensors that are only cast, and does so during the backward pass.

    Raises:
        CalibrationError: if the calibration cannot be read, or belongs to another model.
        ValueError: if `batch` is given, but the calibration does not name the batch size of its measurements.
    """

    def __init__(
        self, engine: Engine, source: str, model: str | None = None, batch: int | None = None, overlaps: bool = True
    ) -> None:
        self.engine = engine
        self.source = source
        self.calibration = load(source)
        self.facts = model_of(self.calibration, engine.tensors.values(), source, model)
        self.ranks_per_node = self.calibration.network.ranks_per_node
        self._setting = Setting(engine.communicator.world_size, batch_size=batch)
        self._overlaps = overlaps

    def seconds(self, plan: Plan, encode: EncodeTime | None, early: int | None = None) -> float:
        """The predicted seconds of a step.

        Args:
            plan: the compressor of each tensor in the step, by name.
            encode: the encode time of all compressed tensors; None if no tensor is compressed.
            early: smallest size, in bytes of gradients, of a bucket that is sent during the backward pass; None for the
                engine's setting.
        """
        exchange = self.exchange(plan, self.carried(plan))
        network, compute = self.calibration.network, self.facts.compute
        least: float | None = early or self.engine.overlap.least_bytes
        # With DistributedDataParallel, hvdcomp uses the library's buckets, and the calibration has their smallest size.
        if least is not None and self.facts.early_bytes is not None:
            least = self.facts.early_bytes
        parts = predict_step(network, compute, exchange, self.facts.bucket_bytes, self._setting, encode, least)
        return float(parts.total)

    def alone_s(self) -> float:
        """The predicted seconds of a step without an exchange."""
        step, _ = passes(self.facts.compute, self._setting)
        return float(step)

    def exchange(self, plan: Plan, overlapped: bool) -> Exchange:
        """The exchange of a plan. `overlapped` is as in `Exchange`.

        Raises:
            SpecError: if a method is unknown to the model.
        """
        tensors, ranks = self.engine.tensors.values(), self.engine.communicator.world_size
        return exchange_of_plan(tensors, plan, overlapped, ranks, self.ranks_per_node)

    def carried(self, plan: Plan) -> bool:
        """Whether Horovod itself exchanges all tensors of a plan."""
        return self._overlaps and self.engine.planner.casts(plan)

    def encode(self, compressor: Compressor) -> EncodeTime:
        """The encode time of a compressor for all tensors.

        Raises:
            CalibrationError: if this time is unknown.
        """
        return self._known(self.known_encode(compressor), compressor)

    def encode_at(self, compressor: Compressor, factor: float) -> EncodeTime:
        """The encode time of a compressor at `factor` times its level.

        Raises:
            CalibrationError: if this time is unknown at every level.
        """
        tensors, known = list(self.engine.tensors.values()), self.facts.compute.encode
        return self._known(encode_time_at(compressor, factor, known, tensors, self.ranks_per_node), compressor)

    def known_encode(self, compressor: Compressor) -> EncodeTime | None:
        """The encode time of a compressor, as `encode` returns it; None if the time is unknown."""
        tensors, known = list(self.engine.tensors.values()), self.facts.compute.encode
        return encode_time_of(compressor, known, tensors, self.ranks_per_node)

    def _known(self, encode: EncodeTime | None, compressor: Compressor) -> EncodeTime:
        if encode is None:
            known = self.facts.compute.encode
            raise CalibrationError(
                f"the calibration {self.source} has no encode time of {str(compressor)!r} for this model. It has "
                f"encode times of: {', '.join(known) or 'none'}. The encode time is the time to compress and "
                "decompress the gradients on a rank. Measure this compressor with `hvdcomp calibrate`, or use a "
                "compressor that is in the calibration"
            )
        return encode


@contextmanager
def errors_of(source: str) -> Iterator[None]:
    """A context manager that turns errors of a prediction into CalibrationErrors that name the calibration."""
    try:
        yield
    except CalibrationError:
        raise
    except ValueError as error:
        raise CalibrationError(f"{source}: {error}") from None
