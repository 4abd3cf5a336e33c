"""The model whose steps are timed: a reference model on random data, or a user's own model. This module needs
PyTorch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn.functional import cross_entropy

from hvdcomp.arrays.types import dtype_bytes
from hvdcomp.compressors import TensorInfo
from hvdcomp.tools.bench.marks import HOST
from hvdcomp.tools.bench.models import IMAGES, split_model
from hvdcomp.tools.train.frameworks import build_model
from hvdcomp.tools.train.options import TEXT_MODELS, SetupError

_TOKENS, _LENGTH = 100, 64  # number of different characters, and number of characters in a text
_TURN_S, _MOST_STEPS = 0.25, 8

T = TypeVar("T")


@dataclass(frozen=True)
class Workload:
    """A model, and a function that computes its loss.

    Attributes:
        model: the model to train.
        loss: function that runs the forward pass on a batch, and returns the loss, a scalar.
    """

    model: torch.nn.Module
    loss: Callable[[], torch.Tensor]

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    def tensors(self) -> list[TensorInfo]:
        """The trained parameters."""
        return [
            TensorInfo(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        ]

    @property
    def dense_bytes(self) -> int:
        """The bytes of all gradients. A gradient has the type of its parameter."""
        return sum(tensor.size * dtype_bytes(tensor.dtype) for tensor in self.tensors())


def turn_of(step_s: float) -> tuple[int, int]:
    """The numbers of steps in a turn: the first steps, which fill the caches again, and then the measured steps.

    Args:
        step_s: the approximate seconds of a step.
    """
    if step_s >= _TURN_S:
        return 0, 1
    return 1, max(2, min(_MOST_STEPS, int(_TURN_S / step_s)))


def in_turn(trainings: Sequence[T], number: int) -> list[T]:
    """The order of a round. Each round begins with a different training run, so the order affects all training runs
    equally."""
    first = number % len(trainings)
    return [*trainings[first:], *trainings[:first]]


def build(model: str, batch_size: int, seed: int, rank: int, device: torch.device = HOST) -> Workload:
    """Creates a model and a batch. The weights are the same on all ranks, and the batch differs between ranks.

    Afterwards, the process treats denormal numbers as zero.

    Args:
        model: one of `hvdcomp.tools.bench.models.TIMED`, with random images of the shape of CIFAR-10; "model@data" for
            random images with the shape of another data set, such as "cnn@digits"; or "package.module:function". This
            function gets the batch size. It returns the model, and a function without arguments that computes the
            model's loss on a batch. It is called several times, and must create a new model each time. During the call,
            `device` is the default device.
        batch_size: the batch size of one rank.
        seed: seed of the weights and the data.
        rank: number of this rank. The data differ between ranks.
        device: device of the model and of its batch.

    Raises:
        SetupError: if the model is unknown, or the function does not return what is required.
    """
    # Timed steps always train on the same batch, so momenta become denormal numbers. Processors are many times slower
    # with denormal numbers.
    torch.set_flush_denormal(True)
    torch.manual_seed(seed)
    if ":" in model:
        return _own_workload(model, batch_size, device)
    name, data = split_model(model)
    text = name in TEXT_MODELS
    channels, size, classes = (1, _LENGTH, _TOKENS) if text else IMAGES[data or "cifar10"]
    network = build_model(name, channels=channels, size=size, classes=classes).to(device)
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    if text:
        inputs = torch.randint(_TOKENS, (batch_size, _LENGTH), generator=generator)
        labels = torch.randint(_TOKENS, (batch_size * _LENGTH,), generator=generator)
    else:
        inputs = torch.randn((batch_size, channels, size, size), generator=generator)
        labels = torch.randint(classes, (batch_size,), generator=generator)
    inputs, labels = inputs.to(device), labels.to(device)
    return Workload(network, lambda: cross_entropy(network(inputs).flatten(0, -2), labels))


def _own_workload(place: str, batch_size: int, device: torch.device) -> Workload:
    module_name, _, function_name = place.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(f"the model {place!r} cannot be imported: {error}; is its folder in PYTHONPATH?") from None
    contract = f"{place}(batch_size) must return (torch.nn.Module, function that returns the loss)"
    with device:
        result: Any = _called(lambda: function(batch_size), contract)
    if not isinstance(result, tuple) or len(result) != 2:
        raise SetupError(f"{contract}, not {type(result).__name__}")
    model, loss = result
    if not isinstance(model, torch.nn.Module) or not callable(loss):
        raise SetupError(f"{contract}, not ({type(model).__name__}, {type(loss).__name__})")
    if not any(parameter.requires_grad and parameter.numel() for parameter in model.parameters()):
        raise SetupError(f"the model of {place} has no parameters to train")
    devices = {parameter.device for parameter in model.parameters()}
    if wrong_devices := {str(actual) for actual in devices if actual.type != device.type}:
        raise SetupError(
            f"the model of {place} is on {', '.join(sorted(wrong_devices))}, but the device to measure is {device}; "
            f"create the model without naming a device, or give --device {min(wrong_devices).partition(':')[0]}"
        )
    value = _called(loss, contract)
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise SetupError(f"{contract}; its loss is {value!r:.80}, not a scalar tensor with a gradient")
    return Workload(model, loss)


def _called(function: Callable[[], Any], contract: str) -> Any:
    try:
        return function()
    except Exception as error:
        raise SetupError(f"{contract}, but raised {type(error).__name__}: {error}") from error
