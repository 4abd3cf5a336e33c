"""Times of the network: latency and transfer time of collectives, from few measured numbers.

Each algorithm is told by two things: how many messages follow one another, and how many bytes pass the busiest link
of a rank. All functions take numbers or NumPy arrays that broadcast against each other.
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
    """Of one rank in one collective: messages that follow one another, and bytes over its busiest link."""

    messages: Array
    bytes: Array


@dataclass(frozen=True)
class Seconds:
    """Time of a collective, in s: waiting for messages to arrive, moving bytes, and before both, until it starts.

    Collectives that are asked for together start together.
    """

    latency: Array
    transfer: Array
    start: Array = 0.0

    @property
    def total(self) -> Array:
        """All together."""
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
"""Traffic of `bytes` handed over by each of `ranks`, by kind of collective and algorithm. What a rank hands to an
alltoall or a reduce-scatter are its parts for all ranks together.

Allreduce: Agarwal et al. 2022, table 1 and equation 1. Allgather, direct: the same, appendix B. Allgather, ring: the
bandwidth term is that of direct, and there are as many messages as other ranks (Thakur et al. 2005, section 4.1).
Alltoall, pairwise: with each other rank in turn a rank exchanges one message of 1 / ranks of the bytes (the same paper,
on long messages). Alltoall, direct: all of these messages at once, so that they wait as those of a direct allgather do.
Reduce-scatter, ring: the first half of a ring allreduce, whose second half is a ring allgather of a rank's sum
(Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations).
"""

_STANDS_IN = {"alltoall": "allgather", "reducescatter": "allreduce"}
"""By kind of a collective whose cost is not known: the kind whose messages and bytes are taken to cost the same."""

_STAND_IN_ALGORITHMS = {("alltoall", "direct"): "direct", ("alltoall", "ring"): "pairwise"}


@dataclass(frozen=True)
class CollectiveCost:
    """The time of one kind of collective on one network.

    Attributes:
        algorithm: a key of `ALGORITHMS[kind]`.
        latency_s: alpha, seconds a message.
        bytes_per_s: bandwidth of a rank's link, for messages beyond the table.
        transfer: optional table of (bytes over the link, seconds), both rising, without latency. Between its entries
            and from (0, 0) to the first the time is interpolated; beyond the last it goes on at `bytes_per_s`.
        incast: optional table of (ranks, factor), for collectives whose senders all reach one receiver at once: by
            how much more than the bandwidth says a transfer takes. Between entries it is interpolated.
        start_s: seconds until an idle Horovod takes up a collective (its cycle), whatever the number of ranks.
        fusion_s_per_byte: what copying into Horovod's fusion buffer and back takes, by byte handed over, where several
            tensors travel together.
        reduction_s_per_byte: by element type, how much longer a byte over the link takes than one of float32, for the
            adding up. It does not change with the bandwidth. A type that is not there takes no longer.
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
            size: bytes that each rank hands over.
            ranks: how many there are; one exchanges nothing and takes no time.
            speed: by how many times the link is faster than `bytes_per_s` and the table say.
            dtype: element type that an allreduce adds up.
            fused: whether Horovod puts it together from several tensors.
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
    """The network of ranks that each have a link of this rate, and exchange in rings.

    Args:
        bits_per_s: of each link, both ways at once.
        latency_s: seconds a message.
    """
    cost = CollectiveCost("ring", latency_s, bits_per_s / 8)
    return Network(cost, cost)


def reduction_of_scatter(of_allreduce: Mapping[str, float]) -> dict[str, float]:
    """What adding up takes in a reduce-scatter, as of `reduction_s_per_byte`, from what it takes in an allreduce.

    A reduce-scatter adds up all bytes that it moves. An allreduce does so with half of them: the others are sums.
    """
    return {dtype: 2 * seconds for dtype, seconds in of_allreduce.items()}


