"""Serves stock `hvd.DistributedOptimizer` of horovod.torch.

Horovod calls `compress` for every gradient as it becomes ready (in any order), and `decompress` for every gradient
once all were compressed. A step takes one of two ways, the same on all ranks:

- cast: where the plan needs no more than an allreduce of cast gradients, Horovod carries them itself, overlapped with
  the backward pass.
- engine: `compress` only notes the gradient and gives Horovod one number to allreduce; the first `decompress` runs the
  engine, whose collectives are then safe to wait for, because every rank has submitted everything of Horovod's own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import horovod.torch as hvd
import numpy
import torch

import hvdcomp
from hvdcomp import checkpoint
from hvdcomp.agreement import require_agreement, require_same_levels
from hvdcomp.broadcast import Broadcaster, CommunicatorBroadcaster
from hvdcomp.collectives import TensorInfo
from hvdcomp.communicators.horovod_torch import HorovodTorchCommunicator
from hvdcomp.coordinator import Coordinator
from hvdcomp.decision_log import DecisionLog
from hvdcomp.engine import Engine
from hvdcomp.errors import ConfigurationError
from hvdcomp.policies import LevelSchedule, Policy
from hvdcomp.policies.decisions import BatchSize
from hvdcomp.torch.caller import ParameterNames, caller_local
from hvdcomp.torch.learning_rate import ScaledSteps, rates_of

if TYPE_CHECKING:
    from hvdcomp.compression import Compression

# The number that Horovod allreduces for each tensor in an engine step. An int64, because Horovod fuses tensors of one
# element type, and must not fuse these with the engine's buffers: what is fused depends on timing, and would change the
# order of additions from run to run. It is this number plus a digest of the rank's levels, so that its mean tells
# whether all ranks take part, and all at the same levels.
_PRESENCE = 2**44
_DIGESTS = 2**20
_PRESENCE_BYTES = 8


class _Ticket(NamedTuple):
    """What Horovod carries from compress to decompress."""

    name: str
    cast: bool
    gradient: torch.Tensor


class TorchBinding:
    """Ties one `Compression` to one Horovod optimizer.

    Args:
        compression: whose settings, ledger and identity are used.
        parameters: by name.
        process_set: of the optimizer; None to take the optimizer's own.
        grad_scaler: the AMP scaler in use, or None.
        optimizer: Horovod's optimizer; None where it is calling.
    """

    def __init__(
        self,
        compression: Compression,
        parameters: Mapping[str, torch.nn.Parameter],
        process_set: Any,
        grad_scaler: Any,
        optimizer: Any = None,
    ) -> None:
        self._compression = compression
        self._parameters = dict(parameters)
        self._grad_scaler = grad_scaler
        self._loss_scale: float | None = None
        self._optimizer = self._checked_optimizer(optimizer, process_set)
        self._communicator = HorovodTorchCommunicator(process_set or getattr(self._optimizer, "process_set", None))
        settings = compression.settings
        self.engine = Engine(
            self._communicator,
            [_describe(name, parameter) for name, parameter in self._parameters.items()],
            settings.compressor,
            memory=settings.memory,
            seed=settings.seed,
            min_numel=settings.min_numel,
            min_ndim=settings.min_ndim,
            bytes_per_tensor=_PRESENCE_BYTES,
            ledger=compression.ledger,
        )
        self._log_error: str | None = None
        self.coordinator = self._make_coordinator()
        self._passes = getattr(self._optimizer, "backward_passes_per_step", 1)  # at the start
        self._scaled: ScaledSteps | None = None
        self._batch_size = BatchSize(1, 1.0)  # as it was put into the optimizer
        self._presence = _PRESENCE
        self._agreed = False
        self._casting = False
        self._pending: dict[str, torch.Tensor] = {}
        self._results: dict[str, torch.Tensor] = {}
        self._submitted: set[str] = set()  # tensors of this step
        self._open: set[str] = set()  # those of them that were not decompressed yet
        self._names = ParameterNames(self._parameters)

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Ticket]:
        if not self._open:
            self._begin()
        name = self._names.of(tensor, self._optimizer)
        self._submitted.add(name)
        self._open.add(name)
        if self._casting:
            self._observe("local", {name: tensor})
            wire = self.engine.plan[name].wire_dtype(str(tensor.dtype).removeprefix("torch."))
            return tensor.to(getattr(torch, wire or "")).contiguous(), _Ticket(name, True, tensor)
        self._pending[name] = tensor
        return torch.full((1,), self._presence), _Ticket(name, False, tensor)

    @torch.no_grad()
    def decompress(self, tensor: torch.Tensor, ticket: _Ticket) -> torch.Tensor:
        if ticket.cast:
            result = _as_gradient(tensor, ticket.gradient)
            self._observe("aggregated", {ticket.name: result})
        else:
            if self._pending:
                self._run_engine(int(tensor.item()))
            result = self._results.pop(ticket.name)
        self._open.discard(ticket.name)
        if not self._open and ticket.cast:
            self.engine.enter_casts(sorted(self._submitted))
            if self.coordinator is not None:
                self.coordinator.end_step()
        return result

    def _begin(self) -> None:
        """Starts a step: the plan is fixed now, so that all tensors of the step take the same way."""
        if self._communicator.is_stale:
            raise ConfigurationError(
                f"Horovod was started anew, and rank {self._communicator.rank} of {self._communicator.size} is now "
                "another one: hvdcomp does not follow elastic changes by itself. After each make a new "
                "hvdcomp.Compression and hvd.DistributedOptimizer, and give it the old one's state_dict()."
            )
        self._results.clear()
        self._submitted.clear()
        self._names.begin_step()
        settings = self._compression.settings
        if isinstance(settings.policy, LevelSchedule):
            step = self.engine.step_number
            own = settings.compressor.level
            self.engine.set_level(settings.policy.level_at(step, settings.steps_per_epoch, own))
        if self.coordinator is not None:
            self.coordinator.begin_step(self._learning_rates)
            self._require_same_batch_size()
        self.engine.begin()
        self._presence = _PRESENCE + self.engine.digest % _DIGESTS
        # The first step goes through the engine whatever the plan, so that ranks with different settings meet in
        # the same collective and can say so.
        more = self.coordinator is not None and self.coordinator.needs_engine
        self._casting = self._agreed and self.engine.only_casts and not more
        if not self._casting:
            self._refuse_predivision()
        self._follow_loss_scale()

    def _run_engine(self, presence: int) -> None:
        factor = self._reduction_factor(presence)
        self._agree()
        if presence != self._presence * factor:
            require_same_levels(self.engine.communicator, self.engine.digest, torch.empty(0))
        self._refuse_double_momentum()
        if self.coordinator is not None:
            self.coordinator.before_exchange()
        pending, self._pending = self._pending, {}
        self._results = self.engine.step(pending)
        self._observe("local", pending, self.engine.poison)
        self._observe("aggregated", self._results, self.engine.poison)
        if self.coordinator is not None:
            self.coordinator.end_step()
        if factor != 1:
            for result in self._results.values():
                result.mul_(factor)

    def _agree(self) -> None:
        if not self._agreed:
            require_agreement(self.engine.communicator, self._facts(), torch.empty(0))
            self._agreed = True
            if self.coordinator is not None:
                self.coordinator.start_log()

    def _reduction_factor(self, presence: int) -> int:
        """What the mean is to be multiplied with: 1, or the number of ranks where the optimizer sums.

        `presence` is what Horovod made of the ranks' numbers.
        """
        size = self.engine.communicator.size
        summed = getattr(self._optimizer, "op", hvd.Average) == hvd.Sum
        expected = size if summed else 1
        present = presence / _PRESENCE * (1 if summed else size)
        if abs(present - size) > 0.5:
            raise ConfigurationError(
                f"only {present:.0f} of {size} ranks took part in this step: hvd.join() "
                "does not work with gradient compression. Give every rank the same number of batches."
            )
        return expected

    # What concerns a policy that rank 0 decides by.

    def _make_coordinator(self) -> Coordinator | None:
        settings = self._compression.settings
        if not isinstance(settings.policy, Policy):
            return None

        def broadcaster() -> Broadcaster:
            if self._communicator.has_mpi:
                from hvdcomp.communicators.mpi import MPIBroadcaster

                return MPIBroadcaster()
            return CommunicatorBroadcaster(self._communicator, torch.empty(0))

        return Coordinator(
            settings.policy, self.engine, broadcaster, torch.empty(0), settings.steps_per_epoch, self._open_log()
        )

    def _open_log(self) -> DecisionLog | None:
        """Rank 0's log. One that cannot be written is told to all ranks with the settings."""
        path = self._compression.decision_log
        if path is None or self.engine.communicator.rank != 0:
            return None
        try:
            return DecisionLog(path)
        except ConfigurationError as error:
            self._log_error = str(error)
            return None

    @property
    def accumulation(self) -> int:
        """`Compression.accumulation`, after what is decided has been put into the optimizer."""
        if self.coordinator is None:
            return 1
        self.coordinator.settle(self._learning_rates)
        self._apply_batch_size()
        return self._batch_size.accumulation

    def _apply_batch_size(self) -> None:
        """Puts the batch size in force into the optimizer, between two steps."""
        if self.coordinator is None or self.coordinator.batch_size == self._batch_size:
            return
        # A residual is a change of the weights that is still to come, at the learning rate of its time.
        factor = self._batch_size.learning_rate_factor / self.coordinator.batch_size.learning_rate_factor
        self.engine.scale_residuals(factor, momentum=False)
        self._follow_batch_size()

    def _follow_batch_size(self) -> None:
        assert self.coordinator is not None
        self._batch_size = self.coordinator.batch_size
        if self._scaled is None:
            self._scaled = ScaledSteps(self._known_optimizer())
        self._known_optimizer().set_backward_passes_per_step(self._passes * self._batch_size.accumulation)
        self._scaled.factor = self._batch_size.learning_rate_factor

    def state_dict(self) -> dict[str, Any]:
        """`Compression.state_dict`."""
        if self.coordinator is not None:
            self.coordinator.receive()
            self._apply_batch_size()
        state = checkpoint.state_of(self.engine, self.coordinator, lambda array: array.detach().clone())
        state["own"]["loss_scale"] = self._loss_scale
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`Compression.load_state_dict`."""

        def place(array: torch.Tensor, name: str) -> torch.Tensor:
            return array.detach().to(self._parameters[name].device, copy=True)

        checkpoint.restore(state, self.engine, self.coordinator, place)
        self._loss_scale = state["own"].get("loss_scale")
        if self.coordinator is not None and self.coordinator.batch_size != self._batch_size:
            self._follow_batch_size()

    def _require_same_batch_size(self) -> None:
        assert self.coordinator is not None
        if self.coordinator.batch_size != self._batch_size:
            raise ConfigurationError(
                f"the policy {self.coordinator.policy} makes the batch larger, and the training loop does not follow: "
                "before each step read compression.accumulation, and do so many times the usual backward passes"
            )

    def _known_optimizer(self) -> Any:
        if self._optimizer is None:
            raise ConfigurationError(
                f"the policy {self._compression.settings.policy} needs the optimizer that Horovod made: use "
                "hvd.DistributedOptimizer(..., compression=compression)"
            )
        return self._optimizer

    def _learning_rates(self) -> tuple[float, ...]:
        if self._scaled is not None:
            return self._scaled.rates
        return rates_of(self._known_optimizer())

    def _observe(
        self, source: str, gradients: Mapping[str, torch.Tensor], poison: torch.Tensor | None = None
    ) -> None:
        if self.coordinator is not None and self.coordinator.source == source:
            self.coordinator.observe(gradients, 1 / (self._loss_scale or 1.0), poison)

    def _checked_optimizer(self, optimizer: Any, process_set: Any) -> Any:
        """The Horovod optimizer, given or calling, checked; None if compress is called by something else."""
        if optimizer is None:
            ours = self._compression
            optimizer = caller_local("self", object, lambda one: one is not self and _compression_of(one) is ours)
        elif _compression_of(optimizer) is not self._compression:
            raise ConfigurationError(
                f"this {type(optimizer).__name__} does not use this hvdcomp.Compression; give what "
                "hvd.DistributedOptimizer(..., compression=compression) returned"
            )
        theirs = getattr(optimizer, "process_set", None)
        if process_set is not None and theirs is not None and process_set != theirs:
            raise ConfigurationError(
                f"hvdcomp.Compression was given process set {process_set}, the optimizer {theirs}; give both the same"
            )
        return optimizer

    def _refuse_predivision(self) -> None:
        factor = getattr(self._optimizer, "gradient_predivide_factor", 1.0)
        if factor != 1.0:
            raise ConfigurationError(
                f"gradient_predivide_factor={factor} scales what Horovod allreduces, but compressed gradients do not "
                "travel in Horovod's allreduce; leave it at 1.0"
            )

    def _momentum_of_optimizer(self) -> str | None:
        """The first momentum in the optimizer's settings, as text; None without one, or where it does no harm."""
        if self.engine.memory is None or not self.engine.memory.is_momentum:
            return None
        for group in getattr(self._optimizer, "param_groups", ()):
            if group.get("momentum"):
                return f"momentum={group['momentum']}"
            if "betas" in group and group["betas"][0]:
                return f"betas={tuple(group['betas'])}"
        return None

    def _refuse_double_momentum(self) -> None:
        found = self._momentum_of_optimizer()
        if found:
            raise ConfigurationError(
                f"the optimizer has {found}, but {self.engine.memory} applies momentum itself, before compression; use "
                "an optimizer without momentum (torch.optim.SGD with momentum=0) and set momentum in the memory "
                "(dgc:momentum=...), or choose memory=hvdcomp.ErrorFeedback()"
            )

    def _follow_loss_scale(self) -> None:
        if self._grad_scaler is None:
            return
        scale = float(self._grad_scaler.get_scale())
        if self._loss_scale is not None and scale != self._loss_scale:
            self.engine.scale_residuals(scale / self._loss_scale)
        self._loss_scale = scale

    def _facts(self) -> dict[str, Any]:
        shapes = [(info.name, info.shape, info.dtype) for info in self.engine.tensors.values()]
        return self._compression.settings.describe() | {
            "parameters": f"{len(shapes)}, {hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]}",
            "level": self._compression.level,
            "step": self.engine.step_number,
            "error of the decision log": self._log_error,
            "momentum of the optimizer": self._momentum_of_optimizer(),
            "hvdcomp": hvdcomp.__version__,
            "numpy": numpy.__version__,
        }


def _describe(name: str, parameter: torch.nn.Parameter) -> TensorInfo:
    if not parameter.dtype.is_floating_point:
        raise ConfigurationError(
            f"parameter {name!r} has type {parameter.dtype}; gradient compression takes floating-point parameters"
        )
    return TensorInfo(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))


def _as_gradient(reduced: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The allreduced tensor in the element type and memory layout of the gradient."""
    if reduced.dtype == gradient.dtype and reduced.stride() == gradient.stride():
        return reduced
    return torch.empty_like(gradient).copy_(reduced)


def _compression_of(candidate: Any) -> Any:
    return getattr(candidate, "_compression", None)
