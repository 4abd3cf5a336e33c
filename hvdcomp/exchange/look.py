"""x of a step's tensors, for those who look at it before it is compressed, and who ask what compression loses of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

from hvdcomp.arrays.types import Array
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.choice import Plan
from hvdcomp.compressors.protocol import Context
from hvdcomp.exchange.bucket_step import BucketStep
from hvdcomp.exchange.energies import Energies, of_arrays, of_errors
from hvdcomp.exchange.previews import Kept, Previews
from hvdcomp.exchange.tensor_step import TensorStep


class Look(Mapping[str, Array]):
    """x of every tensor of a step, by name, and what may be asked of it. What nobody asks for is not made.

    An array is x until the tensor is compressed. It is to be looked at, not to be changed.

    Args:
        xp: the array functions of the gradients.
        buckets, tensors: of the step, not yet open.
        plan, previews: of the engine.
        context: of the step.
        factor: what the memory multiplies gradients with; None for 1.

    Attributes:
        like: an array of the framework, where the gradients are.
    """

    def __init__(
        self,
        xp: ModuleType,
        buckets: Sequence[BucketStep],
        tensors: Sequence[TensorStep],
        plan: Plan,
        previews: Previews,
        context: Context,
        factor: Array | None = None,
    ) -> None:
        self.xp = xp
        self._buckets = buckets
        self._tensors = {one.name: one for one in tensors}
        self._previews = previews
        self._context = context
        self._factor = factor
        self.like = buckets[0].like if buckets else tensors[0].like
        self._plan = plan
        self._addresses: dict[str, int] = {}
        self._energies: list[Array] = []  # of x, by bucket
        self._asked: list[tuple[Energies, set[str]]] = []

    def __iter__(self) -> Iterator[str]:
        for bucket in self._buckets:
            yield from bucket.group.names
        yield from self._tensors

    def __len__(self) -> int:
        return len(self._tensors) + sum(len(bucket.group.names) for bucket in self._buckets)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors or any(name in bucket.group.places for bucket in self._buckets)

    def __getitem__(self, name: str) -> Array:
        if name in self._tensors:
            return self._tensors[name].x
        self.make()
        for bucket in self._buckets:
            if name in bucket.group.places:
                return bucket.x(bucket.group.places[name])
        raise KeyError(name)

    def make(self) -> Mapping[str, int]:
        """Makes x of the tensors in buckets, if nobody has asked for it before; where each lies, by name."""
        if not self._addresses:
            for bucket in self._buckets:
                self._energies.append(bucket.make_x())
                self._addresses.update(zip(bucket.group.names, bucket.addresses, strict=True))
        return self._addresses

    @property
    def made(self) -> Mapping[str, int]:
        """Where x of the tensors in buckets lies; empty if nobody has asked for x."""
        return self._addresses

    def energies(self, names: Sequence[str]) -> Energies:
        """||x||^2 of some tensors."""
        self.make()
        wanted = set(names)
        found = of_arrays(self.xp, {name: one.x for name, one in self._tensors.items() if name in wanted})
        for bucket, values in zip(self._buckets, self._energies, strict=True):
            self._add(found, bucket, values, wanted)
        return found

    def gradient_energies(self, names: Sequence[str]) -> Energies:
        """||g||^2 of some tensors, where g is this rank's gradient without what its memory adds. A pass over it."""
        arrays = {name: one.like for name, one in self._tensors.items()}
        for bucket in self._buckets:
            arrays.update(zip(bucket.group.names, bucket.group.arrays, strict=True))
        return of_arrays(self.xp, {name: arrays[name] for name in names}, self._factor)

    def kept(
        self, compressors: Mapping[str, Compressor], names: Sequence[str], lost: Energies | None = None
    ) -> Kept:
        """C(x) of some tensors, by name, as if this rank were the only one that sends.

        Args:
            compressors: as of `lost`.
            lost: gets ||x - C(x)||^2 of each.
        """
        xs = {name: self[name] for name in names}
        return self._previews.kept(self.xp, xs, compressors, self._context, lost)

    def lost(
        self, compressors: Mapping[str, Compressor], names: Sequence[str], sources: Mapping[str, Array] | None = None
    ) -> Energies:
        """||x - C(x)||^2 of some tensors, as if this rank were the only one that sends.

        Args:
            compressors: by name; the same object for the same compressors is quickest.
            sources: what is compressed in place of x, of the tensors where that is something else.
        """
        return self._previews.lost(self.xp, names, self, self.make(), compressors, self._context, sources or {})

    def lost_when_sent(self, names: Sequence[str]) -> tuple[Energies, set[str]]:
        """||x - C(x)||^2 of what this step sends, to be looked at when it has ended.

        Returns:
            It, of those of the tensors where it will be known, and their names. It will not be where this rank's C(x)
            does not follow from its x alone, and where nothing is kept of x.
        """
        self.make()
        able = {name for one in self._buckets if one.group.bucket.keeps for name in one.group.names}
        told = {name for name in names if self._plan[name].sent_is_own and (name in able or name in self._tensors)}
        self._asked.append((found := Energies(), told))
        return found, told

    def tell(self, buckets: Sequence[BucketStep], tensors: Sequence[TensorStep]) -> None:
        """Notes what the step has lost, for `lost_when_sent`; to be called when all generators have ended."""
        for found, told in self._asked:
            for bucket in buckets:
                if not told.isdisjoint(bucket.group.names):
                    self._add(found, bucket, bucket.left(), told)
            found.extend(of_errors(self.xp, {one.name: (one.x, one.sent) for one in tensors if one.name in told}))

    @staticmethod
    def _add(found: Energies, bucket: BucketStep, values: Array, wanted: set[str]) -> None:
        """Adds those values of a bucket's tensors that are wanted."""
        names = [name for name in bucket.group.names if name in wanted]
        if names:
            found.add(names, values, places=[bucket.group.places[name] for name in names])
