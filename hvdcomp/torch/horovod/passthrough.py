"""Steps in which Horovod itself allreduces the gradients, cast or unchanged, during the backward pass.

All work for a gradient delays the backward pass. So if all gradients are cast to the same type, their names are not
looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import torch

from hvdcomp.compressors.choice import Plan
from hvdcomp.exchange.engine import Engine
from hvdcomp.torch.horovod.caller import ParameterNames


class Ticket(NamedTuple):
    """The context that Horovod passes from `compress` to `decompress`.

    Attributes:
        name: the name of the tensor; "" if it was not looked up.
        cast: whether Horovod itself allreduces the gradient.
        gradient: the original gradient; None if the result of Horovod needs no cast.
    """

    name: str
    cast: bool
    gradient: torch.Tensor | None


UNCHANGED = Ticket("", True, None)  # for tensors whose name was not looked up


class Passthrough:
    """The part of a binding that handles steps in which gradients are only cast.

    Args:
        engine: the engine. The plan of the engine determines how each gradient is cast.
        parameters: the parameters of the model, by name.
        names: the object that finds the names of gradients.
        optimizer: Horovod's optimizer; None if another function of Horovod is the caller.
        observe: function that passes gradients to the policy. The function gets the source of the gradients, as in
            `Policy.source`, and the gradients by name.
    """

    def __init__(
        self,
        engine: Engine,
        parameters: Mapping[str, torch.nn.Parameter],
        names: ParameterNames,
        optimizer: Any,
        observe: Callable[[str, Mapping[str, torch.Tensor]], None],
    ) -> None:
        self._engine = engine
        self._parameters = parameters
        self._names = names
        self._optimizer = optimizer
        self._observe = observe
        self._observed: str | None = None  # the source of the gradients that are observed in this step
        # Three tables with the element type in which each tensor is sent, for the plan `_wires_of`. The keys of
        # `_wires` are the name and the element type of the tensor. The keys of `_wires_alike` are only element types;
        # this table is empty unless all tensors are cast to the same type. `_alike` is the table `_wires_alike` in a
        # step that needs no names, and is empty in other steps.
        self._wires_of: Plan | None = None
        self._wires: dict[tuple[str, torch.dtype], torch.dtype] = {}
        self._wires_alike: dict[torch.dtype, torch.dtype] = {}
        self._alike: dict[torch.dtype, torch.dtype] = {}
        self._named: set[str] = set()  # the names of the tensors of this step
        self._unnamed: list[torch.Tensor] = []  # the gradients of this step that have no name yet
        self._all: frozenset[str] = frozenset()  # the names of all tensors in the latest step that looked up all names
        self._unchanged = {name: Ticket(name, True, None) for name in parameters}

    def begin(self, observed: str | None) -> None:
        """Begins a step.

        Args:
            observed: the source of the gradients that this rank observes, as in `Policy.source`; None if this rank
                observes no gradients.
        """
        plan = self._engine.plan
        if self._wires_of is not plan:
            self._wires_of, self._wires, self._wires_alike = plan, {}, {}
            if len(set(plan.values())) == 1:
                named = {parameter.dtype: name for name, parameter in self._parameters.items()}
                self._wires_alike = {dtype: self._wire_dtype(name, dtype) for dtype, name in named.items()}
        self._named.clear()
        self._unnamed.clear()
        self._observed = observed
        # The name of the dense copy of a sparse gradient can only be found while Horovod passes the copy.
        copies = getattr(self._optimizer, "sparse_as_dense", False)
        self._alike = self._wires_alike if observed is None and not copies else {}

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Ticket]:
        """The tensor that Horovod must allreduce for a gradient."""
        alike = self._alike.get(tensor.dtype)
        if alike is not None and tensor.is_contiguous():
            self._unnamed.append(tensor)
            return (tensor, UNCHANGED) if alike is tensor.dtype else (tensor.to(alike), Ticket("", True, tensor))
        name = self._names.of(tensor, self._optimizer)
        self._named.add(name)
        if self._observed == "local":
            self._observe("local", {name: tensor})
        wire = self._wire_dtype(name, tensor.dtype)
        sent = (tensor if tensor.dtype is wire else tensor.to(wire)).contiguous()
        return sent, self._unchanged[name] if sent is tensor else Ticket(name, True, tensor)

    def decompress(self, tensor: torch.Tensor, ticket: Ticket) -> torch.Tensor:
        """The mean gradient, computed from Horovod's result."""
        result = tensor if ticket.gradient is None else _as_gradient(tensor, ticket.gradient)
        if self._observed == "aggregated":
            self._observe("aggregated", {ticket.name: result})
        return result

    def end(self) -> None:
        """Ends a step, and records its bytes in the ledger."""
        self._engine.enter_casts(self._names_of_step())
        self._unnamed.clear()  # releases gradients, so that their memory is freed when the user sets them to None

    def _names_of_step(self) -> Set[str]:
        """The names of the tensors of a step. Horovod passes the same tensors in all steps. So if the number of tensors
        is the same as before, the tensors are the same."""
        if not self._unnamed:
            return self._named
        if len(self._unnamed) + len(self._named) == len(self._all):
            return self._all
        for gradient in self._unnamed:
            self._named.add(self._names.of(gradient, self._optimizer))
        self._all = frozenset(self._named)
        return self._all

    def _wire_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The element type in which a gradient is sent."""
        wire = self._wires.get((name, dtype))
        if wire is None:
            text = self._engine.plan[name].wire_dtype(str(dtype).removeprefix("torch."))
            wire = self._wires[name, dtype] = getattr(torch, text or "")
        return wire


def _as_gradient(reduced: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The allreduced tensor, with the element type and memory layout of the gradient."""
    if reduced.dtype == gradient.dtype and reduced.stride() == gradient.stride():
        return reduced
    return torch.empty_like(gradient).copy_(reduced)
