"""The model itself: how long a step takes, from what is exchanged, what network and computer cost, and a schedule.

Everything in a `Setting` may be an array; a sweep over thousands of settings is one call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hvdcomp.perfmodel.compute import Compute, EncodeTime
from hvdcomp.perfmodel.exchanges import Exchange
from hvdcomp.perfmodel.network import Network, Seconds
from hvdcomp.perfmodel.schedule import Buckets, Parts, cut, early, overlapped, pieces, sequential, when_ready

Array = Any

UNCOMPRESSED = "none"
"""The spec of dense gradients. Nothing is encoded there, and what its encode time says is what a step takes beside."""

LIMITS = ("compute", "encode", "network", "latency")


@dataclass(frozen=True)
class Setting:
    """Where training would run: numbers, or arrays that broadcast against each other.

    Attributes:
        world_size: number of ranks, 1 or more.
        bytes_per_s: bandwidth of a rank's (or node's) link; None for the calibration's.
        batch_size: of one rank; None for the calibration's.
        compute_speed: by how many times the computer is faster than calibrated, encoding included.
        encode_speed: by how many times encoding and decoding are faster in addition.
        payload: by how much what is sent after the backward pass is multiplied.

    Raises:
        ValueError: for a value out of range.
    """

    world_size: ArrayLike
    bytes_per_s: ArrayLike | None = None
    batch_size: ArrayLike | None = None
    compute_speed: ArrayLike = 1.0
    encode_speed: ArrayLike = 1.0
    payload: ArrayLike = 1.0

    def __post_init__(self) -> None:
        for name, least in (("world_size", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if value is not None and not np.all(np.asarray(value) >= least):
                raise ValueError(f"{name} must be at least {least}, not {value}")
        for name in ("bytes_per_s", "compute_speed", "encode_speed", "payload"):
            value = getattr(self, name)
            if value is not None and not np.all((np.asarray(value) > 0) & np.isfinite(value)):
                raise ValueError(f"{name} must be positive and finite, not {value}")

    @property
    def exchanges(self) -> Array:
        """Where there is somebody to exchange with."""
        return np.asarray(self.world_size) > 1


def predict(
    network: Network,
    compute: Compute,
    exchange: Exchange,
    bucket_bytes: float,
    setting: Setting,
    encode: EncodeTime | None = None,
    early_bytes: float | None = None,
) -> Parts:
    """The parts of a step's time, in s.

    Args:
        network, compute: of the machine and model.
        exchange: what a method sends, with the setting's number of ranks.
        bucket_bytes: how much is sent at a time during the backward pass; at most, if `compute.ready` is known.
        setting: where it would run.
        encode: what encoding and decoding take; None for nothing. What an overlapped method spends on it stands
            before its communication and is not hidden either. Of dense gradients, where nothing is encoded, it is what
            a step takes beside all else, and counts as latency.
        early_bytes: of gradients, the least that the engine sends by itself in the backward pass, as `bucket_bytes` of
            `hvdcomp.Compression`; None if it sends all at its end.
    """
    step, backward = passes(compute, setting)
    cost_of = _cost_of(network, setting)
    if exchange.overlapped:
        parts = _carried(compute, exchange, exchange.bytes, bucket_bytes, setting, cost_of)
        if exchange.is_dense:
            return parts._replace(latency=parts.latency + _beside(encode, setting, exchange))
        return parts._replace(encode=parts.encode + encode_s(encode, setting, exchange))
    spent = encode_s(encode, setting, exchange)
    parts = sequential(step, spent, exchange, cost_of, setting.payload)
    if buckets := [] if early_bytes is None else pieces(compute.ready, early_bytes / exchange.dense_bytes):
        decode = decode_s(encode, setting, exchange)
        gamma = np.where(setting.exchanges, compute.gamma, 1.0)
        whole = (step, backward, gamma, spent - decode, decode)
        hidden = early(*whole, exchange, buckets, cost_of, setting.payload)
        parts = parts.towards(hidden, compute.hides)
    return parts._replace(latency=parts.latency + np.where(setting.exchanges, compute.engine_s, 0.0))


def local_step_s(
    network: Network, compute: Compute, exchange: Exchange, setting: Setting, encode: EncodeTime | None, every: int
) -> Array:
    """Seconds of a step of which each `every`-th alone ends with an exchange, behind which nothing is hidden
    (`hvdcomp.torch.LocalSteps`): a step of one rank, and the exchange over `every`. The outer step is not counted.

    Args:
        network, compute, exchange, setting, encode: as for `predict`.
        every: steps from one exchange to the next.
    """
    step, _ = passes(compute, setting)
    spent = encode_s(encode, setting, exchange)
    parts = sequential(step, spent, exchange, _cost_of(network, setting), setting.payload)
    engine_s = np.where(setting.exchanges, compute.engine_s, 0.0)
    return step + (parts.total - step + engine_s) / every


def _carried(
    compute: Compute, exchange: Exchange, size: Array, bucket_bytes: float, setting: Setting, cost_of: Any
) -> Parts:
    """A step whose gradients, of `size` bytes in all, Horovod itself carries."""
    step, backward = passes(compute, setting)
    gamma, ranks = compute.gamma, setting.world_size
    if compute.ready:
        dtype = max(
            (collective for collectives in exchange.rounds for collective in collectives),
            key=lambda collective: collective.bytes,
        ).dtype
        parts = when_ready(step, backward, gamma, compute.ready, size, bucket_bytes, cost_of, ranks, dtype)
    else:
        whole = cut(exchange.bytes, bucket_bytes)
        share = size / exchange.bytes
        buckets = Buckets(whole.number, whole.size * share, whole.last * share)
        parts = overlapped(step, backward, gamma, buckets, cost_of, ranks)
    return parts._replace(latency=parts.latency + np.where(setting.exchanges, compute.horovod_s, 0.0))


def passes(compute: Compute, setting: Setting) -> tuple[Array, Array]:
    """Seconds of a step without communication, and of the backward pass in it."""
    faster = np.asarray(setting.compute_speed, float)
    share = compute.share(setting.batch_size) / faster
    both = ((compute.forward_s or 0.0) + compute.backward_s) * share
    return both + compute.optimizer_s / faster, compute.backward_s * share


def encode_s(encode: EncodeTime | None, setting: Setting, exchange: Exchange) -> Array:
    """Seconds of encoding and decoding; none where there is nobody to exchange with."""
    if encode is None:
        return 0.0
    faster = np.asarray(setting.compute_speed, float) * np.asarray(setting.encode_speed, float)
    return np.where(setting.exchanges, encode.seconds(exchange.decoded(setting.world_size)) / faster, 0.0)


def _beside(encode: EncodeTime | None, setting: Setting, dense: Exchange) -> Array:
    """`encode_s` of dense gradients: what encodes faster does not change it."""
    return encode_s(encode, replace(setting, encode_speed=1.0), dense)


def decode_s(encode: EncodeTime | None, setting: Setting, exchange: Exchange) -> Array:
    """Seconds of decoding, as far as they are known apart from those of encoding."""
    if encode is None:
        return 0.0
    return encode_s(replace(encode, encode_s=0.0), setting, exchange)


def limited_by(parts: Parts) -> Array:
    """The largest of the four parts of a step's time, by its name in `LIMITS`.

    The passes are left out where they end before the communication that was to hide behind them.
    """
    compute = np.where(parts.waits, 0.0, parts.compute)
    every = np.broadcast_arrays(compute, parts.encode, parts.transfer, parts.latency)
    return np.array(LIMITS)[np.argmax(every, axis=0)]


def least_compression_factor(
    network: Network,
    compute: Compute,
    dense: Exchange,
    bucket_bytes: float,
    setting: Setting,
    efficiency: float = 0.95,
) -> Array:
    """By how much an ideal compressor would have to compress, for a step to be nearly as fast as on one rank.

    An ideal compressor costs nothing and shrinks every bucket of the dense exchange during the backward pass, and what
    dense gradients take beside all else.
    What it can reach at best is a step whose communication is all hidden: the backward pass slowed by gamma. That is
    taken as linear scaling here, since gamma alone can be more than the missing share.

    Args:
        network, compute, dense, bucket_bytes, setting: as for `predict`; `dense` is the uncompressed exchange.
        efficiency: share of linear scaling that is to be reached, 0 < efficiency < 1.

    Returns:
        The factor, 1 where no compression is needed, NaN where latency alone is too much for any factor.
    """
    if not 0 < efficiency < 1:
        raise ValueError(f"efficiency must be between 0 and 1, not {efficiency}")
    step, backward = passes(compute, setting)
    cost_of = _cost_of(network, setting)

    def seconds(factor: Array) -> Array:
        parts = _carried(compute, dense, dense.bytes / factor, bucket_bytes, setting, cost_of)
        return parts.total + _beside(compute.encode.get(UNCOMPRESSED), setting, dense) / factor

    slowed = np.where(setting.exchanges, compute.gamma, 1.0) * backward
    allowed = (step - backward + slowed) / efficiency
    shape = np.broadcast(seconds(1.0), allowed).shape
    low, high = np.zeros(shape), np.full(shape, np.log(1e9))
    for _ in range(60):  # halves an interval of logarithms: far below what can be told apart
        middle = (low + high) / 2
        enough = seconds(np.exp(middle)) <= allowed
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    reached = np.where(seconds(1.0) <= allowed, 1.0, np.exp(high))
    return np.where(seconds(1e9) <= allowed, reached, np.nan)


def _cost_of(network: Network, setting: Setting) -> Any:
    def cost_of(kind: str, size: Array, **what: Any) -> Seconds:
        return network.seconds(kind, size, setting.world_size, setting.bytes_per_s, **what)

    return cost_of
