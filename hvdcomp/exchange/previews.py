"""What compression would keep of tensors, without sending anything: for policies that measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdcomp import kernels
from hvdcomp.arrays.types import Array
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.bucket import Bucket, BucketOutcome, BucketStates
from hvdcomp.compressors.memory import NoMemory
from hvdcomp.compressors.protocol import Context, SparseVector, TensorInfo, run_alone
from hvdcomp.exchange.tensor_step import TensorState

_MOST_BUCKETS = 32  # a policy looks at a handful of levels in turn


class Previews:
    """Compresses as if this rank were the only one that sends; changes nothing that a step sees.

    Args:
        tensors: all tensors, by name.
        states: of the tensors, by name.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo], states: Mapping[str, TensorState]) -> None:
        self._tensors = tensors
        self._states = states
        self._buckets: dict[Any, _Bucket] = {}

    def of(
        self,
        xp: ModuleType,
        xs: Mapping[str, Array],
        compressors: Mapping[str, Compressor],
        context: Context,
        among: Mapping[str, Array],
    ) -> dict[str, Array | SparseVector]:
        """C(x) of some tensors, by name.

        Args:
            context: of the step; its name is not looked at.
            among: indices as of `Context`, of the tensors that have some.
        """
        found: dict[str, Array | SparseVector] = {}
        for names in self._families(xp, xs, compressors):
            found |= self._of_bucket(xp, names, xs, compressors, context)
        for name in xs.keys() - found.keys():
            own = dataclasses.replace(context, name=name, among=among.get(name))
            state = self._states[name].prepare(xp, xs[name], compressors[name], own)
            found[name] = compressors[name].preview(xp, xs[name], state, own)
        return {name: found[name] for name in xs}

    def _families(
        self, xp: ModuleType, xs: Mapping[str, Array], compressors: Mapping[str, Compressor]
    ) -> Sequence[tuple[str, ...]]:
        """The tensors that are compressed together."""
        if not kernels.available() or xp.hosted(list(xs.values())) is None:
            return []
        families: dict[Any, list[str]] = {}
        for name in xs:
            family = compressors[name].bucket_family
            if family is not None and self._states[name].is_flat:  # as the step does it
                families.setdefault(family, []).append(name)
        return [tuple(names) for names in families.values()]

    def _of_bucket(
        self,
        xp: ModuleType,
        names: tuple[str, ...],
        xs: Mapping[str, Array],
        compressors: Mapping[str, Compressor],
        context: Context,
    ) -> dict[str, Array | SparseVector]:
        mine = tuple(compressors[name] for name in names)
        bucket = self._buckets.get((names, mine))
        if bucket is None:
            if len(self._buckets) == _MOST_BUCKETS:
                self._buckets.clear()
            bucket = self._buckets[names, mine] = _Bucket([self._tensors[name] for name in names], mine)
        arrays, addresses = xp.hosted([xs[name] for name in names])
        states: list[tuple[np.ndarray, ...]] = []
        if mine[0].keeps_state:
            for name, array, compressor in zip(names, arrays, mine, strict=True):
                own = dataclasses.replace(context, name=name)
                kept = self._states[name].prepare(xp, array, compressor, own)
                states.append(tuple(xp.to_numpy(one) for one in kept))
        outcome = bucket.run([xp.to_numpy(array).reshape(-1) for array in arrays], addresses, context, states)
        like = xp.flatten(arrays[0])[:0]
        found: dict[str, Array | SparseVector] = {}
        for place, name in enumerate(names):
            sent = outcome.sent(place)
            if isinstance(sent, SparseVector):
                found[name] = SparseVector(*(xp.from_numpy(part.copy(), like=like) for part in sent))
            else:
                found[name] = xp.reshape(xp.from_numpy(sent.copy(), like=like), self._tensors[name].shape)
        return found


class _Bucket:
    """A bucket that sends nothing."""

    def __init__(self, tensors: Sequence[TensorInfo], compressors: Sequence[Compressor]) -> None:
        self._bucket = Bucket(tensors, compressors, NoMemory())
        sizes = self._bucket.segments["size"]
        self._means = np.empty(int(sizes.sum()), np.float32)
        begin = self._means.__array_interface__["data"][0]
        self._bucket.segments["result"] = begin + 4 * (np.cumsum(sizes) - sizes)

    def run(
        self,
        xs: Sequence[np.ndarray],
        addresses: Sequence[int],
        context: Context,
        states: list[tuple[np.ndarray, ...]],
    ) -> BucketOutcome:
        """A step of this rank alone."""
        bucket = self._bucket
        bucket.context = context
        bucket.states = BucketStates(states) if states else None
        bucket.table.bucket.threads = kernels.threads()
        bucket.segments["gradient"] = bucket.segments["source"] = addresses
        bucket.x = bucket.compressed = xs.__getitem__
        outcome, _ = run_alone(bucket.compressors[0].aggregate_bucket(bucket))
        return outcome
