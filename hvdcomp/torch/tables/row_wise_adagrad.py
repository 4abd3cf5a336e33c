"""`RowWiseAdagrad`: Adagrad with one sum for each row of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.tables.rows import rows_of


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad for embedding tables that keeps one sum of squares for each row; `torch.optim.Adagrad` keeps one for each
    weight (Mudigere et al. 2022, arXiv:2104.05158; same rule as in FBGEMM and TorchRec):

        sum of the row += mean of the squares of its gradient
        row -= lr * gradient / (sqrt(sum of the row) + eps)

        tables = hvdcomp.torch.RowWiseAdagrad([table.weight for table in rows.tables.values()], lr=0.05)

    Rows whose gradient is missing or all zero do not change. Sums are float32 for tables of 16 bits.

    Args:
        params: the tables' weights (rows, columns), or parameter groups of them.
        lr: the learning rate.
        eps: above 0.
        initial_accumulator_value: the first value of all sums.

    Raises:
        ConfigurationError: for a parameter that is not a matrix, or an option that is too small.
    """

    def __init__(
        self, params: Any, lr: float = 0.01, *, eps: float = 1e-10, initial_accumulator_value: float = 0.0
    ) -> None:
        if not (lr >= 0 and eps > 0 and initial_accumulator_value >= 0):
            raise ConfigurationError(
                f"RowWiseAdagrad: lr={lr}, eps={eps}, initial_accumulator_value={initial_accumulator_value} is not "
                "allowed; give an eps above 0, and give the others 0 or more"
            )
        options = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in `torch.optim.Optimizer`, whose constructor calls it too."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for table in group["params"]:
            if table.ndim != 2:
                raise ConfigurationError(
                    f"RowWiseAdagrad was given a parameter of the shape {tuple(table.shape)}; pass weights of "
                    "embeddings (rows, columns), and use another optimizer for other parameters"
                )
            start, dtype = group["initial_accumulator_value"], _dtype(table)
            self.state[table]["sum"] = torch.full((len(table),), start, dtype=dtype, device=table.device)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in `torch.optim.Optimizer`, but the sums keep their element type."""
        super().load_state_dict(state_dict)
        tables = (table for group in self.param_groups for table in group["params"])
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for table, number in zip(tables, numbers, strict=True):
            if number in state_dict["state"]:
                saved = state_dict["state"][number]["sum"]
                self.state[table]["sum"] = saved.to(table.device, _dtype(table), copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the rows that have a gradient; returns the result of the closure, which makes the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                ids, gradient = rows_of(table)
                sums = self.state[table]["sum"]
                gradient = gradient.to(sums.dtype)
                sums.index_add_(0, ids, gradient.square().mean(1))
                rates = group["lr"] / (sums[ids].sqrt() + group["eps"])
                table.index_add_(0, ids, (gradient * rates[:, None]).to(table.dtype), alpha=-1)
        return loss


def _dtype(table: torch.Tensor) -> torch.dtype:
    """The element type of sums: of tables in 16 bits it is float32, as squares of small gradients underflow there."""
    return torch.promote_types(table.dtype, torch.float32)
