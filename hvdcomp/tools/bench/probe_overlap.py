"""Measures how much time training saves by sending during the backward pass, as a share of the largest possible saving.
The measurement trains with one compressor, with and without overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdcomp import TwoLevel
from hvdcomp.arrays.types import dtype_bytes
from hvdcomp.compressors import BUCKET_BYTES, Compressor, TensorInfo
from hvdcomp.perfmodel.compute import Compute
from hvdcomp.perfmodel.exchanges import exchange_of
from hvdcomp.perfmodel.network import Network
from hvdcomp.perfmodel.predict import Setting, predict
from hvdcomp.tools.bench.carrier import Carrier, Distributed
from hvdcomp.tools.bench.fit import Reading
from hvdcomp.tools.bench.workload import Workload

EARLY, AT_END = "sent in the backward pass", "sent at its end"
_FEWEST_BUCKETS = 3  # small models also have at least this number of buckets, so that some are sent early
# The smallest saving that can be measured, as a share of a step. A saving within the noise cannot be measured either.
_LEAST_SAVED = 0.02


@dataclass(frozen=True)
class OverlapTrial:
    """A comparison of training with and without overlap.

    Attributes:
        compressor: spec of the compressor in both training runs.
        early_bytes: the size in bytes of the smallest bucket of gradients that is sent during the backward pass.
        ranks: number of ranks.
    """

    compressor: Compressor
    early_bytes: int
    ranks: int

    def distributed(self, way: str, workload: Workload, carrier: Carrier, seed: int) -> Distributed:
        """Creates the training run with overlap (if `way` is `EARLY`) or without overlap (if `way` is `AT_END`).

        Args:
            seed: seed of the compressor.
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
        """Computes `Compute.hides`, the share of the possible overlap that training achieves; None if this share cannot
        be measured here. The second result is a text that says where the share comes from.

        Args:
            network, compute: the measured costs of collectives, and the measured times of the model. The times of the
                model include the encode time of the compressor, and the time at which each gradient is ready.
            tensors: the tensors of the model.
            at_end, early: the measured steps without overlap and with overlap.
        """
        exchange = exchange_of(self.compressor, tensors, self.ranks)
        encode, setting = compute.encode[str(self.compressor)], Setting(self.ranks)
        setup = (network, replace(compute, hides=1.0), exchange, float(self.early_bytes), setting, encode)
        whole, least = (float(predict(*setup, early_bytes).total) for early_bytes in (None, float(self.early_bytes)))
        saving = whole - least
        saved = f"{self.compressor} in buckets of {self.early_bytes:,} bytes could save {1e3 * saving:.2f} ms"
        if saving < max(_LEAST_SAVED, at_end.spread, early.spread) * whole:
            return None, (
                f"assumed to be 1 (all of the possible overlap), because the saving is too small to measure: {saved} "
                f"of {1e3 * whole:.2f} ms"
            )
        times = (
            f"a step takes {1e3 * at_end.seconds:.2f} ms without overlap, and {1e3 * early.seconds:.2f} ms with overlap"
        )
        return min(max((at_end.seconds - early.seconds) / saving, 0.0), 1.0), f"measured: {saved}; {times}"


def trial_of(specs: Sequence[Compressor], tensors: Sequence[TensorInfo], carrier: Carrier) -> OverlapTrial | None:
    """A trial with the compressor that sends the most bytes. Two-level compressors, and compressors without buckets,
    are left out. None if no compressor remains."""
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
    whole = sum(tensor.size * dtype_bytes(tensor.dtype) for tensor in tensors)
    least = carrier.early_bytes if carrier.shares_buckets else 1
    early_bytes = max(least, min(BUCKET_BYTES, whole // _FEWEST_BUCKETS))
    return OverlapTrial(max(sent, key=lambda spec: sent[spec]), early_bytes, ranks)
