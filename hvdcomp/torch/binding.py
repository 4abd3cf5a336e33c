"""Serves stock `hvd.DistributedOptimizer` of horovod.torch.

Horovod calls `compress` for every gradient as it becomes ready (in any order), and `decompress` for every gradient
once all were compressed. A step takes one of two ways, the same on all ranks:

- cast: where the plan needs no more than an allreduce of cast gradients, Horovod carries them itself, overlapped with
  the backward pass. Each gradient interrupts that pass, so where all are cast alike nobody asks whose it is.
- engine: `compress` only notes the gradient and gives Horovod one number to allreduce; the first `decompress` runs the
  engine, whose collectives are then safe to wait for, because every rank has submitted everything of Horovod's own.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch

from hvdcomp.bindings.base import Binding
from hvdcomp.bindings.setup import Setup
from hvdcomp.communicators.horovod_torch import HorovodTorchCommunicator
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.errors import ConfigurationError, RankMismatchError
from hvdcomp.exchange.agreement import refused_on_every_rank
from hvdcomp.exchange.engine import Plan
from hvdcomp.policies.decisions import BatchSize
from hvdcomp.torch.caller import ParameterNames, caller_local
from hvdcomp.torch.learning_rate import ScaledSteps, rates_of
from hvdcomp.torch.optimizer import HorovodOptimizer, OpenSteps, compression_of
from hvdcomp.torch.parameters import by_name


class _Ticket(NamedTuple):
    """What Horovod carries from compress to decompress.

    Attributes:
        name: of the tensor; "" if nobody asked.
        cast: whether the step goes the way of casts.
        gradient: None where what Horovod allreduced is the result as it is.
    """

    name: str
    cast: bool
    gradient: torch.Tensor | None


_UNCHANGED = _Ticket("", True, None)  # of a tensor that nobody asked the name of
_OPEN_STEPS = OpenSteps()


class TorchBinding(Binding):
    """Ties one `Compression` to one Horovod optimizer.

    Args:
        setup: what the user gave. Its `parameters` are by name, or a function that returns pairs; None for those of
            Horovod's optimizer. Its `optimizer` is Horovod's; None where it is calling.
    """

    overlaps_with_policy = True

    def __init__(self, setup: Setup) -> None:
        self._grad_scaler = setup.grad_scaler
        self._optimizer = _checked_optimizer(setup)
        communicator = HorovodTorchCommunicator(setup.process_set or getattr(self._optimizer, "process_set", None))
        like = torch.empty(0)
        with refused_on_every_rank(communicator, like):
            self._parameters = by_name(setup.parameters, self._optimizer)
            self._horovods = HorovodOptimizer(self._optimizer, self._parameters)
            tensors = [_describe(name, parameter) for name, parameter in self._parameters.items()]
            super().__init__(setup, tensors, communicator, like)
        self._passes = getattr(self._optimizer, "backward_passes_per_step", 1)  # at the start
        self._scaled: ScaledSteps | None = None
        self._casting = False
        self._pending: dict[str, torch.Tensor] = {}
        self._results: dict[str, torch.Tensor] = {}
        self._submitted: set[str] = set()  # tensors of this step
        self._unnamed: list[torch.Tensor] = []  # gradients of this step of which nobody asked yet whose they are
        self._open = 0  # tensors of this step that were not decompressed yet
        self._names = ParameterNames(self._parameters)
        self._wires_of: Plan | None = None  # the latest that is nothing but casts
        self._wires: dict[tuple[str, torch.dtype], torch.dtype] = {}  # for `_wire_dtype`, of that plan
        self._wires_alike: dict[torch.dtype, torch.dtype] = {}  # the same by element type alone, if all are cast alike
        self._alike: dict[torch.dtype, torch.dtype] = {}  # `_wires_alike` in this step, empty if names are needed
        self._observed: str | None = None  # whose gradients this rank looks at in a step of casts
        self._unchanged = {name: _Ticket(name, True, None) for name in self._parameters}
        self._all: frozenset[str] = frozenset()  # tensors of the latest such step in which each was named

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Ticket]:
        if not self._open:
            self.begin()
        alike = self._alike.get(tensor.dtype)
        if alike is not None and tensor.is_contiguous():
            self._unnamed.append(tensor)
            self._open += 1
            return (tensor, _UNCHANGED) if alike is tensor.dtype else (tensor.to(alike), _Ticket("", True, tensor))
        name = self._names.of(tensor, self._optimizer)
        self._submitted.add(name)
        self._open += 1
        if self._casting:
            if self._observed == "local":
                self.observe("local", {name: tensor})
            wire = self._wire_dtype(name, tensor.dtype)
            sent = (tensor if tensor.dtype is wire else tensor.to(wire)).contiguous()
            return sent, self._unchanged[name] if sent is tensor else _Ticket(name, True, tensor)
        if name in self._pending or name not in self._horovods.own:
            self._horovods.refuse_gradient(name)
        self._pending[name] = tensor
        # An int64, because Horovod fuses tensors of one element type, and must not fuse these with the engine's
        # buffers: what is fused depends on timing, and would change the order of additions from run to run.
        return torch.full((1,), self.presence), _Ticket(name, False, tensor)

    def decompress(self, tensor: torch.Tensor, ticket: _Ticket) -> torch.Tensor:
        if ticket is _UNCHANGED:
            result = tensor
        elif ticket.cast:
            result = tensor if ticket.gradient is None else _as_gradient(tensor, ticket.gradient)
            if self._observed == "aggregated":
                self.observe("aggregated", {ticket.name: result})
        else:
            if self._pending:
                self._run_engine(int(tensor.item()))
            result = self._results.pop(ticket.name)
        self._open -= 1
        if not self._open and ticket.cast:
            self.engine.enter_casts(self._names_of_step())
            self._unnamed.clear()  # now: who sets gradients to None wants their memory back
            self.end_step()
        return result

    def _names_of_step(self) -> Set[str]:
        """The tensors of a step. Horovod hands over the same ones in each, so as many as before are those."""
        if not self._unnamed:
            return self._submitted
        if len(self._unnamed) + len(self._submitted) == len(self._all):
            return self._all
        for gradient in self._unnamed:
            self._submitted.add(self._names.of(gradient, self._optimizer))
        self._all = frozenset(self._submitted)
        return self._all

    def begin(self) -> None:
        """`Binding.begin`, and which way the step takes."""
        self._horovods.check_caller(self.setup.compression)
        _OPEN_STEPS.enter(self._optimizer)
        self._results.clear()
        self._pending.clear()
        self._submitted.clear()
        self._names.begin_step()
        super().begin()
        self._casting = self.engine.passthrough and not self.needs_engine
        if self._casting:
            self.refuse()
            self._follow_casts()
        if not self._casting or self.setup.settings.policy is not None:
            self.refuse_predivision(getattr(self._optimizer, "gradient_predivide_factor", 1.0))
        coordinator = self.coordinator
        self._observed = None if coordinator is None or not coordinator.observes else coordinator.source
        # What Horovod makes of a sparse gradient can be named only while it is handed over.
        copies = getattr(self._optimizer, "sparse_as_dense", False)
        unseen = self._casting and self._observed is None and not copies
        self._alike = self._wires_alike if unseen else {}

    def _follow_casts(self) -> None:
        """Makes what is remembered of the plan that of a new one."""
        plan = self.engine.plan
        if self._wires_of is not plan:
            self._wires_of, self._wires, self._wires_alike = plan, {}, {}
            if len(set(plan.values())) == 1:
                named = {parameter.dtype: name for name, parameter in self._parameters.items()}
                self._wires_alike = {dtype: self._wire_dtype(name, dtype) for dtype, name in named.items()}

    def _wire_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The element type in which a gradient travels, where the plan is to cast."""
        wire = self._wires.get((name, dtype))
        if wire is None:
            text = self.engine.plan[name].wire_dtype(str(dtype).removeprefix("torch."))
            wire = self._wires[name, dtype] = getattr(torch, text or "")
        return wire

    @torch.no_grad()
    def _run_engine(self, presence: int) -> None:
        """Runs the engine on what is pending; `presence` is what Horovod made of the ranks' numbers."""
        summed = getattr(self._optimizer, "op", hvd.Average) == hvd.Sum
        try:
            self.check_presence(presence if summed else presence * self.communicator.world_size)
        except (ConfigurationError, RankMismatchError):
            self._horovods.finish()
            raise
        pending, self._pending = self._pending, {}
        self._results = self.exchange(pending)
        if summed:
            for result in self._results.values():
                result.mul_(self.communicator.world_size)

    # What `Binding` asks of the framework.

    def facts(self) -> dict[str, Any]:
        return self._horovods.facts()

    def trained(self) -> Set[str]:
        return self._horovods.own

    def checksums(self, names: Sequence[str]) -> list[int]:
        return [_checksum(self._parameters[name]) for name in names]

    def reason_to_refuse(self) -> str | None:
        return self._horovods.reason_to_refuse()

    def learning_rates(self) -> tuple[float, ...]:
        if self._scaled is not None:
            return self._scaled.rates
        return rates_of(self._known_optimizer())

    def follow_batch_size(self, batch_size: BatchSize) -> None:
        if self._scaled is None:
            self._scaled = ScaledSteps(self._known_optimizer())
        self._known_optimizer().set_backward_passes_per_step(self._passes * batch_size.accumulation)
        self._scaled.factor = batch_size.learning_rate_factor

    def loss_scale(self) -> float | None:
        return None if self._grad_scaler is None else float(self._grad_scaler.get_scale())

    def momentum_of_optimizer(self) -> str | None:
        for group in getattr(self._optimizer, "param_groups", ()):
            if group.get("momentum"):
                return f"momentum={group['momentum']}"
            if "betas" in group and group["betas"][0]:
                return f"betas={tuple(group['betas'])}"
        return None

    def copy(self, array: torch.Tensor) -> torch.Tensor:
        return array.detach().clone()

    def place(self, array: torch.Tensor, name: str) -> torch.Tensor:
        return array.detach().to(self._parameters[name].device, copy=True)

    def _known_optimizer(self) -> Any:
        if self._optimizer is None:
            raise ConfigurationError(
                f"the policy {self.setup.settings.policy} needs the optimizer that Horovod made: use "
                "hvd.DistributedOptimizer(..., compression=compression)"
            )
        return self._optimizer


