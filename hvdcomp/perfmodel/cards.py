"""The properties of GPUs that determine how long a training step and its compression take.

All numbers are from NVIDIA's data sheets. The rate of integer operations assumes that each multiprocessor has 64 units
for 32-bit integers, as in all of these architectures, and runs at the boost clock.
"""

from __future__ import annotations

from dataclasses import dataclass

_INTEGER_UNITS = 64  # per multiprocessor


@dataclass(frozen=True)
class Card:
    """The properties of one type of GPU, such as the A100.

    Attributes:
        title: name of the GPU in reports.
        bytes_per_s: bandwidth of the GPU's memory, in bytes/s.
        multiprocessors: number of the GPU's multiprocessors.
        clock_hz: boost clock of the GPU, in Hz.
        flops: 16-bit floating-point operations per second of the tensor cores, without sparsity.
        utilisation: share of `flops` that the training of a transformer reaches.
        memory: size of the GPU's memory, in bytes.
        sources: the source of each number.
        measured: names of the models of `shapes` whose encode times we measured on this GPU (docs/encode/gpu.md).
    """

    title: str
    bytes_per_s: float
    multiprocessors: int
    clock_hz: float
    flops: float
    utilisation: float
    memory: float
    sources: str
    measured: tuple[str, ...] = ()

    @property
    def integers_per_s(self) -> float:
        """Integer operations per second of all multiprocessors together."""
        return _INTEGER_UNITS * self.multiprocessors * self.clock_hz


_FOUNDRY = "utilisation: for 1B parameters and 2,048 tokens in MosaicML's table (llm-foundry, training benchmarks)"
_NO_TABLE = "utilisation: estimated, as on an H100"

CARDS = {
    "v100": Card(
        "NVIDIA V100 SXM2 16GB", 900e9, 80, 1.53e9, 125e12, 0.40, 16e9,
        f"data sheet of the Tesla V100; {_NO_TABLE}",
    ),
    "a100": Card(
        "NVIDIA A100 SXM4 40GB", 1555e9, 108, 1.41e9, 312e12, 0.55, 40e9,
        f"data sheet of the A100; {_FOUNDRY}, 54 to 56 %",
    ),
    "h100": Card(
        "NVIDIA H100 SXM5 80GB", 3350e9, 132, 1.98e9, 989e12, 0.41, 80e9,
        f"data sheet of the H100; clock: as shown by nvidia-smi; {_FOUNDRY}, 41 to 42 %",
        measured=("resnet50",),
    ),
    "h200": Card(
        "NVIDIA H200 SXM 141GB", 4800e9, 132, 1.98e9, 989e12, 0.41, 141e9,
        "data sheet of the H200; clock and utilisation: as on an H100, which has the same chip",
        measured=("resnet50", "bert-base"),
    ),
    "l4": Card("NVIDIA L4 24GB", 300e9, 58, 2.04e9, 121e12, 0.40, 24e9, f"data sheet of the L4; {_NO_TABLE}"),
    "a10g": Card(
        "NVIDIA A10G 24GB", 600e9, 80, 1.71e9, 70e12, 0.40, 24e9,
        f"data sheet of the A10G in Amazon's g5 instances; {_NO_TABLE}",
    ),
    "rtx4090": Card(
        "NVIDIA GeForce RTX 4090 24GB", 1008e9, 128, 2.52e9, 165e12, 0.40, 24e9,
        f"whitepaper of the Ada architecture; flops: for 16-bit numbers with 32-bit sums; {_NO_TABLE}",
    ),
}  # fmt: skip
"""The GPUs, by name. A calibration's field `card` may have these names."""
