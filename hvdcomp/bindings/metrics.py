"""Converts the costs of a step to numbers with names, for experiment trackers and TensorBoard."""

from __future__ import annotations

from statistics import fmean
from typing import Any, Protocol

from hvdcomp.bindings.setup import UsedCompression
from hvdcomp.compressors import NoCompression
from hvdcomp.compressors.choice import Plan
from hvdcomp.exchange.ledger import Ledger


def metrics_of(ledger: Ledger, plan: Plan) -> dict[str, float]:
    """Computes the result of `Compression.metrics`: the costs of the latest step as numbers with names.

    On an accelerator, the times are those of the newest step that the device has finished, which is usually not the
    latest step. There are no times if Horovod or PyTorch itself exchanged the gradients of the latest step.

    Args:
        ledger: the ledger of the training run.
        plan: the compressor of each tensor in the latest step, by name.
    """
    last = ledger.last
    if last is None:
        return {}
    ledger.settle()
    values: dict[str, float | None] = {
        "bytes_sent": last.bytes_sent,
        "bytes_in_node": last.bytes_in_node,
        "dense_bytes": last.dense_bytes,
        "compression_factor": last.compression_factor,
    }
    timed = ledger.timed
    if timed is not None:
        values["encode_seconds"] = timed.encode_seconds
        values["communicate_seconds"] = timed.communicate_seconds
        values["decode_seconds"] = timed.decode_seconds
    values |= {f"mean_{name}": mean for name, mean in mean_levels(plan).items()}
    return {f"hvdcomp/{name}": float(value) for name, value in values.items() if value is not None}


def shown(compression: UsedCompression) -> str:
    """The text that represents a `Compression`: its method, the number of compressed tensors, and the compression
    factor.

        <hvdcomp.Compression topk:ratio=0.01, 3 of 8 tensors compressed, factor 41.20>
    """
    settings, plan, factor = compression.settings, compression.plan, compression.ledger.totals.compression_factor
    words = [str(settings.compressor)]
    if settings.policy is not None:
        words.append(f"policy {settings.policy}")
    if plan:
        compressed = sum(not isinstance(compressor, NoCompression) for compressor in plan.values())
        words.append(f"{compressed} of {len(plan)} tensors compressed")
    if factor is not None:
        words.append(f"factor {factor:.2f}")
    return f"<hvdcomp.Compression {', '.join(words)}>"


def mean_levels(plan: Plan) -> dict[str, float]:
    """The mean level of all tensors whose compressor has a level, by kind of level: "ratio", "rank" or "bits"."""
    levels: dict[str | None, list[float]] = {}
    for compressor in plan.values():
        if compressor.level is not None:
            levels.setdefault(compressor.level_name, []).append(compressor.level)
    return {str(name): fmean(values) for name, values in levels.items()}


class ScalarWriter(Protocol):
    """The method of a TensorBoard writer that `write_metrics` calls."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any: ...


def write_metrics(compression: UsedCompression, writer: ScalarWriter, step: int | None = None) -> None:
    """Writes the metrics of the latest step for TensorBoard. Before the first step, it writes nothing.

        writer = torch.utils.tensorboard.SummaryWriter("runs/mine")
        ...
        optimizer.step()
        hvdcomp.write_metrics(compression, writer)

    Args:
        compression: the `Compression` of the training run.
        writer: a `torch.utils.tensorboard.SummaryWriter`, or another object with the same method `add_scalar`.
        step: the number of the step to write. Default: the number of steps that the training run has made, including
            steps before a restart.
    """
    at = compression.ledger.steps if step is None else step
    for name, value in compression.metrics().items():
        writer.add_scalar(name, value, at)
