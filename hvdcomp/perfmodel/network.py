"""Times of the network: latency and transfer time of collectives, from a few measured numbers.

Two numbers describe an algorithm: the number of messages that follow one another, and the bytes over a rank's busiest
link. All functions take numbers or NumPy arrays that broadcast against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hvdcomp.compressors.protocol import Group
from hvdcomp.perfmodel.fields import CalibrationError

Array = Any  # a number or a NumPy array of float64


class Traffic(NamedTuple):
    """A rank's traffic in one collective: successive messages, and bytes over its busiest link."""

    messages: Array
    bytes: Array


@dataclass(frozen=True)
class Seconds:
    """Time of a collective, in s.

    Attributes:
        latency: time of waiting for messages.
        transfer: time of moving bytes.
        start: time until the collective starts; collectives requested together start together.
    """

    latency: Array
    transfer: Array
    start: Array = 0.0

    @property
    def total(self) -> Array:
        """The sum of the times."""
        return self.start + self.latency + self.transfer

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.latency + other.latency, self.transfer + other.transfer, self.start + other.start)

    def __mul__(self, factor: Array) -> Seconds:
        return Seconds(self.latency * factor, self.transfer * factor, self.start * factor)


def _ring_allreduce(size: Array, ranks: Array) -> Traffic:
    return Traffic(2 * (ranks - 1), 2 * size * (ranks - 1) / ranks)


def _tree_allreduce(size: Array, ranks: Array) -> Traffic:
    return Traffic(2 * np.log2(ranks), 2 * size * np.log2(ranks))


def _parameter_server(size: Array, ranks: Array) -> Traffic:
    return Traffic(2.0 * (ranks > 1), 2 * size * (ranks - 1))


def _direct_allgather(size: Array, ranks: Array) -> Traffic:
    return Traffic(2.0 * (ranks > 1), size * (ranks - 1))


def _ring_allgather(size: Array, ranks: Array) -> Traffic:
    return Traffic(ranks - 1, size * (ranks - 1))


def _direct_alltoall(size: Array, ranks: Array) -> Traffic:
    return Traffic(2.0 * (ranks > 1), size * (ranks - 1) / ranks)


def _part_by_part(size: Array, ranks: Array) -> Traffic:
    """A message of 1 / ranks of the bytes for each other rank."""
    return Traffic(ranks - 1, size * (ranks - 1) / ranks)


ALGORITHMS: dict[str, dict[str, Callable[[Array, Array], Traffic]]] = {
    "allreduce": {"ring": _ring_allreduce, "tree": _tree_allreduce, "parameter_server": _parameter_server},
    "allgather": {"direct": _direct_allgather, "ring": _ring_allgather},
    "alltoall": {"direct": _direct_alltoall, "pairwise": _part_by_part},
    "reducescatter": {"ring": _part_by_part},
}
"""The traffic if each of `ranks` ranks contributes `size` bytes, by kind of collective and algorithm. In an alltoall or
a reduce-scatter, `size` is the sum of a rank's parts for all ranks.

Allreduce: Agarwal et al. 2022, table 1 and equation 1. Allgather, direct: the same, appendix B. Allgather, ring: the
bandwidth term is the same as for direct, and the number of messages is the number of other ranks (Thakur et al. 2005,
section 4.1). Alltoall, pairwise: a rank exchanges one message of 1 / ranks of the bytes with each other rank in turn
(the same paper, on long messages). Alltoall, direct: a rank sends all these messages at once, so they wait like the
messages of a direct allgather.
Reduce-scatter, ring: the first half of a ring allreduce, whose second half is a ring allgather of a rank's sum
(Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations).
"""

_STANDS_IN = {"alltoall": "allgather", "reducescatter": "allreduce"}
"""For a kind of collective with an unknown cost, the kind whose cost by message and byte is used."""

_STAND_IN_ALGORITHMS = {("alltoall", "direct"): "direct", ("alltoall", "ring"): "pairwise"}


