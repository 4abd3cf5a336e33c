"""Simulated ranks (`hvdcomp train --simulate-ranks`). The ranks are threads of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdcomp.communicators import (
    LinkCost,
    SimulatedCommunicator,
    SimulatedGroup,
    asked_ranks_per_node,
    check_ranks_per_node,
)
from hvdcomp.perfmodel import network_of_link, parse_rate
from hvdcomp.tools.train.options import NO_TIME, SIMULATED, TrainingOptions, links_of
from hvdcomp.tools.train.ranks import Ranks

LATENCY_S = 1e-4
"""Seconds of latency of a simulated link, as for small messages on Ethernet."""


class SimulatedRanks(Ranks):
    """All ranks of a simulation, as seen from one rank."""

    backend = SIMULATED
    controller = "threads"

    def __init__(self, communicator: SimulatedCommunicator, links: tuple[str, ...], ranks_per_node: int) -> None:
        self.communicator = communicator
        self.links = links
        exchange = (
            f"the time of exchanges is predicted for {' and '.join(links)}" if links else "exchanges take no time"
        )
        self.note = f"simulated ranks: the time of computation is measured, and {exchange}"
        self.rank, self.size = communicator.rank, communicator.world_size
        self.local_rank, self.local_size = self.rank % ranks_per_node, ranks_per_node

    def now(self) -> float:
        return self.communicator.now()

    def on_links(self) -> np.ndarray:
        return self.communicator.moment()[: len(self.links)]

    def gather(self, value: Any, name: str) -> list[Any]:
        return self.communicator.group.share(self.rank, value, name)

    def broadcast(self, value: Any, name: str) -> Any:
        return self.gather(value if self.rank == 0 else None, name)[0]


def on_simulated_ranks(options: TrainingOptions, run: Callable[[Ranks], Any]) -> Any:
    """Calls a function on each of the simulated ranks, and returns the result of rank 0.

    Raises:
        ConfigurationError: if an environment variable sets a wrong number of ranks per node.
    """
    assert options.simulate_ranks is not None
    links = links_of(options.link)
    costs = [_cost(link) for link in links] or [None]
    ranks_per_node = asked_ranks_per_node()
    check_ranks_per_node(ranks_per_node)
    group = SimulatedGroup(options.simulate_ranks, costs, *_clock(options.framework), ranks_per_node or None)

    def run_rank(communicator: Any) -> Any:
        # By default each rank has its own host.
        return run(SimulatedRanks(communicator, links, ranks_per_node or 1))

    return group.run(run_rank)[0]


def _clock(framework: str) -> tuple[Callable[[], float], Callable[[], None]]:
    """The clock that measures the computation of ranks, and a function that waits for their device. Ranks compute one
    after the other."""
    if framework != "torch":
        # The time of this thread would be too short, because TensorFlow computes in its own threads.
        return time.perf_counter, lambda: None
    import torch

    if torch.cuda.is_available():
        return time.perf_counter, torch.cuda.synchronize
    return time.thread_time, lambda: None


def _cost(link: str) -> LinkCost | None:
    if link == NO_TIME:
        return None
    network = network_of_link(parse_rate(link), LATENCY_S)

    def cost(kind: str, size: int, ranks: int) -> float:
        modeled_kind, size = ("allgather", size // ranks) if kind == "broadcast" else (kind, size)
        return float(network.seconds(modeled_kind, size, ranks).total)

    return cost
