"""Calibrations for the policy `auto`, of models that only the cases have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def made_up_calibration(
    spec: str, shapes: Mapping[str, tuple[int, ...]], others: Sequence[str] = (), ranks_per_node: int | None = None
) -> dict[str, Any]:
    """A calibration of one model, with the encoding time of one compressor or more; its numbers are nobody's."""
    cost = {"algorithm": "ring", "latency_s": 1e-5, "bytes_per_s": 1e9}
    model = {
        "tensors": [{"name": name, "shape": list(shape)} for name, shape in shapes.items()],
        "backward_s": 1e-3, "forward_s": 1e-3, "bucket_bytes": 1e6,
        "encode": {one: {"encode_s": 1e-3} for one in (spec, *others)},
    }  # fmt: skip
    costs = {"allreduce": cost, "allgather": {**cost, "algorithm": "direct"}, "reducescatter": cost}
    network: dict[str, Any] = dict(costs)
    if ranks_per_node is not None:
        network["levels"] = {"ranks_per_node": ranks_per_node, "node": costs, "across": costs}
    return {
        "format": "hvdcomp-calibration", "version": 1, "name": "test", "network": network, "models": {"small": model},
    }  # fmt: skip
