"""Decides which tensors of a step are compressed and sent together.

Tensors that have kernels are in a bucket, and all other tensors are in a tensor group. Kernels take gradients of
float32 or of 16 bits. The following tensors have no kernels: tensors of methods without a bucket form, float64 tensors,
tensors with a memory that a user wrote, and all tensors on hosts and devices without kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias, TypeVar

import numpy as np

from hvdcomp import kernels
from hvdcomp.arrays.types import AllFunctions, AnyArray, Array, dtype_bytes
from hvdcomp.compressors import Compressor, needs_nodes
from hvdcomp.compressors.choice import Plan
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.device_residuals import DeviceResiduals
from hvdcomp.exchange.engine_bucket import EngineBucket
from hvdcomp.exchange.residuals import KNOWN_TO_KERNELS, FlatStorage, Residuals
from hvdcomp.exchange.tensor_group import Member, TensorGroup
from hvdcomp.exchange.tensor_state import TensorState
from hvdcomp.kernels import cuda
from hvdcomp.kernels.tables import NARROW

BucketOrGroup: TypeAlias = EngineBucket | TensorGroup
"""Tensors that the engine handles together in a step. In this file, "bucket" also means a tensor group, unless both are
named."""

_Item = TypeVar("_Item")


class Buckets:
    """The buckets and tensor groups of a training.

    Args:
        tensors: all tensors, by name.
        states: the states of the tensors, by name.
        memory_for: function that returns the memory of a compressor.
        warns: whether to warn if gradients are on a device that has no kernels.
        most_gathered: the most bytes that one rank gathers for a bucket, unless a single tensor needs more; None for no
            limit. If all tensors together need more bytes, no bucket starts before all gradients are ready.
        ranks: number of ranks.

    Attributes:
        order: the names of the tensors in batches, in the order in which their gradients become ready. The gradients of
            a batch become ready at the same time. Empty while the order is not known.
        waves: the waves of the latest buckets, by name. A wave is a set of buckets that exchange their payloads
            together. `Overlap.new_wave` makes waves.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        states: Mapping[str, TensorState],
        memory_for: Callable[[Compressor], Memory],
        warns: bool = False,
        most_gathered: int | None = None,
        ranks: int = 1,
    ) -> None:
        self._tensors = tensors
        self._most_gathered = most_gathered
        self._ranks = ranks
        self._warns = warns
        self._states = states
        self._memory_for = memory_for
        self._numbers = {name: number for number, name in enumerate(tensors)}
        self._sizes = [tensor.size for tensor in tensors.values()]
        self._residuals: FlatStorage = Residuals(self._sizes)
        # The buckets and tensor groups of the latest step. Buckets that may start early come first, by their numbers.
        self._latest: list[BucketOrGroup] = []
        self.waves: dict[str, Any] = {}
        self.order: Sequence[Sequence[str]] = ()
        self._least_bytes = 0
        self._made_for: tuple[Plan, Sequence[str]] | None = None
        self._known_states: list[TensorState] = []
        self._known_changes = 0, 0

    @property
    def with_kernels(self) -> list[EngineBucket]:
        """The buckets of the latest step, without tensor groups. The buckets that may start early come first, by their
        numbers."""
        return [bucket for bucket in self._latest if isinstance(bucket, EngineBucket)]

    @property
    def tensor_groups(self) -> list[TensorGroup]:
        """The tensor groups of the latest step. The groups that may start early come first, by their numbers."""
        return [group for group in self._latest if isinstance(group, TensorGroup)]

    def of_step(
        self,
        xp: AllFunctions,
        names: Sequence[str],
        gradients: Mapping[str, Array],
        plan: Plan,
        under_way: Set[str] = frozenset(),
    ) -> list[BucketOrGroup]:
        """The buckets of a step that have not started.

        Args:
            xp: the array functions of the gradients.
            names: the names of the tensors that have a gradient.
            gradients: the gradients of the step, by name.
            plan: the plan of the step.
            under_way: the names of the tensors whose buckets have started.
        """
        if not self._are_current(plan) or self._made_for != (plan, names):
            self.waves.clear()
            self._latest = list(self._make(xp, names, gradients, plan))
            self._known_states = list(self._states.values())
            self._known_changes = self._residuals.released, self._residuals.dropped
            self._made_for = (plan, names)
        waiting = [bucket for bucket in self._latest if bucket.names[0] not in under_way]
        for bucket in waiting:
            if not self.take(xp, bucket, gradients):
                return [self.tensor_group([name for name in names if name not in under_way], plan)]
        return waiting

    def early(self, plan: Plan) -> list[BucketOrGroup]:
        """The buckets of the latest step that may start early; none if the plan or a tensor's state was replaced."""
        if not self._are_current(plan):
            return []
        return [bucket for bucket in self._latest if bucket.number is not None]

    def take(self, xp: AllFunctions, bucket: BucketOrGroup, gradients: Mapping[str, Array]) -> bool:
        """Gives a bucket its gradients of a step; returns whether kernels can use them. A tensor group can use any
        gradients."""
        if isinstance(bucket, TensorGroup):
            return True
        bucket.given = list(map(gradients.__getitem__, bucket.names))
        placed = self._placed(xp, bucket.given, bucket.bucket.dtype)
        if placed is not None:
            bucket.arrays, bucket.bucket.segments["gradient"] = placed
        return placed is not None

    def tensor_group(
        self, names: Sequence[str], plan: Plan, states: Mapping[str, TensorState] | None = None
    ) -> TensorGroup:
        """A tensor group of these tensors. If `states` is given, the tensor group uses these states, by name, instead
        of the states of the training."""
        states = self._states if states is None else states
        members = []
        for name in names:
            compressor = plan[name]
            floats = compressor.payload_floats(self._tensors[name].shape)
            members.append(Member(name, compressor, self._memory_for(compressor), floats, states[name]))
        return TensorGroup(members)

    def _placed(
        self, xp: AllFunctions, arrays: Sequence[AnyArray], dtype: str
    ) -> tuple[Sequence[AnyArray], list[int]] | None:
        """The gradients and their addresses; None if they are on another device than kernels and flat storage."""
        if (placed := cuda.placed(arrays, dtype)) is not None:
            if not isinstance(self._residuals, DeviceResiduals) and not self.with_kernels:
                # A new array instead of a slice of the gradient: a slice would keep the whole gradient in memory.
                like = xp.astype(xp.zeros((0,), like=arrays[0]), "float32")
                self._residuals = DeviceResiduals(self._sizes, xp, like)
            kept = self._residuals
            return placed if isinstance(kept, DeviceResiduals) and kept.device == arrays[0].device else None
        return xp.hosted(arrays, dtype) if kernels.available() and isinstance(self._residuals, Residuals) else None

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept from step to step: residuals, velocities and the arrays of methods. On the host, each
        tensor has two places for its residual, and both are counted."""
        states = [bucket.bucket.states for bucket in self.with_kernels]
        return self._residuals.nbytes + sum(kept.nbytes for kept in states if kept is not None)

    def start_early(self, order: Sequence[Sequence[str]], least_bytes: int) -> None:
        """From the next step on, makes buckets that may start early: before all gradients are ready.

        Args:
            order: the new value of the attribute `order`; if it is empty, no bucket starts early.
            least_bytes: least bytes of gradients in a bucket that may start early.
        """
        self.order, self._least_bytes = order, least_bytes
        # Make new buckets: if a step ended with an error, collectives may still read the payloads of its buckets.
        self._made_for, self._latest = None, []
        self.waves.clear()

    def _are_current(self, plan: Plan) -> bool:
        if self._made_for is None or self._made_for[0] is not plan:
            return False
        # Make buckets again if a state was replaced or moved out of flat storage, or if a residual was dropped: the
        # tensor may now belong to another bucket.
        same = list(self._states.values()) == self._known_states
        return same and self._known_changes == (self._residuals.released, self._residuals.dropped)

    def _make(
        self, xp: AllFunctions, names: Sequence[str], gradients: Mapping[str, Array], plan: Plan
    ) -> Iterator[BucketOrGroup]:
        kinds = self._kinds(xp, names, gradients, plan)
        gathered = {name: self._gathered_of(name, plan[name]) for name in self._tensors}
        in_order = sum(gathered[name] for name in itertools.chain(*self.order))
        in_one_part = self._most_gathered is None or in_order <= self._most_gathered
        hosted = not any(map(xp.waits, gradients.values()))
        early = self._early_pieces(names, kinds, hosted) if in_one_part else []
        numbers = {name: number for number, piece in enumerate(early) for name in piece}
        by_number: dict[Any, list[str]] = {}
        for name in names:
            by_number.setdefault((numbers.get(name, len(early)), kinds[name]), []).append(name)
        known = {bucket.key: bucket for bucket in self.with_kernels}
        for (number, kind), whole in sorted(by_number.items(), key=lambda entry: entry[0][0]):
            for members in in_parts(whole, gathered.__getitem__, self._most_gathered):
                if kind is None:
                    bucket: BucketOrGroup = self.tensor_group(members, plan)
                else:
                    bucket = self._bucket(xp, members, gradients, plan, kind[1], known)
                bucket.number = number if number < len(early) else None
                bucket.gathered = sum(gathered[name] for name in members)
                yield bucket

    def _bucket(
        self,
        xp: AllFunctions,
        names: Sequence[str],
        gradients: Mapping[str, Array],
        plan: Plan,
        memory: Memory,
        known: Mapping[Any, EngineBucket],
    ) -> EngineBucket:
        """The bucket of these tensors: a known bucket if it has the same key, else a new one."""
        on_device = isinstance(self._residuals, DeviceResiduals)
        bridges = _no_bridges if on_device else _bridges
        tensors = []
        for name in names:
            state, place = self._states[name], self._numbers[name]
            if not state.is_flat:
                # If there is a residual, its keeper has the same class as `memory`, but may differ in `rounds_to`.
                state.keeper = memory
            wrap, unwrap = bridges(xp, gradients[name], self._tensors[name].shape)
            state.move_to_flat_storage(self._residuals, place, unwrap, wrap)
            tensors.append((name, state, place))
        key = (tuple(tensors), tuple(plan[name] for name in names), memory)
        described = [self._tensors[name] for name in names]
        first: AnyArray = gradients[names[0]]
        device = (first.device, xp) if on_device else ()
        bucket = known.get(key) or EngineBucket(*key, described, self._residuals, *device)
        # Since the last step of this bucket, its tensors may have been in another bucket.
        bucket.has_states &= plan[names[0]].keeps_state
        return bucket

    def _gathered_of(self, name: str, compressor: Compressor) -> float:
        """Bytes that one rank gathers for a tensor. The result is 0 if payloads are scattered, or if the compressor has
        two levels. In these cases a rank gathers only small shares, whose sizes depend on the whole bucket."""
        if self._most_gathered is None or needs_nodes(compressor) or compressor.scatters(self._ranks):
            return 0.0
        tensor = self._tensors[name]
        payloads = compressor.payloads(tensor.shape, tensor.dtype, self._ranks)
        return self._ranks * sum(payload.bytes for payload in payloads if payload.kind == "allgather")

    def _kinds(
        self, xp: AllFunctions, names: Sequence[str], gradients: Mapping[str, Array], plan: Plan
    ) -> dict[str, tuple[Any, Memory, str] | None]:
        """The kind of each tensor of the training, as returned by `_kind`. Tensors without a gradient in this step are
        included."""
        served = set(NARROW)
        for dtype in NARROW:
            given = [gradients[name] for name in names if self._tensors[name].dtype == dtype]
            if given and self._warns:
                cuda.warn_where_none(given[0])
            if given and self._placed(xp, given, dtype) is None:
                served.remove(dtype)
        return {
            name: self._kind(name, plan[name]) if tensor.dtype in served else None
            for name, tensor in self._tensors.items()
        }

    def _kind(self, name: str, compressor: Compressor) -> tuple[Any, Memory, str] | None:
        """The kind of a tensor. Only tensors of the same kind can be in one bucket. The kind is None if the tensor must
        be in a tensor group."""
        tensor = self._tensors[name]
        if not compressor.has_bucket_form or not tensor.size:
            return None
        if isinstance(self._residuals, DeviceResiduals) and not cuda.takes(compressor, tensor.size):
            return None
        memory = self._states[name].memory_for(self._memory_for(compressor))
        return (compressor.bucket_family, memory, tensor.dtype) if type(memory) in KNOWN_TO_KERNELS else None

    def _early_pieces(self, names: Sequence[str], kinds: Mapping[str, Any], hosted: bool) -> list[list[str]]:
        """The names of the tensors of each bucket that may start early. The names for one bucket are called a piece.

        Ranks may learn at different times that a tensor has no gradient. So the pieces depend only on the order and the
        plan, which are the same on all ranks. If a tensor of a piece has no gradient in this step, this piece and all
        later pieces do not start early. Tensor groups on a device never start early, because array functions may wait
        for the device and delay the backward pass.

        Args:
            names: the names of the tensors that have a gradient.
            kinds: the kind of each tensor, by name. Only tensors of the same kind can be in one bucket.
            hosted: whether the gradients are on the host.
        """
        pieces: list[list[str]] = []
        filling: dict[Any, tuple[list[str], int]] = {}
        for batch in self.order:
            batch_kinds = [kinds[name] for name in batch]
            for name, kind in zip(batch, batch_kinds, strict=True):
                piece, size = filling.pop(kind, ([], 0))
                piece.append(name)
                filling[kind] = piece, size + self._tensors[name].size * dtype_bytes(self._tensors[name].dtype)
            for kind in dict.fromkeys(batch_kinds):
                if (kind is not None or hosted) and filling[kind][1] >= self._least_bytes:
                    pieces.append(filling.pop(kind)[0])
        return list(itertools.takewhile(set(names).issuperset, pieces))


def in_parts(
    items: Iterable[_Item], size_of: Callable[[_Item], float], most: float | None, before: float = 0.0
) -> list[list[_Item]]:
    """Cuts items into parts, in their order. The sizes of a part add up to at most `most`, unless one item is larger.

    Args:
        items: the items to divide into parts, such as buckets.
        size_of: function that returns the size of an item.
        most: largest sum of the sizes in a part; None for a single part.
        before: the size that is already used in the first part. If the first item does not fit, the first part gets no
            items.

    Example:
        >>> in_parts([3, 1, 2, 9, 1], float, 4)
        [[3, 1], [2], [9], [1]]
        >>> in_parts([3, 1, 2, 9, 1], float, None)
        [[3, 1, 2, 9, 1]]
        >>> in_parts([3, 1], float, 4, before=2)
        [[], [3, 1]]
    """
    parts: list[list[_Item]] = [[]]
    size = before
    for item in items:
        size += size_of(item)
        if (parts[-1] or before) and most is not None and size > most:
            parts.append([])
            size, before = size_of(item), 0.0
        parts[-1].append(item)
    return parts


def _bridges(
    xp: AllFunctions, like: Array, shape: tuple[int, ...]
) -> tuple[Callable[[np.ndarray], Array], Callable[[Array], np.ndarray]]:
    """Two functions. The first function turns a NumPy vector into an array of the framework with a tensor's shape and
    the same storage. The second function turns an array of the framework into a NumPy vector."""
    empty = xp.zeros((0,), like=like)  # not a slice of `like`, which would keep `like` in memory

    def wrap(vector: np.ndarray) -> Array:
        return xp.reshape(xp.from_numpy(vector, like=empty), shape)

    def unwrap(array: Array) -> np.ndarray:
        return xp.to_numpy(xp.flatten(xp.astype(array, "float32")))  # older checkpoints have residuals of 16 bits

    return wrap, unwrap


def _no_bridges(
    xp: AllFunctions, like: Array, shape: tuple[int, ...]
) -> tuple[Callable[[AnyArray], AnyArray], Callable[[AnyArray], AnyArray]]:
    """The same as `_bridges`, but for a device. Vectors on a device are already arrays of the framework."""
    return lambda vector: xp.reshape(vector, shape), xp.flatten
