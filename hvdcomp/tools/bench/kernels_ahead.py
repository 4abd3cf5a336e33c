"""Compiles the kernels for CUDA devices before their first use: `python -m hvdcomp.tools.bench.kernels_ahead 70`.

If you give no compute capability, the module uses the compute capabilities for which Horovod was compiled. No device is
needed. The module runs steps on the CPU. Each kernel launch in these steps compiles the kernel into Triton's cache, but
does not run it. Training later finds the kernels in the cache, under names that depend on their sources, on Triton and
on the compute capability.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors import EXAMPLES, TensorInfo
from hvdcomp.compressors.parsing import parse_compressor, parse_memory
from hvdcomp.exchange import Engine
from hvdcomp.kernels import cuda
from hvdcomp.kernels.tables import NARROW
from hvdcomp.tools.doctor.image import wanted_capabilities

_SHAPES = {"matrix": (64, 33), "vector": (77,)}
_MEMORIES = (
    "none", "error_feedback", "error_feedback:dtype=fp16", "error_feedback:dtype=bf16",
    "momentum_correction", "momentum_correction:nesterov=True",
)  # fmt: skip
_MOST_SHARED = 1 << 20  # bytes of shared memory, more than any device has


def compile_for(capability: int) -> int:
    """Compiles the kernels of each method's examples, with each kind of error-feedback memory.

    Args:
        capability: the compute capability of the device, such as 70 for 7.0.

    Returns:
        The number of compiled kernels.
    """
    import torch

    from hvdcomp.kernels.cuda.language import triton

    compiled: set[str] = set()
    triton.runtime.driver.set_active(_without_device(triton, capability, compiled))

    with cuda.serving_host():
        methods = [method for method in map(parse_compressor, EXAMPLES) if method.name in cuda.METHODS]
        for compressor, memory, dtype in itertools.product(methods, _MEMORIES, NARROW):
            tensors = [TensorInfo(name, shape, dtype) for name, shape in _SHAPES.items()]
            ranks = LoopbackCommunicator(2)
            engine = Engine(ranks, tensors, compressor, parse_memory(memory), min_numel=0, min_ndim=0)
            for _ in range(2):
                engine.begin()
                engine.step({tensor.name: torch.zeros(tensor.shape, dtype=getattr(torch, dtype)) for tensor in tensors})
    return len(compiled)


def _without_device(triton: Any, capability: int, compiled: set[str]) -> Any:
    """A driver for Triton that does not load or launch anything."""

    def load(name: str, code: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), object(), 0, 0, 1024  # module, function, registers, spilled, threads

    def launcher(source: Any, metadata: Any) -> Callable[..., None]:
        compiled.add(metadata.hash)
        return lambda *arguments: None

    return SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: triton.backends.compiler.GPUTarget("cuda", capability, 32),
        launcher_cls=launcher,
        utils=SimpleNamespace(load_binary=load, get_device_properties=lambda device: {"max_shared_mem": _MOST_SHARED}),
    )


if __name__ == "__main__":
    for capability in sys.argv[1:] or [version.replace(".", "") for version in wanted_capabilities()]:
        print(f"compute capability {int(capability) / 10}: {compile_for(int(capability))} kernels")
