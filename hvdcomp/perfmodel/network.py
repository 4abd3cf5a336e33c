"""The times of the network: the latency and the transfer time of collectives, computed from a few measured numbers.

Two numbers describe the algorithm of a collective: the number of messages that follow one another, and the bytes that
a rank's busiest link carries. All functions accept numbers, or NumPy arrays that broadcast against each other.
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
    """The traffic of a rank in one collective: the number of messages that follow one another, and the bytes that the
    rank's busiest link carries."""

    messages: Array
    bytes: Array


@dataclass(frozen=True)
class Seconds:
    """The parts of a collective's time, in seconds.

    Attributes:
        latency: seconds that ranks wait for messages.
        transfer: seconds that the links need to move the bytes.
        start: seconds until the collective starts. Collectives that are requested together start together.
    """

    latency: Array
    transfer: Array
    start: Array = 0.0

    @property
    def total(self) -> Array:
        """The sum of the three parts, in seconds."""
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
    """An algorithm in which a rank sends one message for each other rank. A message has 1 / ranks of the rank's
    bytes."""
    return Traffic(ranks - 1, size * (ranks - 1) / ranks)


ALGORITHMS: dict[str, dict[str, Callable[[Array, Array], Traffic]]] = {
    "allreduce": {"ring": _ring_allreduce, "tree": _tree_allreduce, "parameter_server": _parameter_server},
    "allgather": {"direct": _direct_allgather, "ring": _ring_allgather},
    "alltoall": {"direct": _direct_alltoall, "pairwise": _part_by_part},
    "reducescatter": {"ring": _part_by_part},
}
"""For each kind of collective and each algorithm, a function that computes the traffic if each of `ranks` ranks
contributes `size` bytes. In an alltoall or a reduce-scatter, a rank contributes one part for each rank, and `size` is
the size of all its parts together.

Sources:

- Allreduce: Agarwal et al. 2022, table 1 and equation 1.
- Direct allgather: Agarwal et al. 2022, appendix B.
- Ring allgather: a rank moves the same bytes as in a direct allgather, and the number of messages is the number of
  other ranks (Thakur et al. 2005, section 4.1).
- Pairwise alltoall: a rank exchanges one message of 1 / ranks of the bytes with each other rank in turn (Thakur et al.
  2005, on long messages).
- Direct alltoall: a rank sends all these messages at once, so they wait like the messages of a direct allgather.
- Ring reduce-scatter: the first half of a ring allreduce. The second half is a ring allgather of the sums (Patarasuk
  and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations).
"""

_STANDS_IN = {"alltoall": "allgather", "reducescatter": "allreduce"}
"""For each kind of collective whose cost may be unknown, the kind whose seconds per message and per byte are used
instead."""

_STAND_IN_ALGORITHMS = {("alltoall", "direct"): "direct", ("alltoall", "ring"): "pairwise"}


@dataclass(frozen=True)
class CollectiveCost:
    """The numbers that determine the time of one kind of collective on one network.

    Attributes:
        algorithm: name of the algorithm, a key of `ALGORITHMS[kind]`.
        latency_s: seconds of latency per message (alpha).
        bytes_per_s: bandwidth of a rank's link, in bytes/s. If there is a table `transfer`, the bandwidth is used only
            beyond the last entry of the table.
        transfer: optional table of measured transfer times, without latency: pairs of bytes over the link and seconds,
            both ascending. The time is interpolated linearly from (0, 0), and rises with `bytes_per_s` beyond the last
            entry.
        incast: optional table for collectives in which all senders reach one receiver at once: pairs of a number of
            ranks and the factor by which the transfer time increases. The factor is interpolated linearly.
        start_s: seconds that an idle Horovod takes to start a collective (its cycle), whatever the number of ranks.
        fusion_s_per_byte: seconds per byte that Horovod needs to copy gradients into its fusion buffer and back, if it
            fuses several tensors.
        reduction_s_per_byte: for each element type, the additional seconds per byte over the link that summation takes
            in this type, compared with float32; 0 for types that are missing. These seconds do not depend on the
            bandwidth.
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
        """The predicted time of one collective.

        Args:
            kind: kind of collective, a key of `ALGORITHMS`.
            size: bytes that each rank contributes.
            ranks: number of ranks of the collective. With one rank, the time is 0.
            speed: factor by which the link is faster than `bytes_per_s` and the table `transfer`.
            dtype: element type of an allreduce or a reduce-scatter.
            fused: whether Horovod fuses several tensors in this collective.
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
    """A network in which each rank has its own link with the given rate. All collectives use ring algorithms.

    Args:
        bits_per_s: rate of each link in bits/s. A link reaches this rate in both directions at once.
        latency_s: seconds of latency per message.
    """
    cost = CollectiveCost("ring", latency_s, bits_per_s / 8)
    return Network(cost, cost)


