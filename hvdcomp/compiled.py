"""Computes compressed means of gradients inside a compiled graph.

    means = hvdcomp.compiled.allreduce_means(gradients, "eden", step)

docs/compiled-graph.md shows whole training steps, and lists the methods that a graph can contain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from hvdcomp.compressors.choice import MIN_NUMEL
from hvdcomp.errors import ConfigurationError

if not hasattr(torch.library, "custom_op"):
    raise ConfigurationError(
        f"hvdcomp.compiled needs PyTorch 2.4 or later, but this is PyTorch {torch.__version__}. Install a newer "
        "PyTorch, or use hvdcomp.ddp.register, which works with torch.compile too"
    )

from hvdcomp.torch.compiled import operators, rewrite

__all__ = ["allreduce_mean", "allreduce_means", "backend", "compress_reductions", "reduce_scatter_mean"]


def allreduce_mean(
    tensor: torch.Tensor,
    spec: str,
    step: torch.Tensor | int,
    *,
    name: str,
    group: dist.ProcessGroup | str | None = None,
    seed: int = 0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the compressed mean of a tensor over all ranks of a process group.

    In a graph of `torch.compile` or `make_fx`, the call is one node, `torch.ops.hvdcomp.allreduce_mean`. The function
    works in eager mode too. All ranks must make their calls in the same order. A call returns when the mean is ready.

    Args:
        tensor: the tensor of this rank, in float16, bfloat16, float32 or float64, of any shape. It is not changed.
        spec: the method, such as "eden", "int8", "fp8", "bf16" or "none". Write `str(hvdcomp.EDEN(bits=1))` to get
            the spec of an object.
        step: number of the step, counted from 0. Pass a whole number, or a tensor on the CPU that contains one whole
            number. A method with random numbers draws new numbers in each step. If `step` is a tensor, `torch.compile`
            compiles once. If it is a Python number, `torch.compile` compiles a second time in the second step.
        name: name of the tensor, such as the name of its parameter. Random numbers depend on the name, and rules in
            `spec` may use the name to choose a method. Within a step, all tensors must have different names.
        group: the process group, or its `group_name`; None for all ranks.
        seed: seed of the random numbers; the same on all ranks.
        residual: the residual of a method with error feedback, such as "int4" or "topk:ratio=0.01": the part of earlier
            gradients that was not sent. It has the shape of the tensor, in float32, or in float64 if the tensor is in
            float64. The call changes the residual in place. Begin with zeros, and save the residual of each rank in
            checkpoints. None for methods without error feedback.

    Returns:
        The mean, with the shape, element type and layout of the tensor. If the tensor of any rank contains an inf or
        NaN, the mean contains a NaN on all ranks, and the residual does not change.

    Raises:
        SpecError: if the spec is a policy, if the method keeps a state other than a residual, or if the method needs a
            residual and there is none. Under `torch.compile`, the message appears inside one of PyTorch's own errors.
        ConfigurationError: if any other argument is not allowed.
        RankMismatchError: on every rank, in the first call, if the arguments of the ranks differ.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun needs "gloo" alone
        >>> allreduce_mean(torch.tensor([1.0, -2.0]), "none", 0, name="layer.bias")
        tensor([ 1., -2.])
        >>> dist.destroy_process_group()
    """
    if residual is not None:
        residuals = {name: residual}
        return allreduce_means({name: tensor}, spec, step, group=group, seed=seed, residuals=residuals)[name]
    return operators.allreduce_mean(tensor, spec, _as_tensor(step), _name_of(group), name, seed)


