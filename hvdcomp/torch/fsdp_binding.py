"""Serves models in FSDP2 (`fully_shard`) that are replicated too: hybrid sharding, HSDP.

FSDP reduces each gradient to this rank's shard, and calls a hook. When the backward pass is over, the shards' gradients
are exchanged with the replicas' by the engine, in their place: dense inside of a shard group, compressed between
replicas.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hvdcomp.bindings.setup import Setup
from hvdcomp.communicators.torch_distributed import UNNAMED, TorchDistributedCommunicator
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import refused_on_every_rank
from hvdcomp.torch.compressed_adam import CompressedAdam
from hvdcomp.torch.everyone import Everyone
from hvdcomp.torch.parameters import unique
from hvdcomp.torch.training import WITHOUT_HOROVOD, TorchTraining


class FSDPBinding(TorchTraining):
    """Ties one `Compression` to the shards of one model.

    Args:
        setup: what the user gave.
        model: sharded by `fully_shard` over one dimension.
        group: the ranks that have the same shards, one of each replica.
    """

    overlaps_with_policy = False
    broadcast = "the same random seed, or the same checkpoint, before fully_shard"
    optimizer_from = "hvdcomp.fsdp.register(model, compression, mesh, optimizer=optimizer)"
    averaged_by = "FSDP"
    absence = WITHOUT_HOROVOD

    def __init__(self, setup: Setup, model: torch.nn.Module, group: dist.ProcessGroup) -> None:
        communicator = TorchDistributedCommunicator(group)
        if dist.get_rank() != 0:  # several shards decide, each for itself; one may write the log
            setup.compression.decision_log = None
        self._everyone = Everyone(communicator)
        with refused_on_every_rank(communicator, torch.empty(0)):
            _check(setup)
            self._sharded = _sharded(model)
            shards = {name: _local(parameter) for name, parameter in self._sharded.items()}
            super().__init__(setup, shards, communicator, setup.optimizer, unique(model.named_parameters()))
            self._frozen = {name: one for name, one in model.named_parameters() if not one.requires_grad}
        self._due = False  # whether gradients of this backward pass wait for the exchange

    def arrived(self, shard: torch.Tensor) -> None:
        """The hook of each FSDP module, called when its gradients were reduced to this rank's shard."""
        if not self._due:
            self._due = True
            # FSDP puts gradients into their places after its hook; what it does itself at the end was queued before.
            torch.autograd.Variable._execution_engine.queue_callback(self._exchange)

    @torch.no_grad()
    def _exchange(self) -> None:
        self._due = False
        self.begin()
        self._everyone.ask(self.presence, UNNAMED)
        self.check_presence(self._everyone.end())
        given = {name: one.grad for name, one in self._sharded.items() if one.grad is not None}
        gradients = {name: _local(gradient) for name, gradient in given.items()}
        self.run_in_place(gradients)

    # What `Binding` asks of the framework.

    def facts(self) -> dict[str, Any]:
        return {}

    def trained(self) -> Set[str]:
        return self._sharded.keys()

    def reason_to_refuse(self) -> str | None:
        drifting = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if not drifting:
            return None
        return (
            f"the gradients of {', '.join(drifting)} are not exchanged between the replicas, because they were frozen "
            "when hvdcomp.fsdp.register was called: the replicas' weights would drift apart. Call it while all "
            "parameters need gradients, and freeze some after that."
        )


def _check(setup: Setup) -> None:
    if setup.process_set is not None:
        raise ConfigurationError("process_set is for Horovod; hvdcomp.fsdp.register takes a mesh")
    if isinstance(setup.optimizer, CompressedAdam):
        raise ConfigurationError(
            "CompressedAdam does not work with FSDP, with local steps or without: hvdcomp exchanges gradients of "
            "shards there, and neither momenta nor weights. Use torch.optim.AdamW with a compressor that does no harm "
            "to it, such as hvdcomp.Int4(), or DistributedDataParallel for a model that fits on one device"
        )
    settings = setup.compression.settings
    if settings.overlap is True or settings.bucket_bytes is not None:
        raise ConfigurationError(
            "with FSDP the exchange between replicas begins when the backward pass is over: leave overlap at "
            '"auto" and bucket_bytes at None'
        )


def _sharded(model: torch.nn.Module) -> dict[str, DTensor]:
    """The parameters of which this rank has a part, by name."""
    found: dict[str, DTensor] = {}
    for name, parameter in unique(model.named_parameters()).items():
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter, DTensor):
            raise ConfigurationError(
                f"parameter {name} is not sharded; call fully_shard(model, mesh=mesh['shard']) on the whole model first"
            )
        if parameter.device_mesh.ndim != 1:
            raise ConfigurationError(
                f"parameter {name} is sharded over a mesh of {parameter.device_mesh.ndim} dimensions, between whose "
                "replicas FSDP exchanges gradients itself; give fully_shard only the dimension of the shards, "
                "mesh=mesh['shard'], and hvdcomp.fsdp.register that of the replicas, mesh['replicate']"
            )
        if _local(parameter).numel():
            found[name] = parameter
    return found


def _local(sharded: Any) -> Any:
    return sharded.to_local()


def modules_of(model: torch.nn.Module) -> list[Any]:
    """The FSDP modules in a model, itself included."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
