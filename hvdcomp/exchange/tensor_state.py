"""The state of a tensor, which is kept from step to step: residuals, velocities, and the arrays of its method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np

from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.types import AllFunctions, AnyArray, Array
from hvdcomp.compressors import Compressor, checked
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.exchange.residuals import FlatStorage


class KeepsStates(Protocol):
    """A bucket that can store the arrays that the method keeps for the tensors of the bucket.

    Attributes:
        has_states: whether the bucket stores these arrays for all of its tensors.
    """

    has_states: bool

    def state(self, place: int) -> tuple[Array, ...]:
        """The method's arrays of the tensor at a place of the bucket."""


class TensorState:
    """The state of a tensor: the arrays of its memory, and the arrays of the method that last compressed it.

    The memory's arrays may be in flat storage, where buckets read them. The method's arrays may be in a bucket.

    Args:
        memory, keeper: the arrays that the memory keeps, such as the residual, and the memory that made them.
        method, compressor: the name of the method that last compressed the tensor, and the arrays that this method
            keeps.
    """

    __slots__ = ("_arrays", "_bucket", "_keeper", "_number", "_of_method", "_place", "_residuals", "_wrap", "method")

    def __init__(
        self,
        memory: tuple[Array, ...] = (),
        keeper: Memory | None = None,
        method: str = "",
        compressor: tuple[Array, ...] = (),
    ) -> None:
        self._arrays = memory
        self._keeper = keeper or NoMemory()
        self._residuals: FlatStorage | None = None
        self._number = 0
        self._wrap: Callable[[np.ndarray], Array] | None = None
        self.method = method
        self._of_method = compressor
        self._bucket: KeepsStates | None = None
        self._place = 0

    @property
    def own_bytes(self) -> int:
        """Bytes of the arrays that are neither in a bucket nor in flat storage."""
        return sum(int(array.nbytes) for array in (*self._arrays, *self._of_method))

    @property
    def compressor(self) -> tuple[Array, ...]:
        """The method's arrays. The next step may reuse their storage."""
        return self._of_method if self._bucket is None else self._bucket.state(self._place)

    @compressor.setter
    def compressor(self, arrays: tuple[Array, ...]) -> None:
        self._of_method = arrays
        if self._bucket is not None:
            self._bucket.has_states = False
            self._bucket = None

    def leave_to_bucket(self, bucket: KeepsStates, place: int) -> None:
        """Lets a bucket keep the method's arrays from step to step."""
        self.compressor = ()
        self._bucket, self._place = bucket, place

    @property
    def memory(self) -> tuple[AnyArray, ...]:
        """The memory's arrays, in the shape of the tensor. The next step may reuse their storage."""
        if self._residuals is None:
            return self._arrays
        return tuple(self.wrapped(array) for array in self._residuals.arrays(self._number))

    @memory.setter
    def memory(self, arrays: tuple[AnyArray, ...]) -> None:
        self._keeper = self.keeper
        self._arrays = arrays
        if self._residuals is not None:
            self._residuals.released += 1
            self._residuals = None

    @property
    def keeper(self) -> Memory:
        """The memory that made the residual arrays of the tensor."""
        return self._keeper if self._residuals is None else self._residuals.keepers[self._number]

    @keeper.setter
    def keeper(self, memory: Memory) -> None:
        if self._residuals is None:
            self._keeper = memory
        else:
            self._residuals.keepers[self._number] = memory

    def wrapped(self, vector: np.ndarray) -> Array:
        """A vector of flat storage as an array of the framework, with the tensor's shape and the same storage."""
        assert self._wrap is not None
        return self._wrap(vector)

    @property
    def is_flat(self) -> bool:
        """Whether the memory's arrays are in flat storage."""
        return self._residuals is not None

    @property
    def has_residual(self) -> bool:
        """Whether the memory keeps any arrays for the tensor."""
        return bool(self._arrays) if self._residuals is None else bool(self._residuals.has_residual[self._number])

    def move_to_flat_storage(
        self,
        residuals: FlatStorage,
        number: int,
        unwrap: Callable[[Array], np.ndarray],
        wrap: Callable[[np.ndarray], Array],
    ) -> None:
        """Moves the memory's arrays to flat storage, if they are not there yet.

        Args:
            residuals: the flat storage into which the arrays are moved.
            number: number of the tensor in the storage.
            unwrap: function that returns a vector of an array's elements.
            wrap: function that returns an array in the shape of the tensor, with the storage of a vector.
        """
        self._wrap = wrap
        if self._residuals is None:
            residuals.keep(number, self._keeper, [unwrap(array) for array in self._arrays])
            self._residuals, self._number, self._arrays = residuals, number, ()

    def memory_for(self, memory: Memory) -> Memory:
        """The memory to use in the next step. This is the argument `memory`, unless a residual that another memory made
        must still be sent."""
        return self.keeper if self.has_residual and type(memory) is not type(self.keeper) else memory

    def kept_for(self, compressor: Compressor) -> tuple[Array, ...]:
        """The arrays that a compressor needs from earlier steps. The result is empty if another method last compressed
        the tensor."""
        return self.compressor if self.method == compressor.name else ()

    def prepare(self, xp: AllFunctions, x: Array, compressor: Compressor, context: Context) -> tuple[Array, ...]:
        """The arrays with which a compressor starts a step."""
        return checked.prepare(compressor, xp, x, self.kept_for(compressor), context)

    def prepare_on_host(
        self, xp: AllFunctions, tensor: TensorInfo, compressor: Compressor, context: Context
    ) -> tuple[np.ndarray, ...]:
        """Prepares the state of the method as `prepare` does, but the arrays are NumPy arrays, and the name in the
        context is ignored."""
        x = np.broadcast_to(np.float32(0), tensor.shape)
        kept = tuple(map(xp.to_numpy, self.kept_for(compressor)))
        prepared: tuple[AnyArray, ...] = compressor.prepare(
            numpy_arrays, x, kept, dataclasses.replace(context, name=tensor.name)
        )
        return prepared

    def scale_residual(self, factor: float, momentum: bool) -> None:
        """Multiplies the residual by a factor. If `momentum` is True, the memory's momentum is multiplied too."""
        if self._residuals is not None:
            self._residuals.scale(self._number, factor, momentum)
            return
        first = 0 if momentum else len(self.memory) - 1  # the residual is the last of a memory's arrays
        self.memory = tuple(
            _scaled(array, factor) if place >= first else array for place, array in enumerate(self.memory)
        )


def _scaled(array: Array, factor: float) -> Array:
    """The array times a number, in the array's element type. Each inf or NaN becomes 0."""
    xp = arrays_for(array)
    return xp.finite_or_zero(xp.astype(array * factor, xp.dtype_name(array)))
