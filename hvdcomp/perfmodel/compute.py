"""The times of computation on one rank: the forward and backward pass, encoding and decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Array = Any


@dataclass(frozen=True)
class EncodeTime:
    """The encode time of a method: the seconds that a rank needs in one step to compress and decompress the gradients
    of a whole model. Error feedback is included.

    Attributes:
        encode_s, decode_s: seconds of compression and of decompression that do not depend on the number of ranks.
        decode_per_rank_s: seconds to decode one payload of the whole model. If payloads are gathered, a rank decodes
            one payload from each rank. If payloads are scattered, a rank decodes the bytes of about two payloads
            (`Exchange.decoded`).
        source: the source of the numbers.
        estimated: whether the numbers were estimated, not measured. `source` explains how.
        host_s: seconds that the host needs to launch the kernels of a step, while the device works. Encoding and
            decoding take at least this time, even if only a part of the model is compressed.
    """

    encode_s: float
    decode_s: float = 0.0
    decode_per_rank_s: float = 0.0
    source: str = ""
    estimated: bool = False
    host_s: float = 0.0

    def seconds(self, decoded: ArrayLike) -> Array:
        """Seconds of encoding and decoding, if a rank decodes `decoded` payloads."""
        seconds = self.encode_s + self.decode_s + self.decode_per_rank_s * np.asarray(decoded, float)
        return np.maximum(seconds, self.host_s)

    def part(self, share: float) -> EncodeTime:
        """The encode time for a share of the model. The device's time is assumed to be proportional to the share."""
        device = (self.encode_s * share, self.decode_s * share, self.decode_per_rank_s * share)
        return EncodeTime(*device, host_s=self.host_s)


@dataclass(frozen=True)
class Compute:
    """The times of one model on one rank.

    Attributes:
        backward_s: seconds of the backward pass, without communication.
        forward_s: seconds of the forward pass and of everything else except the backward pass, the exchange and
            `optimizer_s`; None if unknown.
        optimizer_s: seconds of the optimizer's step. They do not depend on the batch size.
        engine_s: seconds of a step with hvdcomp's engine that are not part of the passes, encoding or collectives. They
            are spent on the presence check and on the work that Horovod or DistributedDataParallel does for each
            tensor.
        horovod_s: the seconds that follow the last collective of a step in which Horovod or DistributedDataParallel
            exchanges the gradients itself, with or without a cast.
        ready: when gradients are ready, as pairs of two numbers: a share of all bytes of gradients, and the share of
            the backward pass after which the library can send these bytes. Both numbers ascend from pair to pair, up to
            1. Horovod sends single gradients, and DistributedDataParallel sends its buckets. Empty if unknown.
        gamma: factor by which concurrent communication slows the backward pass, 1 or more.
        hides: share, from 0 to 1, of the predicted overlap that hvdcomp's engine reaches. It is the time that the
            engine saves by sending during the backward pass, divided by the time that it would save if communication
            slowed computation only by gamma. The share is far below 1 if a single processor core both computes and
            communicates.
        batch_size: batch size of one rank at which these times were measured; None if unknown.
        encode: the encode time of each method, by spec. For methods whose gradients the library exchanges itself, such
            as "none", it is the part of a step's time that the other numbers do not include.
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
        """The factor by which a different batch size changes the times of the forward and backward pass. These times
        are assumed to be proportional to the batch size.

        Raises:
            ValueError: if it is unknown at which batch size the times were measured.
        """
        if batch_size is None:
            return 1.0
        if self.batch_size is None:
            raise ValueError(
                "the calibration does not contain the batch size for which its times were measured, so hvdcomp cannot "
                "predict another batch size; leave the batch size out"
            )
        return np.asarray(batch_size, float) / self.batch_size
