"""Times of the computer: forward and backward pass, and encoding and decoding, on one rank without a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Array = Any


@dataclass(frozen=True)
class EncodeTime:
    """Seconds that one step's compression takes for a whole model, memory included.

    Attributes:
        encode_s, decode_s: what does not depend on the number of ranks.
        decode_per_rank_s: what decoding a payload of the whole model takes. A rank decodes one of each rank if they are
            gathered, and about two if they are scattered (`Exchange.decoded`).
        source: where the numbers are from.
        estimated: whether they are not measured, but estimated as `source` says.
    """

    encode_s: float
    decode_s: float = 0.0
    decode_per_rank_s: float = 0.0
    source: str = ""
    estimated: bool = False

    def seconds(self, decoded: ArrayLike) -> Array:
        """Encoding and decoding together, where a rank decodes this number of payloads."""
        return self.encode_s + self.decode_s + self.decode_per_rank_s * np.asarray(decoded, float)

    def part(self, share: float) -> EncodeTime:
        """The time of a share of the model, if all of it takes alike."""
        return EncodeTime(self.encode_s * share, self.decode_s * share, self.decode_per_rank_s * share)


@dataclass(frozen=True)
class Compute:
    """The times of one model on one rank.

    Attributes:
        backward_s: the backward pass alone.
        forward_s: the forward pass and all else that is neither backward pass nor exchange; None if not known.
        optimizer_s: the optimizer's step, which does not depend on the batch.
        engine_s: what a step through hvdcomp's engine takes beside passes, encoding and its collectives: the numbers
            that ride along, and the handling of each tensor by Horovod or DistributedDataParallel.
        horovod_s: what a step takes, after its last collective, in which Horovod or DistributedDataParallel carries the
            gradients itself, whatever they are cast to.
        ready: when that library can send what during the backward pass: pairs of the share of all bytes, up to 1, and
            of the share of the backward pass after which that share of the bytes is ready. Both rise. Empty if not
            known. Horovod can send each gradient by itself, DistributedDataParallel its buckets.
        gamma: by how much communication that runs at the same time slows the backward pass, 1 or more.
        hides: of the time that hvdcomp's engine would save by sending during the backward pass if computing and sending
            shared nothing but what gamma says, the share that it really saves; from 0 to 1. Where one processor core
            does both it is far from 1.
        batch_size: of one rank, that the times are for; None if not known.
        encode: by spec of the compressor. Of what that library carries itself, "none" included, it is all that such a
            step takes beside what the other numbers say.
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
        """By how much another batch size multiplies the times of the passes: taken as proportional.

        Raises:
            ValueError: if it is not known which batch size the times are for.
        """
        if batch_size is None:
            return 1.0
        if self.batch_size is None:
            raise ValueError(
                "the calibration does not say which batch size its times are for, so no other can be asked for"
            )
        return np.asarray(batch_size, float) / self.batch_size
