"""`CompressedAdam`: AdamW whose momentum can be sent compressed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import ConfigurationError
from hvdcomp.specs.described import is_whole


class Momentum(NamedTuple):
    """What a parameter's gradient is sent with.

    Attributes:
        mean: of the gradients so far, as Adam has it; the same on all ranks, and in the parameter's shape.
        weight: by which it is multiplied before it is added to a gradient.
    """

    mean: torch.Tensor
    weight: float


class CompressedAdam(torch.optim.AdamW):
    """AdamW that stops to adapt its second moment, so that the ranks can exchange momenta in place of gradients.

    Under a stock Adam error feedback does harm: what was held back enters the second moment squared. Here the first
    `freeze_after` steps are those of AdamW. After them the second moment stays as it is, and the ranks compress and
    exchange the momentum b1 m + (1 - b1) g, by any compressor with its memory: with one bit an element this is 1-bit
    Adam (Tang et al. 2021, arXiv:2102.02888, algorithm 1).

        optimizer = hvdcomp.torch.CompressedAdam(model.parameters(), lr=6e-4, freeze_after=1500)
        compression = hvdcomp.Compression(hvdcomp.EFSignSGD())
        hvdcomp.ddp.register(model, compression, optimizer=optimizer)   # or hvd.DistributedOptimizer(optimizer, ...)

    Gradients stay gradients for everybody else: the ranks send g + b1 / (1 - b1) m, which is the momentum divided by
    1 - b1, and take that term away from the mean. Whatever exchanges without it, such as a single rank or a lossless
    compressor, has the same result. `clip_grad_norm_` would see the noise of the compression, which is larger than the
    gradient: clip in the first steps only, `if not optimizer.frozen`.

    Where the second moment is zero when it is frozen, the element never had a gradient, and stays as it is: its moment
    becomes infinite in the state. Let rare rows of embeddings have a gradient before.

    Args:
        params, lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.
        freeze_after: steps of a parameter before its second moment is frozen; 15 to 25 % of the training. A state of
            `torch.optim.AdamW` can be loaded, whose steps count.
        warm_up: the compressor of the steps before, as a spec: one that does no harm to AdamW, such as "int8", "int4"
            or "none".

    Attributes:
        frozen: whether the next step is one with frozen second moments. Those of parameters that have begun later than
            others may follow later.

    Raises:
        ConfigurationError: without `freeze_after`, or for one that is no number of steps.
        SpecError: for a `warm_up` that is no compressor.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        freeze_after: int | None = None,
        warm_up: str = "none",
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.defaults |= {"freeze_after": freeze_after, "warm_up": str(parse_compressor(warm_up))}
        self._complete()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._complete()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        if "freeze_after" in self.defaults:  # else __init__ is not done
            self._complete()

    def _complete(self) -> None:
        """Gives all groups what they lack: Horovod makes an optimizer anew of its groups, and AdamW's have less."""
        for group in self.param_groups:
            for option in ("freeze_after", "warm_up"):
                group.setdefault(option, self.defaults[option])
            if not is_whole(group["freeze_after"], 1):
                raise ConfigurationError(
                    f"CompressedAdam: freeze_after={group['freeze_after']!r} is not possible; give the number of "
                    "steps, at least 1, after which the second moment is frozen, 15 to 25 % of the training"
                )

    # What the binding of a `hvdcomp.Compression` asks, before each exchange.

    @property
    def compressor_before(self) -> str:
        """`warm_up`."""
        return str(self.param_groups[0]["warm_up"])

    @property
    def frozen(self) -> bool:
        for group in self.param_groups:
            steps = [int(self.state[one]["step"]) for one in group["params"] if one in self.state]
            if steps and max(steps) < group["freeze_after"]:
                return False
        return bool(self.state)

    def momenta(self) -> dict[torch.Tensor, Momentum]:
        """What each gradient is to be sent with in the next step, by parameter; without those that are sent alone."""
        self._freeze()
        return {
            parameter: Momentum(state["exp_avg"], group["betas"][0] / (1 - group["betas"][0]))
            for group in self.param_groups
            for parameter in group["params"]
            if "frozen_at" in (state := self.state.get(parameter, {}))
        }

    def _freeze(self) -> None:
        """Freezes the second moments that are due."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter)
                if state and "frozen_at" not in state and (step := int(state["step"])) >= group["freeze_after"]:
                    state["frozen_at"] = step
                    # An element without a gradient so far gets no step, whatever noise compression makes of it.
                    state["exp_avg_sq"].masked_fill_(state["exp_avg_sq"] == 0, math.inf)

    # A step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As of `torch.optim.AdamW`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._freeze()
        frozen = {
            parameter: parameter.grad
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and "frozen_at" in self.state.get(parameter, {})
        }
        for parameter in frozen:
            parameter.grad = None
        try:
            super().step()
        finally:
            for parameter, gradient in frozen.items():
                parameter.grad = gradient
        for group in self.param_groups:
            self._step_frozen(group, [one for one in group["params"] if one in frozen])
        return loss

    def _step_frozen(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """The step of parameters whose second moment is frozen."""
        if not parameters:
            return
        rate, (b1, b2) = float(group["lr"]), group["betas"]
        states = [self.state[one] for one in parameters]
        means = [state["exp_avg"] for state in states]
        torch._foreach_add_([state["step"] for state in states], 1)
        torch._foreach_lerp_(means, [one.grad for one in parameters if one.grad is not None], 1 - b1)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        scales = torch._foreach_sqrt([state["exp_avg_sq"] for state in states])
        torch._foreach_div_(scales, [math.sqrt(1 - b2 ** state["frozen_at"]) for state in states])
        torch._foreach_add_(scales, group["eps"])
        rates = [-rate / (1 - b1 ** int(state["step"])) for state in states]
        torch._foreach_addcdiv_(parameters, means, scales, rates)
