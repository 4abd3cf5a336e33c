"""The exchange that the operators of compiled graphs run (`hvdcomp.torch.compiled.operators`).

A node of a graph gets all inputs of a step as its arguments, and keeps nothing between steps. Each node has an engine,
which is created when the node runs for the first time. In each step, the engine gets the step number and the residuals.
The node then gives the same result, bit for bit, as the engine of a training run with the same method, seed and names
in the same step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hvdcomp import settings
from hvdcomp.arrays.torch_arrays import dtype_name
from hvdcomp.arrays.types import FLOATING, wide_dtype
from hvdcomp.communicators import torch_distributed
from hvdcomp.communicators.nodes import RANKS_PER_NODE
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.memory import ErrorFeedback, Memory, NoMemory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.compressors.two_level import within
from hvdcomp.errors import ConfigurationError, SpecError, warn_alone
from hvdcomp.exchange.agreement import facts_of_kernels, refused_on_every_rank, require_agreement
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.ledger import Ledger
from hvdcomp.exchange.shards import ShardReducer, averages_vectors
from hvdcomp.files import VERSION
from hvdcomp.policies import POLICIES
from hvdcomp.torch.training import refuse_capture

_INSTEAD = "Use hvdcomp.ddp.register or hvdcomp.fsdp.register"


@functools.cache
def method_of(spec: str, residuals: bool) -> Compressor:
    """Creates the compressor that a node of the graph uses, from its spec.

    Args:
        spec: spec string of a compressor.
        residuals: whether the node of the graph gets residuals.

    Raises:
        SpecError: if the spec is invalid, or a node cannot run the method.
    """
    if spec.partition(":")[0].strip() in POLICIES:
        raise SpecError(
            f"{spec!r} is a policy, which makes decisions between steps, but a compiled graph repeats the same step. "
            f"{_INSTEAD} for policies, or give the spec of a compressor, such as 'eden'"
        )
    method = parse_compressor(spec)
    settings.check(method, None, None, None)
    leaves = [within(leaf) for leaf in method.leaves()]
    for leaf in leaves:
        memory = leaf.default_memory
        if leaf.keeps_state or not isinstance(memory, NoMemory | ErrorFeedback):
            raise SpecError(
                f"{leaf} does not work in a compiled graph, because this method keeps more than a residual from step "
                f"to step. {_INSTEAD} for this method, or choose a method that keeps nothing, such as eden or int8"
            )
        if isinstance(memory, ErrorFeedback) and not residuals:
            raise SpecError(
                f"{leaf} keeps a residual from step to step, but no residual was given. Give the same tensor in each "
                "step, at first residual=torch.zeros_like(tensor), or choose a method that keeps nothing, such as eden"
            )
    if residuals and not any(isinstance(leaf.default_memory, ErrorFeedback) for leaf in leaves):
        raise SpecError(f"{method} keeps no residual, so leave out the residuals that were given")
    return method


def require_reduce_scatter(method: Compressor, tensor: TensorInfo) -> Compressor:
    """Returns the method that a tensor uses in a reduce-scatter.

    Args:
        method: the compressor that `method_of` returned.
        tensor: the whole tensor, before it is cut.

    Raises:
        SpecError: if the method cannot average a tensor when each rank gets only a part of the mean.
    """
    chosen = method.route(tensor)
    if not averages_vectors(chosen):
        raise SpecError(
            f"{chosen} cannot compress the reduce-scatter of {tensor.name!r}, because each rank gets only a part of "
            "the mean. Choose int8, int4:rounding=stochastic, fp8, eden, bf16 or another quantizer for this tensor. In "
            "hvdcomp.compiled.compress_reductions, you can also leave the tensor uncompressed: let name_of return None"
        )
    return chosen


def info_of(name: str, shape: Sequence[int], dtype: torch.dtype) -> TensorInfo:
    return TensorInfo(name, tuple(shape), str(dtype).removeprefix("torch."))


def check_scattered(tensor: torch.Tensor, name: str, group: dist.ProcessGroup) -> None:
    """Raises ConfigurationError if the ranks of a group cannot get equal parts of a tensor."""
    if tensor.ndim == 0 or tensor.shape[0] % group.size():
        raise ConfigurationError(
            f"tensor {name!r} has the shape {tuple(tensor.shape)}, but the length of its first dimension must be a "
            f"multiple of the number of ranks, {group.size()}; pad this dimension with zeros"
        )


def check(
    tensors: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor] | None, names: Sequence[str], step: torch.Tensor
) -> None:
    """Raises ConfigurationError if the arguments of a node are invalid. The check does not read the values of
    tensors."""
    if not len(set(names)) == len(names) == len(tensors):
        raise ConfigurationError(
            f"{len(tensors)} tensors were given with the names {', '.join(names)}; give each tensor a name of its own"
        )
    if step.numel() != 1 or step.device.type != "cpu" or step.dtype not in (torch.int64, torch.int32):
        raise ConfigurationError(
            f"the step is a tensor of shape {tuple(step.shape)} and type {step.dtype} on {step.device}; give a whole "
            "number, or a tensor with one whole number on the CPU, such as torch.tensor(0)"
        )
    for name, tensor in zip(names, tensors, strict=True):
        if dtype_name(tensor) not in FLOATING or tensor.device != tensors[0].device:
            raise ConfigurationError(
                f"tensor {name!r} has the type {tensor.dtype} and is on {tensor.device}, but all tensors must be on "
                f"one device, and each type must be one of {', '.join(FLOATING)}"
            )
    if residuals is None:
        return
    if len(residuals) != len(tensors):
        raise ConfigurationError(
            f"{len(residuals)} residuals were given for {len(tensors)} tensors; give one residual for each tensor"
        )
    for name, tensor, residual in zip(names, tensors, residuals, strict=True):
        wide = getattr(torch, wide_dtype(dtype_name(tensor)))
        if (residual.shape, residual.dtype, residual.device) != (tensor.shape, wide, tensor.device):
            raise ConfigurationError(
                f"the residual of {name!r} has shape {tuple(residual.shape)} and type {residual.dtype} on "
                f"{residual.device}; give a tensor of shape {tuple(tensor.shape)} and type {wide} on {tensor.device}"
            )


def exchange(
    tensors: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor] | None,
    spec: str,
    step: torch.Tensor,
    group_name: str,
    names: Sequence[str],
    seed: int,
) -> list[torch.Tensor]:
    """Computes the means of tensors over the ranks of a process group, in new tensors. Changes the residuals in place.

    Raises:
        SpecError, ConfigurationError: if arguments are invalid.
        RankMismatchError: on every rank, if ranks pass different arguments when this node of the graph runs for the
            first time.
    """
    check(tensors, residuals, names, step)
    refuse_capture()
    if not tensors:
        return []
    with _uncast(tensors[0]):
        gradients = {name: tensor.detach() for name, tensor in zip(names, tensors, strict=True)}
        node = _node(_Means, gradients, residuals is not None, spec, group_name, seed)
        results = node.step(gradients, dict(zip(names, residuals or (), strict=False)), int(step))
    return [results[name] for name in names]


def reduce_scatter(
    tensor: torch.Tensor, spec: str, step: torch.Tensor, group_name: str, name: str, seed: int
) -> torch.Tensor:
    """This rank's part of the mean of a tensor over the ranks of a process group, in a new tensor.

    Raises:
        SpecError, ConfigurationError, RankMismatchError: as in `exchange`.
    """
    check([tensor], None, [name], step)
    check_scattered(tensor, name, group_of(group_name))
    refuse_capture()
    with _uncast(tensor):
        gradient = tensor.detach()
        return _node(_PartOfMean, {name: gradient}, False, spec, group_name, seed).step(gradient, int(step))


@contextlib.contextmanager
def _uncast(tensor: torch.Tensor) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        yield


def group_of(name: str) -> dist.ProcessGroup:
    """The process group with this name.

    Raises:
        ConfigurationError: if torch.distributed has no process group of this name.
    """
    # The function is declared as Any, because from PyTorch 2.13 on, its argument is not a plain str.
    resolve: Any = dist.distributed_c10d._resolve_process_group
    try:
        group: dist.ProcessGroup = resolve(name)
    except RuntimeError as error:
        raise ConfigurationError(
            f"torch.distributed has no process group with the name {name!r}: {error}. Call init_process_group() first, "
            "and give the name of a process group that exists, which is its attribute group_name"
        ) from None
    return group


class _Node:
    """A node of a graph that exchanges tensors, with its communicator and its settings.

    Attributes:
        group: the process group of the ranks that exchange tensors.
        signature: element types, shapes and device of the tensors.
        communicator: the communicator of the process group.
        infos: names, shapes and element types of the tensors.
        method: the compressor of all tensors.
        seed: seed of the random numbers.
    """

    def __init__(
        self, group: dist.ProcessGroup, spec: str, residuals: bool, tensors: Mapping[str, torch.Tensor], seed: int
    ) -> None:
        self.group, self.seed = group, seed
        self.signature = _signature(tensors)
        self.communicator, like = TorchDistributedCommunicator(group), next(iter(tensors.values()))
        self.infos = [info_of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        # An error is raised on all ranks, because a spec may be invalid on only some ranks, and the other ranks may
        # already wait here.
        with refused_on_every_rank(self.communicator, like):
            self.method = self.checked(method_of(spec, residuals))
        facts = {
            "method": str(self.method),
            "seed": seed,
            "hvdcomp": VERSION,
            **facts_of_kernels(),
            **{f"tensor {info.name}": f"{info.dtype} {info.shape}" for info in self.infos},
        }
        require_agreement(self.communicator, facts, like)

    def checked(self, method: Compressor) -> Compressor:
        """Checks that this kind of node can run the method, and returns the method.

        Raises:
            SpecError: if this kind of node cannot run the method.
        """
        return method


class _Means(_Node):
    """A node that computes means of whole tensors, with its engine."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._engine = Engine(self.communicator, self.infos, self.method, seed=self.seed, min_numel=0, min_ndim=0)

    def step(
        self, gradients: Mapping[str, torch.Tensor], residuals: Mapping[str, torch.Tensor], step: int
    ) -> dict[str, torch.Tensor]:
        """Returns the means by name, and replaces the values of the residuals."""
        _check_number(step)
        engine = self._engine
        engine.begin()
        engine.step_number = step
        kept = {name: residual for name, residual in residuals.items() if self._memory(name).keeps}
        for name, residual in kept.items():
            self._give(name, residual)
        results = engine.step(gradients)
        for name, residual in kept.items():
            residual.copy_(engine.states[name].memory[0].view(residual.shape))
        return results

    def _memory(self, name: str) -> Memory:
        return self._engine.planner.memory_for(self._engine.plan[name])

    def _give(self, name: str, residual: torch.Tensor) -> None:
        """Replaces the residual that the engine keeps for a tensor. The storage stays the same, because with a new
        storage the engine would have to describe its buckets again."""
        state = self._engine.states[name]
        if state.has_residual:
            state.memory[0].copy_(residual.view(state.memory[0].shape))
        else:
            state.memory, state.keeper = (residual.clone(),), self._memory(name)


