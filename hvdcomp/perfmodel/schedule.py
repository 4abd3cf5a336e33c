"""The overlap of computation and exchange in a step of hvdcomp or Horovod.

Overlapped (dense and casts): Horovod sends buckets during the backward pass; or, if the times when gradients are ready
are known, all ready gradients, one collective after the other. Sequential (other methods): hvdcomp's engine encodes,
exchanges and decodes after the backward pass. Both after Agarwal et al. 2022, section 4.1 and appendix B. Early: the
engine starts buckets during the backward pass. Sharded (FSDP2): weights are gathered, and gradients reduced, module by
module during both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.perfmodel.exchanges import Exchange, Round
from hvdcomp.perfmodel.network import Seconds

Array = Any
CostOf = Callable[..., Seconds]  # time of a collective, from its kind, the bytes of one rank, `dtype` and `fused`


class Buckets(NamedTuple):
    """Bytes cut into `number` buckets, all of `size` bytes except the last one of `last` bytes."""

    number: int
    size: float
    last: float


class Parts(NamedTuple):
    """The parts of a step's time, in s, whose sum is the total; of communication, only the exposed part.

    `waits` is whether the backward pass ends before the communication that it hides, so that a faster computer would
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

    def towards(self, other: Parts, share: Array) -> Parts:
        """Interpolates between these parts (share 0) and other ones (share 1), for steps without waits."""
        pairs = zip(self[:4], other[:4], strict=True)
        between = (own_part + share * (other_part - own_part) for own_part, other_part in pairs)
        return Parts._make([*between, self.waits])


def cut(total: float, bucket_bytes: float) -> Buckets:
    """Cuts bytes into full buckets and a last one that is not empty."""
    number = max(1, int(np.ceil(total / bucket_bytes)))
    size = min(bucket_bytes, total)
    return Buckets(number, size, total - (number - 1) * size)


def overlapped(compute: Array, backward: Array, gamma: Array, buckets: Buckets, cost_of: CostOf, ranks: Array) -> Parts:
    """max(gamma backward, (k - 1) T(b)) + T(last), plus the other computation.

    All buckets except the last are sent during the backward pass, and slow it by gamma. A single rank exchanges nothing
    and is not slowed.

    Args:
        compute: seconds of a step without communication.
        backward: seconds of the backward pass, which hides communication.
        gamma: slow-down of the backward pass.
        buckets: the buckets.
        cost_of: cost of collectives.
        ranks: number of ranks.
    """
    slowed = np.where(np.asarray(ranks) > 1, gamma, 1.0) * backward
    hidden = cost_of("allreduce", buckets.size) * (buckets.number - 1)
    last = cost_of("allreduce", buckets.last)
    beyond = np.maximum(hidden.total - slowed, 0)
    # The exposed part has the same proportions as the whole.
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
    """Simulates a step of Horovod's background thread.

    The thread runs one collective at a time. When it is free, it sends all gradients that are ready, up to `most`
    bytes, as one collective. If none is ready, it sleeps until its next cycle, and sends all that are ready then.
    DistributedDataParallel has no cycle, and its buckets become ready instead: no two of them fit into one collective,
    as all but the first and the last have at least `most` bytes. If there are only these two, and small, they count as
    one.

    Args:
        compute, backward, gamma, cost_of, ranks: as in `overlapped`.
        ready: as in `Compute`.
        size: bytes of all gradients.
        most: largest bytes of a collective, unless a single gradient has more (Horovod's fusion threshold).
        dtype: element type of the collectives.
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
    # The exposed part has the same proportions as the whole.
    exposed = spent * (beyond / np.where(spent.total > 0, spent.total, 1))
    latency = exposed.latency + exposed.start
    return Parts(compute - backward + slowed, np.zeros(shape), exposed.transfer, latency, waits)


def sequential(compute: Array, encode: Array, exchange: Exchange, cost_of: CostOf, payload: Array = 1.0) -> Parts:
    """compute + encode and decode + all collectives one after the other; the collectives of a round start together.

    Args:
        compute: seconds of a step without communication.
        encode: seconds of encoding and decoding.
        exchange: the exchange.
        cost_of: cost of collectives.
        payload: factor of the bytes.
    """
    latency: Array = 0.0
    transfer: Array = 0.0
    for collectives in exchange.rounds:
        cost = _of_round(collectives, cost_of, payload)
        latency = latency + cost.latency + cost.start
        transfer = transfer + cost.transfer
    return Parts(compute, encode, transfer, latency, np.False_)


def _of_round(collectives: Round, cost_of: CostOf, payload: Array) -> Seconds:
    """Time of a round's collectives, which start together and run in turn; bytes are multiplied by `payload`."""
    costs = [
        cost_of(collective.kind, collective.bytes * payload, dtype=collective.dtype, among=collective.among)
        for collective in collectives
    ]
    start = np.maximum.reduce([np.asarray(cost.start, float) for cost in costs])
    return Seconds(sum(cost.latency for cost in costs), sum(cost.transfer for cost in costs), start)


class Piece(NamedTuple):
    """A bucket that the engine starts during the backward pass: its share of a model's bytes, and the share of the pass
    after which its last gradient is ready."""

    share: float
    moment: float


def pieces(ready: Sequence[tuple[float, float]], least: float) -> list[Piece]:
    """The buckets that start during the backward pass; bytes that do not fill a bucket are sent at its end.

    Args:
        ready: as in `Compute`; if empty, no bucket starts early.
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
    """Simulates a step in which some buckets are encoded, and start their first collectives, during the backward pass.

    Encoding delays the pass. The network carries one collective at a time, and slows the pass by gamma - 1 of its busy
    time. At the end of the pass the remaining tensors are encoded and sent. Then further rounds begin; while one bucket
    waits for its results, collectives of the others run. Early buckets are decoded during the exchange of the
    remainder. If encoding follows the first round, as within nodes, all is encoded and decoded after the pass, without
    overlap.

    Args:
        compute: seconds of a step without communication.
        backward: seconds of the backward pass.
        gamma: as in `Compute`.
        encode, decode: seconds of encoding and of decoding, of the whole model.
        exchange: the exchange.
        buckets: the early buckets in order; their shares of encode time are assumed to equal their shares of bytes.
        cost_of: cost of collectives.
        payload: factor of the bytes.
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
        # Other buckets start during the first one's collectives.
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
    """max(before, (2 m - 1) G) + max(gamma backward + encode, G + R - R / modules) + R / modules.

    `before` are the passes before the last of m backward passes. G gathers the weights of all modules, once in each
    pass, as modules are resharded after the forward pass. R reduces the gradients of all modules to the ranks' shards.
    Both run at the same time as the computation on other modules; only the reduction of the last module follows the
    backward pass. Encoding competes with the backward pass for the device.

    Args:
        compute: seconds of a step without communication.
        backward: seconds of the last backward pass.
        gamma: as in `Compute`.
        encode: seconds of encoding and decoding.
        exchange: the exchange, whose rounds reduce the gradients.
        modules: number of modules.
        ranks: number of ranks.
        cost_of: cost of collectives.
        micro_batches: m, the number of backward passes; only the last one reduces gradients.
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
    # The exposed part has the same proportions as the whole.
    share = (beyond_before + beyond_busy) / np.where(spent.total > 0, spent.total, 1)
    exposed = spent * share + last
    waiting = exposed.latency + exposed.start
    waits = (beyond_before > 0) | (beyond_busy > 0)
    return Parts(before + gamma * backward, encode + np.zeros_like(exposed.total), exposed.transfer, waiting, waits)
