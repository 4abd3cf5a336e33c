"""Finds parameters that are trained although nothing averages their gradients: the ranks' weights would drift apart."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar
from weakref import WeakSet, finalize, ref

import torch

from hvdcomp.errors import ConfigurationError


class Unaveraged:
    """Looks for parameters that came, or were unfrozen, too late.

    Args:
        model: whose gradients are averaged.
        averaged: the parameters whose gradients are.
        aside: parameters of the model that may be trained without.
        optimizer: that steps with the gradients; None where it is not known.
        advice: what a message says behind the names of the parameters.
    """

    _all: ClassVar[WeakSet[Unaveraged]] = WeakSet()  # of all trainings of this process

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
        # What is outside of the model, and in the optimizer from the start, is left to whoever put it there.
        outside = (parameter for parameter in self._in_optimizer() if id(parameter) not in in_model)
        self._known = self._averaged | {id(parameter): parameter for parameter in (*aside, *outside)}
        self._lists: list[dict[str, Any]] = []  # of each module, its parameters and its children
        self._seen: list[Any] = []  # what was in them; kept, so that nothing else comes to lie where it lay
        self._unknown: list[torch.nn.Parameter] = []  # of these parameters
        self._asked = False  # since the optimizer's latest step
        self._counted = self._count()
        self._added: list[torch.nn.Parameter] = []  # to the optimizer, after that
        self._all.add(self)
        # Where only such parameters are trained, no gradient is handed over: the optimizer's step alone tells. One that
        # is wrapped without a hook of its own, such as accelerate's, has none.
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            finalize(model, optimizer.register_step_pre_hook(self._before_step).remove)

    def reason_to_refuse(self) -> str | None:
        """Names them, and says what to do; None as long as all is well.

        It is asked in each step.
        """
        self._asked = True
        model = self._model()
        if model is None:
            return None
        parameters = (*self._in_model(model), *self._in_groups())
        late = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
        if not late:
            return None
        elsewhere = set().union(*(other._averaged for other in self._all if other._model() is not None))
        names = {id(parameter): name.removeprefix("module.") for name, parameter in model.named_parameters()}
        drifting = [names.get(key, f"one of shape {tuple(late[key].shape)}") for key in late if key not in elsewhere]
        return self._advice.format(", ".join(drifting)) if drifting else None

    def _before_step(self, *_: Any) -> None:
        asked, self._asked = self._asked, False
        reason = None if asked else self.reason_to_refuse()
        if reason is not None:
            raise ConfigurationError(reason)

    def _in_model(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        """The parameters of the model. Walking through its modules takes long, so they are looked at anew only where
        a child or a parameter of any of them is another one."""
        seen = self._in_lists()
        if not seen or len(seen) != len(self._seen) or not all(map(operator.is_, seen, self._seen)):
            modules = list(model.modules())
            self._lists = [registered for module in modules for registered in (module._parameters, module._modules)]
            self._seen = self._in_lists()
            parameters = (
                parameter for module in modules for parameter in module._parameters.values() if parameter is not None
            )
            self._unknown = [parameter for parameter in parameters if id(parameter) not in self._known]
        return self._unknown

    def _in_lists(self) -> list[Any]:
        return [each for of_module in self._lists for each in of_module.values()]

    def _in_groups(self) -> list[torch.nn.Parameter]:
        """The parameters that were added to the optimizer."""
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
