"""What compression would keep of tensors, and lose, without sending anything: for policies that measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdcomp import kernels
from hvdcomp.arrays.types import Array
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.bucket import Bucket, BucketStates
from hvdcomp.compressors.memory import ErrorFeedback
from hvdcomp.compressors.protocol import Context, SparseVector, TensorInfo, run_alone
from hvdcomp.exchange.energies import Energies, of_errors
from hvdcomp.exchange.tensor_step import TensorState

_MOST_BUCKETS = 32  # a policy looks at a handful of levels in turn

Kept = dict[str, Array | SparseVector]


class Previews:
    """Compresses as if this rank were the only one that sends; changes nothing that a step sees.

    Args:
        tensors: all tensors, by name.
        states: of the tensors, by name.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo], states: Mapping[str, TensorState]) -> None:
        self._tensors = tensors
        self._states = states
        self._buckets: dict[Any, tuple[Mapping[str, Compressor], list[_Bucket]]] = {}
        self._room = _Room()

    def kept(
        self, xp: ModuleType, xs: Mapping[str, Array], compressors: Mapping[str, Compressor], context: Context
    ) -> Kept:
        """C(x) of some tensors, by name.

        Args:
            context: of the step; its name is not looked at.
        """
        hosted = xp.hosted(list(xs.values())) if kernels.available() else None
        flat = [] if hosted is None else [name for name in xs if self._states[name].is_flat]  # as the step does it
        addresses = {} if hosted is None else dict(zip(xs, hosted[1], strict=True))
        found: Kept = {}
        for bucket in self._grouped(tuple(flat), compressors):
            bucket.run(addresses, {}, context, self._states_of(xp, bucket, context))
            like = xp.flatten(xs[bucket.names[0]])[:0]
            for tensor, mean in zip(bucket.tensors, bucket.means, strict=True):
                found[tensor.name] = xp.reshape(xp.from_numpy(mean.copy(), like=like), tensor.shape)
        for name in xs.keys() - found.keys():
            found[name] = self._of_tensor(xp, xs[name], compressors[name], dataclasses.replace(context, name=name))
        return {name: found[name] for name in xs}

    def lost(
        self,
        xp: ModuleType,
        names: Sequence[str],
        xs: Mapping[str, Array],
        addresses: Mapping[str, int],
        compressors: Mapping[str, Compressor],
        context: Context,
        sources: Mapping[str, Array],
    ) -> Energies:
        """||x - C(x)||^2 of some tensors.

        Args:
            xs: x by name; looked at where it is not in a bucket.
            addresses: of x by name, where the step has it in a bucket.
            compressors: by name; the same object for the same compressors is quickest.
            sources: what is compressed in place of x, of the tensors where that is something else.
        """
        found = Energies()
        for bucket in self._grouped(tuple(name for name in names if name in addresses), compressors):
            own = [name for name in bucket.names if name in sources]
            hosted, places = xp.hosted([sources[name] for name in own])  # keeps the arrays alive
            replaced = dict(zip(own, places, strict=True))
            bucket.run(addresses, replaced, context, self._states_of(xp, bucket, context))
            del hosted
            found.add(bucket.names, xp.from_numpy(bucket.lost(), like=xs[bucket.names[0]]))
        pairs = {}
        for name in names:
            if name not in addresses:
                own_context = dataclasses.replace(context, name=name)
                source = sources.get(name, xs[name])
                pairs[name] = (xs[name], self._of_tensor(xp, source, compressors[name], own_context))
        found.extend(of_errors(xp, pairs))
        return found

    def _of_tensor(self, xp: ModuleType, x: Array, compressor: Compressor, context: Context) -> Array | SparseVector:
        state = self._states[context.name].prepare(xp, x, compressor, context)
        return compressor.preview(xp, x, state, context)

    def _grouped(self, names: tuple[str, ...], compressors: Mapping[str, Compressor]) -> list[_Bucket]:
        """Tensors that are compressed together, in buckets; those of methods without a bucket form are in none."""
        if not names:
            return []
        key = (names, id(compressors))
        if key not in self._buckets:
            if len(self._buckets) == _MOST_BUCKETS:
                self._buckets.clear()
            families: dict[Any, list[str]] = {}
            for name in names:
                families.setdefault(compressors[name].bucket_family, []).append(name)
            families.pop(None, None)
            buckets = [
                _Bucket([self._tensors[name] for name in members], [compressors[name] for name in members], self._room)
                for members in families.values()
            ]
            self._buckets[key] = (compressors, buckets)  # as long as these are kept, no others get their id
        return self._buckets[key][1]

    def _states_of(self, xp: ModuleType, bucket: _Bucket, context: Context) -> BucketStates | None:
        if not bucket.compressors[0].keeps_state:
            return None
        return BucketStates(
            [
                self._states[tensor.name].prepare_on_host(xp, tensor, compressor, context)
                for tensor, compressor in zip(bucket.tensors, bucket.compressors, strict=True)
            ]
        )


class _Room:
    """Memory for x and means, which all buckets use in turn."""

    def __init__(self) -> None:
        self.vectors = [np.empty(0, np.float32) for _ in range(2)]

    def at_least(self, elements: int) -> list[np.ndarray]:
        """Two vectors of some elements."""
        if len(self.vectors[0]) < elements:
            self.vectors = [np.empty(elements, np.float32) for _ in range(2)]
        return [vector[:elements] for vector in self.vectors]


class _Bucket:
    """A bucket that sends nothing.

    Args:
        room: for what it makes.

    Attributes:
        names: of its tensors.
    """

    def __init__(self, tensors: Sequence[TensorInfo], compressors: Sequence[Compressor], room: _Room) -> None:
        self.tensors = tensors
        self.compressors = compressors
        self.names = [tensor.name for tensor in tensors]
        self._bucket = Bucket(tensors, compressors, ErrorFeedback())
        self._room = room
        sizes = self._bucket.segments["size"]
        self._ends = np.cumsum(sizes)
        self._offsets = 4 * (self._ends - sizes).astype(np.uint64)

    def run(
        self,
        addresses: Mapping[str, int],
        sources: Mapping[str, int],
        context: Context,
        states: BucketStates | None,
    ) -> None:
        """A step of this rank alone, in which nothing was kept before.

        Args:
            addresses: of x, by name.
            sources: of what is compressed in its place, of the tensors where that is something else.
        """
        bucket = self._bucket
        segments = bucket.segments
        bucket.context = context
        bucket.states = states
        bucket.table.bucket.threads = kernels.threads()
        for field, vector in zip(("x", "result"), self._room.at_least(int(self._ends[-1])), strict=True):
            segments[field] = vector.ctypes.data + self._offsets
        segments["gradient"] = [addresses[name] for name in self.names]
        segments["source"] = segments["sent_rule"] = 0
        if sources:
            bucket.call("make_x")
            segments["source"] = [sources.get(name, addresses[name]) for name in self.names]
        run_alone(bucket.compressors[0].aggregate_bucket(bucket), context.world_size)

    @property
    def means(self) -> list[np.ndarray]:
        """C(x) of each tensor, a vector in storage that is used again."""
        return np.split(self._room.at_least(int(self._ends[-1]))[1], self._ends[:-1])

    def lost(self) -> np.ndarray:
        """||x - C(x)||^2 of each tensor, float64 (tensors,)."""
        return self._bucket.sums_of("measure_left")
