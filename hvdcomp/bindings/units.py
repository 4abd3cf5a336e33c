"""The units of gradients. The units change if the loss scale changes, or if momenta are added before the exchange.

A loss scaler multiplies gradients by the loss scale. If the optimizer has frozen its second moment (`CompressedAdam`),
a rank adds a multiple of Adam's first moment to its gradient, and sends the sum. All ranks have the same first moment,
so each rank subtracts this multiple from the mean. In this way the ranks compress momenta, and the optimizer still gets
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdcomp.bindings.training import Training
from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.compressors.parsing import parse_compressor


class Units:
    """The units of the gradients of one training run.

    Args:
        training: the `Training`. Its optimizer may require that momenta are added to gradients.

    Attributes:
        loss_scale: loss scale of the current step; None if it is unknown.
        momenta: the momenta that are added to the gradients of the current step, by name, as arrays of the framework.
        engine_only: whether the current step must use the engine, even if its plan only casts gradients.
    """

    def __init__(self, training: Training) -> None:
        self.loss_scale: float | None = None
        self.momenta: Mapping[str, Any] = {}
        self.engine_only = False
        self._training = training
        self._warm_up: Compressor | None = None  # the optimizer's last warm-up compressor

    @property
    def inverse(self) -> float:
        """The factor that converts scaled gradients to gradients of the loss: 1 / loss scale."""
        return 1 / (self.loss_scale or 1.0)

    def follow(self, scale: float | None) -> None:
        """Sets the loss scale of a step, and multiplies residuals so that they have this loss scale too. If `scale` is
        None, the loss scale and the residuals do not change."""
        if scale is None:
            return
        if self.loss_scale is not None and scale != self.loss_scale:
            self._training.engine.scale_residuals(scale / self.loss_scale)
        self.loss_scale = scale

    def choose_compressor(self) -> None:
        """Chooses the compressor of a step if the optimizer requires a special one. Call this method before the plan of
        the step is fixed.

        During its warm-up, the optimizer specifies a compressor. If the optimizer refreshes its second moment,
        gradients are sent uncompressed. Residuals are parts of momenta, so they are not sent in this step. They are
        sent with the next compressed momentum.
        """
        if self._training.refreshes():
            self._training.engine.planner.compress_by(NoCompression(), ignores_residuals=True)
            return
        spec = self._training.warm_up()
        if spec is not None and (self._warm_up is None or str(self._warm_up) != spec):
            self._warm_up = parse_compressor(spec)
        self._training.engine.planner.compress_by(None if spec is None else self._warm_up)

    def choose_momenta(self) -> None:
        """Chooses the momenta that are added to the gradients of a step. Call this method after the plan of the step is
        fixed."""
        momenta, planner = self._training.momenta_of_step(), self._training.engine.planner
        self.engine_only = any(momentum.sent_always for momentum in momenta.values())
        # If a tensor is sent without loss, the result would be the same with and without a momentum.
        self.momenta = {
            name: momentum
            for name, momentum in momenta.items()
            if momentum.sent_always or not planner.sends_all(name, planner.plan[name])
        }

    @property
    def of_momenta(self) -> float:
        """The factor that converts the optimizer's momenta to the units of this rank's gradients."""
        training = self._training
        # The optimizer's momenta do not contain the loss scale. If gradients are summed over all ranks instead of
        # averaged, the momenta are momenta of these sums.
        return (self.loss_scale or 1.0) / (training.communicator.world_size if training.is_summed else 1)
