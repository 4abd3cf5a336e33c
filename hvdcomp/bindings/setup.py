"""The interface between a `Compression` and its binding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from hvdcomp.adaptation.decision_log import LogFiles
from hvdcomp.compressors.choice import Plan
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.ledger import Ledger
from hvdcomp.settings import Settings
from hvdcomp.specs.levels import Level


class UsedCompression(Protocol):
    """The attributes and methods of `hvdcomp.Compression` that bindings use. `Compression` documents them."""

    settings: Settings
    ledger: Ledger
    decision_log: LogFiles | None

    @property
    def levels(self) -> dict[str, Level]: ...

    @property
    def plan(self) -> Plan: ...

    def metrics(self) -> dict[str, float]: ...

    def paused(self) -> AbstractContextManager[None]: ...

    def serve(self, make_binding: Callable[[Setup], Any], optimizer: Any = None) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], optimizer: Any = None) -> None: ...

    def roll_back(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Setup:
    """What a binding needs from the user: the `Compression`, and what the user passed to it.

    Attributes:
        compression: the `Compression`.
        parameters: the parameters by name, or a function that returns them; None if the binding finds them itself.
        process_set: Horovod's process set; None for the optimizer's own process set, or for all ranks.
        grad_scaler: the loss scaler; None if there is none, or if the binding finds it itself.
        optimizer: the optimizer whose gradients are compressed; None if the binding finds it itself.
    """

    compression: UsedCompression
    parameters: Any
    process_set: Any
    grad_scaler: Any
    optimizer: Any


def require_compression(value: Any, function: str) -> None:
    """Raises ConfigurationError if `value` is not an `hvdcomp.Compression`. `function` is the name of the function that
    got `value`, for the message."""
    if not hasattr(value, "serve"):
        given = repr(value)
        if "\n" in given:  # probably the text of an optimizer or a model, which is too long for the message
            given = f"an object of class {type(value).__name__}"
        raise ConfigurationError(
            f"{function} was given {given} as compression; pass an hvdcomp.Compression, such as "
            "hvdcomp.Compression(hvdcomp.TopK(ratio=0.01)) or hvdcomp.Compression.from_spec('topk:ratio=0.01')"
        )
