"""Steps of two ranks on one GPU, in sizes as in a training: they wait for it nowhere, and give what NumPy gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from hvdcomp import ErrorFeedback, MomentumCorrection
from hvdcomp.compressors.memory import Memory
from tests.gpu.cases import FORMS, compare
from tests.gpu.ranks import HOST, Ranks, Shapes, forbidding_waits

TRAINING: Shapes = {
    "embedding": (2_000, 128), "convolution": (128, 64, 3, 3), "linear": (1_000, 512), "bias": (1_000,),
    **{f"block{number}.weight": (96, 96) for number in range(40)},
    **{f"block{number}.bias": (96,) for number in range(40)},
}  # fmt: skip
STEPS = 5

POLICIES = (
    ("powersgd:rank=4", "accordion:low=4,high=1"),
    ("topk:ratio=0.1", "accordion:low=0.3,high=0.03"),
    ("qsgd:bits=4", "adaqs:start=8,fall=0.01,steps=2"),
    ("topk:ratio=0.1", "gravac:min=2,max=64,window=3,omega=0,epsilon=0.5,smoothing=0.3"),
)
"""A method, and a policy that changes its level. Policies look at rank 0's gradients alone."""

MEMORIES: tuple[tuple[str, Callable[[], Memory | None]], ...] = (
    ("efsignsgd", lambda: MomentumCorrection(0.9, nesterov=True)),
    ("topk:ratio=0.01", lambda: MomentumCorrection(0.9)),
    ("powersgd:rank=4", lambda: ErrorFeedback(0.5)),
    ("topk:ratio=0.01", lambda: ErrorFeedback(dtype="fp16")),
    ("int4", lambda: ErrorFeedback(dtype="fp16")),
)
"""A method, and a memory other than its own."""


def gradients(shapes: Shapes, rank: int, step: int) -> dict[str, np.ndarray]:
    """Of a rank in a step; every second of them is small, as in a training."""
    rng = np.random.default_rng([rank, step, 7])
    return {
        name: np.asarray(rng.standard_normal(shape, dtype=np.float32) * np.float32(1e-3 if number % 2 else 1))
        for number, (name, shape) in enumerate(shapes.items())
    }


class _AfterSome:
    """A context for the later ones of several steps: the first ones make what stays, and compile."""

    def __init__(self, place: str, first: int) -> None:
        self._place = place
        self._left = first

    def __call__(self) -> AbstractContextManager[None]:
        self._left -= 1
        return forbidding_waits(self._place if self._left < 0 else "")


def check(
    spec: str,
    place: str,
    policy: str = "",
    memory: Callable[[], Memory | None] = lambda: None,
    shapes: Shapes = TRAINING,
    steps: int = STEPS,
) -> Iterator[str]:
    """Runs a method, with a policy or without, and says where it differs from NumPy.

    Raises:
        RuntimeError: PyTorch's, if a step waits for the GPU.
    """
    given = [[gradients(shapes, rank, step) for rank in range(2)] for step in range(steps)]
    make = partial(Ranks, spec, shapes, memory=memory, policy=policy)
    options: dict[str, Any] = {"in_place": True, "within": _AfterSome(place, 2)}
    yield from compare(make(place), lambda: make(HOST), given, spec, **options)


def all_checks(place: str, shapes: Shapes = TRAINING) -> Sequence[tuple[str, Iterator[str]]]:
    """Each check, by what it is of."""
    return [
        *((spec, check(spec, place, shapes=shapes)) for spec in FORMS),
        *((f"{spec} with {policy}", check(spec, place, policy, shapes=shapes)) for spec, policy in POLICIES),
        *((f"{spec} with {make()}", check(spec, place, memory=make, shapes=shapes)) for spec, make in MEMORIES),
    ]
