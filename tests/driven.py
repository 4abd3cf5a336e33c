"""A training without a model: a coordinator driven by hand, with made-up gradients and learning rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdcomp.adaptation.channel import CommunicatorBroadcaster
from hvdcomp.adaptation.coordinator import Coordinator
from hvdcomp.adaptation.decision_log import DecisionLog
from hvdcomp.bindings.checkpoint import restore, state_of
from hvdcomp.communicators.in_process import InProcessCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies.base import Policy
from hvdcomp.policies.request import Candidates
from tests.harness import as_numpy, bits, copy, infos, make

# The bias is too small to be compressed.
SHAPES = {"conv": (8, 4, 3, 3), "linear": (16, 24), "bias": (6,)}
COMPRESSED = ("conv", "linear")


def random_gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    """Gradients that differ between ranks and steps, float32."""
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}


def gradients_of(backend: str, rank: int, step: int) -> dict[str, Any]:
    """The gradients as arrays of a backend."""
    return {name: make(backend, values) for name, values in random_gradients(rank, step).items()}


class Driven:
    """One rank of it.

    Args:
        rates: the learning rates, by step.
        gradients: of (rank, step).
        state: of `state`, to go on from.
        candidates, clock, exchange_seconds: of the coordinator; what the policy is told for rank 0 alone.

    Attributes:
        plans, batches, results: of each step: compressors as text, batches accumulated, bits of the results.
        observed: after each step, whether anything is accumulated.
    """

    def __init__(
        self,
        communicator: InProcessCommunicator,
        policy: Policy[Any],
        backend: str,
        *,
        spec: str = "topk:ratio=0.2",
        steps_per_epoch: int | None = None,
        rates: Callable[[int], tuple[float, ...]] = lambda step: (0.1,),
        gradients: Callable[[int, int], Mapping[str, np.ndarray]] = random_gradients,
        log: DecisionLog | None = None,
        state: Mapping[str, Any] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        candidates: Candidates | None = None,
        clock: Callable[[], float] = time.perf_counter,
        exchange_seconds: Mapping[int, float] | None = None,
    ) -> None:
        self.engine = Engine(communicator, infos(shapes or SHAPES), parse_compressor(spec), min_numel=16)
        like = make(backend, np.zeros(0))
        log = log if communicator.rank == 0 else None
        self.coordinator = Coordinator(
            policy, self.engine, lambda: CommunicatorBroadcaster(communicator, like), like, steps_per_epoch, log,
            candidates if communicator.rank == 0 else None, clock,
            exchange_seconds if communicator.rank == 0 else None,
        )  # fmt: skip
        self.backend = backend
        self._rates = rates
        self._gradients = gradients
        self.plans: list[dict[str, str]] = []
        self.batches: list[int] = []
        self.results: list[dict[str, np.ndarray]] = []
        self.observed: list[bool] = []
        self.needed_engine: list[bool] = []
        if state is not None:
            restore(state, self.engine, self.coordinator, lambda array, name: copy(array))
        self.coordinator.start_log()

    def step(self) -> None:
        """Makes one step, as a binding does."""
        coordinator, number = self.coordinator, self.engine.step_number
        coordinator.begin_step(lambda: self._rates(number))
        self.engine.begin()
        self.needed_engine.append(coordinator.needs_engine)
        arrays = self._gradients(self.engine.communicator.rank, number)
        gradients = {name: make(self.backend, values) for name, values in arrays.items()}
        coordinator.before_exchange()
        results = self.engine.step(gradients, sums=coordinator.sums_of_step(1.0))
        self.batches.append(coordinator.batch_size.accumulation)
        coordinator.end_step()
        self.plans.append({name: str(compressor) for name, compressor in self.engine.plan.items()})
        self.results.append({name: as_numpy(x) for name, x in results.items()})
        self.observed.append(bool(coordinator.own_state(copy)["sums"]))

    def run(self, steps: int) -> Driven:
        """Makes further steps."""
        for _ in range(steps):
            self.step()
        return self

    def state(self) -> dict[str, Any]:
        """The checkpoint of this rank."""
        return state_of(self.engine, self.coordinator, copy)

    def result_bits(self, start: int = 0) -> list[dict[str, bytes]]:
        """The results of the steps from `start` on, as bits."""
        return [{name: bits(x) for name, x in results.items()} for results in self.results[start:]]