class _PartOfMean(_Node):
    """A node that computes this rank's part of the mean of one tensor. Within a node of the cluster, values are sent
    without loss."""

    def __init__(self, group: dist.ProcessGroup, spec: str, residuals: bool, tensors: Any, seed: int) -> None:
        super().__init__(group, spec, residuals, tensors, seed)
        (like,) = tensors.values()
        self._reducer = ShardReducer(self.communicator, self.method, NoMemory(), seed, 0, Ledger(), like)
        if self._reducer.levels.across.size == 1 < self.communicator.world_size and dist.get_rank() == 0:
            warn_alone(
                f"all {self.communicator.world_size} ranks of a reduce-scatter are on one node, so hvdcomp does not "
                f"compress it; set {RANKS_PER_NODE}=1 to count each rank as a node"
            )

    def checked(self, method: Compressor) -> Compressor:
        (info,) = self.infos
        return require_reduce_scatter(method, info)

    def step(self, gradient: torch.Tensor, step: int) -> torch.Tensor:
        """The mean of this rank's rows of the gradient."""
        _check_number(step)
        (info,) = self.infos
        reducer, ranks = self._reducer, self.communicator.world_size
        part = (gradient.shape[0] // ranks, *gradient.shape[1:])
        if not reducer.compresses(info.name, gradient.numel()):
            own = gradient.new_empty(part)
            torch_distributed.reduce_scatter(own, gradient.contiguous(), group=self.group)
            return own.mul_(1 / ranks)
        reducer.step_number = step
        mean = reducer.reduce(info.name, gradient.reshape(ranks, -1), gradient.nbytes)
        reducer.end_step()
        return mean.to(gradient.dtype).view(part)


def _check_number(step: int) -> None:
    if step < 0:
        raise ConfigurationError(f"step {step} is not allowed; count the steps from 0")


_N = TypeVar("_N", bound=_Node)
_nodes: dict[tuple[Any, ...], Any] = {}  # all nodes that were created, by the values that distinguish them


def _node(
    kind: type[_N], tensors: Mapping[str, torch.Tensor], residuals: bool, spec: str, group_name: str, seed: int
) -> _N:
    """The node for these arguments. The node is created again if the tensors or the process group have changed."""
    group, key = group_of(group_name), (kind, spec, residuals, group_name, seed, *tensors)
    known: _N | None = _nodes.get(key)
    if known is None or known.group is not group or known.signature != _signature(tensors):
        known = _nodes[key] = kind(group, spec, residuals, tensors, seed)
    return known


def _signature(tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    return [(tensor.dtype, tensor.shape, tensor.device) for tensor in tensors.values()]
