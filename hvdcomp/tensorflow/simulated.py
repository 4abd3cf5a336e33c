"""The binding of simulated ranks. One process has several models, and each model belongs to one simulated rank. The
ranks exchange gradients as with Horovod's tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from hvdcomp.bindings.setup import Setup, UsedCompression
from hvdcomp.communicators.simulated import SimulatedCommunicator
from hvdcomp.tensorflow.names import by_name
from hvdcomp.tensorflow.training import TensorFlowTraining


class SimulatedBinding(TensorFlowTraining):
    """Ties one `Compression` to one model of a simulation.

    Args:
        setup: the `Compression`, and what the user passed to it.
        variables: all trained variables, by name.
        communicator: the communicator of this simulated rank.
    """

    broadcast = "use the same seed on every rank"

    def __init__(self, setup: Setup, variables: Mapping[str, tf.Variable], communicator: SimulatedCommunicator) -> None:
        self._ranks = communicator
        super().__init__(setup, variables, communicator)  # type: ignore[arg-type]
        self.engine.ledger.clock.follow(self.now)

    def exchange(self, gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The means of the gradients of all variables, in the same order."""
        if self._optimizer is not None:
            self.steps_made = int(self._optimizer.iterations)
        self.begin()
        if self._scaled is not None:
            self._scaled.begin_step()
        started = self.communicator.start_allreduce(np.array([self.presence]), "sum", "hvdcomp.presence")
        self.check_presence(int(self.communicator.wait(started)[0]))
        return self.means_of(list(self._variables), gradients)

    # Methods of `Training`.

    def now(self) -> float:
        return self._ranks.now()

    def facts(self) -> dict[str, Any]:
        return {}

    def trained(self) -> Set[str]:
        return self._variables.keys()


def serve_simulated(
    compression: UsedCompression,
    variables: Sequence[tf.Variable],
    communicator: SimulatedCommunicator,
    optimizer: Any,
) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """Sets up the exchange of compressed gradients for the model of a simulated rank.

    Args:
        compression: a `Compression` that no other model uses.
        variables: all trained variables.
        communicator: the communicator of this simulated rank.
        optimizer: the Keras optimizer of the model.

    Returns:
        A function that takes the gradients of all variables, in order, and returns their means. Call this function once
        in each step.
    """
    named = by_name(variables)
    return compression.serve(lambda setup: SimulatedBinding(setup, named, communicator), optimizer).exchange
