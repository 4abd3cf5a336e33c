"""GaLore, which needs parameter groups of its own: `hvdcomp train --optimizer benchmarks.best_rates.galore.galore`."""

from __future__ import annotations

from typing import Any

from pytorch_optimizer import GaLore
from torch import nn
from torch.optim import Optimizer

LEAST_SIDE = 32
"""The gradient of a matrix is not projected if the matrix's smaller side is below this number. An example is the head
of a model with one output."""


def galore(groups: list[dict[str, Any]], lr: float) -> Optimizer:
    """AdamW in a subspace of the gradients of matrices. The rank of the subspace is a quarter of the matrix's smaller
    side (Zhao et al. 2024, arXiv:2403.03507, sections 4 and 5). The subspace changes every 50 steps, because these
    training runs are short."""
    projected: list[dict[str, Any]] = []
    for group in groups:
        sides: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            side = min(parameter.shape) if parameter.dim() == 2 else 0
            sides.setdefault(side if side >= LEAST_SIDE else 0, []).append(parameter)
        for side, parameters in sides.items():
            low_rank = {"rank": side // 4, "update_proj_gap": 50, "scale": 0.25, "projection_type": "std"}
            projected.append({**group, "params": parameters, **(low_rank if side else {})})
    return GaLore(projected, lr=lr)
