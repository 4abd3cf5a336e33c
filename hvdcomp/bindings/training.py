"""The interface of a training that each framework's binding implements."""

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
from hvdcomp.compressors.bucket import BUCKET_BYTES
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies.decisions import BatchSize


class Training(ABC):
    """One training: the facts that only its framework knows.

    Attributes:
        setup: the user's settings and objects.
        communicator: the communicator of the ranks that exchange.
        like: an empty array of the framework on the communicator's device.
        early_bytes: least bytes of gradients in a bucket that starts before all are there, if the user names none.
        engine: the engine that compresses.
        coordinator: the coordinator of the policy, or None.

    Class attributes:
        overlaps_with_policy: whether gradients that are only cast bypass the engine and are allreduced during the
            backward pass, also in a training with a policy.
        results_in_place: whether means may overwrite gradients, as in Horovod's own allreduce.
        overlaps: whether buckets may start before all gradients are there.
        broadcast: code that gives all ranks the weights of rank 0, for messages.
        absence: reason and remedy for a rank that is missing in a step, for messages.
    """

    overlaps_with_policy: ClassVar[bool]
    results_in_place: ClassVar[bool]
    overlaps: bool = False
    broadcast: ClassVar[str]
    absence: ClassVar[str] = (
        "hvd.join() does not work with gradient compression. Give every rank the same number of batches."
    )
    early_bytes: int = BUCKET_BYTES
    setup: Setup
    communicator: Ranks
    like: Array
    engine: Engine
    coordinator: Coordinator | None

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Horovod's settings that must be the same on all ranks; JSON-serialisable."""

    @abstractmethod
    def trained(self) -> Set[str]:
        """The names of the parameters whose gradients Horovod averages."""

    @property
    def steps_before_broadcast(self) -> int:
        """Number of steps that a training may make before all ranks must have the same weights."""
        return 0

    @abstractmethod
    def checksums(self, names: Sequence[str]) -> list[int]:
        """A checksum of each parameter's value, by which the ranks compare weights."""

    def reason_to_refuse(self) -> str | None:
        """The reason why this rank refuses the step that begins, or None."""
        return None

    def now(self) -> float:
        """Seconds on the clock of the steps."""
        return time.perf_counter()

    @abstractmethod
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rate of each parameter group, as set by the user.

        Raises:
            ConfigurationError: if the optimizer is unknown.
        """

    @abstractmethod
    def follow_batch_size(self, batch_size: BatchSize) -> None:
        """Sets the optimizer to a batch size: its number of accumulated batches and its learning rate factor."""

    @abstractmethod
    def loss_scale(self) -> float | None:
        """The loss scale of this step; None if unknown."""

    @abstractmethod
    def momentum_of_optimizer(self) -> str | None:
        """The first momentum in the optimizer's settings, as text; None without one."""

    @property
    def optimizer(self) -> Any:
        """The user's optimizer; None if it is unknown."""
        return None

    def warm_up(self) -> str | None:
        """The spec of the compressor that the optimizer asks for in this step; None for the training's own."""
        return None

    def refreshes(self) -> bool:
        """Whether the optimizer refreshes its frozen second moment by this step's gradients."""
        return False

    def momenta_of_step(self) -> Mapping[str, Any]:
        """Momenta that may be added to gradients before this step's exchange, by name, as the framework has them."""
        return {}

    def take_back(self, means: Mapping[str, Array]) -> None:
        """Subtracts, in place, the momenta that were added to gradients before the exchange."""
        return  # no momenta were added

    @property
    def is_summed(self) -> bool:
        """Whether the training uses the sum of the ranks' gradients instead of their mean."""
        return False

    @abstractmethod
    def agree_with_new_ranks(self) -> None:
        """Agrees on rank 0's state if the ranks may have changed; waits for all ranks. To be called before the first
        step of the present ranks; later calls do nothing."""

    def pack(self, state: Mapping[str, Any]) -> bytes:
        """Bytes from which `unpack` on another rank restores the state."""
        return packed.pack(state)

    def unpack(self, message: bytes) -> dict[str, Any]:
        """The state from the bytes of `pack`, with arrays on the host."""
        return packed.unpack(message)

    @abstractmethod
    def copy(self, array: Array) -> Array:
        """A copy of the array, which nothing changes any more."""

    @abstractmethod
    def place(self, array: Array, name: str) -> Array:
        """The array, on the device of the parameter of this name."""
