"""A bucket's way through one step on a device: as `bucket_step`, but nothing waits for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdcomp.arrays.types import Array
from hvdcomp.compressors.memory import MomentumCorrection
from hvdcomp.exchange.bucket_step import BucketStep, Sums
from hvdcomp.exchange.buckets import Group
from hvdcomp.kernels import cuda


class DeviceStep(BucketStep):
    """The tensors of a bucket on their way through one step.

    What says whether something is not finite is an element that is NaN or 0, on the device: `found_inf`,
    `found_inf_after`, and what `finish` takes. Nobody looks at x, and no gradients are added up: then tensors go one by
    one.
    """

    on_device = True

    def _enter(self, group: Group, factor: Array | None) -> None:
        bucket, memory = group.bucket, group.bucket.memory
        settings = bucket.table.bucket
        settings.decay = memory.keeps
        if isinstance(memory, MomentumCorrection):
            settings.momentum, settings.nesterov = memory.momentum, memory.nesterov
        bucket.kernels.begin(factor, memory.is_momentum)
        if bucket.keeps:
            group.residuals.enter(bucket.kernels, group.numbers, memory)

    def open(
        self,
        gradients: Mapping[str, Array],
        in_place: bool,
        made: Mapping[str, int],
        sources: Mapping[str, Array],
        sums: Sums | None,
    ) -> None:
        group, bucket, xp = self.group, self.group.bucket, self._xp
        start = xp.mark(self.like)
        self._given = [gradients[name] for name in group.names]
        self._results: Sequence[Array] = group.arrays
        bucket.segments["result"] = bucket.segments["gradient"]
        if not in_place:
            self._results, bucket.segments["result"] = cuda.split_like(group.arrays)
        if bucket.compressors[0].keeps_state:
            group.prepare_states(xp)
        self._generator = bucket.compressors[0].aggregate_bucket(bucket)
        self.marks.append((start, xp.mark(self.like)))

    def finish(self, counts: Any) -> dict[str, Array]:
        """Keeps what was not sent or, if the element `counts` is NaN, what was kept before; returns the results by
        name."""
        group, bucket, xp = self.group, self.group.bucket, self._xp
        start = xp.mark(self.like)
        self.had_residual = group.had_residuals
        bucket.call("settle", counts)
        if bucket.keeps:
            group.residuals.commit(group.numbers, bucket.memory)
        if self.compressor.keeps_state:
            group.keep_states(xp, counts)
        group.end_states()
        results = dict(zip(group.names, xp.like_originals(self._results, self._given), strict=True))
        group.arrays = self._given = self._results = ()  # the bucket outlives the step; what it was given need not
        self.marks.append((start, xp.mark(self.like)))
        return results
