"""What the cases of DistributedDataParallel share: models trained on data that differs between the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvdcomp
from tests.multirank.everywhere import assert_same_tensors, raised_everywhere
from tests.multirank.models import batch, tensors_of

Loss = Callable[[Any, torch.Tensor, torch.Tensor, int], torch.Tensor]


def large_model() -> torch.nn.Module:
    """Of 3.7 MB, in two of DDP's buckets of 1.5 MB or more; the same on all ranks."""
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 40),
    )


def own_generator() -> torch.Generator:
    """A generator that differs between the ranks."""
    return torch.Generator().manual_seed(100 + dist.get_rank())


def distribute(
    model: torch.nn.Module, how: hvdcomp.Compression | str | None = None, momentum: float = 0.9, **options: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, hvdcomp.Compression | None]:
    """The model in DDP, SGD, and the compression."""
    distributed = DistributedDataParallel(model, **{"bucket_cap_mb": 1.5, **options})
    optimizer = torch.optim.SGD(distributed.parameters(), lr=0.02, momentum=momentum)
    compression = hvdcomp.Compression.from_spec(how) if isinstance(how, str) else how
    if compression is not None:
        hvdcomp.ddp.register(distributed, compression, optimizer)
    return distributed, optimizer, compression


def plain_loss(model: Any, inputs: torch.Tensor, classes: torch.Tensor, step: int) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(inputs).float(), classes)


def train(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    steps: int = 6,
    *,
    passes: int = 1,
    dtype: torch.dtype = torch.float32,
    loss_of: Loss = plain_loss,
    generator: torch.Generator | None = None,
) -> None:
    """Trains on this rank's own data; of several passes only the last exchanges gradients."""
    generator = own_generator() if generator is None else generator
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(1, passes + 1):
            inputs, classes = batch(generator, dtype)
            with model.no_sync() if number < passes else contextlib.nullcontext():
                loss_of(model, inputs, classes, step).backward()
        optimizer.step()


def assert_same_everywhere(given: torch.nn.Module | torch.Tensor) -> None:
    """Asserts that the weights of a model, or a tensor, are finite and the same, bit for bit, on all ranks."""
    tensors = tensors_of(given)
    vector = torch.cat([*tensors.values()])
    everyone = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, vector)
    assert_same_tensors([(name, len(one)) for name, one in tensors.items()], [other.numpy() for other in everyone])


def gathered(given: Any) -> list[Any]:
    """The objects that all ranks give, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, given)
    return everyone


def raised(kind: type[Exception], work: Callable[[], object]) -> str:
    """The message of the error of this kind that `work` raises; every rank must raise one."""
    return raised_everywhere(kind, work, gathered)
