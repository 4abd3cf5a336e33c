"""Reads the settings of Horovod's optimizer, and refuses uses that would make the weights of the ranks differ."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvdcomp.bindings.callers import caller_local
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.unaveraged import is_table

_NO_PASS = -1  # the number that PyTorch returns outside of any backward pass
_passes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # the backward pass in which a step began, by optimizer
_OPERATIONS = {hvd.Average: "Average", hvd.Sum: "Sum"}

_WRAPPED_TWICE = (
    "Horovod passes each gradient to hvdcomp twice, because these parameters were given to hvd.DistributedOptimizer "
    "twice. Wrap an optimizer only once. Before you wrap it again, delete the old wrapped optimizer (del optimizer, "
    "then gc.collect(), to remove its hooks)"
)
_SHARED = (
    "two optimizers share one hvdcomp.Compression, but it keeps the residuals of only one training; make a Compression "
    "for each optimizer, compression=hvdcomp.Compression(...)"
)


class HorovodOptimizer:
    """The settings and checks of Horovod's optimizer that a binding needs.

    Args:
        optimizer: the optimizer from `hvd.DistributedOptimizer`; None if another function of Horovod is the caller.
        parameters: the parameters of the `hvdcomp.Compression`, by name.

    Raises:
        ConfigurationError: if the optimizer has op=hvd.Adasum, or if this object is created within
            `optimizer.step(closure)`.

    Attributes:
        own: the names of the parameters whose gradients the optimizer passes to hvdcomp.
    """

    def __init__(self, optimizer: Any, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.optimizer = optimizer
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._names_in_horovod: Mapping[torch.nn.Parameter, str] = getattr(optimizer, "_parameter_names", {})
        self._hooked: set[torch.nn.Parameter] = getattr(optimizer, "_requires_update", set())
        self.own = frozenset(self._names[parameter] for parameter in self._hooked if parameter in self._names)
        self._counted = 0  # number of parameters in the optimizer's parameter groups
        self._unhooked: list[torch.nn.Parameter] = []
        if optimizer is not None:
            if not hasattr(optimizer, "op"):  # this is Horovod's optimizer for Adasum
                raise ConfigurationError(
                    "op=hvd.Adasum does not work with gradient compression, because Adasum sends changes of parameters "
                    "instead of gradients; use op=hvd.Average"
                )
            _refuse_closure(optimizer, caller_local("closure", callable, function="step"))
            optimizer.register_step_pre_hook(_before_step)

    def facts(self) -> dict[str, Any]:
        """The settings that must be the same on all ranks."""
        optimizer = self.optimizer
        if optimizer is None:
            return {}
        names = {self._names_in_horovod.get(parameter) for parameter in self._hooked if parameter not in self._names}
        return {
            "op": _OPERATIONS.get(optimizer.op, optimizer.op),
            "backward_passes_per_step": optimizer.backward_passes_per_step,
            "sparse_as_dense": optimizer.sparse_as_dense,
            "gradient_predivide_factor": optimizer.gradient_predivide_factor,
            "parameters that hvdcomp.Compression was not given": sorted(map(str, names)),
        }

    def reason_to_refuse(self) -> str | None:
        """The reason to refuse steps, if Horovod would not average some gradients; otherwise None."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        count = sum(len(group["params"]) for group in groups)
        if count != self._counted:
            self._counted = count
            parameters = [parameter for group in groups for parameter in group["params"]]
            self._unhooked = [parameter for parameter in parameters if parameter not in self._hooked]
        drifting = [parameter for parameter in self._unhooked if parameter.requires_grad and not is_table(parameter)]
        if not drifting:
            return None
        names = [
            self._names.get(parameter) or self._names_in_horovod.get(parameter) or str(tuple(parameter.shape))
            for parameter in drifting
        ]
        return (
            f"Horovod does not average the gradients of {', '.join(names)}, so the ranks' weights would become "
            "different. These parameters were frozen, or not in the optimizer yet, when hvd.DistributedOptimizer was "
            "made. Wrap the optimizer while all its parameters need gradients, and freeze parameters after that. Or "
            "delete this optimizer and its hvdcomp.Compression (del them, then gc.collect(), to remove Horovod's "
            "hooks), and make new ones."
        )

    def check_caller(self, compression: Any) -> None:
        """Raises ConfigurationError if another optimizer uses the same `hvdcomp.Compression`."""
        caller = caller_local("self", lambda value: compression_of(value) is compression)
        if caller is not None and self.optimizer is not None and caller is not self.optimizer:
            raise ConfigurationError(_SHARED)

    def finish(self) -> None:
        """Waits for Horovod's collectives of a step that was abandoned, so that their names can be used again."""
        handles = [handle for handle, _ in getattr(self.optimizer, "_handles", {}).values()]
        for handle in handles:
            if isinstance(handle, int):  # the handle is not an int before submission, or for a sparse gradient
                # someone else has already waited for this collective, or it has failed
                with contextlib.suppress(ValueError, HorovodInternalError):
                    hvd.synchronize(handle)

    def refuse_gradient(self, name: str) -> None:
        """Raises ConfigurationError for a gradient that belongs to another optimizer, or was passed twice."""
        if name in self.own:
            raise ConfigurationError(_WRAPPED_TWICE)
        if self.optimizer is not None:
            raise ConfigurationError(_SHARED)


