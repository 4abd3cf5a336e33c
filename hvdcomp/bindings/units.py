"""The units of gradients: the loss scale, and momenta added before the exchange.

A loss scaler multiplies gradients. If the optimizer freezes its second moment (`CompressedAdam`), a rank sends its
gradient plus a multiple of Adam's first moment, which all ranks have, and subtracts that term from the mean: so the
momentum is compressed, and the optimizer still gets gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdcomp.bindings.training import Training
from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.compressors.parsing import parse_compressor


class Units:
    """The units of one training's gradients.

    Args:
        training: the training, whose optimizer may ask for momenta.

    Attributes:
        loss_scale: loss scale of the present step; None if unknown.
        momenta: momenta added to the gradients of the present step, by name, as arrays of the framework.
        engine_only: whether the present step needs the engine, whatever its plan is.
    """

    def __init__(self, training: Training) -> None:
        self.loss_scale: float | None = None
        self.momenta: Mapping[str, Any] = {}
        self.engine_only = False
        self._training = training
        self._warm_up: Compressor | None = None  # the optimizer's last warm-up compressor

    @property
    def inverse(self) -> float:
        """The factor from scaled gradients to gradients of the loss."""
        return 1 / (self.loss_scale or 1.0)

    def follow(self, scale: float | None) -> None:
        """Sets the loss scale of a step, and rescales residuals."""
        if scale is None:
            return
        if self.loss_scale is not None and scale != self.loss_scale:
            self._training.engine.scale_residuals(scale / self.loss_scale)
        self.loss_scale = scale

    def choose_compressor(self) -> None:
        """Chooses the compressor by the optimizer's warm-up; to be called before the plan of a step is fixed.

        A refresh of the second moment takes the gradient uncompressed. Residuals, which are parts of momenta, wait for
        the next compressed momentum.
        """
        if self._training.refreshes():
            self._training.engine.planner.compress_by(NoCompression(), ignores_residuals=True)
            return
        spec = self._training.warm_up()
        if spec is not None and (self._warm_up is None or str(self._warm_up) != spec):
            self._warm_up = parse_compressor(spec)
        self._training.engine.planner.compress_by(None if spec is None else self._warm_up)

    def choose_momenta(self) -> None:
        """Chooses the momenta of a step after its plan is fixed."""
        momenta, planner = self._training.momenta_of_step(), self._training.engine.planner
        self.engine_only = any(momentum.sent_always for momentum in momenta.values())
        # A tensor sent without loss needs no momentum.
        self.momenta = {
            name: momentum
            for name, momentum in momenta.items()
            if momentum.sent_always or not planner.sends_all(name, planner.plan[name])
        }

    @property
    def of_momenta(self) -> float:
        """The factor of momenta that converts them to the units of this rank's gradients."""
        training = self._training
        # The optimizer has momenta without the loss scale, and of the sum over all ranks if gradients are summed.
        return (self.loss_scale or 1.0) / (training.communicator.world_size if training.is_summed else 1)
