"""Predicts the time of a step from its exchange, the times of the network and of the computer, and a schedule.

Every value in a `Setting` may be an array, so one call predicts the times of thousands of settings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hvdcomp.compressors.bucket import GATHERED_BYTES
from hvdcomp.perfmodel.compute import Compute, EncodeTime
from hvdcomp.perfmodel.exchanges import Exchange
from hvdcomp.perfmodel.network import Network, Seconds
from hvdcomp.perfmodel.schedule import Buckets, Parts, cut, early, overlapped, pieces, sequential, sharded, when_ready

Array = Any

UNCOMPRESSED = "none"
"""The spec of dense gradients. Dense gradients are not encoded, so the encode time of this spec has a different
meaning: it is the part of a dense step's time that the other numbers do not include."""

LIMITS = ("compute", "encode", "network", "latency")


@dataclass(frozen=True)
class Setting:
    """The conditions of a training run. Each value is a number or an array; arrays broadcast against each other.

    Attributes:
        world_size: number of ranks, 1 or more.
        bytes_per_s: bandwidth of the link of a rank (or of a node), in bytes/s; None for the calibrated bandwidth.
        batch_size: batch size of one rank; None for the calibrated batch size.
        compute_speed: factor by which the computer is faster than the calibrated one, also in encoding.
        encode_speed: additional factor by which encoding and decoding are faster.
        payload: factor by which the bytes that hvdcomp's engine sends are multiplied.
        micro_batches: number of backward passes per step (gradient accumulation). Only the last backward pass hides
            communication. `batch_size` is the batch size of one backward pass.
        recompute: share of the forward pass that the backward pass repeats (activation checkpointing).

    Raises:
        ValueError: if a value is out of range.
    """

    world_size: ArrayLike
    bytes_per_s: ArrayLike | None = None
    batch_size: ArrayLike | None = None
    compute_speed: ArrayLike = 1.0
    encode_speed: ArrayLike = 1.0
    payload: ArrayLike = 1.0
    micro_batches: ArrayLike = 1
    recompute: ArrayLike = 0.0

    def __post_init__(self) -> None:
        for name, least in (("world_size", 1), ("batch_size", 1), ("micro_batches", 1), ("recompute", 0)):
            value = getattr(self, name)
            if value is not None and not np.all(np.asarray(value) >= least):
                raise ValueError(f"{name} must be at least {least}, not {value}")
        for name in ("bytes_per_s", "compute_speed", "encode_speed", "payload"):
            value = getattr(self, name)
            if value is not None and not np.all((np.asarray(value) > 0) & np.isfinite(value)):
                raise ValueError(f"{name} must be positive and finite, not {value}")

    @property
    def exchanges(self) -> Array:
        """Whether there are other ranks to exchange gradients with."""
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
    """Predicts the time of a step, by parts, in seconds.

    Args:
        network: the times of collectives.
        compute: the times of the model's computation.
        exchange: the collectives of a step with the number of ranks in `setting`.
        bucket_bytes: bytes of gradients that the framework sends at a time during the backward pass. If `compute.ready`
            is known, this number is an upper limit.
        setting: the conditions of the training, such as the number of ranks.
        encode: the time to encode and decode the gradients; None if it is 0. If the framework exchanges the gradients
            itself, encoding precedes communication and does not overlap with it. For dense gradients, `encode` is the
            part of a step's time that the other numbers do not include, and counts as latency.
        early_bytes: the smallest bucket that the engine sends during the backward pass, in bytes of gradients, as
            `bucket_bytes` of `hvdcomp.Compression`; None if the engine sends all gradients after the backward pass. The
            engine also sends all gradients after the backward pass if a rank would gather more than `GATHERED_BYTES`.
    """
    step, backward = passes(compute, setting)
    cost_of = _cost_of(network, setting)
    if exchange.weights_bytes:
        modules = exchange.dense_bytes / bucket_bytes
        encoded = 0.0 if encode is None else _sharded_encode_s(encode, setting, exchange, modules)
        gamma = np.where(setting.exchanges, compute.gamma, 1.0)
        known = (exchange, modules, setting.world_size, cost_of, setting.micro_batches)
        return sharded(step, backward, gamma, encoded, *known)
    if exchange.overlapped:
        parts = _overlapped_step(compute, exchange, exchange.bytes, bucket_bytes, setting, cost_of)
        if exchange.is_dense:
            return parts._replace(latency=parts.latency + _overhead_s(encode, setting, exchange))
        return parts._replace(encode=parts.encode + encode_s(encode, setting, exchange))
    spent = encode_s(encode, setting, exchange)
    parts = sequential(step, spent, exchange, cost_of, setting.payload)
    if buckets := [] if early_bytes is None else pieces(compute.ready, early_bytes / exchange.dense_bytes):
        decode = decode_s(encode, setting, exchange)
        gamma = np.where(setting.exchanges, compute.gamma, 1.0)
        whole = (step, backward, gamma, spent - decode, decode)
        hidden = early(*whole, exchange, buckets, cost_of, setting.payload)
        in_one_part = exchange.gathered(setting.world_size) * setting.payload <= GATHERED_BYTES
        parts = parts.toward(hidden, np.where(in_one_part, compute.hides, 0.0))
    return parts._replace(latency=parts.latency + np.where(setting.exchanges, compute.engine_s, 0.0))


