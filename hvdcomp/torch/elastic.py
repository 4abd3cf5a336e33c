"""Lets `hvd.elastic.TorchState(..., compression=compression)` keep a `hvdcomp.Compression`.

Horovod asks a handler for what it does not know: at a commit to keep a copy, after a failure to go back to it, and
when the ranks have changed to make all ranks agree. The last is done by `hvdcomp.bindings.elastic` in the first step.
Only a policy that changes the batch size needs it earlier, since the training loop reads `compression.accumulation`
before that step.
"""

from __future__ import annotations

from typing import Any

from horovod.torch.elastic.state import StateHandler, TorchState, get_handler_registry, set_handler_registry

from hvdcomp.bindings.callers import caller_local
from hvdcomp.torch.optimizer import compression_of


class CompressionHandler(StateHandler):
    """Keeps one `hvdcomp.Compression` for Horovod's TorchState.

    Args:
        value: the compression.
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


def register(kind: type) -> None:
    """Tells Horovod to keep objects of this kind by `CompressionHandler`; once is enough."""
    registry = get_handler_registry()
    if all(known is not kind for known, _ in registry):
        set_handler_registry([*registry, (kind, CompressionHandler)])
