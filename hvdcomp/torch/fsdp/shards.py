"""The binding that replaces FSDP's reduce-scatter for models in FSDP2 (`fully_shard`), over all ranks or in each
replica.

After the backward pass of a module, FSDP passes the module's flat gradient to this binding, and gets this rank's row of
the mean. The flat gradient has one row for each rank. So the exchange overlaps with the rest of the backward pass, like
FSDP's own reduce-scatter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hvdcomp.bindings.setup import Setup
from hvdcomp.bindings.state_check import FORMAT, parts_of
from hvdcomp.communicators.nodes import RANKS_PER_NODE
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator, reduce_scatter
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.bucket import GATHERED_BYTES
from hvdcomp.compressors.memory import NoMemory
from hvdcomp.errors import ConfigurationError, UnevenNodesError, warn_alone
from hvdcomp.exchange.agreement import facts_of_kernels, refused_on_every_rank, require_agreement
from hvdcomp.exchange.ledger import Cost, Sent
from hvdcomp.exchange.shards import ShardReducer, averages_vectors
from hvdcomp.files import VERSION
from hvdcomp.specs.levels import Level
from hvdcomp.torch.fsdp.boxes import number_of_boxes
from hvdcomp.torch.fsdp.checks import (
    before_forward_passes,
    check_divide_factors,
    check_settings,
    check_sharding,
    modules_of,
    parameter_groups,
)
from hvdcomp.torch.fsdp.flat_gradients import FlatGradient
from hvdcomp.torch.fsdp.resharding import FlatLayout, OwnedRows, replica_of, resharded, with_plain_names
from hvdcomp.torch.fsdp.weight_changes import WeightChanges
from hvdcomp.torch.parameters import plain_names
from hvdcomp.torch.training import refuse_capture

_WITH_MEMORY = " with memory "


class ShardsBinding:
    """Ties one `Compression` to the reduce-scatters of one model. All ranks must create this binding at the same point.

    Args:
        setup: the `Compression`, and what the user passed to it.
        model: a model sharded by `fully_shard`.
        weights: the compressor of changes of weights; None to keep FSDP's own all-gather.
        group: the process group over which each replica is sharded; None for all ranks.
        replica, replicas: the number of this rank's replica, from 0, and the number of replicas.

    Attributes:
        engine: the object that compresses and reduces flat gradients, a `ShardReducer`.
        coordinator, accumulation: None and 1, as in a `Binding` without a policy.
    """

    coordinator = None
    accumulation = 1

    def __init__(
        self,
        setup: Setup,
        model: torch.nn.Module,
        weights: Compressor | None = None,
        group: dist.ProcessGroup | None = None,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        communicator, like = TorchDistributedCommunicator(group), torch.empty(0)
        self._replica, self._replicas = replica, replicas
        settings = setup.compression.settings
        with refused_on_every_rank(communicator, like):
            check_settings(setup)
            _check(setup)
            _check_weights(weights)
            trained = _trained(model, dist.get_process_group_ranks(communicator.group), in_replica=group is not None)
            check_divide_factors(model)
        shapes = {
            f"parameter {name}": f"{parameter.dtype} {tuple(parameter.shape)}" for name, parameter in trained.items()
        }
        facts = {
            **settings.describe(),
            "weights": str(weights),
            "hvdcomp": VERSION,
            **facts_of_kernels(),
            **shapes,
        }
        require_agreement(communicator, facts, like)
        self._device = next((parameter.device_mesh.device_type for parameter in trained.values()), "cpu")
        try:
            self.engine = ShardReducer(
                communicator, settings.compressor, settings.memory,
                settings.seed + replica,  # the same seed would give similar errors in all replicas
                settings.min_numel, setup.compression.ledger, like,
            )  # fmt: skip
        except UnevenNodesError:
            raise ConfigurationError(
                "the nodes have different numbers of ranks, so FSDP's reduce-scatter cannot have two levels. Start the "
                f"same number of ranks on each node. Or set {RANKS_PER_NODE}=1 on every rank, so that each rank counts "
                "as a node"
            ) from None
        if self.engine.levels.across.size == 1 < communicator.world_size and dist.get_rank() == 0:
            whose = "" if group is None else " of a replica"
            warn_alone(
                f"all {communicator.world_size} ranks{whose} are on one node, so hvdcomp.fsdp.register does not "
                f"compress FSDP's reduce-scatter; set {RANKS_PER_NODE}=1 to count each rank as a node"
            )
        self._named = str(settings.compressor)
        self._method = f"{self._named}{_WITH_MEMORY}{self.engine.memory}"
        self._due = False  # whether the current step has not ended yet
        # for each flat gradient in float16, the number by which FSDP divides it
        self._divided_by: dict[str, float | None] = {}
        self._flats: dict[str, FlatGradient] = {}
        try:
            for flat, group in _flat_gradients(model, communicator.world_size):
                self._flats[flat.name] = flat
                gather = None
                if weights is not None and self.engine.levels.across.size > 1:
                    gather = WeightChanges(self.engine, weights, flat.name, settings.min_numel)
                for module in flat.modules:
                    # `_ReduceScatter` has no base class, because FSDP only calls its methods, and FSDP's own base class
                    # is private.
                    module.set_custom_reduce_scatter(_ReduceScatter(self, flat, group))
                    if gather is not None:
                        module.set_custom_all_gather(gather)
                        gather.forget_where_loaded(module)
                if not isinstance(self.engine.memory, NoMemory):
                    flat.watch()
        except ValueError as error:
            raise _several_meshes_error(error) from None
        before_forward_passes(model, self._forget)

    @torch.compiler.disable  # in case the whole training step is compiled
    @torch.no_grad()
    def reduce(
        self, flat: FlatGradient, row: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup, op: Any, factor: Any
    ) -> None:
        """Computes this rank's row of the mean, of the sum, or of the sum divided by a factor, and writes it to `row`.

        Args:
            flat: the flat gradient that FSDP is about to reduce.
            row, rows, group, op: the arguments of FSDP's own reduce-scatter.
            factor: the factor of `set_gradient_divide_factor`; None for the mean.
        """
        if not self._due:
            refuse_capture()
            self._due = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_step)
        engine, dense_bytes = self.engine, rows.numel() * rows.element_size()
        ranks = engine.communicator.world_size
        names = flat.take_names(rows.numel() // ranks)
        if not engine.compresses(flat.name, rows.numel()):
            reduce_scatter(row, rows, op=op, group=group)
            engine.enter(flat.name, dense_bytes, Sent(dense_bytes), rows.numel())
            return
        if rows.dtype == torch.float16:
            self._require_same_divisor(flat.name, factor)
        mean = self._mean(flat, names, rows.view(ranks, -1), dense_bytes)
        if op == dist.ReduceOp.SUM:
            mean = mean * ranks
        elif op != dist.ReduceOp.AVG:  # FSDP's own reduce-scatter would multiply by 1 / factor
            mean = mean * (ranks / factor)
        row.copy_(mean)

    def _require_same_divisor(self, name: str, factor: float | None) -> None:
        """Raises ConfigurationError if FSDP divides by a different factor than before.

        FSDP divides gradients in float16 twice, once before and once after the exchange. If the first divisor changed,
        the residual would have a different scale. FSDP divides gradients of other types only once, after the exchange.
        """
        before, self._divided_by[name] = self._divided_by.get(name, factor), factor
        if before != factor and self.engine.states.get(name):
            raise ConfigurationError(
                f"module {name}: set_gradient_divide_factor changed its factor from {before or 'none'} to {factor}, so "
                "the scale of float16 gradients would differ from the scale of the residual. Set the factor before the "
                "first step, or use MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)"
            )

    def _mean(self, flat: FlatGradient, names: list[str] | None, rows: torch.Tensor, dense_bytes: int) -> torch.Tensor:
        """Computes this rank's row of the mean. The residual in `states` has all parameters of `flat.held`.

        Args:
            names: the parameters that have gradients in this step; None if they are not known.
        """
        engine, name = self.engine, flat.name
        if isinstance(engine.memory, NoMemory) or names == flat.held:
            return engine.reduce(name, rows, dense_bytes)
        kept = engine.states.get(name, ())
        if names is None:
            warn_alone(
                f"{name}: forward() of this module was not called, so hvdcomp does not know which parameters have "
                "gradients in this step. In this step, hvdcomp does not add the residual of this module, and its "
                "rounding errors are lost"
            )
        else:
            kept = flat.hold(names, kept)
        engine.states[name] = () if names is None else flat.moved(kept, flat.held, names)
        mean = engine.reduce(name, rows, dense_bytes)
        if names is not None:
            kept = flat.moved(engine.states[name], names, flat.held, kept)
        engine.states[name] = kept
        return mean

    @torch.compiler.disable
    def _end_step(self) -> None:
        self._due = False
        self.engine.end_step()

    def _forget(self) -> None:
        """Ends the bookkeeping of a backward pass that has raised an error. The bytes that it has sent are counted in
        the next step."""
        self._due = False

    # Methods that `Compression` calls.

    @property
    def has_begun(self) -> bool:
        """Whether training has begun, that is, whether any gradient has arrived."""
        return bool(self.engine.plan)

    def compress(self, tensor: torch.Tensor) -> Any:
        """Raises ConfigurationError, because Horovod must not exchange gradients of this model."""
        raise ConfigurationError(
            "this hvdcomp.Compression is used by a model in FSDP, which already averages its gradients; use the "
            "optimizer without hvd.DistributedOptimizer"
        )

    @property
    def level(self) -> Level | None:
        """The level of the next step, as in `Compression.level`."""
        return self.engine.compressor.level

    def set_level(self, level: Level) -> None:
        """Sets the level from the next step on, as in `Compression.set_level`."""
        self.engine.set_level(level)

    def begin_from(self, state: Mapping[str, Any]) -> None:
        """Loads a state when the binding is created, as `load_state_dict` does."""
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, as in `Compression.state_dict`."""
        engine, memory = self.engine, str(self.engine.memory)
        residuals = {
            name: {"memory": memory, "arrays": [array.to(torch.float32, copy=True) for array in arrays]}
            for name, arrays in engine.states.items()
            if arrays
        }
        shapes = {name: list(kept["arrays"][0].shape) for name, kept in residuals.items()}
        shared = {
            "format": FORMAT,
            "compressor": self._method,
            "tensors": shapes,
            "shards": self._shards,
            "nodes": engine.levels.across.size,
            "order": engine.order,
            "layouts": self._layouts,
            "step": engine.step_number,
            "level": engine.compressor.level,
            "warm_starts": {},
            "coordinator": None,
        }
        own = {
            "rank": engine.communicator.rank,
            "size": engine.communicator.world_size,
            "replica": self._replica,
            "replicas": self._replicas,
            "owners": engine.owners,
            "residuals": residuals,
            "coordinator": None,
            "totals": dataclasses.asdict(engine.ledger.totals),
            "steps": engine.ledger.steps,
        }
        if self._divided_by:
            own["divided_by"] = dict(self._divided_by)
        return {"shared": shared, "own": own}

    @property
    def _layouts(self) -> dict[str, FlatLayout]:
        """The layout of each residual. Modules whose parameters are cut along a dimension other than the first are
        omitted."""
        return {name: layout for name, flat in self._flats.items() if (layout := flat.layout) is not None}

    @property
    def _shards(self) -> str:
        return f"{self.engine.communicator.world_size} ranks on {self.engine.levels.across.size} nodes"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state before the first step, as in `Compression.load_state_dict`.

        If the number of ranks or nodes has changed, `hvdcomp.dcp.load` passes the states of all ranks.

        Raises:
            ConfigurationError: if the state was saved with another compressor; or if the state was saved by another
                rank, whose residuals belong to other rows, and the states of all ranks are not given.
        """
        shared, own = parts_of(state)
        engine = self.engine
        states = {name: tuple(kept["arrays"]) for name, kept in own["residuals"].items()}
        if shared["compressor"] != self._method and (states or _without_memory(shared["compressor"]) != self._named):
            raise ConfigurationError(
                f"the checkpoint was written with compressor {shared['compressor']}, but this run has {self._method}; "
                "continue with the settings that the training was started with. The default memory depends on the "
                'number of ranks on a node. Set memory= of hvdcomp.Compression, or residuals="drop" of hvdcomp.dcp.load'
            )
        placed_as = shared.get("shards"), shared.get("order", engine.order), own["rank"], *replica_of(own)
        here = self._shards, engine.order, engine.communicator.rank, self._replica, self._replicas
        if states and placed_as != here:
            every, nodes = state.get("every"), engine.levels.across.size
            if every is None or nodes == 1 or "layouts" not in shared:
                raise ConfigurationError(
                    f"the state was saved by rank {own['rank']} of "
                    f"{shared.get('shards', 'a model that was sharded differently')}{_of_replica(*replica_of(own))}, "
                    f"but was given to rank {engine.communicator.rank} of "
                    f"{self._shards}{_of_replica(self._replica, self._replicas)}. The residual of a shard fits only "
                    "the same rank, with the same number of ranks and nodes. If there are several nodes, load the "
                    "checkpoint with hvdcomp.dcp.load, which cuts the residuals for the new ranks. Or load no state on "
                    "any rank: then the residuals are lost"
                )
            new = OwnedRows(engine.owners, engine.communicator.world_size, nodes, self._replica, self._replicas)
            states = resharded(every, self._layouts, new)
        else:
            states = self._by_name(states, shared.get("layouts", {}))
        engine.set_level(shared["level"])
        engine.step_number = shared["step"]
        engine.states = {
            name: tuple(array.to(self._device, copy=True) for array in arrays) for name, arrays in states.items()
        }
        self._divided_by = dict(own.get("divided_by") or {})
        engine.ledger.continue_from(Cost(**own["totals"]), own["steps"])

    def _by_name(
        self, states: Mapping[str, tuple[torch.Tensor, ...]], layouts: Mapping[str, FlatLayout]
    ) -> dict[str, tuple[torch.Tensor, ...]]:
        """The saved residuals of this rank, extended with zeros for parameters that are in this model's residuals but
        not in the saved residuals.

        Raises:
            ConfigurationError: if a module or parameter is not in the model.
        """
        placed = {}
        for name, arrays in states.items():
            flat, layout = self._flats.get(name), layouts.get(name)
            restored = None
            if flat is not None:
                restored = flat.restored(arrays, None if layout is None else with_plain_names(layout))
            if restored is None:
                raise ConfigurationError(
                    f"the residual of module {name} belongs to parameters that differ from those of this module, or an "
                    "earlier version of hvdcomp saved it after a step in which some parameters had no gradients. Drop "
                    'the residuals on all ranks: call hvdcomp.dcp.load with residuals="drop"'
                )
            placed[name] = restored
        return placed


class _ReduceScatter:
    """The reduce-scatter of a module's flat gradient. FSDP calls this object instead of its own reduce-scatter."""

    def __init__(self, binding: ShardsBinding, flat: FlatGradient, group: Any) -> None:
        self._binding, self._flat, self._parameters = binding, flat, group

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        factor = self._parameters.gradient_divide_factor
        self._binding.reduce(self._flat, output_tensor, input_tensor, group, op, factor)


