"""What carries gradients between the ranks while steps are measured, as far as measuring needs to know. PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hvdcomp.communicators import Communicator
from hvdcomp.compression import Compression
from hvdcomp.compressors import Compressor
from hvdcomp.perfmodel import STOCK
from hvdcomp.tools.bench.workload import Workload
from hvdcomp.tools.train.ranks import Ranks
from hvdcomp.torch import all_ranks

Ready = tuple[tuple[float, float], ...]
"""Pairs as of `hvdcomp.perfmodel.Compute.ready`."""

_LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Distributed:
    """A training of one way to exchange gradients.

    Attributes:
        loss: runs the forward pass on a batch and returns the loss, a scalar.
        optimizer: that makes the step. It ends the exchange of gradients before.
        exchange: ends it earlier, if something else is to be done between exchange and step.
        compression: what hvdcomp compresses with; None where it does not take part.
    """

    loss: Callable[[], torch.Tensor]
    optimizer: Any
    exchange: Callable[[], None] = lambda: None
    compression: Compression | None = None


def sgd(workload: Workload) -> torch.optim.SGD:
    """The optimizer of each training that is measured."""
    return torch.optim.SGD(workload.model.parameters(), lr=_LEARNING_RATE, momentum=0.9)


def alone(workload: Workload) -> Distributed:
    """A training in which no gradient leaves the rank."""
    return Distributed(workload.loss, sgd(workload))


class Carrier(ABC):
    """A library that exchanges gradients. `hvdcomp.tools.bench.carriers.carrier_on` makes one.

    Args:
        ranks: all of them, connected through this library.

    Class attributes:
        title: its name.
        network: the library whose collectives these are, in words.
        warm_up: steps that a new training makes before it is like all later ones.

    Attributes:
        start_s: seconds until the idle library takes up a collective, whatever the number of ranks.
        bucket_bytes: how much the library sends at a time at most, unless one gradient has more.
        early_bytes: of gradients, the least that hvdcomp sends by itself in the backward pass.
        own_buckets: whether hvdcomp takes the library's buckets, to which it is then said how much they hold.
    """

    title: ClassVar[str]
    network: ClassVar[str]
    warm_up: ClassVar[int]
    start_s: float
    bucket_bytes: float
    early_bytes: int
    own_buckets: bool

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    @property
    def stock(self) -> tuple[str, ...]:
        """What the library itself offers, without hvdcomp: the names of dense and of its cast to float16."""
        return STOCK[self.ranks.backend]

    def communicator(self) -> Communicator:
        """All ranks. To be called on every rank at the same point."""
        return all_ranks(self.ranks.backend)

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """What measured times depend on, in words."""

    @abstractmethod
    def with_stock(self, workload: Workload, method: str, name: str) -> Distributed:
        """What the library itself does.

        Args:
            method: one of `stock`.
            name: of the training, unlike those of all others in this process.
        """

    @abstractmethod
    def with_one_number(self, workload: Workload, name: str) -> Distributed:
        """All that happens in a step through hvdcomp's engine but what the engine does: no gradient is sent."""

    @abstractmethod
    def with_cast(self, workload: Workload, compressor: Compressor, name: str) -> Distributed:
        """What hvdcomp does with a compressor that only casts: the library sends the casts."""

    @abstractmethod
    def compressed(
        self, workload: Workload, spec: str, name: str, *, bucket_bytes: int | None = None, **options: Any
    ) -> Distributed:
        """What hvdcomp does.

        Args:
            spec: of a compressor.
            bucket_bytes: of gradients, the least that is sent by itself in the backward pass; None for what hvdcomp
                does without being told.
            options: of `Compression.from_spec`.
        """

    @property
    def fused_allreduce(self) -> Callable[[Sequence[torch.Tensor], str], Any] | None:
        """An allreduce of several tensors under a name, which the library puts together; None if it never does."""
        return None

    def sent_together(self, ready: Ready, dense_bytes: float) -> Ready:
        """When what can be sent.

        Args:
            ready: when each gradient is there.
            dense_bytes: of all gradients.
        """
        return ready


def named_parameters(workload: Workload, name: str) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters, under names of a training's own: a known name with another shape costs Horovod a negotiation."""
    return [(f"{name}.{key}", parameter) for key, parameter in workload.model.named_parameters()]
