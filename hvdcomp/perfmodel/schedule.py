"""Predicts how computation and exchange overlap in a step. Each kind of step has a function:

- `overlapped`, for dense gradients and casts: Horovod sends full buckets during the backward pass (Agarwal et al. 2022,
  section 4.1 and appendix B).
- `when_ready`, for dense gradients and casts if it is known when gradients are ready: Horovod sends all gradients that
  are ready, one collective after the other.
- `sequential`, for other methods: hvdcomp's engine encodes, exchanges and decodes all gradients after the backward pass
  (the same paper).
- `early`, for other methods: hvdcomp's engine starts buckets during the backward pass.
- `sharded`, for FSDP2: FSDP2 gathers weights and reduces gradients, module by module, during both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.perfmodel.exchanges import Exchange, Round
from hvdcomp.perfmodel.network import Seconds

Array = Any
# A function that returns the time of a collective, from its kind, the bytes of one rank, `dtype`, `fused` and `among`.
CostOf = Callable[..., Seconds]


class Buckets(NamedTuple):
    """Gradients cut into `number` buckets. Each bucket has `size` bytes, except the last bucket, which has `last`
    bytes."""

    number: int
    size: float
    last: float


class Parts(NamedTuple):
    """The parts of a step's time, in seconds. Their sum is the time of the step.

    Attributes:
        compute: seconds of computation, except encoding and decoding.
        encode: seconds of encoding and decoding.
        transfer: seconds spent moving bytes, as far as they do not overlap with computation.
        latency: seconds spent waiting for messages, as far as they do not overlap with computation.
        waits: whether computation ends before the communication that overlaps with it, so that a faster computer would
            only wait longer.
    """

    compute: Array
    encode: Array
    transfer: Array
    latency: Array
    waits: Array

    @property
    def total(self) -> Array:
        """Seconds of the step."""
        return self.compute + self.encode + self.transfer + self.latency

    def toward(self, other: Parts, share: Array) -> Parts:
        """Interpolates linearly between these parts (share 0) and other parts (share 1). `waits` is taken from these
        parts."""
        pairs = zip(self[:4], other[:4], strict=True)
        between = (own_part + share * (other_part - own_part) for own_part, other_part in pairs)
        return Parts._make([*between, self.waits])


def cut(total: float, bucket_bytes: float) -> Buckets:
    """Cuts `total` bytes into full buckets of `bucket_bytes` bytes and a last bucket that is not empty."""
    number = max(1, int(np.ceil(total / bucket_bytes)))
    size = min(bucket_bytes, total)
    return Buckets(number, size, total - (number - 1) * size)


def overlapped(compute: Array, backward: Array, gamma: Array, buckets: Buckets, cost_of: CostOf, ranks: Array) -> Parts:
    """Predicts a step in which Horovod sends full buckets during the backward pass.

    All buckets except the last are sent during the backward pass, which becomes slower by the factor gamma. With k
    buckets and a function T for the time of an allreduce, the time of the step is

        max(gamma backward, (k - 1) T(size)) + T(last) + the time of other computation.

    A single rank exchanges nothing, and its backward pass does not become slower.

    Args:
        compute: seconds of a step without communication.
        backward: seconds of the backward pass. Communication overlaps with it.
        gamma: factor by which communication slows the backward pass, as in `Compute`.
        buckets: number and bytes of the buckets.
        cost_of: function that returns the time of a collective.
        ranks: number of ranks.
    """
    slowed = np.where(np.asarray(ranks) > 1, gamma, 1.0) * backward
    hidden = cost_of("allreduce", buckets.size) * (buckets.number - 1)
    last = cost_of("allreduce", buckets.last)
    beyond = np.maximum(hidden.total - slowed, 0)
    # We assume that the part that does not overlap has the same ratio of latency to transfer as the whole time.
    share = beyond / np.where(hidden.total > 0, hidden.total, 1)
    exposed = hidden * share + last
    waiting = exposed.latency + exposed.start
    return Parts(compute - backward + slowed, np.zeros_like(exposed.total), exposed.transfer, waiting, beyond > 0)


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
    """Predicts a step in which Horovod's background thread sends gradients when they are ready, by a simulation.

    The thread runs one collective at a time. When the thread is free, it sends all gradients that are ready as one
    collective, up to `most` bytes. If no gradient is ready, the thread sleeps until its next cycle, and then sends all
    gradients that are ready.

    DistributedDataParallel is simulated in the same way, but has no cycle, and its buckets become ready instead of
    single gradients. No two of its buckets fit into one collective, because all buckets except the first and the last
    have at least `most` bytes. If there are only a first and a last bucket, and both are small, the simulation sends
    them as one.

    Args:
        compute, backward, gamma, cost_of, ranks: as in `overlapped`.
        ready: when gradients are ready, as in `Compute`.
        size: bytes of all gradients.
        most: largest number of bytes in a collective (Horovod's fusion threshold). A single gradient may have more.
        dtype: element type of the gradients that are sent.
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
        ready_end = np.searchsorted(moments, begins / slowed, side="right")
        fits = np.searchsorted(shares, edges[at] + most / size * (1 + 1e-9), side="right")
        upto = np.maximum(at + 1, np.minimum(ready_end, fits))
        cost = cost_of("allreduce", (edges[upto] - edges[at]) * size, dtype=dtype, fused=upto - at > 1)
        waits = np.where(under_way, ~idle & (clock > slowed), waits)
        clock = np.where(under_way, begins + cost.latency + cost.transfer, clock)
        spent = spent + Seconds(cost.latency, cost.transfer, np.where(idle, cost.start, 0.0)) * under_way
        sent = np.where(under_way, upto, sent)
    beyond = np.maximum(clock - slowed, 0) * several
    # We assume that the part that does not overlap has the same ratio of latency to transfer as the whole time.
    exposed = spent * (beyond / np.where(spent.total > 0, spent.total, 1))
    latency = exposed.latency + exposed.start
    return Parts(compute - backward + slowed, np.zeros(shape), exposed.transfer, latency, waits)


def sequential(compute: Array, encode: Array, exchange: Exchange, cost_of: CostOf, payload: Array = 1.0) -> Parts:
    """Predicts a step without overlap: computation, then encoding, all collectives one after the other, and decoding.
    The collectives of a round start together.

    Args:
        compute: seconds of a step without communication.
        encode: seconds of encoding and decoding.
        exchange: the collectives of the step.
        cost_of: function that returns the time of a collective.
        payload: factor by which the bytes of all collectives are multiplied.
    """
    latency: Array = 0.0
    transfer: Array = 0.0
    for collectives in exchange.rounds:
        cost = _of_round(collectives, cost_of, payload)
        latency = latency + cost.latency + cost.start
        transfer = transfer + cost.transfer
    return Parts(compute, encode, transfer, latency, np.False_)


def _of_round(collectives: Round, cost_of: CostOf, payload: Array) -> Seconds:
    """The time of a round's collectives. The collectives are requested together, and run one after the other. Their
    bytes are multiplied by `payload`."""
    costs = [
        cost_of(collective.kind, collective.bytes * payload, dtype=collective.dtype, among=collective.among)
        for collective in collectives
    ]
    start = np.maximum.reduce([np.asarray(cost.start, float) for cost in costs])
    return Seconds(sum(cost.latency for cost in costs), sum(cost.transfer for cost in costs), start)


class Piece(NamedTuple):
    """A bucket that the engine starts during the backward pass.

    Attributes:
        share: the bucket's share of the bytes of all gradients.
        moment: share of the backward pass after which the last gradient of the bucket is ready.
    """

    share: float
    moment: float


def pieces(ready: Sequence[tuple[float, float]], least: float) -> list[Piece]:
    """The buckets that the engine starts during the backward pass. Gradients that do not fill a bucket are sent after
    the backward pass.

    Args:
        ready: when gradients are ready, as in `Compute`. If it is empty, no bucket starts early.
        least: share of the bytes of all gradients that fills a bucket.

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
    """Predicts a step in which the engine starts some buckets during the backward pass, by a simulation.

    During the backward pass, the engine encodes these early buckets and starts their first collectives. Encoding delays
    the backward pass. The network carries one collective at a time. Collectives slow the backward pass, which becomes
    longer by gamma - 1 times the time that they take during the pass. After the backward pass, the remaining tensors
    are encoded and sent. Then the later rounds begin. While one bucket waits for its results, the collectives of other
    buckets run. Early buckets are decoded during the exchange of the remaining tensors.

    In a two-level exchange, encoding follows the first collective. All buckets are therefore encoded and decoded after
    the backward pass, without overlap.

    Args:
        compute: seconds of a step without communication.
        backward: seconds of the backward pass.
        gamma: factor by which communication slows the backward pass, as in `Compute`.
        encode, decode: seconds of encoding and of decoding the gradients of the whole model.
        exchange: the collectives of the step.
        buckets: the early buckets, in order. A bucket's share of the encode time is assumed to be its share of the
            bytes.
        cost_of: function that returns the time of a collective.
        payload: factor by which the bytes of all collectives are multiplied.
    """
    at_once = encode if exchange.encodes_first else 0.0
    first, *further = exchange.rounds
    remainder = 1.0 - sum(bucket.share for bucket in buckets)
    remainder = remainder if remainder > 1e-9 else 0.0

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
    shares = [*(bucket.share for bucket in buckets), *([remainder] if remainder else [])]
    if remainder:
        spent = spent + (taken := cost(first, remainder))
        network = network + taken.total
    network = network + encode - at_once
    for collectives in further:
        several = [cost(collectives, share) for share in shares]
        taken = sum(several[1:], several[0])
        # The collectives of the first bucket hide the start of the collectives of other buckets.
        taken = Seconds(taken.latency, taken.transfer, several[0].start)
        spent = spent + taken
        network = network + taken.total
    ends = ends + encode - at_once
    meanwhile = 1 - remainder if exchange.encodes_first else 0.0
    done = np.maximum(network, ends + decode * meanwhile) + decode * (1 - meanwhile)
    exposed = spent * ((done - ends - decode) / np.where(spent.total > 0, spent.total, 1))
    return Parts(compute + slowed, encode + decode, exposed.transfer, exposed.latency + exposed.start, np.False_)


def sharded(
    compute: Array,
    backward: Array,
    gamma: Array,
    encode: Array,
    exchange: Exchange,
    modules: float,
    ranks: Array,
    cost_of: CostOf,
    micro_batches: Array = 1,
) -> Parts:
    """Predicts a step of FSDP2. With m backward passes, the time of the step is

        max(before, (2 m - 1) G) + max(gamma backward + encode, G + R - R / modules) + R / modules.

    `before` is the time of all passes before the last backward pass. G is the time to gather the weights of all
    modules. They are gathered once in each pass, because modules are resharded after the forward pass. R is the time to
    reduce the gradients of all modules to the shards of the ranks. Gathering and reducing overlap with the computation
    of other modules; only the reduction of the last module follows the backward pass. Encoding does not overlap with
    the backward pass, because both need the device.

    Args:
        compute: seconds of a step without communication.
        backward: seconds of the last backward pass.
        gamma: factor by which communication slows the backward pass, as in `Compute`.
        encode: seconds of encoding and decoding.
        exchange: the collectives of the step. Its rounds reduce the gradients.
        modules: number of modules.
        ranks: number of ranks.
        cost_of: function that returns the time of a collective.
        micro_batches: m, the number of backward passes. Only the last backward pass reduces gradients.
    """
    gathered = cost_of("allgather", exchange.weights_bytes / modules / np.asarray(ranks, float)) * modules
    reduced = Seconds(0.0, 0.0)
    for collectives in exchange.rounds:
        reduced = reduced + _of_round(collectives, cost_of, 1 / modules) * modules
    last = reduced * (1 / modules)
    gathered_before = gathered * (2 * np.asarray(micro_batches, float) - 1)
    before, busy = compute - backward, gamma * backward + encode
    beyond_before = np.maximum(gathered_before.total - before, 0)
    hidden = gathered + reduced * (1 - 1 / modules)
    beyond_busy = np.maximum(hidden.total - busy, 0)
    spent = gathered_before + hidden
    # We assume that the part that does not overlap has the same ratio of latency to transfer as the whole time.
    share = (beyond_before + beyond_busy) / np.where(spent.total > 0, spent.total, 1)
    exposed = spent * share + last
    waiting = exposed.latency + exposed.start
    waits = (beyond_before > 0) | (beyond_busy > 0)
    return Parts(before + gamma * backward, encode + np.zeros_like(exposed.total), exposed.transfer, waiting, waits)