def _check(setup: Setup) -> None:
    """Raises ConfigurationError if a setting is not possible with a reduce-scatter."""
    settings = setup.compression.settings
    method, memory = settings.compressor, settings.memory
    if not averages_vectors(method):
        raise ConfigurationError(
            f"{method} does not work in FSDP's reduce-scatter, because FSDP passes flat gradients of whole modules to "
            "hvdcomp. Use int8, int4, fp8, bf16, eden (without scaled=True) or another quantizer for all modules. "
            "Within a node, gradients are always exchanged uncompressed"
        )
    if memory is not None and (memory.is_momentum or memory.needs_all_gradients):
        raise ConfigurationError(
            f"the memory {memory} needs the whole gradients of each rank, and FSDP's reduce-scatter does not have "
            "them; use error_feedback or none"
        )
    if settings.policy is not None:
        raise ConfigurationError(
            f"the policy {settings.policy} does not work in FSDP's reduce-scatter, because FSDP reduces the gradients "
            "of one module after the other; leave the policy out"
        )
    if settings.overlap is True or settings.bucket_bytes or settings.gathered_bytes not in (None, GATHERED_BYTES):
        raise ConfigurationError(
            'FSDP itself decides when gradients are exchanged: leave overlap at "auto", and leave out bucket_bytes and '
            "gathered_bytes"
        )
    if setup.grad_scaler is not None and setup.grad_scaler.is_enabled():
        raise ConfigurationError(
            "a torch.amp.GradScaler does not work in FSDP's reduce-scatter, because the scale of residuals would "
            "differ from the scale of the gradients to which they are added. Train in bfloat16, which needs no scaler"
        )


