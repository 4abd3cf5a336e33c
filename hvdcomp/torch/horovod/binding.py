"""The binding of the unmodified `hvd.DistributedOptimizer` of horovod.torch.

Horovod calls `compress` for every gradient when the gradient becomes ready, in any order. Horovod calls `decompress`
for every gradient after all gradients were compressed. There are two kinds of steps, and all ranks choose the same
kind:

- cast: the plan only casts gradients. Horovod itself allreduces the gradients, overlapped with the backward pass
  (`hvdcomp.torch.horovod.passthrough`).
- engine: `compress` keeps the gradient, and gives Horovod a single number to allreduce. `compress` may start
  collectives of the engine, and never waits. The first `decompress` runs the engine. At this time it is safe to wait
  for the engine's collectives, because every rank has already submitted all of Horovod's own collectives.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import horovod.torch as hvd
import torch

from hvdcomp.bindings.base import PRESENCE_BYTES
from hvdcomp.bindings.callers import caller_local
from hvdcomp.bindings.setup import Setup
from hvdcomp.communicators.horovod_torch import HorovodTorchCommunicator
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.errors import ConfigurationError, RankMismatchError
from hvdcomp.exchange.agreement import refused_on_every_rank
from hvdcomp.policies.decisions import BatchSize
from hvdcomp.torch.horovod.caller import ParameterNames
from hvdcomp.torch.horovod.optimizer import HorovodOptimizer, compression_of, enter_step
from hvdcomp.torch.horovod.passthrough import UNCHANGED, Passthrough, Ticket
from hvdcomp.torch.parameters import by_name
from hvdcomp.torch.presence import PresenceCheck
from hvdcomp.torch.training import TorchTraining


class TorchBinding(TorchTraining):
    """Ties one `Compression` to one Horovod optimizer.

    Args:
        setup: the `Compression`, and what the user passed to it. `setup.parameters` is a mapping of parameters by name,
            or a function that returns pairs of a name and a parameter. If it is None, the binding uses the parameters
            of Horovod's optimizer. `setup.optimizer` is Horovod's optimizer. If it is None, the binding uses the
            optimizer that calls `compress`.
    """

    overlaps_with_policy = True
    overlaps = True
    broadcast = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
    optimizer_from = "hvd.DistributedOptimizer(..., compression=compression)"

    def __init__(self, setup: Setup) -> None:
        optimizer = _checked_optimizer(setup)
        communicator = HorovodTorchCommunicator(setup.process_set or getattr(optimizer, "process_set", None))
        with refused_on_every_rank(communicator, torch.empty(0)):
            parameters = by_name(setup.parameters, optimizer)
            self._horovod_optimizer = HorovodOptimizer(optimizer, parameters)
            super().__init__(setup, parameters, communicator, optimizer)
        self._passes = getattr(optimizer, "backward_passes_per_step", 1)  # before a policy changes it

    def connect(self, communicator: Ranks) -> None:
        assert isinstance(communicator, HorovodTorchCommunicator)
        super().connect(communicator)
        self._presence_check = PresenceCheck(communicator)
        self._casting = False
        self._alone = False  # whether the current step has no exchange
        self._pending: dict[str, torch.Tensor] = {}
        self._frozen: list[str] = []  # the tensors whose parameters are frozen in this step
        self._results: dict[str, torch.Tensor] = {}
        self._open = 0  # number of tensors of this step that were not decompressed yet
        self._names = ParameterNames(self._parameters)
        self._passthrough = Passthrough(self.engine, self._parameters, self._names, self._optimizer, self.observe)

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Ticket]:
        if not self._open or self.is_stale:
            self._alone = not self.exchanges
            if not self._alone:
                self.begin()
        if self._alone:
            self._open += 1
            return torch.zeros(1, dtype=torch.int64), Ticket("", False, tensor)  # Horovod needs a tensor to allreduce
        if self._casting:
            sent = self._passthrough.compress(tensor)
            self._open += 1
            return sent
        name = self._names.of(tensor, self._optimizer)
        self._open += 1
        if name in self._pending or name not in self._horovod_optimizer.own:
            self._horovod_optimizer.refuse_gradient(name)
        self._pending[name] = tensor
        ready = {name: tensor}
        self.add_momenta(ready)
        self.engine.overlap.ready(ready)
        # The number is an int64, so that Horovod does not fuse it with the engine's buffers. Fusion depends on timing,
        # so the order of additions would differ from run to run.
        return torch.full((1,), self.presence), Ticket(name, False, tensor)

    def decompress(self, tensor: torch.Tensor, ticket: Ticket) -> torch.Tensor:
        if self._alone:
            return self._keep(ticket)
        if ticket is UNCHANGED:
            result = tensor
        elif ticket.cast:
            result = self._passthrough.decompress(tensor, ticket)
        else:
            if self._pending:
                self._run_pending(int(tensor.item()))
            result = self._results.pop(ticket.name)
        self._open -= 1
        if not self._open and ticket.cast:
            self._passthrough.end()
            self.end_step()
        return result

    def _keep(self, ticket: Ticket) -> torch.Tensor:
        """Returns this rank's own gradient, in a step without an exchange."""
        assert ticket.gradient is not None
        self._open -= 1
        if not self._open:
            self.engine.enter_alone(self._horovod_optimizer.own, PRESENCE_BYTES * len(self._horovod_optimizer.own))
        return ticket.gradient

    def begin(self) -> None:
        """Begins a step like `Binding.begin`, and chooses between casts and the engine."""
        self._horovod_optimizer.check_caller(self.setup.compression)
        enter_step(self._optimizer)
        self._results.clear()
        self._pending.clear()
        self._names.begin_step()
        super().begin()
        self._casting = self.engine.passthrough and not self.needs_engine
        if self._casting:
            self.refuse()
        if not self._casting or self.setup.compression.settings.policy is not None:
            self.refuse_predivision(getattr(self._optimizer, "gradient_predivide_factor", 1.0))
        if self._casting:
            coordinator = self.coordinator
            self._passthrough.begin(coordinator.source if coordinator is not None and coordinator.observes else None)
        else:
            if era := self.engine.overlap.era:  # if this is 0, no rank starts buckets early in this step
                self._presence_check.start(self.presence, f"hvdcomp.order{era}.presence")
            self.expect(self._presence_check.agrees)

    @torch.no_grad()
    def _run_pending(self, presence: int) -> None:
        """Runs the engine with the gradients that were kept. `presence` is Horovod's mean (or sum, with op=hvd.Sum) of
        the numbers `presence` of all ranks."""
        try:
            self.check_presence(presence if self.is_summed else presence * self.communicator.world_size)
        except (ConfigurationError, RankMismatchError):
            self._horovod_optimizer.finish()
            raise
        self._presence_check.end()
        pending, self._pending = self._pending, {}
        self._results = self.run_engine(pending)
        # Horovod passes zeros for frozen parameters, but these may still have residuals.
        for name in self._results.keys() & self._frozen:
            self._results[name].zero_()
        if self.is_summed:
            for result in self._results.values():
                result.mul_(self.communicator.world_size)

    # Methods of `Training`.

    @property
    def is_summed(self) -> bool:
        return bool(getattr(self._optimizer, "op", hvd.Average) == hvd.Sum)

    def facts_of_step(self) -> dict[str, Any]:
        own = self._horovod_optimizer.own
        self._frozen = [name for name in self._parameters if name in own and not self._parameters[name].requires_grad]
        return {"frozen parameters": self._frozen} if self._frozen else {}

    def presence_bytes(self, tensors: int) -> int:
        return PRESENCE_BYTES * (tensors + bool(self.engine.overlap.era))

    def facts(self) -> dict[str, Any]:
        return self._horovod_optimizer.facts()

    def trained(self) -> Set[str]:
        return self._horovod_optimizer.own

    def reason_to_refuse(self) -> str | None:
        return self._horovod_optimizer.reason_to_refuse()

    def follow_batch_size(self, batch_size: BatchSize) -> None:
        super().follow_batch_size(batch_size)
        self._optimizer.set_backward_passes_per_step(self._passes * batch_size.accumulation)


def _checked_optimizer(setup: Setup) -> Any:
    """Finds and checks Horovod's optimizer: the optimizer that the user passed, or else the optimizer that called
    `compress`. The result is None if another function called `compress`."""
    compression, optimizer = setup.compression, setup.optimizer
    if optimizer is None:
        optimizer = caller_local("self", lambda value: compression_of(value) is compression)
    elif compression_of(optimizer) is not compression:
        raise ConfigurationError(
            f"this {type(optimizer).__name__} does not use this hvdcomp.Compression; pass the optimizer that "
            "hvd.DistributedOptimizer(..., compression=compression) returned"
        )
    process_set = getattr(optimizer, "process_set", None)
    if setup.process_set is not None and process_set is not None and setup.process_set != process_set:
        raise ConfigurationError(
            f"hvdcomp.Compression was given process set {setup.process_set}, but the optimizer has {process_set}; give "
            "both the same process set"
        )
    return optimizer
