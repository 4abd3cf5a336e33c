"""The encode times of hvdcomp's own kernels on any GPU, computed from measurements on an H200.

For one step of a method, the device needs

    launches x LAUNCH_S  +  elements x (bytes / bandwidth  +  arithmetic x integer rate of an H200 / integer rate)

seconds. `bytes` is the number of bytes that the kernels read and write for an element; it follows from the method.
`arithmetic` is the time that an H200 needs for an element beyond the time to read and write these bytes. We measured
this time, and the kernels spend most of it on integer operations. The bandwidth is `REACHED` times the bandwidth in the
data sheet. On any GPU, the host needs `HOST_S` seconds for a step and `HOST_LAUNCH_S` seconds for each launch. The host
works while the device works, so a step takes the longer of the two times.

`benchmarks/times/other_card.py` predicts the times of each measured GPU from the other measured GPU, and compares the
predictions with the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdcomp.perfmodel.cards import CARDS, Card
from hvdcomp.perfmodel.compute import EncodeTime

LAUNCH_S = 6e-6
"""Seconds that the device needs to launch a kernel, in addition to the kernel's own work."""
HOST_S, HOST_LAUNCH_S = 0.8e-3, 75e-6
"""Seconds that the host needs for a step, and seconds that it needs to launch a kernel, with Python on a Xeon."""
REACHED = 0.85
"""The share of a GPU's memory bandwidth (from the data sheet) that a kernel reaches if it only copies."""

MEASURED_ON = CARDS["h200"]
BENCH = "docs/encode/gpu.json, part bench"
ROOFLINE = "docs/encode/gpu.json, part roofline"


@dataclass(frozen=True)
class Kernels:
    """The work of a method's kernels in one step. "Per element" means per element of the gradients.

    Attributes:
        launches: number of kernel launches per step.
        bytes: bytes per element that the kernels read and write if they decode a single payload.
        arithmetic_ps: picoseconds per element that an H200 needs beyond the time for launches and bytes.
        payload: bytes per element that the kernels read and write to decode each additional payload, if payloads are
            gathered or scattered; 0 if not.
        decode_ps: picoseconds per element that an H200 needs to decode each additional payload, beyond the time for its
            bytes.
        source: file with the measurement, or how the numbers were estimated.
    """

    launches: int
    bytes: float
    arithmetic_ps: float
    payload: float = 0.0
    decode_ps: float = 0.0
    source: str = BENCH

    @property
    def estimated(self) -> bool:
        """Whether the method was never measured on a GPU, so that the numbers are estimates."""
        return self.source.startswith("estimated")


def arithmetic_ps(device_s: Mapping[int, float], kernels: Kernels, card: Card) -> float:
    """Computes `Kernels.arithmetic_ps` from times measured on a GPU.

    Args:
        device_s: for each measured number of elements, the seconds that the device's kernels take.
        kernels: the kernels of the method. Only `launches` and `bytes` are used.
        card: the GPU on which the times were measured.
    """
    beyond = (sum(device_s.values()) - len(device_s) * kernels.launches * LAUNCH_S) / sum(device_s)
    beyond -= kernels.bytes / (REACHED * card.bytes_per_s)
    return 1e12 * max(0.0, beyond) * card.integers_per_s / MEASURED_ON.integers_per_s


def device_s(kernels: Kernels, card: Card, elements: float) -> float:
    """Predicted seconds that the device's kernels take in a step that decodes a single payload."""
    return kernels.launches * LAUNCH_S + elements * _element_s(kernels.bytes, kernels.arithmetic_ps, card)


def host_s(kernels: Kernels) -> float:
    """Predicted seconds that the host needs for a step."""
    return HOST_S + kernels.launches * HOST_LAUNCH_S


def _element_s(moved: float, picoseconds: float, card: Card) -> float:
    slower = MEASURED_ON.integers_per_s / card.integers_per_s
    return moved / (REACHED * card.bytes_per_s) + 1e-12 * picoseconds * slower


# `Kernels.bytes` is the sum of these bytes per element. Computing x = gradient + residual takes 12 bytes: the gradient
# and the residual are read, and x is written. Without residuals it takes 4 bytes, and a momentum takes 8 more. The
# payload is written once and read once, and the result takes 4 bytes. Quantizers read x a second time (4) once they
# know the scales. EDEN does not: it has a scale for each block, and computes the codes of a block while the block is in
# registers. With a scale for each element, EDEN reads the running means of squares twice (8) and writes the next ones
# (4). PyTorch then reads both and writes those that are kept (12), because a step that is skipped keeps the old ones.
# PowerSGD multiplies x a second time (4), and its decoding reads and writes x (8).
# Sparsifiers decode 1 % of the elements. For each decoded element, a sector of 32 bytes is read and written.
_SCATTERED = 64 * 0.01

