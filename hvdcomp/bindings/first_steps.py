"""Compares the settings of the ranks in the first step, and the weights of the ranks in the first step that requires
equal weights.

During the backward pass, a rank waits for all ranks only in these comparisons.
"""

from __future__ import annotations

from typing import Any

import numpy

from hvdcomp.bindings.training import Training
from hvdcomp.compressors import needs_nodes
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import WEIGHTS, facts_of_kernels, refused_on_every_rank, require_agreement
from hvdcomp.files import VERSION

MPI4PY = "mpi4py for decisions (install it on all hosts or on none)"  # the setting's name in messages


class FirstSteps:
    """Compares the settings and the weights of all ranks.

    Args:
        training: the `Training` of this rank.
        error: message of an error that occurred on this rank while its binding was created. This error is raised on all
            ranks in the first step. None if there was no error.
    """

    def __init__(self, training: Training, error: str | None) -> None:
        self._training = training
        self._error = error
        self._settings_agreed = self._weights_agreed = False
        self._first: int | None = None  # number of the first step that the current ranks make together

    @property
    def has_begun(self) -> bool:
        """Whether the first step has begun."""
        return self._first is not None

    @property
    def has_agreed(self) -> bool:
        """Whether the settings and the weights were both compared."""
        return self._settings_agreed and self._weights_agreed

    def compare(self) -> None:
        """Makes the comparisons that the current step needs. If the step needs a comparison, this method waits for all
        ranks.

        Raises:
            RankMismatchError: on every rank, if the settings or the weights of the ranks differ.
            ConfigurationError: on every rank, if a rank has settings that do not work.
        """
        if self.has_agreed:
            return
        training = self._training
        if self._first is None:
            training.agree_with_new_ranks()
            self._first = training.engine.step_number
        step = training.engine.step_number
        weights_due = step - self._first >= training.steps_before_broadcast
        if self._settings_agreed and not weights_due:
            return
        facts: dict[str, Any] = {}
        with refused_on_every_rank(training.communicator, training.like):
            if not self._settings_agreed:
                if self._error is not None:
                    raise ConfigurationError(self._error)
                facts |= self._facts()
                self._refuse_double_momentum()
            if weights_due:
                facts |= self._weights()
        require_agreement(training.communicator, facts, training.like, training.broadcast)
        if not self._settings_agreed:
            settings = training.setup.compression.settings
            if any(map(needs_nodes, settings.compressors)):
                # If a two-level exchange is not possible, this call raises the error now. Otherwise the error would be
                # raised later, when a policy chooses a two-level exchange.
                training.engine.levels.find()
            if training.coordinator is not None:
                training.coordinator.start_log()
        self._settings_agreed, self._weights_agreed = True, weights_due

    def _facts(self) -> dict[str, Any]:
        training = self._training
        settings, engine, trained = training.setup.compression.settings, training.engine, training.trained()
        tensors, level = engine.tensors, engine.planner.level
        infos = [tensors[name] for name in sorted(trained)]
        parameters = {f"parameter {tensor.name}": f"{tensor.dtype} {tensor.own_shape}" for tensor in infos}
        return {
            **settings.describe(),
            **training.facts(),
            "level": settings.compressor.level if level is None else level,
            "step": engine.step_number,
            "momentum of the optimizer": self._doubled_momentum(),
            "warm-up of the optimizer": training.warm_up(),
            "hvdcomp": VERSION,
            MPI4PY: training.coordinator is not None and training.communicator.has_mpi,
            "numpy": numpy.__version__,
            **facts_of_kernels(),
            "parameters that are not trained": [name for name in tensors if name not in trained],
            **parameters,
        }

    def _weights(self) -> dict[str, Any]:
        names = sorted(self._training.trained())
        numbers = self._training.checksums(names)
        return {f"{WEIGHTS}{name}": f"{number:x}" for name, number in zip(names, numbers, strict=True)}

    def _doubled_momentum(self) -> str | None:
        """The optimizer's momentum, in words, if both the optimizer and the memory apply momentum; otherwise None."""
        memory = self._training.engine.memory
        return self._training.momentum_of_optimizer() if memory is not None and memory.is_momentum else None

    def _refuse_double_momentum(self) -> None:
        momentum = self._doubled_momentum()
        if momentum:
            raise ConfigurationError(
                f"the optimizer has {momentum}, but {self._training.engine.memory} already applies momentum, before "
                "compression. Use an optimizer without momentum (SGD with momentum=0) and set the momentum of the "
                "memory (dgc:momentum=...), or choose memory=hvdcomp.ErrorFeedback()"
            )
