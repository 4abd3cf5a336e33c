"""What every framework's binding answers about the training that it serves."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

from hvdcomp.adaptation.coordinator import Coordinator
from hvdcomp.arrays.types import Array
from hvdcomp.bindings import packed
from hvdcomp.bindings.setup import Setup
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies.decisions import BatchSize


class Training(ABC):
    """One training, as only its framework knows it.

    Attributes:
        setup: what the user gave.
        communicator: of the ranks that exchange.
        like: an empty array of the framework, where the communicator works.
        engine: that compresses.
        coordinator: of the policy, if there is one that rank 0 decides by.

    Class attributes:
        overlaps_with_policy: whether gradients that are only cast are allreduced during the backward pass, past the
            engine, also in a training with a policy.
        results_in_place: whether the means may take the gradients' place, as those of Horovod's own allreduce do.
        overlaps: whether buckets may start before all gradients are there.
        broadcast: what a user writes to give all ranks the weights of rank 0.
        absence: why a rank may be missing in a step, and what to do.
    """

    overlaps_with_policy: ClassVar[bool]
    results_in_place: ClassVar[bool]
    overlaps: bool = False
    broadcast: ClassVar[str]
    absence: ClassVar[str] = (
        "hvd.join() does not work with gradient compression. Give every rank the same number of batches."
    )
    setup: Setup
    communicator: Ranks
    like: Array
    engine: Engine
    coordinator: Coordinator | None

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What Horovod was told, as far as it must be the same on all ranks; JSON-serialisable."""

    @abstractmethod
    def trained(self) -> Set[str]:
        """The names of the parameters whose gradients Horovod averages."""

    @property
    def steps_before_broadcast(self) -> int:
        """How many steps a training may make before all ranks have the same weights."""
        return 0

    @abstractmethod
    def checksums(self, names: Sequence[str]) -> list[int]:
        """A number for each parameter's value, by which the ranks compare their weights."""

    def reason_to_refuse(self) -> str | None:
        """Why this rank cannot make the step that begins; None if it can."""
        return None

    def now(self) -> float:
        """Seconds on the clock by which steps are timed."""
        return time.perf_counter()

    @abstractmethod
    def learning_rates(self) -> tuple[float, ...]:
        """The rate of each parameter group, as the user set it.

        Raises:
            ConfigurationError: if the optimizer is not known.
        """

    @abstractmethod
    def follow_batch_size(self, batch_size: BatchSize) -> None:
        """Makes the optimizer accumulate this number of batches, and step at this multiple of its learning rate."""

    @abstractmethod
    def loss_scale(self) -> float | None:
        """By how much the loss is multiplied in this step; None where that is not known."""

    @abstractmethod
    def momentum_of_optimizer(self) -> str | None:
        """The first momentum in the optimizer's settings, as text; None without one."""

    def adam(self) -> str | None:
        """The class of the optimizer, if it is known to be an Adam."""
        return None

    def kind_of_optimizer(self) -> str | None:
        """Which of those the optimizer is whose trainings were measured; None if that is not known."""
        return None

    def warm_up(self) -> str | None:
        """The spec of the compressor of all gradients in the step that begins; None for that of the training."""
        return None

    def refreshes(self) -> bool:
        """Whether the optimizer adds the gradients of the step that begins to a second moment that is else frozen."""
        return False

    def momenta_of_step(self) -> Mapping[str, Any]:
        """By name, the momenta that gradients may be sent with in the step that begins, as the framework has them."""
        return {}

    def take_back(self, means: Mapping[str, Array]) -> None:
        """Takes away, in place, the momenta that gradients were sent with."""
        return  # they were sent without

    @property
    def summed(self) -> bool:
        """Whether the training takes the sum of the ranks' gradients, and not their mean."""
        return False

    @abstractmethod
    def meet_elastic_ranks(self) -> None:
        """Goes on from what rank 0 knows, where the ranks may have changed, before the first step with those that there
        are now; waits for all. It does nothing if it was called before."""

    def pack(self, state: Mapping[str, Any]) -> bytes:
        """Bytes that `unpack` on another rank makes the same state of."""
        return packed.pack(state)

    def unpack(self, message: bytes) -> dict[str, Any]:
        """What `pack` was given, with arrays on the host."""
        return packed.unpack(message)

    @abstractmethod
    def copy(self, array: Array) -> Array:
        """An array of the same content that nothing changes any more."""

    @abstractmethod
    def place(self, array: Array, name: str) -> Array:
        """The array on the device of the parameter of this name."""
