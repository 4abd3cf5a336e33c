"""x of a step's tensors, for observers that look at it before it is compressed, and ask what the step loses of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

from hvdcomp.arrays.types import Array
from hvdcomp.compressors.choice import Plan
from hvdcomp.compressors.protocol import Context
from hvdcomp.exchange.buckets import BucketOrGroup
from hvdcomp.exchange.energies import Energies, of_arrays


class Look(Mapping[str, Array]):
    """x of every tensor of a step, by name, and what may be asked of it. What nobody asks for is not made.

    An array is x until the tensor is compressed. It is to be looked at, not to be changed.

    Args:
        xp: the array functions of the gradients.
        buckets: what goes through the step, not yet open.
        plan: compressor of each tensor, by name.
        context: of the step.
        factor: what the memory multiplies gradients with; None for 1.

    Attributes:
        xp, context: as given.
        like: an array of the framework, where the gradients are.
    """

    def __init__(
        self,
        xp: ModuleType,
        buckets: Sequence[BucketOrGroup],
        plan: Plan,
        context: Context,
        factor: Array | None = None,
    ) -> None:
        self.xp = xp
        self._buckets = buckets
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
        self.context = context
        self._factor = factor
        self._plan = plan
        self.like = buckets[0].like
        self._asked: list[tuple[Energies, set[str]]] = []

    def __iter__(self) -> Iterator[str]:
        return iter(self._bucket_of)

    def __len__(self) -> int:
        return len(self._bucket_of)

    def __contains__(self, name: object) -> bool:
        return name in self._bucket_of

    def __getitem__(self, name: str) -> Array:
        return self._bucket_of[name].x(name)

    def energies(self, names: Sequence[str]) -> Energies:
        """||x||^2 of some tensors."""
        wanted, energies = set(names), Energies()
        for bucket in self._buckets:
            energies.extend(bucket.energies(wanted))
        return energies

    def gradient_energies(self, names: Sequence[str]) -> Energies:
        """||g||^2 of some tensors, where g is this rank's gradient without what its memory adds. A pass over it."""
        return of_arrays(self.xp, {name: self._bucket_of[name].gradient(name) for name in names}, self._factor)

    @property
    def addresses(self) -> dict[str, int]:
        """Address of x of each tensor that is in a bucket, by name; x is made if it was not."""
        return {name: place for bucket in self._buckets for name, place in bucket.addresses.items()}

    def lost_when_sent(self, names: Sequence[str]) -> tuple[Energies, set[str]]:
        """||x - C(x)||^2 of what this step sends, to be looked at when it has ended.

        Returns:
            It, of those of the tensors where it will be known, and their names. It will not be where this rank's C(x)
            does not follow from its x alone, and where nothing is kept of x.
        """
        for bucket in self._buckets:
            bucket.make_x()
        known = {name for name in names if self._plan[name].sent_is_own and self._bucket_of[name].keeps_x}
        self._asked.append((energies := Energies(), known))
        return energies, known

    def tell(self) -> None:
        """Notes what the step has lost, for `lost_when_sent`; to be called when all generators have ended."""
        for energies, known in self._asked:
            for bucket in self._buckets:
                energies.extend(bucket.lost(known))
