"""The class `Training`: an interface that the binding of each framework implements."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

from hvdcomp.adaptation.coordinator import Coordinator
from hvdcomp.arrays.types import AnyArray
from hvdcomp.bindings import packed
from hvdcomp.bindings.setup import Setup
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.compressors.bucket import BUCKET_BYTES
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies.decisions import BatchSize


class Training(ABC):
    """One training run, with the methods that depend on its framework.

    Attributes:
        setup: the `Compression`, and what the user passed to it.
        communicator: the communicator of the ranks that exchange gradients.
        like: an empty array of the framework on the device of the communicator's arrays.
        early_bytes: smallest size, in bytes of gradients, of a bucket that is sent during the backward pass, if the
            user does not set `bucket_bytes`.
        engine: the engine that compresses and exchanges gradients.
        coordinator: the coordinator of the policy; None if there is no policy.

    Class attributes:
        overlaps_with_policy: whether a training run with a policy overlaps the exchange of gradients that are only cast
            with the backward pass. If so, the framework's library exchanges these gradients instead of the engine.
        results_in_place: whether mean gradients may overwrite the gradients, as in Horovod's own allreduce.
        overlaps: whether buckets may be sent during the backward pass.
        broadcast: code that sends the weights of rank 0 to all ranks, for messages.
        absence: sentences for a message. They explain why a rank may be missing in a step, and what to do.
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
    like: AnyArray
    engine: Engine
    coordinator: Coordinator | None

    @property
    @abstractmethod
    def is_first_rank(self) -> bool:
        """Whether this rank alone shows what concerns the whole training run."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Settings of Horovod or PyTorch that must be the same on all ranks, by name. The values must be representable
        in JSON."""

    @abstractmethod
    def trained(self) -> Set[str]:
        """The names of the parameters whose gradients are averaged over the ranks."""

    @property
    def steps_before_broadcast(self) -> int:
        """The number of steps that ranks may make before all of them must have the same weights."""
        return 0

    @abstractmethod
    def checksums(self, names: Sequence[str]) -> list[int]:
        """A checksum of the values of each parameter, in the order of `names`. Ranks compare these checksums instead of
        weights."""

    def reason_to_refuse(self) -> str | None:
        """The reason why this rank refuses the step that begins; None if it does not refuse the step."""
        return None

    def now(self) -> float:
        """The time in seconds on the clock that measures steps."""
        return time.perf_counter()

    @abstractmethod
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rate of each parameter group, as the user has set it, without the changes that a policy makes.

        Raises:
            ConfigurationError: if the optimizer is unknown.
        """

    @abstractmethod
    def follow_batch_size(self, batch_size: BatchSize) -> None:
        """Adapts the optimizer to a batch size: sets the number of batches whose gradients it accumulates, and the
        factor of its learning rate."""

    @abstractmethod
    def loss_scale(self) -> float | None:
        """The loss scale of this step; None if it is unknown."""

    @abstractmethod
    def momentum_of_optimizer(self) -> str | None:
        """The first momentum in the optimizer's settings, in words; None if the optimizer has no momentum."""

    @property
    def optimizer(self) -> Any:
        """The user's optimizer; None if it is unknown."""
        return None

    def warm_up(self) -> str | None:
        """The spec of the compressor that the optimizer requires in this step, during its warm-up; None if this step
        uses the compressor of the training run itself."""
        return None

    def refreshes(self) -> bool:
        """Whether the optimizer updates its frozen second moment with the gradients of this step."""
        return False

    def momenta_of_step(self) -> Mapping[str, Any]:
        """The optimizer's momenta that may be added to gradients before the exchange of this step. The keys are the
        names of the parameters, and the values are tensors of the framework."""
        return {}

    def take_back(self, means: Mapping[str, AnyArray]) -> None:
        """Subtracts from mean gradients, in place, the momenta that were added to gradients before the exchange."""
        return  # no momenta were added

    @property
    def is_summed(self) -> bool:
        """Whether the training run uses the sum of the ranks' gradients instead of their mean."""
        return False

    @abstractmethod
    def agree_with_new_ranks(self) -> None:
        """If the ranks may have changed, waits for all ranks and then copies the state of rank 0. Call this method
        before the first step of the current ranks; later calls do nothing."""

    def pack(self, state: Mapping[str, Any]) -> bytes:
        """Converts a state to bytes. `unpack` restores the state from these bytes on another rank."""
        return packed.pack(state)

    def unpack(self, message: bytes) -> dict[str, Any]:
        """Restores a state from the bytes that `pack` returned. The arrays in the state are on the host."""
        return packed.unpack(message)

    @abstractmethod
    def copy(self, array: AnyArray) -> AnyArray:
        """A copy of the array, which later steps do not change."""

    @abstractmethod
    def place(self, array: AnyArray, name: str) -> AnyArray:
        """Moves an array to the device of the parameter with this name."""
