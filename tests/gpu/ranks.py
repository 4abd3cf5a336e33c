"""Engines of some ranks in one process, on a device or on the host, step by step."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from hvdcomp import kernels
from hvdcomp.adaptation.channel import CommunicatorBroadcaster
from hvdcomp.adaptation.coordinator import Coordinator
from hvdcomp.communicators.in_process import InProcessCommunicator, InProcessGroup
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.tensor_state import TensorState
from hvdcomp.policies import parse_policy

Named = Mapping[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]

HOST = "host"
"""The place of the reference: NumPy."""


def placed(arrays: Named, place: str) -> dict[str, Any]:
    """Copies of arrays as tensors of PyTorch on a device, or in NumPy."""
    if place == HOST:
        return {name: np.array(array) for name, array in arrays.items()}
    return {name: torch.from_numpy(np.array(array)).to(place) for name, array in arrays.items()}


def on_host(array: Any) -> np.ndarray:
    """The same values in NumPy, in storage of their own."""
    return np.array(array if isinstance(array, np.ndarray) else array.detach().cpu().numpy())


@contextmanager
def one_by_one() -> Iterator[None]:
    """Within it, nothing uses kernels: every tensor is compressed by itself."""
    before = os.environ.get("HVDCOMP_KERNELS")
    os.environ["HVDCOMP_KERNELS"] = "off"
    kernels.reset()
    try:
        yield
    finally:
        del os.environ["HVDCOMP_KERNELS"]
        if before is not None:
            os.environ["HVDCOMP_KERNELS"] = before
        kernels.reset()


@contextmanager
def forbidding_waits(place: str) -> Iterator[None]:
    """Within it, an operation of PyTorch that waits for the GPU is an error. It counts for all threads."""
    if place != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def synchronize(place: str) -> None:
    """Waits until the device has done all that it was given; on the host there is nothing to wait for."""
    if place == "cuda":
        torch.cuda.synchronize()


def allocated(place: str, most: bool = False) -> int:
    """Bytes of the GPU's memory that PyTorch has handed out, or has at most since it was asked last; 0 on the host."""
    if place != "cuda":
        return 0
    found = torch.cuda.max_memory_allocated() if most else torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


class Ranks:
    """Engines of some ranks.

    A step has three parts, and all ranks end one before any begins the next: so what a policy reads between two steps
    is not taken for what a step reads.

    Args:
        spec: of the compressor.
        shapes: of the gradients.
        place: where gradients are: a device of PyTorch, or `HOST`.
        size: number of ranks.
        memory: makes the memory of one rank; None for what belongs to the compressor.
        policy: a spec; empty for none.
        dtype: of the gradients.
        options: of `Engine`.
    """

    def __init__(
        self,
        spec: str,
        shapes: Shapes,
        place: str,
        size: int = 2,
        memory: Callable[[], Memory | None] = lambda: None,
        policy: str = "",
        dtype: str = "float32",
        **options: int,
    ) -> None:
        self.place = place
        self.size = size
        self._group = InProcessGroup(size)
        tensors = [TensorInfo(name, shape, dtype) for name, shape in shapes.items()]

        def make(communicator: InProcessCommunicator) -> Engine:
            return Engine(communicator, tensors, parse_compressor(spec), memory(), **options)

        self.engines: Sequence[Engine] = self._group.run(make)
        self._coordinators = [self._coordinator(engine, policy) for engine in self.engines] if policy else []

    def _coordinator(self, engine: Engine, spec: str) -> Coordinator:
        policy: Any = parse_policy(spec)
        like = np.zeros(0, np.float32)
        ticks = itertools.count()  # in place of seconds, so that a policy decides the same in each run
        return Coordinator(
            policy, engine, lambda: CommunicatorBroadcaster(engine.communicator, like), like, steps_per_epoch=2,
            clock=lambda: float(next(ticks)),
        )  # fmt: skip

    def step(
        self,
        given: Sequence[Named],
        in_place: bool = False,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[dict[str, Any]]:
        """A step of all ranks.

        Args:
            given: gradients of each rank, which are copied to where they belong first.
            within: what the engines' part of the step runs in.

        Returns:
            The results of each rank, on its device.
        """
        gradients = [placed(one, self.place) for one in given]
        synchronize(self.place)

        def begin(communicator: InProcessCommunicator) -> None:
            if self._coordinators:
                self._coordinators[communicator.rank].begin_step(lambda: (0.1,))
            self.engines[communicator.rank].begin()
            if self._coordinators:
                self._coordinators[communicator.rank].before_exchange()

        def exchange(communicator: InProcessCommunicator) -> dict[str, Any]:
            sums = self._coordinators[communicator.rank].sums_of_step(1.0) if self._coordinators else None
            return self.engines[communicator.rank].step(gradients[communicator.rank], in_place, sums)

        self._group.run(begin)
        with within():
            results = list(self._group.run(exchange))

        def end(communicator: InProcessCommunicator) -> None:
            self._coordinators[communicator.rank].end_step()

        if self._coordinators:
            self._group.run(end)
        return results

    def plan(self) -> dict[str, str]:
        """The compressor of each tensor in the latest step."""
        return {name: str(compressor) for name, compressor in self.engines[0].plan.items()}

    def memories(self) -> list[dict[str, list[np.ndarray]]]:
        """What each rank keeps of each tensor, in NumPy, float32. A residual that was only described is made real by
        that."""
        return [
            {name: [on_host(one).astype(np.float32) for one in state.memory] for name, state in engine.states.items()}
            for engine in self.engines
        ]

    def states(self) -> list[dict[str, TensorState]]:
        """What each rank keeps, the compressors' arrays included, for `set_states` of ranks on the host."""
        return [
            {
                name: TensorState(_copies(state.memory), state.keeper, state.method, _copies(state.compressor))
                for name, state in engine.states.items()
            }
            for engine in self.engines
        ]

    def set_states(self, states: Sequence[Mapping[str, TensorState]]) -> None:
        """Goes on from what other ranks keep."""
        for engine, one in zip(self.engines, states, strict=True):
            engine.states.update(one)


def _copies(arrays: Sequence[Any]) -> tuple[np.ndarray, ...]:
    return tuple(on_host(array) for array in arrays)
