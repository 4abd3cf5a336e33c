"""How much of what sending in the backward pass could save, it really saves here: one compressor, through the binding,
with overlap and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdcomp import TwoLevel
from hvdcomp.compressors import BUCKET_BYTES, Compressor, TensorInfo
from hvdcomp.perfmodel.compute import Compute
from hvdcomp.perfmodel.exchanges import exchange_of
from hvdcomp.perfmodel.network import Network
from hvdcomp.perfmodel.predict import Setting, predict
from hvdcomp.tools.bench.carrier import Carrier, Distributed
from hvdcomp.tools.bench.fit import Reading
from hvdcomp.tools.bench.workload import Workload

EARLY, AT_END = "sent in the backward pass", "sent at its end"
_FEWEST_BUCKETS = 3  # of a model, so that small ones have buckets that start early too
_LEAST_SAVED = 0.02  # of a step: of less than this, or than its repetitions differ, nobody could measure a share


@dataclass(frozen=True)
class OverlapTrial:
    """What is trained in both ways.

    Attributes:
        compressor: of both.
        early_bytes: of gradients, the least that a bucket holds that starts in the backward pass.
        ranks: how many train.
    """

    compressor: Compressor
    early_bytes: int
    ranks: int

    def distributed(self, way: str, workload: Workload, carrier: Carrier, seed: int) -> Distributed:
        """The training of one way, `EARLY` or `AT_END`.

        Args:
            seed: of the compressor.
        """
        options = {"seed": seed, "overlap": way == EARLY}
        return carrier.compressed(workload, str(self.compressor), way, bucket_bytes=self.early_bytes, **options)

    def hidden_share(
        self,
        network: Network,
        compute: Compute,
        tensors: Sequence[TensorInfo],
        at_end: Reading,
        early: Reading,
    ) -> tuple[float | None, str]:
        """`Compute.hides`, or None if it cannot be told here; and why it is that.

        Args:
            network, compute: as measured, with the compressor's encode time, and the moment of each gradient.
            tensors: of the model.
            at_end, early: steps of both ways, as measured.
        """
        exchange = exchange_of(self.compressor, tensors, self.ranks)
        encode, setting = compute.encode[str(self.compressor)], Setting(self.ranks)
        known = (network, replace(compute, hides=1.0), exchange, float(self.early_bytes), setting, encode)
        whole, least = (float(predict(*known, one).total) for one in (None, float(self.early_bytes)))
        could = whole - least
        what = f"{self.compressor} in buckets of {self.early_bytes:,} bytes could save {1e3 * could:.2f} ms"
        if could < max(_LEAST_SAVED, at_end.spread, early.spread) * whole:
            return None, f"taken as 1, as it cannot be told: {what} of {1e3 * whole:.2f} ms"
        times = f"{1e3 * at_end.seconds:.2f} ms a step without overlap, {1e3 * early.seconds:.2f} ms with it"
        return min(max((at_end.seconds - early.seconds) / could, 0.0), 1.0), f"measured: {what}; {times}"


def trial_of(specs: Sequence[Compressor], tensors: Sequence[TensorInfo], carrier: Carrier) -> OverlapTrial | None:
    """The compressor that sends most, of those whose buckets can start in the backward pass and that exchange in one
    level; None if there is none."""
    ranks = carrier.ranks.size
    sent = {
        spec: exchange.bytes
        for spec in specs
        if spec.has_bucket_form
        and not isinstance(spec, TwoLevel)
        and not (exchange := exchange_of(spec, tensors, ranks)).overlapped
    }
    if not sent:
        return None
    whole = sum(4 * tensor.size for tensor in tensors)
    least = carrier.early_bytes if carrier.own_buckets else 1
    early_bytes = max(least, min(BUCKET_BYTES, whole // _FEWEST_BUCKETS))
    return OverlapTrial(max(sent, key=lambda one: sent[one]), early_bytes, ranks)
