"""The binding of simulated ranks. One process has several models, and each model belongs to one simulated rank.

A step gives the same result as DistributedDataParallel, bit for bit. Gradients that are only cast are allreduced in the
same buckets as in DDP, and each bucket starts when its gradients are ready. The engine exchanges all other gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from hvdcomp.bindings.setup import Setup, UsedCompression
from hvdcomp.communicators.simulated import Moment, SimulatedCommunicator
from hvdcomp.torch import half_precision
from hvdcomp.torch.training import WITHOUT_HOROVOD, TorchTraining

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""Bytes of the first bucket of DistributedDataParallel, and of its other buckets."""


class SimulatedBinding(TorchTraining):
    """Ties one `Compression` to one model of a simulation.

    Args:
        setup: the `Compression`, and what the user passed to it.
        model: the model, on any device.
        communicator: the communicator of this simulated rank.
    """

    overlaps_with_policy = True
    broadcast = "use the same seed on every rank"
    optimizer_from = "the optimizer that makes the steps"
    averaged_by = "a simulation"
    absence = WITHOUT_HOROVOD

    def __init__(self, setup: Setup, model: torch.nn.Module, communicator: SimulatedCommunicator) -> None:
        self._ranks = communicator
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        super().__init__(setup, trained, communicator, setup.optimizer)  # type: ignore[arg-type]
        self.engine.ledger.clock.follow(self.now)
        self._ready: dict[str, Moment] = {}  # the time at which each gradient was ready, in the order of these times
        self._order: list[str] = []  # the order of gradients in DDP's buckets; empty before the first step
        self._may_change = self.plan_may_change
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(self._noting(name))

    def _noting(self, name: str) -> Any:
        def note(parameter: torch.Tensor) -> None:
            self._ready.pop(name, None)  # removes the time from an earlier backward pass of this step
            self._ready[name] = self._ranks.moment()

        return note

    @torch.no_grad()
    def exchange(self) -> None:
        """Replaces the gradients with their means. Call this method after the backward passes of a step."""
        ready, self._ready = self._ready, {}
        gradients = {name: gradient for name in ready if (gradient := self._parameters[name].grad) is not None}
        if not self.exchanges:
            self.engine.enter_alone(gradients.keys())
            return
        self.begin()
        tensors, plan = self.engine.tensors, self.engine.plan
        wires = {compressor.wire_dtype(tensors[name].dtype) for name, compressor in plan.items()}
        casts = self.engine.passthrough and not self.needs_engine and len(wires) == 1
        is_checked = self._may_change or not casts
        if is_checked:
            # The presence check starts when the first gradient is ready, and ends at the end of the backward pass.
            self._ranks.starts_at = next(iter(ready.values()), None)
            presence = self.communicator.start_allreduce(torch.full((1,), self.presence), "sum", "hvdcomp.presence")
            self._ranks.starts_at = None
            self.check_presence(int(self.communicator.wait(presence)))
        if casts:
            self._cast(gradients, ready, wires.pop(), is_checked)
        else:
            own = {name: gradients[name] for name in self._parameters if name in gradients}
            self.add_momenta(own)
            self.run_in_place(own)
        self._order = self._order or list(ready)  # DDP rebuilds its buckets after its first step

    def _cast(
        self, gradients: Mapping[str, torch.Tensor], ready: Mapping[str, Moment], wire: str | None, is_checked: bool
    ) -> None:
        self.observe("local", gradients)
        for names in self._ddp_buckets(gradients):
            in_ddp_bucket = [gradients[name] for name in names]
            buffer = torch.cat([gradient.flatten() for gradient in in_ddp_bucket])
            self._ranks.starts_at = np.max([ready[name] for name in names], axis=0)
            self._reduce(buffer, wire)
            self._ranks.starts_at = None
            means = buffer.split([gradient.numel() for gradient in in_ddp_bucket])
            for gradient, mean in zip(in_ddp_bucket, means, strict=True):
                gradient.copy_(mean.view_as(gradient))
        self.observe("aggregated", gradients)
        self.engine.enter_casts(set(gradients), is_checked)
        self.end_step()

    def _reduce(self, buffer: torch.Tensor, wire: str | None) -> None:
        """Replaces a bucket with the mean over all ranks, like `DDPBinding`."""
        ranks, name = self.communicator, "hvdcomp.bucket"
        dtype = buffer.dtype if wire is None else getattr(torch, wire)
        if dtype == buffer.dtype:
            buffer.copy_(ranks.wait(ranks.start_allreduce(buffer.div_(ranks.world_size), "sum", name)))
        else:
            half_precision.widen(
                ranks.wait(ranks.start_allreduce(half_precision.narrow(buffer, dtype), "mean", name)), buffer
            )

    def _ddp_buckets(self, gradients: Mapping[str, torch.Tensor]) -> Iterator[Sequence[str]]:
        """The names of the gradients in each DDP bucket, in order."""
        if not self._order:
            yield [name for name in self._parameters if name in gradients]
            return
        full, size, names = FIRST_BUCKET_BYTES, 0, []
        for name in filter(gradients.__contains__, self._order):
            names.append(name)
            size += gradients[name].nbytes
            if size >= full:
                yield names
                full, size, names = BUCKET_BYTES, 0, []
        if names:
            yield names

    # Methods of `Training`.

    def now(self) -> float:
        return self._ranks.now()

    def facts(self) -> dict[str, Any]:
        return {}

    def trained(self) -> Set[str]:
        return self._parameters.keys()


def serve_simulated(
    compression: UsedCompression, model: torch.nn.Module, communicator: SimulatedCommunicator, optimizer: Any
) -> Callable[[], None]:
    """Sets up the exchange of compressed gradients for the model of a simulated rank.

    Args:
        compression: a `Compression` that no other model uses.
        model: the model, on any device.
        communicator: the communicator of this simulated rank.
        optimizer: the optimizer of the model.

    Returns:
        A function that replaces the gradients with their means. Call this function after the backward passes of each
        step.
    """
    return compression.serve(lambda setup: SimulatedBinding(setup, model, communicator), optimizer).exchange
