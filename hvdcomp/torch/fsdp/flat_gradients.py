"""Finds out which parameters are in the flat gradients of FSDP, so that each parameter keeps its own residual.

In a step, some parameters of a module may have no gradient. FSDP joins the gradients that exist, and does not report
which parameters they belong to. The length of the flat gradient is not enough to find out, because two experts of the
same shape may be trained in different steps. So each parameter has a hook.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from hvdcomp.torch.fsdp.resharding import FlatLayout, part_of
from hvdcomp.torch.parameters import plain_names


class _Parameter(NamedTuple):
    """One parameter that is a part of a flat gradient.

    Attributes:
        owner, attribute: the module and its attribute that contain the parameter. During a pass, the attribute contains
            the whole parameter.
        shape: the shape of the whole parameter.
        length: the number of elements of this parameter in a row of the flat gradient.
        cut_first: whether the first dimension is cut. Resharding requires this.
    """

    owner: torch.nn.Module
    attribute: str
    shape: tuple[int, ...]
    length: int
    cut_first: bool

    @property
    def present(self) -> Any:
        return getattr(self.owner, self.attribute)


class FlatGradient:
    """The joined gradient of modules that FSDP reduces together.

    Args:
        name: name of the flat gradient.
        modules: the modules of one `fully_shard`, in FSDP's order. The key of a module is the prefix of the names of
            its parameters.
        ranks: the number of ranks over which each parameter is sharded.

    Attributes:
        name: name of the flat gradient.
        modules: the modules.
        held: the names of the parameters in a residual, in order. A parameter is in the residual if it was trained at
            the start, or has had a gradient since then.
    """

    def __init__(self, name: str, modules: Mapping[str, Any], ranks: int) -> None:
        self.name, self.modules = name, list(modules.values())
        found: dict[Any, tuple[str, torch.nn.Module, str]] = {}
        visited: set[torch.nn.Module] = set()
        for prefix, module in modules.items():
            for own_name, owner, attribute, parameter in _in_order(module, prefix, visited):
                found.setdefault(parameter, (own_name, owner, attribute))
        names = plain_names([own_name for own_name, _, _ in found.values()])
        self._parameters = {
            own_name: _Parameter(owner, attribute, tuple(parameter.shape), *_cut(parameter, ranks))
            for own_name, (parameter, (_, owner, attribute)) in zip(names, found.items(), strict=True)
        }
        self.held = self._trained()
        self._with_gradient: set[str] = set()  # the parameters that got a gradient since the last exchange

    @property
    def layout(self) -> FlatLayout | None:
        """The parameters of the residual; None if a parameter is cut along a dimension other than the first."""
        parameters = [(name, self._parameters[name]) for name in self.held]
        if not all(parameter.cut_first for _, parameter in parameters):
            return None
        return [(name, list(parameter.shape)) for name, parameter in parameters]

    def watch(self) -> None:
        """Registers hooks that record which parameters get gradients."""
        unwatched = dict(self._parameters)

        @torch.compiler.disable
        def look(*_: Any) -> None:
            for name, parameter in list(unwatched.items()):
                whole = parameter.present  # FSDP creates the whole parameter in the first pass, and keeps it
                if whole.requires_grad and not isinstance(whole, DTensor):
                    whole.register_post_accumulate_grad_hook(functools.partial(self._note, name))
                    del unwatched[name]

        for module in self.modules:
            module.register_forward_pre_hook(look)  # after FSDP's own hook

    @torch.compiler.disable
    def _note(self, name: str, _: torch.Tensor) -> None:
        self._with_gradient.add(name)

    def take_names(self, length: int) -> list[str] | None:
        """The names of the parameters in the flat gradient that FSDP is passing to hvdcomp; None if the names are not
        known.

        Args:
            length: the number of elements of a row.
        """
        noted, self._with_gradient = self._with_gradient, set()
        # The flat gradient contains all trained parameters after `set_reduce_scatter_unused_params`, or in a pass that
        # does not call the module's forward().
        for names in ([name for name in self._parameters if name in noted], self._trained()):
            if self._length(names) == length:
                return names
        return None

    def hold(self, names: Iterable[str], arrays: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Adds parameters to `held`. Returns the residual, an array of shape (rows, length), which is zero for the
        added parameters."""
        before, wanted = self.held, {*self.held, *names}
        self.held = [name for name in self._parameters if name in wanted]
        return tuple(arrays) if self.held == before else self.moved(arrays, before, self.held)

    def moved(
        self, arrays: Iterable[torch.Tensor], names: Sequence[str], new_names: Sequence[str], into: Any = None
    ) -> tuple[torch.Tensor, ...]:
        """Rearranges arrays of shape (rows, length). The given arrays contain the parameters `names`, and the results
        contain the parameters `new_names`. Parameters that are not in `names` become zero.

        Args:
            into: the arrays to which the results are written. Parameters that are not in `names` then keep their values
                in these arrays. None to create new arrays.
        """
        old, new, results = self._places(names), self._places(new_names), []
        for number, array in enumerate(arrays):
            result = into[number] if into else array.new_zeros(len(array), self._length(new_names))
            for name in old.keys() & new.keys():
                result[:, new[name]] = array[:, old[name]]
            results.append(result)
        return tuple(results)

    def restored(self, arrays: Sequence[torch.Tensor], layout: FlatLayout | None) -> tuple[torch.Tensor, ...] | None:
        """A residual of shape (rows, length) from a checkpoint; None if its parameters do not belong to this flat
        gradient.

        Args:
            layout: the saved layout; None if no layout was saved. Without a layout, the residual must have exactly the
                parameters `held`.
        """
        known = self._parameters
        shapes = {name: known[name].shape for name in self.held} if layout is None else dict(layout)
        is_known = all(name in known and known[name].shape == tuple(shape) for name, shape in shapes.items())
        names = list(shapes)
        if not is_known or any(array.shape[1] != self._length(names) for array in arrays):
            return None
        self.hold(names, ())
        return self.moved(arrays, names, self.held)

    def _trained(self) -> list[str]:
        return [name for name, parameter in self._parameters.items() if parameter.present.requires_grad]

    def _length(self, names: Iterable[str]) -> int:
        return sum(self._parameters[name].length for name in names)

    def _places(self, names: Iterable[str]) -> dict[str, slice]:
        places, end = {}, 0
        for name in names:
            start, end = end, end + self._parameters[name].length
            places[name] = slice(start, end)
        return places


def _in_order(
    module: torch.nn.Module, prefix: str, visited: set[torch.nn.Module]
) -> Iterator[tuple[str, torch.nn.Module, str, Any]]:
    """Yields (name, module, attribute, parameter) for each parameter, in FSDP's order: child modules come before the
    module itself.
    """
    visited.add(module)
    for inside, child in module.named_children():
        if child not in visited and not isinstance(child, FSDPModule):
            yield from _in_order(child, f"{prefix}{inside}.", visited)
    for attribute, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):  # not a parameter of `ignored_params`
            yield f"{prefix}{attribute}", module, attribute, parameter


def _cut(parameter: DTensor, ranks: int) -> tuple[int, bool]:
    """The number of elements of a parameter in a row of the flat gradient, and whether the parameter's first dimension
    is cut."""
    if Shard(0) in parameter.placements:
        return part_of(parameter.shape, ranks), True
    return parameter.numel() // ranks, False  # FSDP cuts another dimension only if the ranks divide it evenly