def _check_weights(weights: Any) -> None:
    """Raises ConfigurationError unless `weights` is a compressor that can send changes of weights."""
    if weights is not None and not (isinstance(weights, Compressor) and averages_vectors(weights)):
        raise ConfigurationError(
            f"weights={weights!r} does not work with hvdcomp.fsdp.register; give hvdcomp.Int8(), hvdcomp.Int4() or "
            "another quantizer, or None for FSDP's own all-gather"
        )


def _without_memory(method: str) -> str:
    return method.partition(_WITH_MEMORY)[0]


def _of_replica(replica: int, replicas: int) -> str:
    return f" in replica {replica} of {replicas}" if replicas > 1 else ""


def _trained(model: torch.nn.Module, ranks: list[int], in_replica: bool) -> dict[str, DTensor]:
    """The trained parameters, by name.

    Args:
        ranks: the ranks over which the model is sharded.
        in_replica: whether `ranks` are the ranks of one replica, as returned by `group_of_shards`.

    Raises:
        ConfigurationError: if a parameter is not sharded over exactly these ranks.
    """
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise ConfigurationError(
            f"PyTorch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter; install PyTorch 2.13 or later"
        )
    trained = check_sharding(model.named_parameters())
    for name, parameter in trained.items():
        mesh = parameter.device_mesh
        if in_replica:
            if number_of_boxes(parameter) != len(ranks) or mesh.ndim > 2:
                raise ConfigurationError(
                    f"parameter {name} is on a mesh of {mesh.ndim} dimensions, as with tensor parallelism, so several "
                    "ranks of a replica may have copies of a shard. These copies would become different, because each "
                    "rank compresses its copy together with other shards. Leave out the argument shards of "
                    "hvdcomp.fsdp.register, or train without tensor parallelism"
                )
            continue
        if mesh.ndim != 1:
            raise ConfigurationError(
                f"parameter {name} is sharded over a mesh of {mesh.ndim} dimensions, as with tensor parallelism, and "
                "not over all ranks. The copies of a shard on several ranks would become different, because each rank "
                "compresses its copy together with other shards. Use a mesh that also has replicas: then hvdcomp "
                "compresses between the replicas. Or train without tensor parallelism, and let fully_shard shard over "
                "these ranks too"
            )
        if mesh.mesh.tolist() != ranks:
            raise ConfigurationError(
                f"parameter {name} is sharded over {mesh.size()} ranks, and not over all {len(ranks)} ranks in order. "
                "If the model has replicas, pass the dimension of the replicas, mesh['replicate'], to "
                "hvdcomp.fsdp.register. Otherwise shard the model over all ranks"
            )
    return trained


def _flat_gradients(model: torch.nn.Module, ranks: int) -> list[tuple[FlatGradient, Any]]:
    """The flat gradient and the parameter group of each `fully_shard`. The flat gradient is named after the last module
    of its `fully_shard`."""
    modules: dict[str, Any] = modules_of(model)
    names = {module: name for name, module in zip(plain_names(modules), modules.values(), strict=True)}
    groups, flats = {}, []
    for module, name in names.items():
        for group in parameter_groups(module)[:1]:  # modules with several groups are refused
            groups[id(group)] = name or "model", group
    for name, group in groups.values():
        several = len(group.modules) > 1
        parts = {(f"{names[module]}." * several).removeprefix("."): module for module in group.modules}
        flats.append((FlatGradient(name, parts, ranks), group))
    return flats


def _several_meshes_error(error: ValueError) -> ConfigurationError:
    """The error to raise if FSDP refuses a hook. FSDP then refuses the hook on every rank, so every rank raises this
    error."""
    return ConfigurationError(
        "FSDP cannot use the reduce-scatter of hvdcomp for a module whose parameters are sharded over several meshes: "
        f"{error} Let shard_placement_fn return no meshes, or call fully_shard on modules whose parameters share a "
        "single mesh"
    )