_SAME = "which uses the same kernels"
_BY_CPU = "with its arithmetic scaled by the ratio of both methods' times on a CPU (docs/encode/"

KERNELS = {
    "powersgd:rank=4": Kernels(23, 28, 5.7),
    "powersgd:rank=8": Kernels(23, 28, 11.4, source="estimated: twice the arithmetic of powersgd:rank=4"),
    "powersgd:rank=16": Kernels(23, 28, 22.8, source="estimated: four times the arithmetic of powersgd:rank=4"),
    "topk:ratio=0.01": Kernels(19, 16, 4.7, _SCATTERED, 0.6),
    "mstopk:ratio=0.01": Kernels(19, 16, 6.9, _SCATTERED, 0.6),
    "mstopk:ratio=0.001": Kernels(19, 16, 6.9, _SCATTERED / 10, 0.06, f"estimated: mstopk:ratio=0.01, {_SAME}"),
    "redsync:ratio=0.01": Kernels(24, 16, 8.5, _SCATTERED, 0.6),
    "dgc:ratio=0.01": Kernels(24, 24, 9.7, _SCATTERED, 0.6),
    "topkc:ratio=0.01": Kernels(
        19, 16, 6.4, source=f"estimated: mstopk:ratio=0.01, {_BY_CPU}presets-sparsifiers.json)"
    ),
    "randomk:ratio=0.01": Kernels(15, 16, 2.1),
    "signsgd": Kernels(12, 8.5, 3.1, 0.125, 1.9, ROOFLINE),
    "efsignsgd": Kernels(12, 16.25, 1.1, 0.125, 0.5),
    "onebit": Kernels(12, 16.25, 1.3, 0.125, 0.5),
    "qsgd:bits=2": Kernels(12, 12.5, 4.2, 0.25, 1.1, f"estimated: qsgd:bits=4, {_SAME}"),
    "qsgd:bits=4": Kernels(12, 13, 4.2, 0.5, 1.1),
    "terngrad": Kernels(13, 12.5, 3.1, 0.25, 0.8),
    "natural": Kernels(11, 10.25, 3.4, 1.125, 1.7),
    "globalqsgd": Kernels(13, 14, 0.4, source=ROOFLINE),
    "int8": Kernels(12, 14, 2.8, 1.0, 1.2),
    "int4": Kernels(12, 25, 3.8, 0.5, 1.6, f"estimated: int8 with residuals, {_BY_CPU}presets.json)"),
    "fp8": Kernels(12, 14, 2.0, 1.0, 0.4),
    "bf16": Kernels(7, 12, 0.4, 2.0, 0.3, ROOFLINE),
    "eden": Kernels(12, 8.5, 6.7, 0.25, 1.8, f"estimated: qsgd:bits=2, {_BY_CPU}presets-rotated.json)"),
    "eden:bits=1": Kernels(12, 8.25, 6.0, 0.125, 1.6, f"estimated: qsgd:bits=2, {_BY_CPU}presets-rotated.json)"),
    "eden:scaled=True": Kernels(14, 32.5, 10.0, 0.25, 1.8, f"estimated: eden, {_BY_CPU}presets-scales.json)"),
    "eden:bits=1,scaled=True": Kernels(
        14, 32.25, 9.5, 0.125, 1.6, f"estimated: eden:bits=1, {_BY_CPU}presets-scales.json)"
    ),
}
"""The work of the kernels of each method, by spec."""


def encode_time(spec: str, card: Card, elements: float, model: str | None = None) -> EncodeTime:
    """The encode time of a method on a GPU.

    Args:
        spec: spec of the method, a key of `KERNELS`.
        card: the GPU.
        elements: number of elements of the model's gradients.
        model: name of the model in `shapes`; None if it has no name there. The result is marked as measured only if the
            time was measured for this model.

    Example:
        >>> time = encode_time("topk:ratio=0.01", CARDS["v100"], elements=25_557_032)
        >>> f"{1e3 * time.seconds(1):.1f} ms, of which the host needs {1e3 * time.host_s:.1f}"
        '2.2 ms, of which the host needs 2.2'
    """
    kernels = KERNELS[spec]
    further_s = elements * _element_s(kernels.payload, kernels.decode_ps, card)
    measured = not kernels.estimated and kernels.source == BENCH and model in card.measured
    on = "" if measured else f"; scaled from an H200 to {card.title} by bandwidth and integer rate"
    return EncodeTime(
        encode_s=device_s(kernels, card, elements) - further_s,
        decode_per_rank_s=further_s,
        host_s=host_s(kernels),
        source=kernels.source if measured else f"{'' if kernels.estimated else 'estimated: '}{kernels.source}{on}",
        estimated=not measured,
    )
