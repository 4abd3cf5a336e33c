"""How computing and exchanging overlap: as hvdcomp and Horovod run a step.

Overlapped (dense and casts): Horovod sends buckets while the backward pass goes on; or, where it is known when which
gradients are ready, all that are, one collective after the other. Sequential (all else): hvdcomp's engine encodes,
exchanges and decodes after the backward pass. After Agarwal et al. 2022, section 4.1 and appendix B. Early: the engine
starts buckets in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.perfmodel.exchanges import Exchange, Round
from hvdcomp.perfmodel.network import Seconds

Array = Any
CostOf = Callable[..., Seconds]  # time of a collective: its kind, the bytes of one rank, `dtype` and `fused`


class Buckets(NamedTuple):
    """How bytes are cut: `number` buckets, all of `size` bytes but the last, of `last`."""

    number: int
    size: float
    last: float


class Parts(NamedTuple):
    """The parts that a step's time is the sum of, in s; of communication, only what is not hidden.

    `waits` says whether the backward pass is over before what was to hide behind it, so that a faster computer would
    only wait longer.
    """

    compute: Array
    encode: Array
    transfer: Array
    latency: Array
    waits: Array

    @property
    def total(self) -> Array:
        """Time of the step."""
        return self.compute + self.encode + self.transfer + self.latency

    def towards(self, other: Parts, share: float) -> Parts:
        """What lies between these and others, of steps in which nothing waits: 0 for these, 1 for the others."""
        own, theirs = self[:4], other[:4]
        between = (first + share * (second - first) for first, second in zip(own, theirs, strict=True))
        return Parts._make([*between, self.waits])


def cut(total: float, bucket_bytes: float) -> Buckets:
    """Cuts bytes into full buckets and a last one that is not empty."""
    number = max(1, int(np.ceil(total / bucket_bytes)))
    size = min(bucket_bytes, total)
    return Buckets(number, size, total - (number - 1) * size)


def overlapped(compute: Array, backward: Array, gamma: Array, buckets: Buckets, cost_of: CostOf, ranks: Array) -> Parts:
    """max(gamma backward, (k - 1) T(b)) + T(last), and what else is computed.

    All but the last bucket travel during the backward pass, and slow it by gamma. One rank exchanges nothing and is
    not slowed.

    Args:
        compute: seconds of a step without communication.
        backward: seconds of that in which communication can hide.
        gamma: slow-down of the backward pass.
        buckets: what is sent.
        cost_of: the network.
        ranks: how many there are.
    """
    slowed = np.where(np.asarray(ranks) > 1, gamma, 1.0) * backward
    hidden = cost_of("allreduce", buckets.size) * (buckets.number - 1)
    last = cost_of("allreduce", buckets.last)
    beyond = np.maximum(hidden.total - slowed, 0)
    # What sticks out is of the same mixture as all of it.
    share = beyond / np.where(hidden.total > 0, hidden.total, 1)
    seen = hidden * share + last
    waiting = seen.latency + seen.start
    return Parts(compute - backward + slowed, np.zeros_like(seen.total), seen.transfer, waiting, beyond > 0)


def when_ready(
    compute: Array,
    backward: Array,
    gamma: Array,
    ready: Sequence[tuple[float, float]],
    size: Array,
    most: float,
    cost_of: CostOf,
    ranks: Array,
    dtype: str = "",
) -> Parts:
    """Goes through a step as Horovod's background thread does.

    The thread runs one collective at a time. When it is free, it sends all gradients that are ready by then, up to
    `most` bytes, as one collective. If it has to wait for the first of them, it sleeps until its next cycle, and what
    becomes ready meanwhile goes along. DistributedDataParallel has no cycle, and what is ready are its buckets: of
    these no two fit into one collective, as each but the first and the last has `most` bytes or more. Where there are
    but these two, and small, they count as one.

    Args:
        compute, backward, gamma, cost_of, ranks: as for `overlapped`.
        ready: as in `Compute`.
        size: bytes of all gradients.
        most: bytes of a collective at most, unless one gradient has more (Horovod's fusion threshold).
        dtype: element type in which they travel.
    """
    shares, moments = (np.array(column) for column in zip(*ready, strict=True))
    several = np.asarray(ranks) > 1
    slowed = np.where(several, gamma, 1.0) * backward
    shape = np.broadcast_shapes(np.shape(slowed), np.shape(size), np.shape(cost_of("allreduce", size).total))
    clock, spent = np.zeros(shape), Seconds(np.zeros(shape), np.zeros(shape))
    sent, waits = np.zeros(shape, int), np.zeros(shape, bool)
    edges = np.concatenate([[0.0], shares])
    while np.any(under_way := sent < len(shares)):
        at = np.minimum(sent, len(shares) - 1)
        arrives = moments[at] * slowed
        idle = arrives >= clock
        begins = np.where(idle, arrives + cost_of("allreduce", size).start, clock)
        here = np.searchsorted(moments, begins / slowed, side="right")
        fits = np.searchsorted(shares, edges[at] + most / size * (1 + 1e-9), side="right")
        upto = np.maximum(at + 1, np.minimum(here, fits))
        cost = cost_of("allreduce", (edges[upto] - edges[at]) * size, dtype=dtype, fused=upto - at > 1)
        waits = np.where(under_way, ~idle & (clock > slowed), waits)
        clock = np.where(under_way, begins + cost.latency + cost.transfer, clock)
        spent = spent + Seconds(cost.latency, cost.transfer, np.where(idle, cost.start, 0.0)) * under_way
        sent = np.where(under_way, upto, sent)
    beyond = np.maximum(clock - slowed, 0) * several
    # What sticks out is of the same mixture as all of it.
    seen = spent * (beyond / np.where(spent.total > 0, spent.total, 1))
    return Parts(compute - backward + slowed, np.zeros(shape), seen.transfer, seen.latency + seen.start, waits)


def sequential(compute: Array, encode: Array, exchange: Exchange, cost_of: CostOf, payload: Array = 1.0) -> Parts:
    """compute + encode and decode + every collective, one after the other; those of a round start together.

    Args:
        compute: seconds of a step without communication.
        encode: seconds of encoding and decoding.
        exchange: what is sent.
        cost_of: the network.
        payload: by how much the bytes are multiplied.
    """
    latency: Array = 0.0
    transfer: Array = 0.0
    for collectives in exchange.rounds:
        cost = _of_round(collectives, cost_of, payload)
        latency = latency + cost.latency + cost.start
        transfer = transfer + cost.transfer
    return Parts(compute, encode, transfer, latency, np.False_)


def _of_round(collectives: Round, cost_of: CostOf, payload: Array) -> Seconds:
    """Time of collectives that start together, one after the other; bytes are multiplied by `payload`."""
    costs = [
        cost_of(collective.kind, collective.bytes * payload, dtype=collective.dtype, among=collective.among)
        for collective in collectives
    ]
    start = np.maximum.reduce([np.asarray(cost.start, float) for cost in costs])
    return Seconds(sum(cost.latency for cost in costs), sum(cost.transfer for cost in costs), start)


class Piece(NamedTuple):
    """A bucket that the engine starts in the backward pass: its share of a model's bytes, and after which share of the
    pass the last of its gradients is ready."""

    share: float
    moment: float


def pieces(ready: Sequence[tuple[float, float]], least: float) -> list[Piece]:
    """The buckets that start in the backward pass; what fills no bucket is left for its end.

    Args:
        ready: as in `Compute`; nothing starts early where it is not known.
        least: share of all bytes that fills a bucket.

    Example:
        >>> pieces([(0.3, 0.1), (0.5, 0.4), (0.9, 0.6), (1.0, 1.0)], least=0.4)
        [Piece(share=0.5, moment=0.4), Piece(share=0.4, moment=0.6)]
    """
    pieces, begin = [], 0.0
    for upto, moment in ready:
        if upto - begin >= least * (1 - 1e-9):
            pieces.append(Piece(round(upto - begin, 12), moment))
            begin = upto
    return pieces


def early(
    compute: Array,
    backward: Array,
    gamma: Array,
    encode: Array,
    decode: Array,
    exchange: Exchange,
    buckets: Sequence[Piece],
    cost_of: CostOf,
    payload: Array = 1.0,
) -> Parts:
    """Goes through a step in which some buckets are encoded, and start their first collectives, in the backward pass.

    Encoding delays the pass. The network carries one collective after the other, and slows the pass by gamma - 1 of the
    time for which it is busy meanwhile. At the end of the pass the rest is encoded and sent. Further rounds begin then;
    while one bucket waits for its answers, those of the others are under way. What was sent early is decoded while the
    rest is under way. Where the first round only brings together what is to be encoded, all is encoded and decoded
    after the pass, and nothing is under way meanwhile.

    Args:
        compute: seconds of a step without communication.
        backward: seconds of the backward pass in it.
        gamma: as in `Compute`.
        encode, decode: seconds of encoding and of decoding, of the whole model.
        exchange: what is sent.
        buckets: that start early, in their order; their shares of encoding and of bytes are taken to be equal.
        cost_of: the network.
        payload: by how much the bytes are multiplied.
    """
    at_once = encode if exchange.encodes_first else 0.0
    first, *others = exchange.rounds
    rest = 1.0 - sum(bucket.share for bucket in buckets)
    rest = rest if rest > 1e-9 else 0.0

    def cost(collectives: Round, share: float) -> Seconds:
        return _of_round(collectives, cost_of, payload * share)

    spent, encoded, network = Seconds(0.0, 0.0), 0.0, np.zeros(np.shape(backward))
    for share, moment in buckets:
        encoded = encoded + share * at_once
        spent = spent + (taken := cost(first, share))
        network = np.maximum(network, moment * backward + encoded) + taken.total
    ends = backward + at_once
    hidden = spent.total - np.maximum(network - ends, 0)
    slowed = (np.asarray(gamma) - 1) * hidden
    ends = ends + slowed
    network = np.maximum(network, ends)
    shares = [*(bucket.share for bucket in buckets), *([rest] if rest else [])]
    if rest:
        spent = spent + (taken := cost(first, rest))
        network = network + taken.total
    network = network + encode - at_once
    for collectives in others:
        several = [cost(collectives, share) for share in shares]
        taken = sum(several[1:], several[0])
        # The others start while the first one's collectives are under way.
        taken = Seconds(taken.latency, taken.transfer, several[0].start)
        spent = spent + taken
        network = network + taken.total
    ends = ends + encode - at_once
    meanwhile = 1 - rest if exchange.encodes_first else 0.0
    done = np.maximum(network, ends + decode * meanwhile) + decode * (1 - meanwhile)
    seen = spent * ((done - ends - decode) / np.where(spent.total > 0, spent.total, 1))
    return Parts(compute + slowed, encode + decode, seen.transfer, seen.latency + seen.start, np.False_)
