"""The steps of a training that somebody else wrote: when each of its parts begins and ends. PyTorch.

Nothing of the training has to be known or changed. PyTorch tells every optimizer's steps to whoever asks, and each
parameter tells when its gradient is there; the backward pass begins where `torch.autograd.backward` is called, through
which `loss.backward()` goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hvdcomp.bindings import kind_of
from hvdcomp.tools.bench.marks import mark, seconds_between
from hvdcomp.tools.bench.workload import Workload
from hvdcomp.tools.train.options import SetupError

FORWARD, BACKWARD, EXCHANGE, OPTIMIZER = range(4)
"""Parts of a step. FORWARD is all that is none of the others, such as loading data; EXCHANGE is what is left of it when
the last gradient is there, and all else until the optimizer's step."""


@dataclass(frozen=True)
class Watched:
    """What was seen of a training.

    Attributes:
        workload: the model, with the gradients of the last step.
        optimizer: its kind, as in `hvdcomp.compressors.evidence`; None for another one.
        parts: seconds of the parts of each step, (steps, 4).
        ready: when the gradient of each parameter was there, as a share of the backward pass, (steps, parameters).
        backward_passes: of a step. All but the last count as FORWARD.
        more_optimizers: names of others that also made steps, and whose parameters were not looked at.
    """

    workload: Workload
    optimizer: str | None
    parts: np.ndarray
    ready: np.ndarray
    backward_passes: int
    more_optimizers: tuple[str, ...] = ()


class Watch:
    """Watches the steps of the first optimizer that makes one.

    Args:
        steps: to take times of, after `warm_up` others.
        then: called with what was seen, inside the last of these steps, when the optimizer has made it.

    Attributes:
        seen: number of steps, up to now.
        done: whether `then` was called.
        ended: None; see `hvdcomp.tools.bench.watched_keras.KerasWatch`.

    Example:
        >>> watch = Watch(20, 10, print)
        >>> watch.start()
        >>> watch.seen
        0
        >>> watch.stop()
    """

    def __init__(self, steps: int, warm_up: int, then: Callable[[Watched], None]) -> None:
        self._steps, self._warm_up, self._then = steps, warm_up, then
        self.seen = 0
        self.done = False
        self.ended: BaseException | None = None
        self._handles: list[Any] = []
        self._optimizer: Any = None
        self._others: set[str] = set()
        self._depth = 0  # Horovod's optimizer calls the step of the one that it wraps
        self._models: list[torch.nn.Module] = []
        self._last: Any = None
        self._marks: dict[str, Any] = {}
        self._passes = 0
        self._moments: dict[str, Any] = {}
        self._samples: list[dict[str, Any]] = []

    def start(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        backward = torch.autograd.backward

        @wraps(backward)
        def marked(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._before_backward(tensors)
            backward(tensors, *args, **kwargs)

        torch.autograd.backward = marked
        self._backward = backward

    def stop(self) -> None:
        """Leaves the training as it would be without."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        torch.autograd.backward = self._backward

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        """Remembers modules that are called by no other, which a name is looked up in: the first of each step."""
        if self._optimizer is None and not any(module is part for model in self._models for part in model.modules()):
            self._models.append(module)

    def _before_backward(self, tensors: Any) -> None:
        first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
        if self._optimizer is None or not isinstance(first, torch.Tensor) or not first.requires_grad:
            return
        self._passes += 1
        self._marks = {"begin": mark(first.device)}
        engine: Any = torch.autograd.Variable._execution_engine

        def computed() -> None:
            self._marks["computed"] = mark(first.device)

        # PyTorch calls what was asked for first, and DistributedDataParallel, which then waits, asks later.
        handle = first.register_hook(lambda _: engine.queue_callback(computed))
        self._handles.append(handle)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer is self._optimizer:
            self._depth += 1
            self._marks["exchanged"] = mark(self._device)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._optimizer is None:
            self._look_at(optimizer)
            return
        if optimizer is not self._optimizer:
            self._others.add(type(optimizer).__name__)
            return
        self._marks.setdefault("stepped", mark(self._device))
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._end_step()

    def _look_at(self, optimizer: Any) -> None:
        """The first step: from the next on, its parameters tell when their gradients are there."""
        wanted = {id(one): one for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
        if any(hasattr(one, "device_mesh") for one in wanted.values()):
            raise SetupError(
                "the parameters are sharded (FSDP, or tensor parallelism), whose steps hvdcomp profile does not know: "
                "profile the same model in DistributedDataParallel or Horovod"
            )
        names: dict[int, str] = {}
        for model in self._models:  # of several, two may have the same names
            for name, one in model.named_parameters():
                own = name.removeprefix("module.")  # DistributedDataParallel's
                names.setdefault(id(one), own if own not in names.values() else f"{own}.{len(names)}")
        self._parameters = {
            names.get(key, f"parameter{place}"): one for place, (key, one) in enumerate(wanted.items())
        }
        self._handles.pop(0).remove()  # of the forward pass: names are known
        self._optimizer = optimizer
        self._device = next(iter(wanted.values())).device
        for name, parameter in self._parameters.items():
            there = partial(self._is_there, name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(there))
        self._last = mark(self._device)

    def _is_there(self, name: str, _: torch.Tensor) -> None:
        self._moments[name] = mark(self._device)

    def _end_step(self) -> None:
        end = mark(self._device)
        self.seen += 1
        if self.seen > self._warm_up and {"begin", "computed", "exchanged"} <= self._marks.keys():
            self._samples.append({**self._marks, "before": self._last, "end": end, "ready": self._moments})
        passes, self._passes = self._passes, 0
        self._marks, self._moments, self._last = {}, {}, end
        if len(self._samples) == self._steps:
            self.stop()
            self.done = True
            self._then(self._watched(passes))

    def _watched(self, passes: int) -> Watched:
        parts, ready = [], []
        for sample in self._samples:
            backward = seconds_between(sample["begin"], sample["computed"])
            exchange = seconds_between(sample["computed"], sample["exchanged"])
            optimizer = seconds_between(sample["exchanged"], sample["stepped"])
            whole = seconds_between(sample["before"], sample["end"])
            parts.append([max(0.0, whole - backward - exchange - optimizer), backward, exchange, optimizer])
            ready.append(
                [
                    seconds_between(sample["begin"], sample["ready"].get(name, sample["computed"])) / backward
                    for name in self._parameters
                ]
            )
        return Watched(
            Workload(Named(self._parameters), no_loss),
            kind_of(self._optimizer),
            np.array(parts),
            np.array(ready),
            passes,
            tuple(sorted(self._others)),
        )


class Named(torch.nn.Module):
    """Parameters by the names that the training's model has for them."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        super().__init__()
        self._by_name = parameters

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self._by_name.values())

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self._by_name.items())


def no_loss() -> torch.Tensor:
    """In place of a loss that is the training's own."""
    raise NotImplementedError("the training makes its own steps")
