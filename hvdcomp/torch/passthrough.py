"""Steps that Horovod carries itself: each gradient as it is, or cast, while the backward pass goes on.

Each gradient interrupts that pass, so where all are cast alike its name is not looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import torch

from hvdcomp.compressors.choice import Plan
from hvdcomp.exchange.engine import Engine
from hvdcomp.torch.caller import ParameterNames


class Ticket(NamedTuple):
    """The context that Horovod carries from compress to decompress.

    Attributes:
        name: of the tensor; "" where it was not looked up.
        cast: whether Horovod carries the gradient itself.
        gradient: None where what Horovod allreduced is the result as it is.
    """

    name: str
    cast: bool
    gradient: torch.Tensor | None


UNCHANGED = Ticket("", True, None)  # of a tensor whose name was not looked up


class Passthrough:
    """The work of a binding in steps that need no more than an allreduce of (cast) gradients.

    Args:
        engine: whose plan says how each gradient is cast.
        parameters: by name.
        names: of their gradients.
        optimizer: Horovod's; None if something else calls.
        observe: is given a source, as in `Policy.source`, and gradients by name.
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
        self._observed: str | None = None  # whose gradients this rank looks at in this step
        # Of the latest plan that is nothing but casts: the element type in which each tensor travels, by name and
        # element type; by element type alone, if all are cast alike; and the latter if this step asks for no names.
        self._wires_of: Plan | None = None
        self._wires: dict[tuple[str, torch.dtype], torch.dtype] = {}
        self._wires_alike: dict[torch.dtype, torch.dtype] = {}
        self._alike: dict[torch.dtype, torch.dtype] = {}
        self._named: set[str] = set()  # tensors of this step
        self._unnamed: list[torch.Tensor] = []  # gradients of this step whose names are not known yet
        self._all: frozenset[str] = frozenset()  # tensors of the latest step in which each was named in the end
        self._unchanged = {name: Ticket(name, True, None) for name in parameters}

    def begin(self, observed: str | None) -> None:
        """Starts a step.

        Args:
            observed: whose gradients this rank looks at, as in `Policy.source`; None for nobody's.
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
        # What Horovod makes of a sparse gradient can be named only while it is handed over.
        copies = getattr(self._optimizer, "sparse_as_dense", False)
        self._alike = self._wires_alike if observed is None and not copies else {}

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Ticket]:
        """The tensor that Horovod is to allreduce for a gradient."""
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
        """The gradient's mean, from what Horovod allreduced."""
        result = tensor if ticket.gradient is None else _as_gradient(tensor, ticket.gradient)
        if self._observed == "aggregated":
            self._observe("aggregated", {ticket.name: result})
        return result

    def end(self) -> None:
        """Ends a step: counts what its tensors cost."""
        self._engine.enter_casts(self._names_of_step())
        self._unnamed.clear()  # now: who sets gradients to None wants their memory back

    def _names_of_step(self) -> Set[str]:
        """The tensors of a step. Horovod hands over the same ones in each: if their number is the same, they are."""
        if not self._unnamed:
            return self._named
        if len(self._unnamed) + len(self._named) == len(self._all):
            return self._all
        for gradient in self._unnamed:
            self._named.add(self._names.of(gradient, self._optimizer))
        self._all = frozenset(self._named)
        return self._all

    def _wire_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The element type in which a gradient travels."""
        wire = self._wires.get((name, dtype))
        if wire is None:
            text = self._engine.plan[name].wire_dtype(str(dtype).removeprefix("torch."))
            wire = self._wires[name, dtype] = getattr(torch, text or "")
        return wire


def _as_gradient(reduced: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The allreduced tensor in the element type and memory layout of the gradient."""
    if reduced.dtype == gradient.dtype and reduced.stride() == gradient.stride():
        return reduced
    return torch.empty_like(gradient).copy_(reduced)
