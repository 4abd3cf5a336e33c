"""The binding of models in FSDP2 (`fully_shard`, `replicate`) that have replicas (hybrid sharding, HSDP).

FSDP reduces the gradients of a module to this rank's shards, and calls hooks on its own stream. The engine exchanges
the shards with the other replicas, in place. So gradients are uncompressed within a replica and compressed between
replicas. Buckets start during the backward pass, and the remaining gradients are sent at its end. If the model's mesh
has a dimension for replicas, FSDP itself averages over this dimension at first. After `FSDPBinding.__init__` has
finished, the engine does this instead.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Set
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hvdcomp.bindings.base import PRESENCE_BYTES
from hvdcomp.bindings.setup import Setup
from hvdcomp.bindings.state_check import parts_of
from hvdcomp.communicators.torch_distributed import UNNAMED, TorchDistributedCommunicator
from hvdcomp.errors import ConfigurationError, RankMismatchError, listed, warn_alone
from hvdcomp.exchange.agreement import gather_rows, refused_on_every_rank, require_agreement
from hvdcomp.kernels import cuda
from hvdcomp.policies import changes_batch_size
from hvdcomp.policies.request import Statistic
from hvdcomp.torch.fsdp.boxes import box_of, boxes_in, number_of_boxes, on_other_mesh, shared_in_replica
from hvdcomp.torch.fsdp.checks import (
    all_parameter_groups,
    before_forward_passes,
    check_divide_factors,
    check_settings,
    check_sharding,
    modules_of,
)
from hvdcomp.torch.fsdp.replicas import REGISTER, leave_to_hook, require_replicas, require_same_shards, shards_of
from hvdcomp.torch.parameters import unique
from hvdcomp.torch.presence import PresenceCheck
from hvdcomp.torch.training import WITHOUT_HOROVOD, TorchTraining


class FSDPBinding(TorchTraining):
    """Ties one `Compression` to the shards of one model.

    Args:
        setup: the `Compression`, and what the user passed to it.
        model: a model sharded by `fully_shard`, or replicated by `replicate`.
        group: the process group of the ranks that have the same shards, one rank of each replica.
    """

    overlaps_with_policy = False
    overlaps = True
    broadcast = "use the same random seed, or load the same checkpoint, before fully_shard"
    optimizer_from = "hvdcomp.fsdp.register(model, compression, optimizer=optimizer)"
    averaged_by = "FSDP"
    absence = WITHOUT_HOROVOD

    def __init__(self, setup: Setup, model: torch.nn.Module, group: dist.ProcessGroup) -> None:
        # The engine has its own process group, because buckets start at different times on each rank. In the user's
        # process group, a bucket could be matched with a wrong collective, for example with a collective of another
        # model in the same backward pass.
        self._replicas = TorchDistributedCommunicator(group)
        communicator, like = self._replicas.duplicate(), torch.empty(0)
        if self._replicas.world_size == 1 and self.is_first_rank:
            warn_alone(
                "the mesh has a single replica of the model, so hvdcomp.fsdp.register has no exchange between replicas "
                "to compress; give fully_shard a mesh with several replicas, or no mesh"
            )
        # Each process group of replicas makes its own decisions, but only rank 0 writes the log.
        if not self.is_first_rank:
            setup.compression.decision_log = None
        # On a device, all ranks must start a bucket between the same two collectives of FSDP, as in `DDPBinding`.
        parameters = unique(model.named_parameters())
        on_device = any(parameter.is_cuda for parameter in parameters.values())
        self._presence_check = PresenceCheck(communicator, waits=on_device)
        with refused_on_every_rank(communicator, like):
            check_settings(setup)
            trained = check_sharding(parameters.items())
            require_replicas(trained, group, REGISTER)
            _require_one_root(model)
            check_divide_factors(model)
            _require_decisions_of_whole_gradients(setup, trained)
        require_agreement(communicator, {}, like)  # raises an error if another rank has raised an error
        require_same_shards(trained, communicator, like, REGISTER)
        self._trained = list(trained.values())
        self._registered = set(parameters.values())
        # For each residual, the number by which FSDP divided the gradients; None if FSDP computed the mean.
        self._divided_by: dict[str, float | None] = {}
        # A parameter is omitted here if it is so small that this rank has none of its elements.
        self._sharded = {name: parameter for name, parameter in trained.items() if _local(parameter).numel()}
        self._boxes = {name: box_of(parameter) for name, parameter in self._sharded.items()}
        with refused_on_every_rank(communicator, like):
            shards = {name: _local(parameter) for name, parameter in self._sharded.items()}
            shared = shared_in_replica(trained)
            super().__init__(setup, shards, communicator, setup.optimizer, parameters, shared)
            self._frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
            self._register(model)
        self._model = ref(model)
        # The known parameters are stored by name, because FSDP replaces the parameters with whole parameters during a
        # pass.
        self._known = WeakKeyDictionary({module: _own_names(module) for module in model.modules()})
        self._due = False  # whether gradients of this backward pass still wait for the exchange
        self._was_inner = False  # whether a nested backward pass has made a step since the forward pass
        self._ready: dict[str, torch.Tensor] = {}  # the gradients of this backward pass, in the order of their arrival

    @property
    def is_first_rank(self) -> bool:
        # Each process group of replicas has a rank 0.
        return dist.get_rank() == 0

    def _register(self, model: torch.nn.Module) -> None:
        groups: dict[torch.Tensor, Any] = {}
        for group in itertools.chain(*all_parameter_groups(model).values()):
            groups.update((one.sharded_param, group) for one in group.fsdp_params)
            leave_to_hook(group, functools.partial(self._group_reduced, group))
        self._groups = {name: groups[parameter] for name, parameter in self._sharded.items()}
        for name, parameter in self._sharded.items():
            # FSDP calls this hook after the hook of the parameter group, when `grad` is set.
            parameter.register_post_accumulate_grad_hook(functools.partial(self._gradient_ready, name))
        before_forward_passes(model, self._forget)

    @torch.compiler.disable  # in case the whole training step is compiled
    @torch.no_grad()
    def _group_reduced(self, group: Any, shard: torch.Tensor) -> None:
        """The hook of each parameter group. FSDP calls this hook when the gradients of the parameter group are reduced
        to this rank's shard."""
        if any(one.sharded_param not in self._registered for one in group.fsdp_params):
            raise ConfigurationError(
                "the model's parameters were added or replaced after the call of hvdcomp.fsdp.register, so the "
                "replicas would not exchange the gradients of the new parameters. load_state_dict(assign=True) "
                "replaces parameters: call load_state_dict before register"
            )
        if torch._C._current_graph_task_id() == -1:
            raise ConfigurationError(
                "FSDP reduces gradients outside of a backward pass, as with schedules of torch.distributed.pipelining, "
                "so hvdcomp cannot find the end of the step. Train without pipeline parallelism, or do not call "
                "hvdcomp.fsdp.register"
            )
        # FSDP allocated the shard on another stream, and may free the shard while this stream still reads it.
        cuda.let_go(shard)
        if group.gradient_divide_factor is not None:
            # FSDP divides the sum by the user's factor, and the mean over replicas would divide it a second time.
            # `_gradient_ready` cannot correct this, because `grad` may contain means of earlier backward passes.
            shard *= self._replicas.world_size
        if group.all_reduce_grads and not self._due:
            if self._was_inner:
                raise ConfigurationError(
                    "a reentrant activation checkpoint makes a backward pass of its own, which hvdcomp would treat as "
                    "a separate step; use torch.utils.checkpoint with use_reentrant=False"
                )
            self.begin()
            self._presence_check.start(self.presence, UNNAMED)
            self.expect(self._presence_check.agrees)
            self._due = True
            # `_exchange` runs after FSDP's own callback of the backward pass, because FSDP's callback was queued
            # earlier.
            torch.autograd.Variable._execution_engine.queue_callback(self._exchange)

    @torch.compiler.disable  # in case the whole training step is compiled
    @torch.no_grad()
    def _gradient_ready(self, name: str, parameter: torch.nn.Parameter) -> None:
        if not self._groups[name].all_reduce_grads:
            return
        if name in self._ready and self.engine.overlap.started:
            raise ConfigurationError(
                f"FSDP has reduced the gradient of {name} twice in one backward pass, and hvdcomp may have begun to "
                "send it after the first time; use hvdcomp.Compression(..., overlap=False)"
            )
        if name not in self._ready:
            self._follow(name)
            self._ready[name] = _local(parameter.grad)
            self.engine.overlap.ready({name: self._ready[name]})

    def _follow(self, name: str) -> None:
        """Rescales the residual of a parameter if FSDP now divides the gradient by a different factor."""
        factor = self._groups[name].gradient_divide_factor
        before = self._divided_by.setdefault(name, factor)
        if before != factor:
            self._divided_by[name] = factor
            ranks = self._replicas.world_size * shards_of(self._groups[name])
            divisor, new_divisor = (ranks if one is None else one for one in (before, factor))
            self.engine.states[name].scale_residual(divisor / new_divisor, momentum=True)

    @torch.compiler.disable  # in case the whole training step is compiled
    @torch.no_grad()
    def _exchange(self) -> None:
        self._due = False
        self._was_inner = torch._C._current_autograd_node() is not None
        ready, self._ready = self._ready, {}
        self.check_presence(self._presence_check.end())
        gradients = {
            name: _local(parameter.grad)
            for name, parameter in self._sharded.items()
            # After `set_requires_all_reduce(False)`, `grad` accumulates gradients that a later pass exchanges.
            if parameter.grad is not None and self._groups[name].all_reduce_grads
        }
        self._require_same(gradients)
        self.run_in_place({**ready, **gradients})  # `ready` comes first, because all ranks use the order of rank 0

    def _require_same(self, names: Collection[str]) -> None:
        """Raises RankMismatchError on every rank if only some replicas have gradients of these names. The comparison
        uses the user's process group, because ranks may have started different numbers of buckets in the engine's
        process group.
        """
        flags = gather_rows(self._replicas, bytes(name in names for name in self._sharded), self.like, "hvdcomp.names")
        differing = [name for name, *of_rank in zip(self._sharded, *flags, strict=True) if len(set(of_rank)) > 1]
        if differing:
            self._due = True  # the next forward pass then treats this as a failed backward pass
            raise RankMismatchError(
                f"only some replicas have gradients of {listed(differing)} in this step, but hvdcomp averages the "
                "gradients of all replicas. Let all replicas use the same modules in each step. To give an unused "
                "module gradients, add 0 times its output to the loss"
            )

    def _forget(self) -> None:
        """Drops the state of a backward pass that has raised an error."""
        self._was_inner = False
        frozen = torch.is_grad_enabled() and not any(parameter.requires_grad for parameter in self._trained)
        # This is checked before the forward pass, because if all parameters are frozen, no gradient arrives, so no step
        # begins that could check it.
        if frozen and (reason := self.reason_to_refuse()):
            raise ConfigurationError(reason)
        if not self._due:
            return
        # On the host, a rank starts a bucket as soon as it knows that all ranks agree. One rank may know this earlier
        # than another. So ranks may have started different numbers of buckets, but torch.distributed matches
        # collectives by their order.
        if self.engine.overlap.era and not self._presence_check.waits:
            raise ConfigurationError(
                "a backward pass has raised an error, and some ranks may have begun an exchange that other ranks have "
                "not begun, so this training cannot continue. Continue from a checkpoint in new processes, or use "
                "hvdcomp.Compression(..., overlap=False) to be able to continue after such an error"
            )
        self._due = False
        self._ready = {}

    # Methods of `Training`.

    def presence_bytes(self, tensors: int) -> int:
        return PRESENCE_BYTES + len(self._sharded)

    def facts(self) -> dict[str, Any]:
        return {}

    def warm_up(self) -> str | None:
        """The spec of the compressor for all tensors; None to use the compressors in the plan. With a single replica,
        nothing is compressed, because there is no other replica to send to."""
        return "none" if self.communicator.world_size == 1 else None

    def trained(self) -> Set[str]:
        return self._sharded.keys()

    def reason_to_refuse(self) -> str | None:
        drifting = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        drifting += self._added()
        if not drifting:
            return None
        return (
            f"the gradients of {', '.join(drifting)} are not exchanged between the replicas, so the replicas' weights "
            "would become different. These parameters were frozen, or not in the model yet, when hvdcomp.fsdp.register "
            "was called. Call register when the model has all its modules and all parameters need gradients, and "
            "freeze parameters after that."
        )

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["own"]["divided_by"] = dict(self._divided_by)
        state["own"]["boxes"] = {name: [list(numbers) for numbers in box] for name, box in self._boxes.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state as `Compression.load_state_dict` does. If the mesh has changed, `hvdcomp.dcp.load` passes
        the states of all ranks."""
        _, own = parts_of(state)
        rank, ranks, boxes, saved = self._replicas.rank, self._replicas.world_size, self._boxes, boxes_in(own)
        common = [(saved[name], boxes[name]) for name in saved.keys() & boxes.keys()]
        if "every" in state and (own["rank"], own["size"], saved) != (rank, ranks, boxes):
            state = on_other_mesh(state["every"], own, boxes, rank, ranks)
        elif any(box != other and box.whole == other.whole for box, other in common):
            raise ConfigurationError(
                f"the state was saved by rank {own['rank']} of {own['size']} replicas, whose shards differ from those "
                "of this rank. Give each rank the state that it saved. If the mesh has changed, use hvdcomp.dcp.load, "
                "which reads the states of all ranks"
            )
        super().load_state_dict(state)
        self._divided_by = dict(state["own"].get("divided_by", {}))

    def _added(self) -> list[str]:
        """The names of trained parameters that were added to the model after this binding was created."""
        model = self._model()
        if model is None:
            return []
        return [
            f"{name}.{own}".removeprefix(".")
            for name, module in model.named_modules()
            for own, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad and own not in self._known.get(module, ())
        ]


def _require_one_root(model: torch.nn.Module) -> None:
    """Raises ConfigurationError if the model has several outermost sharded modules."""
    roots: list[str] = []
    for name in modules_of(model):  # outer modules come before inner modules
        if not any(name.startswith(f"{root}.") or not root for root in roots):
            roots.append(name)
    if len(roots) > 1:
        raise ConfigurationError(
            f"{listed(roots)} are sharded separately, but the whole model is not sharded: FSDP ends the backward pass "
            "of each of them separately, and hvdcomp would treat one backward pass as several steps. Also call "
            "fully_shard for the whole model, with the same mesh, after its layers"
        )


def _require_decisions_of_whole_gradients(setup: Setup, trained: Mapping[str, DTensor]) -> None:
    """Raises ConfigurationError if a setting would make ranks decide something for the whole model, although each rank
    knows the gradients of only one shard."""
    policy: Any = setup.compression.settings.policy
    if all(number_of_boxes(parameter) == 1 for parameter in trained.values()):
        return
    if changes_batch_size(policy) and Statistic.MODEL_NORM in policy.first_request.ever:
        raise ConfigurationError(
            f"the policy {policy} does not work with a sharded model: each rank knows only the norm of its own shard's "
            "gradients, so ranks of one model would make different numbers of backward passes. Use a policy of levels, "
            "such as accordion, or use DistributedDataParallel, where replicas are not sharded"
        )
    if setup.grad_scaler is not None and setup.grad_scaler.is_enabled():
        raise ConfigurationError(
            "a torch.amp.GradScaler does not work with a sharded model: if the gradients of one shard overflow, the "
            "step is skipped, and the other shards lose the gradients that they have sent. Train in bfloat16, which "
            "needs no scaler"
        )


def _own_names(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(recurse=False)}


def _local(sharded: Any) -> Any:
    return sharded.to_local()