@dataclass(frozen=True)
class CollectiveCost:
    """The time of one kind of collective on one network.

    Attributes:
        algorithm: a key of `ALGORITHMS[kind]`.
        latency_s: alpha, seconds of a message.
        bytes_per_s: bandwidth of a rank's link, for messages beyond the table.
        transfer: optional table of (bytes over the link, seconds), both ascending, without latency. It is interpolated
            linearly from (0, 0), and continued at `bytes_per_s` beyond the last entry.
        incast: optional table of (ranks, factor) for collectives in which all senders reach one receiver at once: the
            factor of the transfer time, interpolated linearly.
        start_s: seconds until an idle Horovod starts a collective (its cycle), for any number of ranks.
        fusion_s_per_byte: seconds a byte of copying into Horovod's fusion buffer and back, if several tensors are
            fused.
        reduction_s_per_byte: additional seconds of adding up a byte over the link relative to float32, by element type;
            0 for types that are missing. Does not depend on the bandwidth.
    """

    algorithm: str
    latency_s: float
    bytes_per_s: float
    transfer: tuple[tuple[float, float], ...] = ()
    incast: tuple[tuple[float, float], ...] = ()
    start_s: float = 0.0
    fusion_s_per_byte: float = 0.0
    reduction_s_per_byte: Mapping[str, float] = field(default_factory=dict)

    def seconds(
        self,
        kind: str,
        size: ArrayLike,
        ranks: ArrayLike,
        speed: ArrayLike = 1.0,
        dtype: str = "",
        fused: ArrayLike = False,
    ) -> Seconds:
        """Time of one collective.

        Args:
            kind: a key of `ALGORITHMS`.
            size: bytes that each rank contributes.
            ranks: number of ranks; with one rank the time is 0.
            speed: factor by which the link is faster than `bytes_per_s` and the table.
            dtype: element type of an allreduce.
            fused: whether Horovod fuses several tensors.
        """
        ranks, size = np.asarray(ranks, float), np.asarray(size, float)
        traffic = ALGORITHMS[kind][self.algorithm](size, ranks)
        transfer = self._transfer_s(traffic.bytes) * self._incast(ranks) / np.asarray(speed, float)
        several = ranks > 1
        copied = np.where(fused, self.fusion_s_per_byte * size, 0.0) * several
        added = self.reduction_s_per_byte.get(dtype, 0.0) * traffic.bytes
        return Seconds(self.latency_s * traffic.messages, transfer + copied + added, self.start_s * several)

    def _transfer_s(self, size: Array) -> Array:
        if not self.transfer:
            return size / self.bytes_per_s
        sizes, seconds = zip((0.0, 0.0), *self.transfer, strict=True)
        beyond = np.maximum(size - sizes[-1], 0) / self.bytes_per_s
        return np.interp(size, sizes, seconds) + beyond

    def _incast(self, ranks: Array) -> Array:
        if not self.incast:
            return 1.0
        places, factors = zip(*self.incast, strict=True)
        return np.interp(ranks, places, factors)


def network_of_link(bits_per_s: float, latency_s: float) -> Network:
    """The network of ranks of which each has a link of the given rate. The collectives are ring algorithms.

    Args:
        bits_per_s: rate of each link, both ways at once.
        latency_s: latency of a message, in seconds.
    """
    cost = CollectiveCost("ring", latency_s, bits_per_s / 8)
    return Network(cost, cost)


def network_of_nodes(
    ranks_per_node: int, bytes_per_s: float, latency_s: float, inside_bytes_per_s: float, inside_latency_s: float
) -> Network:
    """The network of nodes that each have one link, with ring algorithms as NCCL's.

    A ring through all ranks leaves each node once, so a rank has the whole link, and a message takes the mean latency
    of the hops. In an alltoall, and in an exchange between nodes, all ranks of a node send at once, so each rank has
    only its share of the link.

    Args:
        ranks_per_node: number of ranks of a node, at least 2.
        bytes_per_s: bandwidth of a node's link, both ways at once.
        latency_s: seconds of a message between nodes.
        inside_bytes_per_s, inside_latency_s: the same between the ranks of a node, for each rank's own link.
    """

    def costs(ring_bytes_per_s: float, shared_bytes_per_s: float, seconds: float) -> Among:
        ring = CollectiveCost("ring", seconds, ring_bytes_per_s)
        pairwise = CollectiveCost("pairwise", seconds, shared_bytes_per_s)
        return Among(ring, ring, alltoall=pairwise, reducescatter=ring)

    share = bytes_per_s / ranks_per_node
    mean_latency_s = (latency_s + (ranks_per_node - 1) * inside_latency_s) / ranks_per_node
    every, across = costs(bytes_per_s, share, mean_latency_s), costs(share, share, latency_s)
    levels = TwoLevelCosts(ranks_per_node, costs(inside_bytes_per_s, inside_bytes_per_s, inside_latency_s), across)
    return Network(
        every.allreduce, every.allgather, alltoall=every.alltoall, reducescatter=every.reducescatter, levels=levels
    )


def reduction_of_scatter(of_allreduce: Mapping[str, float]) -> dict[str, float]:
    """Computes `reduction_s_per_byte` of a reduce-scatter from `reduction_s_per_byte` of an allreduce.

    A reduce-scatter adds up all bytes that it moves. An allreduce adds up only half of its bytes, because the other
    half are finished sums.
    """
    return {dtype: 2 * seconds for dtype, seconds in of_allreduce.items()}


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """Costs of kinds of collectives.

    Attributes:
        alltoall, reducescatter: costs; None if unknown.
    """

    alltoall: CollectiveCost | None = None
    reducescatter: CollectiveCost | None = None

    def cost(self, kind: str) -> CollectiveCost:
        """The cost of a kind of collective.

        An unknown alltoall has the numbers of the allgather, and an unknown reduce-scatter those of the allreduce, for
        a message, a byte over the link and a byte to add up.
        """
        known: CollectiveCost | None = getattr(self, kind)
        if known is not None:
            return known
        substitute: CollectiveCost = getattr(self, _STANDS_IN[kind])
        return replace(
            substitute,
            algorithm=_STAND_IN_ALGORITHMS.get((kind, substitute.algorithm), "ring"),
            reduction_s_per_byte=reduction_of_scatter(substitute.reduction_s_per_byte),
        )

    def stand_in(self, kind: str) -> str | None:
        """The kind whose numbers are used if this kind is unknown; None if it is known."""
        return None if getattr(self, kind) is not None else _STANDS_IN[kind]