def network_of_nodes(
    ranks_per_node: int, bytes_per_s: float, latency_s: float, inside_bytes_per_s: float, inside_latency_s: float
) -> Network:
    """A network of nodes that each have one link to the other nodes. Collectives use ring algorithms, as in NCCL.

    A ring through all ranks leaves each node only once. Each rank can therefore use the whole link, and the latency of
    a message is the mean over the hops of the ring. In an alltoall, and in an exchange between nodes, all ranks of a
    node send at once, so each rank has only its share of the link.

    Args:
        ranks_per_node: number of ranks per node, at least 2.
        bytes_per_s: bandwidth of a node's link, in bytes/s. The link reaches it in both directions at once.
        latency_s: seconds of latency per message between nodes.
        inside_bytes_per_s: bandwidth of each rank's own link within its node, in bytes/s.
        inside_latency_s: seconds of latency per message within a node.
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
    """Computes `CollectiveCost.reduction_s_per_byte` of a reduce-scatter from that of an allreduce.

    A reduce-scatter adds up all bytes that it moves. An allreduce adds up only half of its bytes, because the other
    half are finished sums.
    """
    return {dtype: 2 * seconds for dtype, seconds in of_allreduce.items()}


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """The costs of the kinds of collectives. Subclasses add `allreduce` and `allgather`.

    Attributes:
        alltoall, reducescatter: costs of an alltoall and of a reduce-scatter; None if unknown.
    """

    alltoall: CollectiveCost | None = None
    reducescatter: CollectiveCost | None = None

    def cost(self, kind: str) -> CollectiveCost:
        """The cost of a kind of collective.

        If the cost of an alltoall is unknown, its seconds per message and per byte are those of the allgather. If the
        cost of a reduce-scatter is unknown, its seconds per message and per byte are those of the allreduce.
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
        """The kind of collective whose cost is used instead, if the cost of this kind is unknown; None if it is
        known."""
        return None if getattr(self, kind) is not None else _STANDS_IN[kind]


@dataclass(frozen=True)
class Among(_Costs):
    """The costs of collectives in a group of ranks.

    Attributes:
        allreduce, allgather: costs of an allreduce and of an allgather.
        alltoall, reducescatter: costs of an alltoall and of a reduce-scatter; None if unknown.
    """

    allreduce: CollectiveCost
    allgather: CollectiveCost


@dataclass(frozen=True)
class Inner(Among):
    """The costs of collectives within one node, on its fast inner link. They are used for collectives that have one
    stage within nodes and one stage between nodes.

    Attributes:
        ranks_per_node: number of ranks that share a node and its link to other nodes.
    """

    ranks_per_node: int = field(kw_only=True)


@dataclass(frozen=True)
class TwoLevelCosts:
    """The costs of the collectives of a two-level exchange.

    Attributes:
        ranks_per_node: number of ranks that share a node and its link to other nodes.
        node: costs of collectives among the ranks of a node.
        across: costs of collectives among ranks of different nodes that have the same local rank. The ranks with other
            local ranks exchange the same number of bytes over the same links at the same time.
    """

    ranks_per_node: int
    node: Among
    across: Among


@dataclass(frozen=True)
class Network(_Costs):
    """The costs of collectives between ranks.

    Attributes:
        allreduce, allgather, alltoall, reducescatter: costs of these collectives among all ranks, or among nodes if
            `inner` is not None. The costs of an alltoall and of a reduce-scatter are None if unknown.
        inner: the costs on the link within nodes; None if collectives do not depend on nodes. An example is a ring
            through all ranks that leaves each node once.
        levels: the costs of the collectives of a two-level exchange; None if they are unknown, or if they follow from
            `inner`.
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
        """The costs of collectives in a group of ranks: all ranks ("all"), the ranks of a node ("node"), or ranks of
        different nodes ("across").

        Raises:
            CalibrationError: for "node" and "across", if the calibration has no nodes of several ranks.
        """
        if among == "all":
            return self
        if self.levels is not None:
            return self.levels.node if among == "node" else self.levels.across
        if self.inner is None:
            raise CalibrationError(
                "the calibration has no network costs for nodes with several ranks; calibrate with several ranks on "
                "each node"
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
        """The predicted time of one collective.

        With an inner link, a collective among all ranks has one stage within each node and one stage between nodes. All
        nodes except the last are assumed to be full.

        - Allreduce and reduce-scatter: both stages carry the bytes of one rank.
        - Allgather: the stage between nodes carries the bytes of all ranks of a node. The stage within nodes carries
          the result.
        - Alltoall: the stage within nodes carries the bytes of one rank. The stage between nodes carries the bytes of
          all ranks of a node.

        Args:
            kind: kind of collective, a key of `ALGORITHMS`.
            size: bytes that each rank contributes.
            ranks: number of all ranks.
            bytes_per_s: bandwidth of the allreduce, in bytes/s; None for the measured bandwidth. The bandwidths of
                other kinds of collectives change by the same factor, except within a node.
            dtype: element type of an allreduce or a reduce-scatter.
            fused: whether Horovod fuses several tensors in this collective.
            among: the ranks of the collective, as in `costs_among`.

        Raises:
            CalibrationError: if `among` is "node" or "across", and the calibration has no nodes of several ranks.
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
        # If there is an inner link, the costs are those of the node's link, which carries the bytes of all its ranks.
        return cost.seconds(kind, size if self.levels is not None else size * local, nodes, speed, dtype, fused)
