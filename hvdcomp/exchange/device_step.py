"""A bucket's way through one step on a device: as `bucket_step`, but nothing waits for the device."""

from __future__ import annotations

from types import ModuleType

from hvdcomp.arrays.types import Array
from hvdcomp.compressors.protocol import Context
from hvdcomp.exchange.bucket_step import BucketStep
from hvdcomp.exchange.buckets import EngineBucket
from hvdcomp.exchange.clock import Clock


class DeviceStep(BucketStep):
    """The tensors of a bucket on their way through one step.

    What says whether something is not finite is an element that is NaN or 0, on the device: `found_inf` and
    `found_inf_after` too.
    """

    on_device = True

    def _settle(self, found_inf: Array) -> None:
        self.held.bucket.call("settle", found_inf, self._adds(), self._aside)
        self._keep(found_inf)


def bucket_step(xp: ModuleType, held: EngineBucket, context: Context, factor: Array | None, clock: Clock) -> BucketStep:
    """A bucket's way through one step, on the host or on its device; arguments as of `BucketStep`."""
    return (DeviceStep if held.on_device else BucketStep)(xp, held, context, factor, clock)