def allreduce_means(
    tensors: Mapping[str, torch.Tensor],
    spec: str,
    step: torch.Tensor | int,
    *,
    group: dist.ProcessGroup | str | None = None,
    seed: int = 0,
    residuals: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Computes the compressed means of several tensors, in few collectives. This is faster than calling
    `allreduce_mean` for each tensor.

    Args:
        tensors: the tensors of this rank, by name.
        spec: the spec of a method for all tensors, or rules that choose a method by the tensor's name or size, such as
            '{"numel<1024": "none", "ndim<2": "none", "*": "eden"}'.
        step, group, seed: as in `allreduce_mean`.
        residuals: the residual of each tensor, by the same names, as in `allreduce_mean`; None for methods without
            error feedback.

    Returns:
        The mean of each tensor, by name, as in `allreduce_mean`. If any tensor of any rank contains an inf or NaN, each
        mean contains a NaN.

    Raises:
        SpecError, ConfigurationError, RankMismatchError: as in `allreduce_mean`.
    """
    names, given = list(tensors), list(tensors.values())
    if residuals is None:
        means = operators.allreduce_means(given, spec, _as_tensor(step), _name_of(group), names, seed)
        return dict(zip(names, means, strict=True))
    if missing := [name for name in names if name not in residuals]:
        raise ConfigurationError(f"there is no residual for {', '.join(missing)}; give a residual for each tensor")
    means = [torch.empty_like(tensor) for tensor in given]
    kept = [residuals[name] for name in names]
    operators.allreduce_means_with_residuals(given, kept, means, spec, _as_tensor(step), _name_of(group), names, seed)
    return dict(zip(names, means, strict=True))


def reduce_scatter_mean(
    tensor: torch.Tensor,
    spec: str,
    step: torch.Tensor | int,
    *,
    name: str,
    group: dist.ProcessGroup | str | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """Computes this rank's part of the mean of a tensor over all ranks of a process group.

    Within a node, tensors are sent uncompressed, and between nodes they are quantized. `hvdcomp.fsdp.register`
    exchanges gradients in the same way if the model has no replicas. On a single node, nothing is compressed, and rank
    0 gives a warning. In a graph, the call is one node, `torch.ops.hvdcomp.reduce_scatter_mean`.

    Args:
        tensor: the tensor of this rank, in float16, bfloat16, float32 or float64. Its first dimension must be a
            multiple of the number of ranks. The tensor is not changed. Compressed means are computed in float32.
        spec: the spec of a quantizer that keeps no state between steps, such as "int8", "int4:rounding=stochastic",
            "fp8", "eden" or "bf16"; or "none".
        step, name, group, seed: as in `allreduce_mean`.

    Returns:
        This rank's part of the mean. The mean is cut into equal parts along its first dimension, and the n-th rank of
        the process group gets the n-th part. If the tensor of any rank contains an inf or NaN, the part of at least one
        rank also contains an inf or NaN.

    Raises:
        SpecError: if the method does not work in a reduce-scatter, or keeps a state.
        ConfigurationError: if any other argument is not allowed.
        RankMismatchError: on every rank, in the first call, if the arguments of the ranks differ.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun needs "gloo" alone
        >>> reduce_scatter_mean(torch.tensor([1.0, -2.0]), "none", 0, name="layer.bias")
        tensor([ 1., -2.])
        >>> dist.destroy_process_group()
    """
    return operators.reduce_scatter_mean(tensor, spec, _as_tensor(step), _name_of(group), name, seed)


def compress_reductions(
    module: GraphModule,
    spec: str,
    step: torch.Tensor | Node,
    *,
    group: dist.ProcessGroup | str | None = None,
    seed: int = 0,
    least: int = MIN_NUMEL,
    name_of: Callable[[Node], str | None] = lambda node: node.name,
) -> list[str]:
    """Replaces the all-reduces and reduce-scatters in the graph of a training step with compressed means.

        traced = make_fx(train)(weights, inputs, classes)
        step = torch.tensor(0)
        hvdcomp.compiled.compress_reductions(traced, "eden", step)
        for inputs, classes in batches:
            loss, weights = traced(weights, inputs, classes)
            step += 1

    The function replaces `all_reduce` and `reduce_scatter_tensor` of `_c10d_functional`, and their forms for several
    tensors (`all_reduce_coalesced`, `reduce_scatter_tensor_coalesced`), if their operation is "sum" or "avg". It also
    replaces the `wait_tensor` after them, and a division by the number of ranks before or after them. A sum without
    such a division becomes the mean times the number of ranks. Reduce-scatters become `reduce_scatter_mean`. Call the
    function on every rank with the same graph, once for each process group.

    Args:
        module: a graph from `make_fx`, from Dynamo, or from AOTAutograd. The graph is changed in place.
        spec: spec of a method that keeps no state between steps, such as "eden", "int8" or "fp8".
        step: number of the step, counted from 0, in one of two forms. The first form is a tensor with one whole number
            on the CPU. It becomes a buffer of the module, and you add 1 to it in place after each step. The second form
            is a node of the graph that has such a tensor as its value, such as a placeholder. Use a node inside
            Inductor's own passes, because Inductor turns small buffers into constants.
        group: the process group whose reductions are replaced, or its `group_name`; None for the process group of all
            ranks.
        seed: seed of the random numbers; the same on all ranks.
        least: a tensor is compressed only if it has at least this number of elements. Smaller tensors, such as the
            loss, stay uncompressed.
        name_of: function that takes a node, and returns the name of the tensor that the node reduces, or None to leave
            the tensor uncompressed. The node is the `all_reduce` or `reduce_scatter_tensor`; in the forms for several
            tensors, it is the `getitem` that picks the result of this tensor. Default: the name of the node.

    Returns:
        The names of the tensors that are now compressed; an empty list if there are none. All other reductions in the
        graph stay unchanged.

    Raises:
        SpecError: as in `allreduce_mean`; and if a reduce-scatter would be replaced, but the method does not work in a
            reduce-scatter.
        ConfigurationError: if several tensors get the same name, or if there is no such process group.
    """
    return rewrite.replace_reductions(module, spec, step, _name_of(group), seed, least, name_of)


def backend(
    spec: str, step: torch.Tensor, *, then: str = "inductor", **options: Any
) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    """Creates a backend for `torch.compile` that first calls `compress_reductions`.

        train = torch.compile(train, fullgraph=True, backend=hvdcomp.compiled.backend("eden", step))

    The backend finds only the reductions that the compiled function itself starts, with `torch.distributed.all_reduce`
    or a functional collective.

    Args:
        spec, step: as in `compress_reductions`.
        then: name of the backend that compiles the changed graph.
        options: the other arguments of `compress_reductions`.
    """

    def compile_compressed(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # If Dynamo made the module, AOTAutograd looks up a variable of the program for each tensor of the module. The
        # tensor `step` has no such variable, so the graph is put into a new module.
        module = GraphModule(module, module.graph)
        compress_reductions(module, spec, step, **options)
        return rewrite.compile_by(then, module, inputs)

    return compile_compressed


def _as_tensor(step: torch.Tensor | int) -> torch.Tensor:
    return step if isinstance(step, torch.Tensor) else torch.full((), step, dtype=torch.int64)


def _name_of(group: dist.ProcessGroup | str | None) -> str:
    if isinstance(group, str):
        return group
    process_group = dist.group.WORLD if group is None else group
    if process_group is None:
        raise ConfigurationError(
            "torch.distributed was not started: start the ranks with torchrun, and call "
            "torch.distributed.init_process_group() first"
        )
    name: str = process_group.group_name
    return name
