"""What gradients are measured in, and what they are sent with.

A loss scaler multiplies them. And where the optimizer freezes its second moment (`CompressedAdam`), a rank sends its
gradient plus a multiple of Adam's first moment, which all ranks have, and takes that term away from the mean: what is
compressed is the momentum, and everybody else still sees gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdcomp.bindings.training import Training
from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.compressors.parsing import parse_compressor


class Units:
    """Those of one training's gradients.

    Args:
        training: whose optimizer may ask for momenta.

    Attributes:
        loss_scale: of the step that has begun; None where it is not known.
        momenta: by name, what gradients are sent with in that step, as the framework has it.
        engine_only: whether that step needs the engine, whatever its plan.
    """

    def __init__(self, training: Training) -> None:
        self.loss_scale: float | None = None
        self.momenta: Mapping[str, Any] = {}
        self.engine_only = False
        self._training = training
        self._warm_up: Compressor | None = None  # that the optimizer asked for last

    @property
    def inverse(self) -> float:
        """What makes gradients of the loss of what arrives."""
        return 1 / (self.loss_scale or 1.0)

    def follow(self, scale: float | None) -> None:
        """Takes the loss scale of a step; what is left to be sent follows."""
        if scale is None:
            return
        if self.loss_scale is not None and scale != self.loss_scale:
            self._training.engine.scale_residuals(scale / self.loss_scale)
        self.loss_scale = scale

    def choose_compressor(self) -> None:
        """Compresses by what the optimizer asks for in its warm-up; to be called before the plan of a step is fixed.

        What enters a second moment that is refreshed is the gradient as it is. What was held back is a part of momenta,
        and waits for the next of these.
        """
        if self._training.refreshes():
            self._training.engine.planner.compress_by(NoCompression(), beside_residuals=True)
            return
        spec = self._training.warm_up()
        if spec is not None and (self._warm_up is None or str(self._warm_up) != spec):
            self._warm_up = parse_compressor(spec)
        self._training.engine.planner.compress_by(None if spec is None else self._warm_up)

    def choose_momenta(self) -> None:
        """Notes the momenta of a step, when its plan is fixed."""
        momenta, planner = self._training.momenta_of_step(), self._training.engine.planner
        self.engine_only = any(momentum.sent_always for momentum in momenta.values())
        # Where all is sent nothing is lost, and nothing has to be added.
        self.momenta = {
            name: momentum
            for name, momentum in momenta.items()
            if momentum.sent_always or not planner.sends_all(name, planner.plan[name])
        }

    @property
    def of_momenta(self) -> float:
        """By what momenta are multiplied, to be in the units of this rank's gradients."""
        training = self._training
        # The optimizer has them in the units of what it gets: without a loss scale, and of a sum of all ranks.
        return (self.loss_scale or 1.0) / (training.communicator.world_size if training.summed else 1)
