"""Buckets on a device against the statement of each method for one tensor, in NumPy: sizes, shapes and numbers of every
kind, on two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.compressors.parsing import parse_compressor
from tests.cuda_kernels import SPECS
from tests.gpu.ranks import HOST, Named, Ranks, Shapes, on_host, one_by_one

FORMS = (
    *SPECS, "qsgd:bits=7", "qsgd:bits=1,bucket=100", "signsgd:zeros=elements", "topk:ratio=0.3,values=fp16",
    "powersgd:rank=2,iterations=2", "int4:rounding=stochastic,block=100", "fp8:rounding=stochastic,format=e5m2",
    "eden:bits=1,block=512", "eden:bits=4", "eden:bits=1,scaled=True",
)  # fmt: skip

ODD: Shapes = {
    "scalar": (), "one": (1,), "seven": (7,), "vector": (1_023,), "odd": (5, 7, 3), "piece": (8_193,),
    "tall": (2_049, 3), "wide": (3, 3_001), "long": (3, 47_000), "square": (129, 257),
}  # fmt: skip
"""Of one element and of a few, at and beyond the ends of groups, blocks and pieces, and of more than 2**16."""

STEPS = 3


def _ties(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(rng.integers(-3, 4, shape), np.float32)


def _zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    kept = rng.random(shape) < 0.1
    return np.asarray(np.where(kept, rng.standard_normal(shape), rng.choice([0.0, -0.0], shape)), np.float32)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape, dtype=np.float32))


def _float16(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(_normal(rng, shape), np.float16)


NUMBERS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": _normal,
    "ties": _ties,
    "zeros": _zeros,
    "all zero": lambda rng, shape: np.zeros(shape, np.float32),
    "denormal": lambda rng, shape: np.asarray(_normal(rng, shape) * np.float32(1e-39)),
    "large": lambda rng, shape: np.asarray(_normal(rng, shape) * np.float32(1e15)),
    "float16": _float16,
    "inf": _normal,
    "nan": _normal,
}
"""Kinds of gradients. Of the last two, one element of one rank is set in the second step."""


def gradients(kind: str, shapes: Shapes, rank: int, step: int) -> dict[str, np.ndarray]:
    """What a rank is given in a step."""
    rng = np.random.default_rng([rank, step])
    found = {name: NUMBERS[kind](rng, shape) for name, shape in shapes.items()}
    if kind in ("inf", "nan") and step == 1 and rank == 1:
        found[max(shapes, key=lambda name: np.prod(shapes[name]))].reshape(-1)[-1] = float(kind)
    return found


def difference(found: Any, expected: np.ndarray, loose: float = 1.0, rounded: float = 0.0) -> str:
    """Says how far an array is from what it should be; empty if it is near enough.

    Sums are added up in another order, so the last bits may differ. Where an element then lies on the other side of a
    threshold, such as that of a sign, it may be quite another one: of each array, so may one and one in 10,000.

    Args:
        loose: how many times further than usual it may be.
        rounded: what rounding to the gradients' type may change.
    """
    array = on_host(found)
    if array.shape != expected.shape or array.dtype != expected.dtype:
        return f"it is {array.dtype} {array.shape} in place of {expected.dtype} {expected.shape}"
    if not np.isfinite(expected).all():
        return "" if np.isnan(array).any() else "it holds no NaN"
    if not np.isfinite(array).all():
        return "it is not finite"
    largest = float(np.abs(expected).max(initial=0))
    least = 8 * float(np.finfo(np.float32).smallest_subnormal)
    away = np.abs(array.astype(np.float64) - expected)
    apart = away > loose * (2e-5 * np.abs(expected) + 5e-6 * largest + least) + rounded
    count = int(apart.sum())
    if count <= 1 + array.size // 10_000:
        return ""
    return f"{count} of {array.size} elements are apart, one by {away.max():.3g} where the largest is {largest:.3g}"


def check(spec: str, kind: str, place: str, shapes: Shapes = ODD, steps: int = STEPS) -> Iterator[str]:
    """Runs a method on a device and in NumPy, and says where they differ."""
    options: dict[str, Any] = {"min_numel": 0, "min_ndim": 0}
    if kind == "float16":
        if not parse_compressor(spec).has_bucket_form:
            return  # tensor by tensor, without a kernel
        options["dtype"] = kind
    given = [[gradients(kind, shapes, rank, step) for rank in range(2)] for step in range(steps)]
    device = Ranks(spec, shapes, place, **options)
    # Where a single element of a tensor is positive, onebit leaves 0 of it, or the last bit of a mean: the sign of the
    # next step, and so both means, hang on the order in which that mean was added up.
    follows = spec == "onebit"
    # And it divides before it adds up, by another number than the kernel: of a denormal element few bits are left.
    loose = 500.0 if follows and kind == "denormal" else 1.0
    # Of numbers up to 8, which NumPy rounds at other places than a kernel.
    rounded = 8 * 2.0**-11 if kind == "float16" else 0.0
    yield from compare(device, lambda: Ranks(spec, shapes, HOST, **options), given, spec, follows, loose, rounded)


def compare(
    device: Ranks,
    make_plain: Callable[[], Ranks],
    given: list[list[dict[str, np.ndarray]]],
    spec: str,
    follows: bool = False,
    loose: float = 1.0,
    rounded: float = 0.0,
    **options: Any,
) -> Iterator[str]:
    """Says where ranks on a device differ from ranks in NumPy that are given the same.

    What the ranks on the device keep is not looked at before the end, as in a training: a residual that is only
    described stays so. PowerSGD alone goes on from what it found, and the last bits would grow: there every step begins
    from the same.

    Args:
        given: gradients of each step and rank.
        follows: whether every step begins from the same, as with PowerSGD.
        loose, rounded: as of `difference`.
        options: of the steps on the device.
    """
    follows = follows or spec.startswith("powersgd")
    before, found, plans = [], [], []
    for one in given:
        if follows:
            before.append(device.states())
        found.append([{name: on_host(x) for name, x in rank.items()} for rank in device.step(one, **options)])
        plans.append(device.plan())
    if all(group.bucket.device is None for engine in device.engines for group in engine.buckets.with_kernels):
        yield "no bucket was on the device"
    kept = device.memories()
    loose = 20.0 if spec.startswith("powersgd") else loose
    with one_by_one(), _first_of_equals():
        plain = make_plain()
        for step, one in enumerate(given):
            if follows:
                plain.set_states(before[step])
            expected = plain.step(one)
            if plain.plan() != plans[step]:
                yield f"step {step}: the plan is {plans[step]} in place of {plain.plan()}"
                return
            yield from _different(found[step], expected, f"step {step}", loose, rounded)
        for rank, (mine, theirs) in enumerate(zip(kept, plain.memories(), strict=True)):
            for name, arrays in theirs.items():
                for array, right in zip(mine[name] or [np.zeros_like(right) for right in arrays], arrays, strict=True):
                    if said := difference(array, right, loose, rounded):
                        yield f"what rank {rank} keeps of {name}: {said}"


@contextmanager
def _first_of_equals() -> Iterator[None]:
    """Within it, NumPy takes the first of equal magnitudes, as kernels do; by itself it may take any."""
    before = numpy_arrays.top

    def top(x: np.ndarray, k: int) -> np.ndarray:
        return np.argsort(-x, kind="stable")[..., :k]

    numpy_arrays.top = top
    try:
        yield
    finally:
        numpy_arrays.top = before


def _different(
    found: list[dict[str, Any]], expected: list[dict[str, Any]], where: str, loose: float, rounded: float
) -> Iterator[str]:
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for name, right in theirs.items():
            if said := difference(mine[name], right, loose, rounded):
                yield f"{where}, rank {rank}, {name}: {said}"
            elif rank and on_host(mine[name]).tobytes() != on_host(found[0][name]).tobytes():
                yield f"{where}, {name}: ranks 0 and {rank} have different bits"


def tiny_steps(place: str, given: Callable[[int, int], Named], shapes: Shapes) -> None:
    """Two steps of every form on two ranks, of which nothing is compared: for a tool that watches the kernels."""
    for spec in FORMS:
        ranks = Ranks(spec, shapes, place, min_numel=0, min_ndim=0)
        for step in range(2):
            ranks.step([given(rank, step) for rank in range(2)])
