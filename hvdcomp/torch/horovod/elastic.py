"""Enables `hvd.elastic.TorchState(..., compression=compression)` to save and restore an `hvdcomp.Compression`, and also
optimizers.

Each object in an elastic state has a handler. Horovod calls the handler to save the object at a commit, to restore the
object after a failure, and to synchronize the object when the ranks have changed. `hvdcomp.bindings.elastic`
synchronizes a `Compression` in the first step after a change. Only a policy that changes the batch size must be
synchronized earlier, because the training loop reads `compression.accumulation` before this step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.elastic.state import (
    OptimizerStateHandler,
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)

from hvdcomp.bindings.callers import caller_local
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.horovod.optimizer import compression_of
from hvdcomp.torch.local_steps.optimizer import OWN, LocalSteps, put


class CompressionHandler(StateHandler):
    """Saves and restores one `hvdcomp.Compression` for Horovod's TorchState.

    Args:
        value: the `Compression` in the elastic state.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved = value.state_dict()

    def save(self) -> None:
        self._saved = self.value.state_dict()

    def restore(self) -> None:
        self.value.roll_back(self._saved)

    def sync(self) -> None:
        state = caller_local("self", lambda value: isinstance(value, TorchState))
        handlers = () if state is None else state._handlers.values()
        optimizers = (handler.value for handler in handlers if compression_of(handler.value) is self.value)
        self.value.meet_ranks_early(next(optimizers, None))


class OptimizerHandler(OptimizerStateHandler):
    """Saves and restores an optimizer like Horovod's own handler, but does not change the weights.

    To give a new rank the state of an optimizer, Horovod's own handler makes a step with zero gradients on the new
    rank. In this step, weight decay would change the weights of the new rank, although they may already be equal to the
    weights of rank 0.

    Args:
        value: the optimizer in the elastic state.
    """

    def sync(self) -> None:
        weights = [parameter.clone() for parameter in _parameters(self.value)]
        super().sync()
        put(_parameters(self.value), weights)


class LocalStepsHandler(StateHandler):
    """Saves and restores one `LocalSteps` together with the weights of the model. Between two exchanges, weights differ
    between ranks.

    A rank that survives keeps its own weights, moments and steps. A new rank begins with the state of rank 0: the outer
    weights, the outer momentum, the state of the inner optimizer, and the number of steps since the exchange.

    Args:
        value: the `LocalSteps` optimizer in the elastic state.
    """

    def __init__(self, value: LocalSteps) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy((list(_parameters(self.value)), self.value.state_dict()))

    def restore(self) -> None:
        weights, state = self._saved
        put(_parameters(self.value), weights)
        self.value.roll_back(copy.deepcopy(state))

    def sync(self) -> None:
        state = caller_local("self", lambda value: isinstance(value, TorchState))
        if any(isinstance(handler.value, torch.nn.Module) for handler in getattr(state, "_handlers", {}).values()):
            raise ConfigurationError(
                "hvd.elastic.TorchState was given a model together with LocalSteps. Horovod would then give all ranks "
                "the weights of rank 0, and the steps of the other ranks since the latest exchange would be lost. "
                "Leave out model=, because LocalSteps keeps the weights"
            )
        own = self.value.state_dict()
        own.get(OWN, {}).pop("compression", None)  # the binding synchronizes the compression
        message = (list(_parameters(self.value)), own) if hvd.rank() == 0 else None
        weights, common = hvd.broadcast_object(message, root_rank=0, name="hvdcomp.local_steps")
        if OWN not in common:  # rank 0 has not made a step
            put(_parameters(self.value), weights)
        if OWN not in common or OWN not in own:
            self.value.join(common)
        self.save()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter.detach() for group in optimizer.param_groups for parameter in group["params"])


def register(kind: type) -> None:
    """Registers handlers with Horovod: `CompressionHandler` for objects of this kind, and the handlers of optimizers.
    Later calls do nothing."""
    registry = get_handler_registry()
    if all(registered is not kind for registered, _ in registry):
        # LocalSteps comes first, because Horovod uses the first handler that fits, and a LocalSteps is also an
        # optimizer.
        optimizers = [(LocalSteps, LocalStepsHandler), (torch.optim.Optimizer, OptimizerHandler)]
        set_handler_registry([*optimizers, *registry, (kind, CompressionHandler)])