@dataclass(frozen=True, kw_only=True)
class _Known:
    """Costs of kinds of collectives, of which some may not be known.

    Attributes:
        alltoall, reducescatter: None if not known.
    """

    alltoall: CollectiveCost | None = None
    reducescatter: CollectiveCost | None = None

    def cost(self, kind: str) -> CollectiveCost:
        """The cost of a kind of collective.

        That of an unknown alltoall is made of allgather's numbers, and that of an unknown reduce-scatter of
        allreduce's: a message, a byte over the link and a byte to be added up take the same.
        """
        known: CollectiveCost | None = getattr(self, kind)
        if known is not None:
            return known
        other: CollectiveCost = getattr(self, _STANDS_IN[kind])
        return replace(
            other,
            algorithm=_STAND_IN_ALGORITHMS.get((kind, other.algorithm), "ring"),
            reduction_s_per_byte=reduction_of_scatter(other.reduction_s_per_byte),
        )

    def stand_in(self, kind: str) -> str | None:
        """The kind whose numbers serve for this one, if this one is not known; None if it is."""
        return None if getattr(self, kind) is not None else _STANDS_IN[kind]


@dataclass(frozen=True)
class Among(_Known):
    """The times of collectives among some of the ranks.

    Attributes:
        allreduce, allgather, alltoall, reducescatter: costs; of the latter two None if not known.
    """

    allreduce: CollectiveCost
    allgather: CollectiveCost


@dataclass(frozen=True)
class Inner(Among):
    """The fast link between the ranks of one node, for collectives in two stages.

    Attributes:
        ranks_per_node: how many share a node and its link to other nodes.
    """

    ranks_per_node: int = field(kw_only=True)


@dataclass(frozen=True)
class Levels:
    """The times of the collectives of two levels.

    Attributes:
        ranks_per_node: how many share a node and its link to other nodes.
        node: among the ranks of a node.
        across: among the ranks that have the same place in each node, while those of the other places exchange as much
            over the same links.
    """

    ranks_per_node: int
    node: Among
    across: Among


@dataclass(frozen=True)
class Network(_Known):
    """The times of collectives between ranks.

    Attributes:
        allreduce, allgather, alltoall, reducescatter: costs between ranks, or between nodes if there is an inner link;
            of the latter two None if not known.
        inner: None if ranks exchange without regard to nodes (a ring through all ranks needs no more: one of its
            links leaves each node).
        levels: None if they are not known; with an inner link they follow from that.
    """

    allreduce: CollectiveCost
    allgather: CollectiveCost
    inner: Inner | None = None
    levels: Levels | None = None

    @property
    def ranks_per_node(self) -> int | None:
        """How many ranks share a node; None if that is not known."""
        known = self.levels or self.inner
        return None if known is None else known.ranks_per_node

    def costs_among(self, among: Group) -> _Known:
        """The costs that tell those of collectives among some ranks.

        Raises:
            CalibrationError: for those of a node, or of the same place in each node, if nodes are not known.
        """
        if among == "all":
            return self
        if self.levels is not None:
            return self.levels.node if among == "node" else self.levels.across
        if self.inner is None:
            raise CalibrationError("the calibration knows no nodes of several ranks; calibrate with some on each node")
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

        With an inner link: an allreduce or a reduce-scatter within each node and one between nodes, each of all bytes;
        an allgather between nodes of what each node's ranks hand over, and one within nodes of what that brought; an
        alltoall within each node of all bytes, and one between nodes of what each node's ranks hand over. Nodes are
        full but for the last.

        Args:
            kind: a key of `ALGORITHMS`.
            size: bytes that each rank hands over.
            ranks: how many there are, all together.
            bytes_per_s: the bandwidth of allreduce if another than measured; those of the other kinds change in
                proportion, but for those within a node.
            dtype, fused: as for `CollectiveCost.seconds`.
            among: whose collective it is.

        Raises:
            CalibrationError: as of `costs_among`.
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
        # Those of an inner link are of the node's link, which carries what all of its ranks send.
        return cost.seconds(kind, size if self.levels is not None else size * local, nodes, speed, dtype, fused)
