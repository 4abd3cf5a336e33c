"""Muon for the hidden matrices of a model and AdamW for all else, in one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvdcomp.tools.train.options import SetupError


def require_muon() -> None:
    """Raises SetupError if this PyTorch has no Muon."""
    if not hasattr(torch.optim, "Muon"):
        raise SetupError(
            f"--optimizer muon needs PyTorch 2.9 or later, and this is {torch.__version__}; take --optimizer adamw"
        )


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for the groups that say `use_muon`, and `torch.optim.AdamW` for the others.

    One optimizer, since Horovod wraps one, and learning rates, checkpoints and policies are of one: PyTorch's two step
    its groups, with its state. The steps of Muon are as large as AdamW's (`match_rms_adamw`), so that one learning rate
    serves both.

    Args:
        params: groups. Each may have the options of its optimizer; what it does not have gets PyTorch's default.
        lr: the learning rate of the groups that have none.

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
        """As of `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        self._share()

    def _share(self) -> None:
        """Lets PyTorch's two step the groups that there are now, with the state that there is now."""
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
        """As of `torch.optim.Optimizer`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