def _checked_optimizer(setup: Setup) -> Any:
    """The Horovod optimizer, given or calling, checked; None if compress is called by something else."""
    ours, optimizer = setup.compression, setup.optimizer
    if optimizer is None:
        optimizer = caller_local("self", object, lambda one: compression_of(one) is ours)
    elif compression_of(optimizer) is not ours:
        raise ConfigurationError(
            f"this {type(optimizer).__name__} does not use this hvdcomp.Compression; give what "
            "hvd.DistributedOptimizer(..., compression=compression) returned"
        )
    theirs = getattr(optimizer, "process_set", None)
    if setup.process_set is not None and theirs is not None and setup.process_set != theirs:
        raise ConfigurationError(
            f"hvdcomp.Compression was given process set {setup.process_set}, the optimizer {theirs}; give both the same"
        )
    return optimizer


def _describe(name: str, parameter: torch.nn.Parameter) -> TensorInfo:
    if not parameter.dtype.is_floating_point:
        raise ConfigurationError(
            f"parameter {name!r} has type {parameter.dtype}; gradient compression takes floating-point parameters"
        )
    return TensorInfo(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))


def _checksum(parameter: torch.Tensor) -> int:
    """The sum of the elements' bit patterns, taken as whole numbers."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    return int(parameter.detach().view(bits).sum(dtype=torch.int64)) & 2**64 - 1


def _as_gradient(reduced: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The allreduced tensor in the element type and memory layout of the gradient."""
    if reduced.dtype == gradient.dtype and reduced.stride() == gradient.stride():
        return reduced
    return torch.empty_like(gradient).copy_(reduced)