def enter_step(optimizer: Any) -> None:
    """Registers the beginning of a step.

    Raises:
        ConfigurationError: if another optimizer is exchanging gradients with the same names.
    """
    if optimizer is None:
        return
    current = torch._C._current_graph_task_id()
    if _clash(optimizer, current):
        gc.collect()  # frees optimizers that nothing uses any more
        if why := _clash(optimizer, current):
            raise ConfigurationError(why)
    _passes[optimizer] = current


def _clash(optimizer: Any, current: int) -> str | None:
    """The reason why Horovod cannot distinguish the gradients of this optimizer from the gradients of another
    optimizer; None if Horovod can."""
    for other_optimizer, began in list(_passes.items()):
        in_one_pass = began == current != _NO_PASS
        if other_optimizer is optimizer or not (in_one_pass or _is_under_way(other_optimizer)):
            continue
        own, other_names = _names_of(optimizer), _names_of(other_optimizer)
        equal = sorted(own.keys() & other_names.keys())
        if any(own[name] is other_names[name] for name in equal):
            return _WRAPPED_TWICE
        if equal:
            when, before = "are both in one backward pass", ""
            if not in_one_pass:
                when = "both wait for optimizer.step() after their backward passes"
                before = (
                    "call step() of one optimizer before the backward pass of the other, delete an optimizer that is "
                    "no longer used, or "
                )
            return (
                f"two models have parameters with the same names, such as {equal[0]!r}, and {when}, but Horovod "
                f"identifies gradients by these names. Ways out: {before}give different names to both "
                "hvd.DistributedOptimizer and hvdcomp.Compression, named_parameters=[(f'second.{name}', parameter) for "
                "name, parameter in model.named_parameters()]"
            )
    return None


def _is_under_way(optimizer: Any) -> bool:
    """Whether Horovod has gradients of this optimizer that nobody has waited for yet. The result does not depend on
    whether the exchange of these gradients is complete, because ranks may see completion at different times."""
    return any(map(_is_open, (handle for handle, _ in optimizer._handles.values())))


def _is_open(handle: Any) -> bool:
    if not isinstance(handle, int):  # the gradient was not submitted yet, or is sparse
        return False
    try:
        hvd.poll(handle)
    except ValueError:  # someone else has already waited for this collective
        return False
    return True


def compression_of(candidate: Any) -> Any:
    """The `compression` of a Horovod optimizer; None for other objects."""
    return getattr(candidate, "_compression", None)


def _names_of(optimizer: Any) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for parameter, name in optimizer._parameter_names.items()}


def _before_step(optimizer: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """A step pre-hook of PyTorch. `arguments` are the arguments of `optimizer.step`, beginning with the optimizer."""
    _refuse_closure(optimizer, options.get("closure", arguments[1] if len(arguments) > 1 else None))


def _refuse_closure(optimizer: Any, closure: Any) -> None:
    """Raises ConfigurationError if the gradients of a closure would not be averaged."""
    if closure is not None and getattr(optimizer, "_should_synchronize", False):
        raise ConfigurationError(
            "optimizer.step(closure) computes gradients after Horovod has averaged, so each rank would step with its "
            "own gradients. Call the closure first: loss = closure(); optimizer.step(). If the optimizer needs the "
            "closure (LBFGS), call optimizer.synchronize() at the end of the closure, and call step(closure) within "
            "optimizer.skip_synchronize()"
        )