@dataclass(frozen=True)
class Among(_Costs):
    """The costs of collectives in a group of ranks.

    Attributes:
        allreduce, allgather, alltoall, reducescatter: costs; the latter two None if unknown.
    """

    allreduce: CollectiveCost
    allgather: CollectiveCost


@dataclass(frozen=True)
class Inner(Among):
    """The fast link between the ranks of one node, for collectives in two stages.

    Attributes:
        ranks_per_node: number of ranks that share a node and its link to other nodes.
    """

    ranks_per_node: int = field(kw_only=True)


@dataclass(frozen=True)
class TwoLevelCosts:
    """The costs of the collectives of two levels.

    Attributes:
        ranks_per_node: number of ranks that share a node and its link to other nodes.
        node: costs among the ranks of a node.
        across: costs among the ranks with the same local rank. Meanwhile the ranks with other local ranks exchange the
            same number of bytes over the same links.
    """

    ranks_per_node: int
    node: Among
    across: Among


@dataclass(frozen=True)
class Network(_Costs):
    """The costs of collectives between ranks.

    Attributes:
        allreduce, allgather, alltoall, reducescatter: costs between ranks, or between nodes if there is an inner link;
            the latter two None if unknown.
        inner: the link within nodes; None if collectives do not depend on nodes (as in a ring through all ranks, of
            which one link leaves each node).
        levels: the costs of two levels; None if unknown, or if they follow from `inner`.
    """

    allreduce: CollectiveCost
    allgather: CollectiveCost
    inner: Inner | None = None
    levels: TwoLevelCosts | None = None

    @property
    def ranks_per_node(self) -> int | None:
        """Number of ranks of a node; None if unknown."""
        known = self.levels or self.inner
        return None if known is None else known.ranks_per_node

    def costs_among(self, among: Group) -> _Costs:
        """The costs of collectives in a group of ranks.

        Raises:
            CalibrationError: for "node" and "across", if nodes are unknown.
        """
        if among == "all":
            return self
        if self.levels is not None:
            return self.levels.node if among == "node" else self.levels.across
        if self.inner is None:
            raise CalibrationError(
                "the calibration has no costs of nodes with several ranks; calibrate with several ranks on each node"
            )
        return self.inner if among == "node" else self

    def seconds(
        self,
        kind: str,
        size: ArrayLike,
        ranks: ArrayLike,
        bytes_per_s: ArrayLike | None = None,
        dtype: str = "",
        fused: ArrayLike = False,
        among: Group = "all",
    ) -> Seconds:
        """Time of one collective.

        With an inner link, an allreduce or a reduce-scatter is one within each node and one between nodes, each of all
        bytes; an allgather is one between nodes of the bytes of each node's ranks, and one within nodes of its result;
        an alltoall is one within each node of all bytes, and one between nodes of the bytes of each node's ranks. All
        nodes but the last are full.

        Args:
            kind: a key of `ALGORITHMS`.
            size: bytes that each rank contributes.
            ranks: number of all ranks.
            bytes_per_s: the allreduce's bandwidth, if it is not the measured one; bandwidths of other kinds are
                proportional, except within a node.
            dtype, fused: as in `CollectiveCost.seconds`.
            among: the group of ranks.

        Raises:
            CalibrationError: as in `costs_among`.
        """
        speed = 1.0 if bytes_per_s is None else np.asarray(bytes_per_s, float) / self.allreduce.bytes_per_s
        if among != "all":
            return self._in_levels(kind, np.asarray(size, float), np.asarray(ranks, float), speed, dtype, fused, among)
        outer = self.cost(kind)
        if self.inner is None:
            return outer.seconds(kind, size, ranks, speed, dtype, fused)
        inner = self.inner.cost(kind)
        local = np.minimum(ranks, self.inner.ranks_per_node)
        nodes = np.ceil(np.asarray(ranks, float) / self.inner.ranks_per_node)
        if kind in ("allreduce", "reducescatter"):
            between = outer.seconds(kind, size, nodes, speed, dtype, fused)
            return between + inner.seconds(kind, size, local, dtype=dtype)
        size = np.asarray(size, float)
        brought = size * nodes if kind == "allgather" else size
        return outer.seconds(kind, size * local, nodes, speed) + inner.seconds(kind, brought, local)

    def _in_levels(
        self, kind: str, size: Array, ranks: Array, speed: Array, dtype: str, fused: ArrayLike, among: Group
    ) -> Seconds:
        cost, per_node = self.costs_among(among).cost(kind), float(self.ranks_per_node or 1)
        local, nodes = np.minimum(ranks, per_node), np.ceil(ranks / per_node)
        if among == "node":
            return cost.seconds(kind, size, local, dtype=dtype, fused=fused)
        # Costs with an inner link are those of the node's link, which carries the bytes of all its ranks.
        return cost.seconds(kind, size if self.levels is not None else size * local, nodes, speed, dtype, fused)
