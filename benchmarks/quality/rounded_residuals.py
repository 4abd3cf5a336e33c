"""Measures how much error feedback loses if residuals are rounded to 16 bits between steps, to nearest or at random.

`ErrorFeedback.dtype` rounds to nearest.

    python -m benchmarks.quality.rounded_residuals

Gradients have 10,000 elements, and a normal distribution around a constant mean. The mean is a third of the standard
deviation. Top-k sends some elements of the sum of gradient and residual. The columns are norms after the last step,
relative to the norm of the sum of all gradients. "late" is the norm of the residual. "lost" is the norm of the part
that was not sent and is not in the residual.
"""

from __future__ import annotations

import numpy as np

ELEMENTS, STEPS = 10_000, 3_000


def rounded(x: np.ndarray, how: str, rng: np.random.Generator) -> np.ndarray:
    """A vector rounded to a 16-bit type, as float32. `how` is the type and the kind of rounding, or float32 for no
    rounding."""
    dtype, _, way = how.partition(" ")
    if dtype == "float32":
        return x
    if dtype == "bf16":
        bits = x.view(np.uint32)
        odd = bits >> np.uint32(16) & np.uint32(1)
        added = odd + np.uint32(0x7FFF) if way == "nearest" else rng.integers(0, 1 << 16, x.shape, dtype=np.uint32)
        return ((bits + added) & np.uint32(0xFFFF0000)).view(np.float32)
    near = x.astype(np.float16)
    if way == "nearest":
        return near.astype(np.float32)
    beside = np.nextafter(near, np.where(x > near, np.inf, -np.inf).astype(np.float16)).astype(np.float32)
    distance = beside - near
    share = np.divide(x - near, distance, out=np.zeros_like(x), where=distance != 0)
    return np.where(rng.random(x.shape) < share, beside, near).astype(np.float32)


def run(ratio: float, how: str) -> tuple[float, float]:
    """The norms "lost" and "late"."""
    rng, rounding = np.random.default_rng(0), np.random.default_rng(1)
    mean = rng.standard_normal(ELEMENTS).astype(np.float32) * np.float32(1e-3)
    residual, arrived, given = np.zeros(ELEMENTS, np.float32), np.zeros(ELEMENTS), np.zeros(ELEMENTS)
    count = round(ratio * ELEMENTS)
    for _ in range(STEPS):
        gradient = mean + rng.standard_normal(ELEMENTS).astype(np.float32) * np.float32(3e-3)
        given += gradient
        x = residual + gradient
        largest = np.argpartition(np.abs(x), ELEMENTS - count)[ELEMENTS - count :]
        arrived[largest] += x[largest]
        x[largest] = 0
        residual = rounded(x, how, rounding)
    norm = float(np.linalg.norm(given))
    return float(np.linalg.norm(given - arrived - residual)) / norm, float(np.linalg.norm(residual)) / norm


def main() -> None:
    print(f"{'top-k':>6} {'residuals':<14} {'lost':>9} {'late':>9}")
    for ratio in (0.01, 0.001):
        for how in ("float32", "bf16 nearest", "bf16 at random", "fp16 nearest", "fp16 at random"):
            lost, late = run(ratio, how)
            print(f"{ratio:>6.1%} {how:<14} {lost:>9.4%} {late:>9.4%}", flush=True)


if __name__ == "__main__":
    main()
