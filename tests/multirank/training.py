"""What the cases share: a small model trained on data that differs between the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

import hvdcomp
from tests.multirank.everywhere import assert_same_tensors, raised_everywhere
from tests.multirank.models import batch, small_model, tensors_of, weights

__all__ = [
    "assert_same_everywhere", "batch", "compression", "distribute", "own_generator", "raised", "small_model", "train",
    "weights",
]  # fmt: skip


def own_generator() -> torch.Generator:
    """A generator that differs between the ranks."""
    return torch.Generator().manual_seed(100 + hvd.rank())


def compression(spec: str, model: torch.nn.Module, **options: Any) -> hvdcomp.Compression:
    """A compression for all parameters of a model."""
    return hvdcomp.Compression.from_spec(spec, named_parameters=model.named_parameters(), **options)


def distribute(
    model: torch.nn.Module, how: Any, learning_rate: float = 0.05, momentum: float = 0.9, **options: Any
) -> torch.optim.Optimizer:
    """Horovod's optimizer around SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=how, **options)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 50,
    passes: int = 1,
    dtype: torch.dtype = torch.float32,
    before_step: Callable[[], None] | None = None,
) -> None:
    """Trains on this rank's own data."""
    generator = own_generator()
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            inputs, classes = batch(generator, dtype)
            torch.nn.functional.cross_entropy(model(inputs).float(), classes).backward()
        if before_step:
            before_step()
        optimizer.step()


def assert_same_everywhere(given: torch.nn.Module | torch.Tensor) -> None:
    """Asserts that the weights of a model, or a tensor, are finite and the same, bit for bit, on all ranks."""
    tensors = tensors_of(given)
    everyone = hvd.allgather(torch.cat([*tensors.values()]).reshape(1, -1), name="test.same")
    assert_same_tensors([(name, len(vector)) for name, vector in tensors.items()], everyone.numpy())


def raised(kind: type[Exception], work: Callable[[], object]) -> str:
    """The message of the error of this kind that `work` raises; every rank must raise one."""
    return raised_everywhere(kind, work, hvd.allgather_object)
