"""A bucket's way through one step on a device: as `bucket_step`, but nothing waits for the device."""

from __future__ import annotations

from hvdcomp.arrays.types import Array
from hvdcomp.exchange.bucket_step import BucketStep


class DeviceStep(BucketStep):
    """The tensors of a bucket on their way through one step.

    What says whether something is not finite is an element that is NaN or 0, on the device: `found_inf`,
    `found_inf_after`, and what `finish` takes.
    """

    on_device = True

    def _settle(self, counts: Array) -> None:
        self.group.bucket.call("settle", counts, self._adds(), self._aside)
        self._keep(counts)
