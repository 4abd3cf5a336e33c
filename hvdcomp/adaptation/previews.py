"""Computes C(x) and the compression error of tensors without sending anything. x is the gradient plus the residual, and
C(x) is x after compression and decompression. Policies that measure compression use this module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from hvdcomp.adaptation.energies import Energies, of_errors
from hvdcomp.adaptation.look import Look
from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import AllFunctions, AnyArray, Array
from hvdcomp.compressors import Compressor, inside
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.memory import ErrorFeedback
from hvdcomp.compressors.protocol import Context, SparseVector, TensorInfo
from hvdcomp.exchange.engine_bucket import prepared_states
from hvdcomp.exchange.tensor_state import TensorState
from hvdcomp.kernels import cuda

_MOST_BUCKETS = 32  # a policy previews only a few levels

Kept = dict[str, Array | SparseVector]


class Previews:
    """Compresses tensors as if this rank were the only rank. The compression does not change anything that a step uses.

    Args:
        tensors: all tensors, by name.
        states: the state of each tensor, by name.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo], states: Mapping[str, TensorState]) -> None:
        self._tensors = tensors
        self._states = states
        self._buckets: dict[Any, tuple[Mapping[str, Compressor], list[_PreviewBucket]]] = {}
        self._room = _Room()

    def kept(
        self,
        look: Look,
        compressors: Mapping[str, Compressor],
        names: Sequence[str],
        lost: Energies | None = None,
    ) -> Kept:
        """C(x) of some tensors of a step, by name.

        Args:
            compressors: the compressor of each tensor, by name. If you pass the same mapping again, the function is
                faster.
            lost: an `Energies` to which ||x - C(x)||^2 of each tensor is added.
        """
        return self.kept_alone(look.xp, {name: look[name] for name in names}, compressors, look.context, lost)

    def lost(
        self,
        look: Look,
        compressors: Mapping[str, Compressor],
        names: Sequence[str],
        sources: Mapping[str, Array] = MappingProxyType({}),
    ) -> Energies:
        """Compresses some tensors of a step, and returns the squared error of each, ||x - C(x)||^2, by name.

        Args:
            compressors: the compressor of each tensor, by name. If you pass the same mapping again, the function is
                faster.
            sources: arrays that are compressed in place of x, by tensor name. For all other tensors, x is compressed.
        """
        return self._lost(look.xp, names, look, look.addresses, compressors, look.context, sources)

    def kept_alone(
        self,
        xp: AllFunctions,
        xs: Mapping[str, Array],
        compressors: Mapping[str, Compressor],
        context: Context,
        lost: Energies | None = None,
    ) -> Kept:
        """C(x) of some arrays that do not belong to a step, by name.

        Args:
            context: the context of the step. The `name` of the context is not used.
            lost: an `Energies` to which ||x - C(x)||^2 of each tensor is added.
        """
        addresses, _alive = self._addresses(xp, xs)
        kept: Kept = {}
        for bucket in self._grouped(xp, list(addresses), xs, compressors):
            self._run(xp, bucket, xs, addresses, {}, context)
            kept.update(zip(bucket.names, bucket.means(xp, xs[bucket.names[0]]), strict=True))
            if lost is not None:
                lost.add(bucket.names, bucket.lost(xp, xs[bucket.names[0]]))
            bucket.release()
        pairs = {}
        # in the order of `xs`, because errors are added up in the same order
        for name in [name for name in xs if name not in kept]:
            kept[name] = self._of_tensor(xp, xs[name], compressors[name], dataclasses.replace(context, name=name))
            pairs[name] = (xs[name], kept[name])
        if lost is not None:
            lost.extend(of_errors(xp, pairs))
        return {name: kept[name] for name in xs}

    def lost_alone(
        self, xp: AllFunctions, xs: Mapping[str, Array], compressors: Mapping[str, Compressor], context: Context
    ) -> Energies:
        """Compresses some arrays that do not belong to a step, and returns the squared error of each, ||x - C(x)||^2,
        by name. The arguments are those of `kept_alone`."""
        addresses, _alive = self._addresses(xp, xs)
        return self._lost(xp, list(xs), xs, addresses, compressors, context, {})

    def _addresses(self, xp: AllFunctions, xs: Mapping[str, Array]) -> tuple[dict[str, int], Sequence[Array]]:
        """The addresses of the arrays that fit a bucket; and the arrays that must be kept alive while the addresses are
        used."""
        placed = _placed(xp, list(xs.values())) if xs else None
        if placed is None:
            return {}, []
        places = dict(zip(xs, placed[1], strict=True))
        return {name: place for name, place in places.items() if self._states[name].is_flat}, placed[0]

    def _lost(
        self,
        xp: AllFunctions,
        names: Sequence[str],
        xs: Mapping[str, Array],
        addresses: Mapping[str, int],
        compressors: Mapping[str, Compressor],
        context: Context,
        sources: Mapping[str, Array],
    ) -> Energies:
        """Compresses some tensors, and returns the squared error of each, ||x - C(x)||^2, by name.

        Args:
            xs: x of each tensor, by name.
            addresses: for tensors that are in a bucket of the step, the address of x, by name.
            compressors: the compressor of each tensor, by name. If the same mapping is passed again, the function is
                faster.
            sources: arrays that are compressed in place of x, by tensor name.
        """
        energies = Energies()
        done: set[str] = set()
        for bucket in self._grouped(xp, [name for name in names if name in addresses], xs, compressors):
            own = [name for name in bucket.names if name in sources]
            placed = _placed(xp, [sources[name] for name in own]) if own else ([], [])
            assert placed is not None
            self._run(xp, bucket, xs, addresses, dict(zip(own, placed[1], strict=True)), context)
            del placed  # `placed` has kept the arrays alive until here
            energies.add(bucket.names, bucket.lost(xp, xs[bucket.names[0]]))
            bucket.release()
            done.update(bucket.names)
        pairs = {}
        for name in names:
            if name not in done:
                own_context = dataclasses.replace(context, name=name)
                source = sources.get(name, xs[name])
                pairs[name] = (xs[name], self._of_tensor(xp, source, compressors[name], own_context))
        energies.extend(of_errors(xp, pairs))
        return energies

    def _of_tensor(self, xp: AllFunctions, x: Array, compressor: Compressor, context: Context) -> Array | SparseVector:
        kept = self._states[context.name].kept_for(compressor)
        return inside.preview(compressor, xp, x, kept, context)

    def _grouped(
        self, xp: AllFunctions, names: Sequence[str], xs: Mapping[str, Array], compressors: Mapping[str, Compressor]
    ) -> list[_PreviewBucket]:
        """Puts tensors that are compressed together into buckets. On a device, this includes only tensors that kernels
        support."""
        if not names:
            return []
        first: AnyArray = xs[names[0]]
        device = (first.device, xp) if cuda.placed([first]) is not None else ()
        key = (tuple(names), id(compressors), device)
        if key not in self._buckets:
            if len(self._buckets) == _MOST_BUCKETS:
                self._buckets.clear()
            families: dict[Any, list[str]] = {}
            for name in names:
                compressor, tensor = compressors[name], self._tensors[name]
                if compressor.has_bucket_form and (not device or cuda.takes(compressor, tensor.size)):
                    families.setdefault((compressor.bucket_family, tensor.dtype), []).append(name)
            buckets = [
                _PreviewBucket(
                    [self._tensors[name] for name in own], [compressors[name] for name in own], self._room, *device
                )
                for own in families.values()
            ]
            # keeps the compressors alive, so that no other object gets the same id
            self._buckets[key] = (compressors, buckets)
        return self._buckets[key][1]

    def _run(
        self,
        xp: AllFunctions,
        bucket: _PreviewBucket,
        xs: Mapping[str, Array],
        addresses: Mapping[str, int],
        sources: Mapping[str, int],
        context: Context,
    ) -> None:
        own = [xs[name] for name in bucket.names]
        bucket.bucket.begin(context)
        states = [self._states[name] for name in bucket.names]
        bucket.bucket.states = prepared_states(xp, bucket.bucket, states, own)
        bucket.run(own, addresses, sources)


