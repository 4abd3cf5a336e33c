"""Muon for the hidden matrices of a model and AdamW for all other parameters, in one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvdcomp.tools.train.options import SetupError


def require_muon() -> None:
    """Raises SetupError if this PyTorch has no Muon."""
    if not hasattr(torch.optim, "Muon"):
        raise SetupError(
            f"--optimizer muon needs PyTorch 2.9 or later, and this is {torch.__version__}; use --optimizer adamw"
        )


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for the groups with `use_muon`, and `torch.optim.AdamW` for the others.

    It is a single optimizer, because Horovod, learning rates, checkpoints and policies expect one. PyTorch's two
    optimizers share its groups and its state. Muon's steps are as large as AdamW's (`match_rms_adamw`), so that both
    use the same learning rate.

    Args:
        params: groups, with options of their optimizer; missing options get PyTorch's defaults.
        lr: the learning rate of groups without their own.

    Raises:
        ValueError: a parameter of Muon is not a matrix.

    References: Liu et al., Muon is Scalable for LLM Training, 2025, arXiv:2502.16982, section 2.2 (the size of a step).
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        self._share()

    def _share(self) -> None:
        """Creates PyTorch's two optimizers, with the present groups and the present state."""
        by_muon = [group for group in self.param_groups if group.get("use_muon", False)]
        by_adamw = [group for group in self.param_groups if not group.get("use_muon", False)]
        self._parts: list[torch.optim.Optimizer] = []
        if by_muon:
            self._parts.append(torch.optim.Muon(by_muon, adjust_lr_fn="match_rms_adamw"))
        if by_adamw:
            self._parts.append(torch.optim.AdamW(by_adamw))
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See `torch.optim.Optimizer`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
