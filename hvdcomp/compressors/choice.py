"""Chooses the compressor and the memory of each tensor. The choice depends only on names, shapes and element types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType

from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.casts import NoCompression
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.compressors.sizes import state_elements

MIN_NUMEL, MIN_NDIM = 1024, 2
"""The default smallest number of elements, and the default smallest number of dimensions, of compressed tensors."""

Plan = Mapping[str, Compressor]
"""The compressor of each tensor, by name. A plan is not changed once it is made."""


@dataclass(eq=False)
class Chooser:
    """Chooses the compressor and the memory of each tensor.

    Args:
        described: all tensors that may have a gradient; the same on all ranks.
        compressor: the user's compressor. The compressor's method `route` returns the compressor of each tensor.
        memory: the memory of all tensors, or None for the default. By default, biased compressors get error feedback,
            and other compressors get no memory. But if the default memory of any compressor is momentum correction, all
            tensors get momentum correction.
        min_numel, min_ndim: tensors with fewer elements or dimensions are sent uncompressed.

    Attributes:
        tensors: the tensors by name, sorted.
        memory: the memory of all tensors; None if each tensor gets the default of its compressor.
    """

    described: InitVar[Iterable[TensorInfo]]
    compressor: Compressor
    memory: Memory | None = None
    min_numel: int = MIN_NUMEL
    min_ndim: int = MIN_NDIM
    tensors: dict[str, TensorInfo] = field(init=False)

    def __post_init__(self, described: Iterable[TensorInfo]) -> None:
        # Sorted, because the user chooses the order of named parameters, and the order must be the same on all ranks.
        self.tensors = {tensor.name: tensor for tensor in sorted(described, key=lambda tensor: tensor.name)}
        if self.memory is None:  # if one tensor has momentum, all tensors must have momentum
            methods = (self.compressor, *self.plan_for(self.compressor).values())
            self.memory = next((kind.default_memory for kind in methods if kind.default_memory.is_momentum), None)

    def plan_for(self, compressor: Compressor) -> Plan:
        """The plan for a compressor. The plan sends small and low-dimensional tensors uncompressed, unless the
        compressor is a cast."""
        return MappingProxyType({name: self.choose(compressor, tensor) for name, tensor in self.tensors.items()})

    def choose(self, compressor: Compressor, tensor: TensorInfo) -> Compressor:
        """The compressor that a tensor gets. A small tensor gets no compression."""
        chosen = compressor.route(tensor) if tensor.size else NoCompression()
        return chosen if self.may_compress(tensor) or chosen.wire_dtype(tensor.dtype) is not None else NoCompression()

    def may_compress(self, tensor: TensorInfo) -> bool:
        """Whether a tensor may be compressed: it must be large enough, and its attribute `is_shared` must be False."""
        is_large = tensor.size >= max(1, self.min_numel) and len(tensor.own_shape) >= self.min_ndim
        return is_large and not tensor.is_shared

    def memory_for(self, compressor: Compressor) -> Memory:
        """The memory of a tensor that this compressor compresses."""
        memory = compressor.default_memory if self.memory is None else self.memory
        return NoMemory() if compressor.lossless and not memory.is_momentum else memory

    def kept_bytes(self, compressor: Compressor) -> int:
        """The bytes that a rank on a device keeps between steps for all tensors: residuals, momentum, and two copies of
        the method's own arrays. On the host, float32 residuals also have two copies."""
        kept = 0
        for name, chosen in self.plan_for(compressor).items():
            tensor, memory = self.tensors[name], self.memory_for(chosen)
            if not isinstance(memory, NoMemory):
                kept += tensor.size * (2 if memory.rounds_to else 4) * (2 if memory.is_momentum else 1)
            kept += 2 * 4 * state_elements(chosen, tensor.shape)
        return kept

    def casts(self, plan: Plan) -> bool:
        """Whether the plan has only casts (fp16, bf16 or none), without residuals."""
        return all(self.is_cast(name, compressor) for name, compressor in plan.items())

    def is_cast(self, name: str, compressor: Compressor) -> bool:
        """Whether a compressor only casts this tensor, without memory."""
        cast = compressor.wire_dtype(self.tensors[name].dtype) is not None
        return cast and isinstance(self.memory_for(compressor), NoMemory)

    def sends_all(self, name: str, compressor: Compressor) -> bool:
        """Whether a compressor leaves no residual of this tensor."""
        return compressor.lossless or self.is_cast(name, compressor)