def local_step_s(
    network: Network, compute: Compute, exchange: Exchange, setting: Setting, encode: EncodeTime | None, every: int
) -> Array:
    """Predicts the mean seconds of a step with local steps (`hvdcomp.torch.LocalSteps`), if only every `every`-th step
    ends with an exchange. The mean is the time of a step without exchange, plus 1 / `every` of the time that the
    exchange and the outer optimizer take.

    The exchange does not overlap with anything, because it begins after the step of the inner optimizer. The outer
    optimizer also processes all weights once, so its step is assumed to take the same time as a step of the inner
    optimizer.

    Args:
        network, compute, exchange, setting, encode: as in `predict`.
        every: number of steps from one exchange to the next. With 1, ranks exchange a pseudo-gradient after each step.
    """
    step, _ = passes(compute, setting)
    spent = encode_s(encode, setting, exchange)
    parts = sequential(step, spent, exchange, _cost_of(network, setting), setting.payload)
    engine_s = np.where(setting.exchanges, compute.engine_s, 0.0)
    outer_s = compute.optimizer_s / np.asarray(setting.compute_speed, float)
    return step + (parts.total - step + engine_s + outer_s) / every


def _overlapped_step(
    compute: Compute, exchange: Exchange, size: Array, bucket_bytes: float, setting: Setting, cost_of: Any
) -> Parts:
    """The parts of a step's time if Horovod or DistributedDataParallel exchanges the gradients, `size` bytes in all."""
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
    """The seconds of a step without communication, and the seconds of its last backward pass."""
    faster = np.asarray(setting.compute_speed, float)
    share = compute.share(setting.batch_size) / faster
    forward = compute.forward_s or 0.0
    backward = compute.backward_s + forward * np.asarray(setting.recompute, float)
    passes_s = (forward + backward) * share * np.asarray(setting.micro_batches, float)
    return passes_s + compute.optimizer_s / faster, backward * share


def encode_s(encode: EncodeTime | None, setting: Setting, exchange: Exchange) -> Array:
    """Seconds of encoding and decoding in a step; 0 if there is only one rank."""
    if encode is None:
        return 0.0
    faster = np.asarray(setting.compute_speed, float) * np.asarray(setting.encode_speed, float)
    return np.where(setting.exchanges, encode.seconds(exchange.decoded(setting.world_size)) / faster, 0.0)


def _sharded_encode_s(encode: EncodeTime, setting: Setting, exchange: Exchange, modules: float) -> Array:
    """Seconds of encoding and decoding in a step, if FSDP reduces one module after the other. Nothing is encoded on a
    single node. The host needs `EncodeTime.host_s` for each module. A rank encodes and decodes only its share of the
    gradients that its node sends."""
    if not any(collective.kind == "alltoall" for collectives in exchange.rounds for collective in collectives):
        return 0.0
    faster = np.asarray(setting.compute_speed, float) * np.asarray(setting.encode_speed, float)
    own = encode.part(1 / exchange.ranks_per_node)
    seconds = replace(own, host_s=own.host_s * modules).seconds(1)
    return np.where(setting.exchanges, seconds / faster, 0.0)


def _overhead_s(encode: EncodeTime | None, setting: Setting, dense: Exchange) -> Array:
    """Seconds of a dense step that the other numbers do not include (`UNCOMPRESSED`). `Setting.encode_speed` does not
    change them."""
    return encode_s(encode, replace(setting, encode_speed=1.0), dense)


def decode_s(encode: EncodeTime | None, setting: Setting, exchange: Exchange) -> Array:
    """Seconds of decoding in a step, as far as they are known separately from the seconds of encoding."""
    if encode is None:
        return 0.0
    return encode_s(replace(encode, encode_s=0.0, host_s=0.0), setting, exchange)


def limited_by(parts: Parts) -> Array:
    """The name in `LIMITS` of the largest part of a step's time.

    Computation does not count if it ends before the communication that overlaps with it, because a faster computer
    would then only wait longer.
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
    """The compression factor with which an ideal compressor makes a step nearly as fast as on one rank.

    An ideal compressor itself takes no time. It divides the bytes of every bucket, and the overhead of dense gradients,
    by the compression factor. In the fastest possible step, all communication overlaps with the backward pass, which
    becomes slower by the factor gamma. The speed of this step counts as linear scaling, because gamma alone can cost
    more than `efficiency` allows.

    Args:
        network, compute, bucket_bytes, setting: as in `predict`.
        dense: the collectives of a step with uncompressed gradients.
        efficiency: share of linear scaling to reach, 0 < efficiency < 1.

    Returns:
        The factor. It is 1 if no compression is needed, and NaN if no factor suffices because of latency.
    """
    if not 0 < efficiency < 1:
        raise ValueError(f"efficiency must be between 0 and 1, not {efficiency}")
    step, backward = passes(compute, setting)
    cost_of = _cost_of(network, setting)

    def seconds(factor: Array) -> Array:
        parts = _overlapped_step(compute, dense, dense.bytes / factor, bucket_bytes, setting, cost_of)
        return parts.total + _overhead_s(compute.encode.get(UNCOMPRESSED), setting, dense) / factor

    slowed = np.where(setting.exchanges, compute.gamma, 1.0) * backward
    allowed = (step - backward + slowed) / efficiency
    shape = np.broadcast(seconds(1.0), allowed).shape
    low, high = np.zeros(shape), np.full(shape, np.log(1e9))
    for _ in range(60):  # bisection of the logarithm, much finer than needed
        middle = (low + high) / 2
        enough = seconds(np.exp(middle)) <= allowed
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    reached = np.where(seconds(1.0) <= allowed, 1.0, np.exp(high))
    return np.where(seconds(1e9) <= allowed, reached, np.nan)


def _cost_of(network: Network, setting: Setting) -> Any:
    def cost_of(kind: str, size: Array, **options: Any) -> Seconds:
        return network.seconds(kind, size, setting.world_size, setting.bytes_per_s, **options)

    return cost_of
