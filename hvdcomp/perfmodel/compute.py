"""Times of computation on one rank: forward and backward pass, encoding and decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Array = Any


@dataclass(frozen=True)
class EncodeTime:
    """Seconds of one step's compression of a whole model, memory included.

    Attributes:
        encode_s, decode_s: times that do not depend on the number of ranks.
        decode_per_rank_s: time to decode one payload of the whole model. A rank decodes a payload of each rank if they
            are gathered, and about two if they are scattered (`Exchange.decoded`).
        source: source of the numbers.
        estimated: whether they were estimated, as `source` says, and not measured.
        host_s: time that the host needs to launch the kernels of a step, while the device works. Encoding and decoding
            take at least this time, even if only a part of the model is compressed.
    """

    encode_s: float
    decode_s: float = 0.0
    decode_per_rank_s: float = 0.0
    source: str = ""
    estimated: bool = False
    host_s: float = 0.0

    def seconds(self, decoded: ArrayLike) -> Array:
        """Seconds of encoding and decoding, if a rank decodes this number of payloads."""
        seconds = self.encode_s + self.decode_s + self.decode_per_rank_s * np.asarray(decoded, float)
        return np.maximum(seconds, self.host_s)

    def part(self, share: float) -> EncodeTime:
        """The time for a share of the model, assuming that the time is proportional to the share."""
        device = (self.encode_s * share, self.decode_s * share, self.decode_per_rank_s * share)
        return EncodeTime(*device, host_s=self.host_s)


@dataclass(frozen=True)
class Compute:
    """The times of one model on one rank.

    Attributes:
        backward_s: seconds of the backward pass alone.
        forward_s: seconds of the forward pass and all else except backward pass and exchange; None if unknown.
        optimizer_s: seconds of the optimizer's step, which does not depend on the batch.
        engine_s: further seconds of a step through hvdcomp's engine, besides passes, encoding and collectives: the
            presence check, and the handling of each tensor by Horovod or DistributedDataParallel.
        horovod_s: seconds after the last collective of a step whose gradients Horovod or DistributedDataParallel
            exchanges itself, with any cast.
        ready: pairs of a share of all bytes, up to 1, and the share of the backward pass after which the library can
            send these bytes; both ascending. Empty if unknown. Horovod sends single gradients, DistributedDataParallel
            its buckets.
        gamma: factor by which concurrent communication slows the backward pass, 1 or more.
        hides: the time that hvdcomp's engine saves by sending during the backward pass, as a share (0 to 1) of the time
            that it would save if computation and communication shared no resource except by gamma. Far below 1 if one
            processor core computes and communicates.
        batch_size: batch size of one rank for these times; None if unknown.
        encode: encode time by spec of the compressor. For methods that the library exchanges itself, "none" included,
            it is the time of such a step that the other numbers do not include.
    """

    backward_s: float
    forward_s: float | None = None
    gamma: float = 1.0
    batch_size: int | None = None
    encode: Mapping[str, EncodeTime] = field(default_factory=dict)
    optimizer_s: float = 0.0
    engine_s: float = 0.0
    horovod_s: float = 0.0
    ready: tuple[tuple[float, float], ...] = ()
    hides: float = 1.0

    def share(self, batch_size: ArrayLike | None) -> Array:
        """The factor by which the times of the passes change for another batch size, assuming that they are
        proportional to the batch size.

        Raises:
            ValueError: if the batch size of the times is unknown.
        """
        if batch_size is None:
            return 1.0
        if self.batch_size is None:
            raise ValueError(
                "the calibration does not say for which batch size its times were measured, so hvdcomp cannot predict "
                "another batch size; leave the batch size out"
            )
        return np.asarray(batch_size, float) / self.batch_size
