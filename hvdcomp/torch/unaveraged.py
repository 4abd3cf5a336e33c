"""Finds trained parameters whose gradients are not averaged. The weights of these parameters would differ more and more
between ranks."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar
from weakref import WeakSet, finalize, ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvdcomp.errors import ConfigurationError

_of_rows: Any = WeakIdKeyDictionary()


def note_tables(weights: Iterable[torch.nn.Parameter]) -> None:
    """Records that the gradients of these weights are exchanged row by row, and not by Horovod."""
    _of_rows.update(dict.fromkeys(weights, True))


def is_table(parameter: torch.nn.Parameter) -> bool:
    """Whether the parameter was recorded as a table."""
    return parameter in _of_rows


class Unaveraged:
    """Looks for parameters that were added or unfrozen too late to be averaged.

    Args:
        model: the model whose gradients are averaged.
        averaged: the parameters whose gradients are averaged.
        aside: the parameters of the model whose gradients may differ between ranks.
        optimizer: the optimizer of the model; None if unknown.
        advice: the text of the message, with a field for the names of parameters.
    """

    _all: ClassVar[WeakSet[Unaveraged]] = WeakSet()  # all instances of this process

    def __init__(
        self,
        model: torch.nn.Module,
        averaged: Iterable[torch.nn.Parameter],
        aside: Iterable[torch.nn.Parameter],
        optimizer: Any,
        advice: str,
    ) -> None:
        self._model = ref(model)
        self._optimizer = optimizer
        self._advice = advice
        self._averaged = {id(parameter): parameter for parameter in averaged}
        in_model = set(map(id, model.parameters()))
        # If a parameter outside the model was in the optimizer from the start, the user is responsible for it.
        outside = (parameter for parameter in self._in_optimizer() if id(parameter) not in in_model)
        self._known = self._averaged | {id(parameter): parameter for parameter in (*aside, *outside)}
        self._lists: list[dict[str, Any]] = []  # the parameters and the children of each module
        # the objects in these lists; they are kept so that their addresses are not reused
        self._entries: list[Any] = []
        self._unknown: list[torch.nn.Parameter] = []  # the parameters in these lists that are not in `_known`
        self._checked_in_step = False  # whether the check was made since the optimizer's latest step
        self._counted = self._count()
        self._added: list[torch.nn.Parameter] = []  # the parameters that were added to the optimizer later
        self._all.add(self)
        # If only parameters that are not averaged are trained, hvdcomp gets no gradient at all. Then only the
        # optimizer's step can show the mistake. Some wrapped optimizers, such as accelerate's, have no hooks.
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            finalize(model, optimizer.register_step_pre_hook(self._before_step).remove)

    def reason_to_refuse(self) -> str | None:
        """The message that names parameters that are not averaged; None if there are none. The method is called in each
        step.
        """
        self._checked_in_step = True
        model = self._model()
        if model is None:
            return None
        parameters = (*self._in_model(model), *self._in_groups())
        late = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
        if not late:
            return None
        elsewhere = set().union(*(training._averaged for training in self._all if training._model() is not None))
        names = {id(parameter): name.removeprefix("module.") for name, parameter in model.named_parameters()}
        drifting = [
            names.get(key, f"a parameter of shape {tuple(late[key].shape)}") for key in late if key not in elsewhere
        ]
        return self._advice.format(", ".join(drifting)) if drifting else None

    def _before_step(self, *_: Any) -> None:
        was_checked, self._checked_in_step = self._checked_in_step, False
        reason = None if was_checked else self.reason_to_refuse()
        if reason is not None:
            raise ConfigurationError(reason)

    def _in_model(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        """The parameters of the model that are not in `_known`. Walking through the modules is slow. So the walk is
        repeated only if a child or a parameter of some module has changed."""
        entries = self._in_lists()
        if not entries or len(entries) != len(self._entries) or not all(map(operator.is_, entries, self._entries)):
            modules = list(model.modules())
            self._lists = [registered for module in modules for registered in (module._parameters, module._modules)]
            self._entries = self._in_lists()
            parameters = (
                parameter for module in modules for parameter in module._parameters.values() if parameter is not None
            )
            self._unknown = [parameter for parameter in parameters if id(parameter) not in self._known]
        return self._unknown

    def _in_lists(self) -> list[Any]:
        return [entry for registered in self._lists for entry in registered.values()]

    def _in_groups(self) -> list[torch.nn.Parameter]:
        """The parameters that were added to the optimizer and are not in `_known`."""
        count = self._count()
        if count != self._counted:
            self._counted = count
            self._added = [parameter for parameter in self._in_optimizer() if id(parameter) not in self._known]
        return self._added

    def _in_optimizer(self) -> Iterator[torch.nn.Parameter]:
        for group in getattr(self._optimizer, "param_groups", ()):
            yield from group["params"]

    def _count(self) -> int:
        return sum(len(group["params"]) for group in getattr(self._optimizer, "param_groups", ()))
