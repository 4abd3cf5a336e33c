"""Times the parts of the steps of a user's training program without changing the program. This module needs PyTorch.

PyTorch's hooks report the steps of every optimizer, and the time at which the gradient of each parameter is ready. The
backward pass begins when `loss.backward()` calls `torch.autograd.backward`.
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
"""Parts of a step. FORWARD includes all other work, such as loading data. EXCHANGE is the time from the last computed
gradient to the optimizer's step."""


@dataclass(frozen=True)
class Watched:
    """The times of a program's training steps.

    Attributes:
        workload: the model, with the gradients of the last step.
        optimizer: kind of the optimizer, as in `hvdcomp.compressors.evidence`; None if hvdcomp's own training runs do
            not include this kind.
        parts: the seconds of the four parts of each step, an array of shape (steps, 4).
        ready: for each step, the time at which the gradient of each parameter was computed, as a share of the backward
            pass. The array has the shape (steps, parameters).
        backward_passes: the number of backward passes in a step. All passes except the last count as FORWARD.
        more_optimizers: the names of further optimizers that were used. The parameters of these optimizers were not
            watched.
    """

    workload: Workload
    optimizer: str | None
    parts: np.ndarray
    ready: np.ndarray
    backward_passes: int
    more_optimizers: tuple[str, ...] = ()


class Watch:
    """Times the steps of the first optimizer that takes a step after a backward pass.

    A step without a backward pass is not a training step. `hvd.broadcast_optimizer_state` takes such a step, with zero
    gradients, to create the state of an optimizer. That optimizer need not be the optimizer that trains the model.

    Args:
        steps: the number of timed steps, after `warm_up` steps.
        then: a function that is called with the times at the end of the last step, after the optimizer's step.

    Attributes:
        seen: the number of steps so far.
        before_backward: number of optimizer steps before the first backward pass.
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
        self.before_backward = 0
        self.done = False
        self.ended: BaseException | None = None
        self._handles: list[Any] = []
        self._optimizer: Any = None
        self._other_optimizers: set[str] = set()
        self._depth = 0  # nested calls of `step`: Horovod's optimizer calls `step` of the wrapped optimizer
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
        """Removes all hooks from the program."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        torch.autograd.backward = self._backward

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        """Stores the top-level modules of the program, which later give the names of the parameters."""
        if self._optimizer is None and not any(module is part for model in self._models for part in model.modules()):
            self._models.append(module)

    def _before_backward(self, tensors: Any) -> None:
        first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
        if not isinstance(first, torch.Tensor) or not first.requires_grad:
            return
        self._passes += 1
        if self._optimizer is None:
            return
        self._marks = {"begin": mark(first.device)}
        engine: Any = torch.autograd.Variable._execution_engine

        def computed() -> None:
            self._marks["computed"] = mark(first.device)

        # PyTorch calls callbacks in the order of their registration. DistributedDataParallel waits in a callback that
        # it registers later, so this mark does not include the wait.
        handle = first.register_hook(lambda _: engine.queue_callback(computed))
        self._handles.append(handle)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer is self._optimizer:
            self._depth += 1
            self._marks["exchanged"] = mark(self._device)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._optimizer is None:
            if self._passes:
                self._look_at(optimizer)
            else:
                self.before_backward += 1
            return
        if optimizer is not self._optimizer:
            self._other_optimizers.add(type(optimizer).__name__)
            return
        self._marks.setdefault("stepped", mark(self._device))
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._end_step()

    def _look_at(self, optimizer: Any) -> None:
        """Adds hooks to the parameters after the first step. From the next step on, the hooks report when gradients are
        ready."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        trained = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
        if any(hasattr(parameter, "device_mesh") for parameter in trained.values()):
            raise SetupError(
                "the parameters are sharded (FSDP, or tensor parallelism), which hvdcomp profile does not support; "
                "profile the same model in DistributedDataParallel or Horovod"
            )
        names: dict[int, str] = {}
        for model in self._models:  # two models may have parameters with the same names
            for name, parameter in model.named_parameters():
                short = name.removeprefix("module.")  # the prefix comes from DistributedDataParallel
                names.setdefault(id(parameter), short if short not in names.values() else f"{short}.{len(names)}")
        self._parameters = {
            names.get(key, f"parameter{place}"): parameter for place, (key, parameter) in enumerate(trained.items())
        }
        self._handles.pop(0).remove()  # the hook of forward passes is no longer needed
        self._optimizer = optimizer
        self._device = next(iter(trained.values())).device
        for name, parameter in self._parameters.items():
            hook = partial(self._gradient_computed, name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._passes = 0
        self._last = mark(self._device)

    def _gradient_computed(self, name: str, _: torch.Tensor) -> None:
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
            tuple(sorted(self._other_optimizers)),
        )


class Named(torch.nn.Module):
    """A module that contains the trained parameters under the names that they have in the user's model."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        super().__init__()
        self._by_name = parameters

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self._by_name.values())

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self._by_name.items())


def no_loss() -> torch.Tensor:
    """A placeholder for the loss, which only the user's program can compute."""
    raise NotImplementedError("only the user's program can compute the loss")