def _placed(xp: AllFunctions, arrays: Sequence[Array]) -> tuple[Sequence[Array], Sequence[int]] | None:
    """The addresses of arrays, as `cuda.placed` returns them, but also for arrays on the host. The result is None if
    the arrays do not fit a bucket."""
    placed = cuda.placed(arrays)
    return xp.hosted(arrays) if placed is None else placed


class _Room:
    """Memory that all buckets use, one after the other.

    Attributes:
        on_device: memory on a device, as in `DeviceKernels.room`.
    """

    def __init__(self) -> None:
        self._vectors = [np.empty(0, np.float32) for _ in range(2)]
        self.on_device: dict[str, Any] = {}

    def on_host(self, sizes: np.ndarray) -> list[tuple[list[np.ndarray], np.ndarray]]:
        """Two sets of vectors. Each set has one vector for each size, and is returned together with the addresses of
        its vectors."""
        ends = np.cumsum(sizes)
        if len(self._vectors[0]) < ends[-1]:
            self._vectors = [np.empty(ends[-1], np.float32) for _ in range(2)]
        offsets = 4 * (ends - sizes).astype(np.uint64)
        return [(np.split(vector[: ends[-1]], ends[:-1]), vector.ctypes.data + offsets) for vector in self._vectors]


class _PreviewBucket:
    """A bucket whose tensors are compressed without sending anything.

    Args:
        room: the memory for x and C(x).
        device, xp: as in `Bucket`.

    Attributes:
        names: the names of the bucket's tensors.
        bucket: the bucket that the compressors fill.
    """

    def __init__(
        self,
        tensors: Sequence[TensorInfo],
        compressors: Sequence[Compressor],
        room: _Room,
        device: Any = None,
        xp: AllFunctions = numpy_arrays,
    ) -> None:
        self.names = [tensor.name for tensor in tensors]
        self.bucket = Bucket(tensors, compressors, ErrorFeedback(), device, xp)
        self._room = room
        if device is not None:
            self.bucket.kernels.room = room.on_device
        self._made: Sequence[Sequence[AnyArray]] = ()  # the arrays of x, and the arrays of C(x)

    def run(self, xs: Sequence[Array], addresses: Mapping[str, int], sources: Mapping[str, int]) -> None:
        """Runs a step as if this rank were the only rank, without a residual. Call `bucket.begin` first.

        Args:
            xs: the array x of each tensor.
            addresses: the address of each tensor's x, by name.
            sources: the addresses of arrays that are compressed in place of x, by name.
        """
        bucket, segments = self.bucket, self.bucket.segments
        made: Sequence[tuple[Sequence[AnyArray], Any]] = (
            self._room.on_host(segments["size"]) if bucket.device is None else [cuda.split_like(xs) for _ in range(2)]
        )
        self._made = [arrays for arrays, _ in made]
        segments["x"], segments["result"] = (places for _, places in made)
        segments["gradient"] = [addresses[name] for name in self.names]
        if sources:
            bucket.call("make_x")
            segments["source"] = [sources.get(name, addresses[name]) for name in self.names]
        bucket.compressors[0].preview_bucket(bucket)

    def means(self, xp: AllFunctions, like: Array) -> Sequence[Array]:
        """C(x) of each tensor. `like` is an array of the framework."""
        means = self._made[1]
        if self.bucket.device is not None:
            return means
        empty = xp.flatten(like)[:0]  # not a view of `like`, because a view would keep all of `like` in memory
        return [
            xp.reshape(xp.from_numpy(mean.copy(), like=empty), tensor.shape)
            for mean, tensor in zip(means, self.bucket.tensors, strict=True)
        ]

    def lost(self, xp: AllFunctions, like: Array) -> Array:
        """The squared compression error of each tensor, ||x - C(x)||^2, float64 (tensors,). `like` is an array of the
        framework."""
        sums = self.bucket.sums_of("measure_left")
        return xp.from_numpy(sums, like=like) if self.bucket.device is None else sums

    def release(self) -> None:
        """Releases x and C(x), because other code needs their memory on a device."""
        self._made = ()
