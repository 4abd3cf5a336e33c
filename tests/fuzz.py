"""Random cases: any method with any settings, on any ranks, tensors, element types and magnitudes.

A case depends only on a seed and its number, so that a failed case can be run again alone.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdcomp import ByDimensions, ByName, BySize, Compressor, ErrorFeedback, MomentumCorrection, NoMemory, SpecError
from hvdcomp.arrays.types import Array, matrix_shape
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors import COMPRESSORS
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.low_rank import PowerSGD
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.compressors.routing import Router
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies import DENSE
from tests.harness import DTYPES, INSTALLED, as_numpy, bits, dtype_of, make, states_of

_SHAPES = [(), (1,), (0,), (7,), (33,), (1, 1), (0, 3), (1, 9), (6, 1), (5, 7), (16, 16), (40, 30), (2, 3, 2, 2)]
_LARGE = [(70_001,), (257, 300)]  # beyond 65536 elements indices travel in blocks
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": 3.4028e38}

# How to draw a setting, by its name; of another one the values in the class's examples are tried.
_SETTINGS: dict[str, Callable[[random.Random], Any]] = {
    "ratio": lambda rng: rng.choice([1.0, 0.5, 10 ** rng.uniform(-4, 0)]),
    "values": lambda rng: rng.choice(["same", "fp16"]),
    "rank": lambda rng: rng.randint(1, 6),
    "bits": lambda rng: rng.randint(1, 16),
    "back": lambda rng: rng.choice([None, rng.randint(1, 4)]),
    **dict.fromkeys(("bucket", "block"), lambda rng: rng.choice([1, 3, 16, 512, 4096])),
    "rounds": lambda rng: rng.randint(1, 30),
    "stages": lambda rng: rng.randint(1, 5),
    "iterations": lambda rng: rng.randint(1, 3),
    "min_rate": lambda rng: rng.choice([0.5, 1.0, 2.0]),
    "clip": lambda rng: rng.choice([0.0, 0.5, 2.5, 1e30, math.inf]),
    "momentum": lambda rng: rng.choice([0.0, 0.9, rng.random()]),
    "exchange": lambda rng: rng.choice(["gather", "scatter", "auto"]),
    "zeros": lambda rng: rng.choice(["rows", "elements"]),
    "rounding": lambda rng: rng.choice(["nearest", "stochastic"]),
    "format": lambda rng: rng.choice(["e4m3", "e5m2"]),
    **dict.fromkeys(("unbiased", "alternating", "per_row", "nesterov"), lambda rng: rng.random() < 0.5),
}


@dataclass(frozen=True)
class Case:
    """One training of a few steps.

    Attributes:
        changes: the setting before each step: a level, `DENSE`, None for the compressor's own, or "as before".
        rescaled: the factor of the loss scale's change before each step.
        spoilt: the step in which the last rank's first gradient holds this value, if any.
    """

    backend: str
    ranks: int
    tensors: tuple[TensorInfo, ...]
    compressor: Compressor
    memory: Memory | None
    changes: tuple[Any, ...]
    rescaled: tuple[float, ...]
    spoilt: tuple[int, float] | None
    smallest: tuple[int, int]  # the engine's min_numel and min_ndim
    seed: str


def draw_case(seed: int, number: int) -> Case:
    """The case of a number."""
    rng = random.Random(f"{seed}:{number}")
    backend = rng.choices(INSTALLED, [{"numpy": 50, "torch": 48}.get(name, 2) for name in INSTALLED])[0]
    ranks = rng.randint(1, 5)
    tensors = tuple(
        TensorInfo(f"t{place}", draw_shape(rng), rng.choice(DTYPES[backend])) for place in range(rng.randint(1, 3))
    )
    steps = rng.randint(1, 5)
    compressor = draw_compressor(rng, ranks)
    momentum = MomentumCorrection(rng.random(), rng.random() < 0.5, rng.choice([0.0, 1.0]), rng.random() < 0.5)
    return Case(
        backend=backend,
        ranks=ranks,
        tensors=tensors,
        compressor=compressor,
        memory=rng.choice([None, None, ErrorFeedback(), ErrorFeedback(rng.uniform(0.1, 1)), momentum, NoMemory()]),
        changes=tuple(draw_change(rng, compressor, ranks) for _ in range(steps)),
        rescaled=tuple(rng.choice([1.0] * 17 + [0.5, 2.0, 65536.0]) for _ in range(steps)),
        spoilt=(rng.randrange(steps), rng.choice([math.inf, -math.inf, math.nan])) if rng.random() < 0.05 else None,
        smallest=rng.choice([(0, 0), (0, 0), (16, 2), (1024, 2)]),
        seed=f"{seed}:{number}",
    )


def draw_shape(rng: random.Random) -> tuple[int, ...]:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(_SHAPES)
    if kind < 0.99:
        return tuple(rng.choice([1, 2, 3, 7, 16, 29]) for _ in range(rng.randint(0, 3)))
    return rng.choice(_LARGE)


def draw_compressor(rng: random.Random, ranks: int, depth: int = 0) -> Compressor:
    """Any compressor with any settings that it allows; now and then a router."""
    if depth < 2 and rng.random() < 0.08:
        first, second = (draw_compressor(rng, ranks, depth + 1) for _ in range(2))
        kind = rng.randrange(3)
        if kind == 0:
            return ByName({rng.choice(["t0", "*1", "t?"]): first, "*": second})
        return BySize(rng.choice([1, 8, 300]), first, second) if kind == 1 else ByDimensions(2, first, second)
    kind = rng.choice(list(COMPRESSORS.values()))
    while True:
        settings = {
            field.name: draw_setting(rng, kind, field.name)
            for field in dataclasses.fields(kind)
            if field.default is dataclasses.MISSING or rng.random() < 0.6
        }
        try:
            compressor = kind(**settings)
        except SpecError:  # settings that do not go together
            continue
        least = compressor.least_level(ranks)
        return compressor if least is None else compressor.at_level(max(least, compressor.level or 0))


def draw_setting(rng: random.Random, kind: type[Compressor], name: str) -> Any:
    if name in _SETTINGS:
        return _SETTINGS[name](rng)
    return getattr(parse_compressor(rng.choice(kind.examples)), name)


def draw_change(rng: random.Random, compressor: Compressor, ranks: int) -> Any:
    """The setting before a step."""
    kind = rng.random()
    if kind < 0.6:
        return "as before"
    if kind < 0.7:
        return DENSE
    if kind < 0.75 or compressor.level is None or isinstance(compressor, Router):
        return None
    level = compressor.level_for(10 ** rng.uniform(0, 3), rng.choice([(40, 30), (7, 3), (1000, 500)]))
    least = compressor.least_level(ranks)
    return level if level is None or least is None else max(level, least)


def gradient_of(case: Case, tensor: TensorInfo, rank: int, step: int) -> Array:
    """Any gradient: of any magnitude, from subnormal numbers to the largest, evenly or unevenly spread."""
    rng = random.Random(f"{case.seed}:{tensor.name}:{rank}:{step}")
    normal = np.random.default_rng(rng.getrandbits(32)).standard_normal(tensor.shape)
    # Magnitudes are a matter of the step, or of the rank too.
    shared = random.Random(f"{case.seed}:{tensor.name}:{step}")
    scale = 10 ** rng.choice([shared, rng]).uniform(-46, 39) if shared.random() < 0.5 else 1.0
    kind = rng.randrange(8)
    if kind == 0:
        normal = np.zeros(tensor.shape)
    elif kind == 1:
        normal = np.full(tensor.shape, rng.choice([-1.0, 1.0]))
    elif kind == 2:
        normal = normal * (np.abs(normal) > 2)
    elif kind == 3:
        normal = normal * 10.0 ** (8 * np.abs(normal))
    largest = _LARGEST[tensor.dtype]
    values = np.clip(normal * scale, -largest, largest)
    if case.spoilt is not None and case.spoilt[0] == step and rank == case.ranks - 1 and tensor is case.tensors[0]:
        values = np.full(tensor.shape, case.spoilt[1])
    return make(case.backend, values, tensor.dtype)


def run_case(case: Case) -> None:
    """Runs a case, and fails if a result is wrong."""

    def work(communicator: InProcessCommunicator) -> list[Any]:
        with np.errstate(all="ignore"):
            return _run_rank(case, communicator)

    first, *other_results = run_ranks(case.ranks, work)
    for rank, result in enumerate(other_results, start=1):
        assert result == first, f"rank {rank} differs from rank 0"


def _run_rank(case: Case, communicator: InProcessCommunicator) -> list[Any]:
    """The data that must be equal on all ranks: bits of results and warm starts, and whether steps are finite."""
    engine = Engine(communicator, case.tensors, case.compressor, case.memory, 3, *case.smallest)
    shared: list[Any] = []
    for step, (change, factor) in enumerate(zip(case.changes, case.rescaled, strict=True)):
        if change != "as before":
            engine.set_level(change)
        if factor != 1:
            engine.scale_residuals(factor)
        engine.begin()
        before = states_of(engine)
        gradients = {tensor.name: gradient_of(case, tensor, communicator.rank, step) for tensor in case.tensors}
        results = engine.step(gradients)
        counts = engine.found_inf.item() == 0
        _check_results(gradients, results, counts)
        # A warm start is fitted to another level whether or not the step then counts.
        _check_states(engine, None if counts or change != "as before" else before)
        _check_bytes(engine, step)
        shared.append((counts, {name: bits(result) for name, result in results.items()}))
        shared.append({name: [bits(array) for array in state.compressor] for name, state in engine.states.items()})
    return shared


def _check_results(gradients: Mapping[str, Array], results: Mapping[str, Array], counts: bool) -> None:
    for name, result in results.items():
        values = as_numpy(result)
        assert values.shape == tuple(gradients[name].shape)
        assert dtype_of(result) == dtype_of(gradients[name])
        assert np.isfinite(values).all() if counts else np.isnan(values).any() or not values.size, f"{name}: {values}"


def _check_states(engine: Engine, before: Mapping[str, tuple[bytes, ...]] | None) -> None:
    """`before`: what was kept, if it must still be so; but what was empty is made anew in any case."""
    for name, state in engine.states.items():
        for array in (*state.memory, *state.compressor):
            assert np.isfinite(as_numpy(array)).all(), f"{name}: not finite in what is kept: {as_numpy(array)}"
    if before is not None:
        after = states_of(engine)
        changed = [name for name, arrays in before.items() if arrays != after[name] and len(arrays) == len(after[name])]
        assert not changed, f"a step that does not count has changed what is kept of {changed}"


def _check_bytes(engine: Engine, step: int) -> None:
    cost = engine.ledger.last
    assert cost is not None
    ranks, scattered = engine.communicator.world_size, False
    for name, tensor in engine.tensors.items():
        compressor = engine.plan[name]
        promised = compressor.payload_bytes(tensor.shape, dtype=tensor.dtype, ranks=ranks)
        if isinstance(compressor, PowerSGD) and compressor.alternating:
            side = matrix_shape(tensor.shape)[step % 2]
            promised = 2 * promised * side // sum(matrix_shape(tensor.shape))
        allowed = {promised}
        if isinstance(compressor, Gathering) and compressor.scatters(ranks):
            scattered = True
            # Of a bucket, whose chunks are cut as one, without what fills up the chunks of a tensor by itself.
            alone, of_mean = (
                one.payload_bytes(tensor.shape, dtype=tensor.dtype) for one in (compressor, compressor.of_means)
            )
            allowed.add(int(alone + of_mean / ranks))
        assert cost.tensors[name].bytes_sent in allowed, f"{name}: {cost.tensors[name].bytes_sent}, not {allowed}"
    if scattered:  # chunks are as long as the longest
        return
    overhead = cost.bytes_sent - sum(tensor.bytes_sent for tensor in cost.tensors.values())
    # Each payload, of a bucket of one tensor or more, has room for a flag, and both are padded to eight bytes.
    assert 0 <= overhead <= (4 + 7) * len(engine.tensors), overhead
