"""The operators of compiled graphs: `torch.ops.hvdcomp.allreduce_mean`, its variants for several tensors, and
`reduce_scatter_mean`.

An operator is opaque to the compiler. The fake kernel of an operator computes the shapes of the results for the
compiler, and refuses invalid arguments when the graph is made. An operator is registered with an effect, so that the
compiler keeps the operators in the order of the program. This order is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdcomp.torch.compiled.exchange import (
    check,
    check_scattered,
    exchange,
    group_of,
    info_of,
    method_of,
    reduce_scatter,
    require_reduce_scatter,
)

_COMMON = "str spec, Tensor step, str group_name"


def _operator(name: str, schema: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that registers a function as the operator `hvdcomp::NAME`."""

    def register(function: Callable[..., Any]) -> Any:
        made = torch.library.custom_op(f"hvdcomp::{name}", function, mutates_args=mutates, schema=schema)
        if hasattr(made, "register_effect"):
            made.register_effect(torch.library.EffectType.ORDERED)
        return made

    return register


@_operator("allreduce_mean", f"(Tensor tensor, {_COMMON}, str name, int seed) -> Tensor")
def allreduce_mean(tensor: Tensor, spec: str, step: Tensor, group_name: str, name: str, seed: int) -> Tensor:
    """The mean of a tensor over the ranks of a process group. The arguments are those of
    `hvdcomp.compiled.allreduce_mean`."""
    return _apart(exchange([tensor], None, spec, step, group_name, [name], seed), [tensor])[0]


@allreduce_mean.register_fake
def _(tensor: Tensor, spec: str, step: Tensor, group_name: str, name: str, seed: int) -> Tensor:
    return _like([tensor], None, spec, step, [name])[0]


@_operator("allreduce_means", f"(Tensor[] tensors, {_COMMON}, str[] names, int seed) -> Tensor[]")
def allreduce_means(
    tensors: Sequence[Tensor], spec: str, step: Tensor, group_name: str, names: Sequence[str], seed: int
) -> list[Tensor]:
    """The means of several tensors, computed with few collectives."""
    return _apart(exchange(tensors, None, spec, step, group_name, names, seed), tensors)


@allreduce_means.register_fake
def _(
    tensors: Sequence[Tensor], spec: str, step: Tensor, group_name: str, names: Sequence[str], seed: int
) -> list[Tensor]:
    return _like(tensors, None, spec, step, names)


@_operator(
    "allreduce_means_with_residuals",
    f"(Tensor[] tensors, Tensor(a!)[] residuals, Tensor(b!)[] means, {_COMMON}, str[] names, int seed) -> ()",
    mutates=("residuals", "means"),
)
def allreduce_means_with_residuals(
    tensors: Sequence[Tensor],
    residuals: Sequence[Tensor],
    means: Sequence[Tensor],
    spec: str,
    step: Tensor,
    group_name: str,
    names: Sequence[str],
    seed: int,
) -> None:
    """Computes the means of several tensors with error feedback, and writes them to `means`. The operator replaces the
    values of the residuals.

    The means are an argument because PyTorch does not functionalize an operator that changes a list of tensors and also
    returns a list.
    """
    for mean, result in zip(means, exchange(tensors, residuals, spec, step, group_name, names, seed), strict=True):
        mean.copy_(result)


@allreduce_means_with_residuals.register_fake
def _(
    tensors: Sequence[Tensor],
    residuals: Sequence[Tensor],
    means: Sequence[Tensor],
    spec: str,
    step: Tensor,
    group_name: str,
    names: Sequence[str],
    seed: int,
) -> None:
    _like(tensors, residuals, spec, step, names)


@_operator("reduce_scatter_mean", f"(Tensor tensor, {_COMMON}, str name, int seed) -> Tensor")
def reduce_scatter_mean(tensor: Tensor, spec: str, step: Tensor, group_name: str, name: str, seed: int) -> Tensor:
    """This rank's part of the mean. The arguments are those of `hvdcomp.compiled.reduce_scatter_mean`."""
    return reduce_scatter(tensor, spec, step, group_name, name, seed)


@reduce_scatter_mean.register_fake
def _(tensor: Tensor, spec: str, step: Tensor, group_name: str, name: str, seed: int) -> Tensor:
    group = group_of(group_name)
    check([tensor], None, [name], step)
    check_scattered(tensor, name, group)
    require_reduce_scatter(method_of(spec, residuals=False), info_of(name, tensor.shape, tensor.dtype))
    return tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])


def _apart(means: list[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies the means so that each has its own storage, as PyTorch requires of an operator. The means of one fused
    all-reduce would share a storage."""
    own = {mean.untyped_storage().data_ptr() for mean in means}
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return means if len(own) == len(means) and own.isdisjoint(given) else [mean.clone() for mean in means]


def _like(
    tensors: Sequence[Tensor], residuals: Sequence[Tensor] | None, spec: str, step: Tensor, names: Sequence[str]
) -> list[Tensor]:
    method_of(spec, residuals is not None)
    check(tensors, residuals, names, step)
    return [torch.empty_like(tensor) for tensor in tensors]
