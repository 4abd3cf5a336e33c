"""`RowWiseAdagrad`: Adagrad with one sum for each row of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.tables.rows import rows_of


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad for embedding tables. This optimizer keeps one sum of squares for each row. In contrast,
    `torch.optim.Adagrad` keeps one sum for each weight (Mudigere et al. 2022, arXiv:2104.05158). The rule is the same
    as in FBGEMM and TorchRec:

        sum of the row += mean of the squares of its gradient
        row -= lr * gradient / (sqrt(sum of the row) + eps)

        tables = hvdcomp.torch.RowWiseAdagrad([table.weight for table in rows.tables.values()], lr=0.05)

    A row does not change if its gradient is missing or all zero. For tables in 16 bits, sums are float32.

    Args:
        params: the weights of the tables (rows, columns), or parameter groups of them.
        lr: the learning rate.
        eps: a number above 0 that is added to the divisor, as in the rule above.
        initial_accumulator_value: the value of all accumulated sums at the start.

    Raises:
        ConfigurationError: if a parameter is not a matrix, or an option is too small.
    """

    def __init__(
        self, params: Any, lr: float = 0.01, *, eps: float = 1e-10, initial_accumulator_value: float = 0.0
    ) -> None:
        if not (lr >= 0 and eps > 0 and initial_accumulator_value >= 0):
            raise ConfigurationError(
                f"RowWiseAdagrad: lr={lr}, eps={eps}, initial_accumulator_value={initial_accumulator_value} is not "
                "allowed; give an eps above 0, and an lr and an initial_accumulator_value of at least 0"
            )
        options = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as `torch.optim.Optimizer` does. The constructor of this base class also calls this
        method."""
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
        """Restores a state, as `torch.optim.Optimizer` does, but the sums keep their element type."""
        super().load_state_dict(state_dict)
        tables = (table for group in self.param_groups for table in group["params"])
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for table, number in zip(tables, numbers, strict=True):
            if number in state_dict["state"]:
                saved = state_dict["state"][number]["sum"]
                self.state[table]["sum"] = saved.to(table.device, _dtype(table), copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the rows that have a gradient. If there is a closure, it computes the gradients, and its result is
        returned."""
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
    """The element type of sums. For tables in 16 bits, this type is float32, because squares of small gradients would
    underflow in 16 bits."""
    return torch.promote_types(table.dtype, torch.float32)
