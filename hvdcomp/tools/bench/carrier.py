"""The interface through which measurements use a library that exchanges gradients. This module needs PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hvdcomp.communicators import Communicator
from hvdcomp.compression import Compression
from hvdcomp.compressors import Compressor, least_early_bytes
from hvdcomp.perfmodel import STOCK
from hvdcomp.tools.bench.workload import Workload
from hvdcomp.tools.train.ranks import Ranks
from hvdcomp.torch import all_ranks

Ready = tuple[tuple[float, float], ...]
"""The times at which gradients are ready, as pairs in the format of `hvdcomp.perfmodel.Compute.ready`."""

_LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Distributed:
    """A training run, with the functions that run its steps and exchange its gradients.

    Attributes:
        loss: function that runs the forward pass on a batch, and returns the loss, a scalar.
        optimizer: function that waits until the gradients are exchanged, and then updates the weights.
        exchange: function that waits for the end of the exchange, so that the time of the exchange can be separated
            from the optimizer's step.
        compression: the `hvdcomp.Compression`; None if the training does not use hvdcomp.
    """

    loss: Callable[[], torch.Tensor]
    optimizer: Any
    exchange: Callable[[], None] = lambda: None
    compression: Compression | None = None


def sgd(workload: Workload) -> torch.optim.SGD:
    """Creates the optimizer that all measured training runs use."""
    return torch.optim.SGD(workload.model.parameters(), lr=_LEARNING_RATE, momentum=0.9)


def alone(workload: Workload) -> Distributed:
    """Creates a training run without an exchange of gradients."""
    return Distributed(workload.loss, sgd(workload))


class Carrier(ABC):
    """A library that exchanges gradients. `hvdcomp.tools.bench.carriers.carrier_on` creates instances.

    Args:
        ranks: the communicator of all ranks, which this library connects.

    Class attributes:
        title: the name of the library. network: the name of the library that runs the collectives. warm_up: the number
        of steps at the start of training that differ from later steps.

    Attributes:
        start_s: seconds that the idle library takes to start a collective, whatever the number of ranks.
        bucket_bytes: the largest buffer that the library sends at a time. A buffer may be larger only if it contains a
            single gradient.
        early_bytes: the smallest bucket of gradients that hvdcomp sends during the backward pass.
        shares_buckets: whether hvdcomp uses the library's buckets. If so, the size of the buckets is an option of the
            library.
    """

    title: ClassVar[str]
    network: ClassVar[str]
    warm_up: ClassVar[int]
    start_s: float
    bucket_bytes: float
    early_bytes: int
    shares_buckets: bool

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    @property
    def stock(self) -> tuple[str, ...]:
        """The names of the library's two own methods: one sends dense gradients, and the other casts gradients to
        float16."""
        return STOCK[self.ranks.backend]

    def communicator(self) -> Communicator:
        """The communicator of all ranks. Every rank must call this method at the same point of the program."""
        return all_ranks(self.ranks.backend)

    def early_bytes_of(self, workload: Workload) -> int | None:
        """`early_bytes` for a model, if hvdcomp uses the library's buckets; None if hvdcomp has its own buckets."""
        if not self.shares_buckets:
            return None
        return least_early_bytes(self.early_bytes, workload.dense_bytes, workload.device.type == "cuda")

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """A description of the properties that affect measured times."""

    @abstractmethod
    def with_stock(self, workload: Workload, method: str, name: str) -> Distributed:
        """Creates a training run in which the library exchanges the gradients with one of its own methods.

        Args:
            method: name of one of the library's own methods (`stock`).
            name: name of the training run, unique in this process.
        """

    @abstractmethod
    def with_one_number(self, workload: Workload, name: str) -> Distributed:
        """Creates a training run that exchanges only the small control numbers that hvdcomp exchanges in each step. The
        run does not use hvdcomp's engine, and does not send gradients."""

    @abstractmethod
    def with_cast(self, workload: Workload, compressor: Compressor, name: str) -> Distributed:
        """Creates a training run with a compressor that only casts. The library itself casts and sends the
        gradients."""

    @abstractmethod
    def compressed(
        self, workload: Workload, spec: str, name: str, *, bucket_bytes: int | None = None, **options: Any
    ) -> Distributed:
        """Creates a training run in which hvdcomp compresses the gradients.

        Args:
            spec: spec of a compressor.
            bucket_bytes: the smallest bucket of gradients that is sent during the backward pass; None for hvdcomp's
                default.
            options: other arguments of `Compression.from_spec`.
        """

    @property
    def fused_allreduce(self) -> Callable[[Sequence[torch.Tensor], str], Any] | None:
        """A function that runs an allreduce of several tensors, which the library fuses; None if the library never
        fuses tensors."""
        return None

    def sent_together(self, ready: Ready, dense_bytes: float) -> Ready:
        """The time at which each part of the gradients can be sent.

        Args:
            ready: the times at which each gradient is ready.
            dense_bytes: bytes of all gradients.
        """
        return ready


def named_parameters(workload: Workload, name: str) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters, with names that differ between training runs. If two training runs used the same name for tensors
    of different shapes, Horovod would negotiate the tensor again after every change of shape."""
    return [(f"{name}.{key}", parameter) for key, parameter in workload.model.named_parameters()]
