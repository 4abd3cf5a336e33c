"""`CompressedAdam`: a variant of AdamW that lets ranks exchange compressed momenta."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hvdcomp.bindings.adam import check_freezing, is_refresh
from hvdcomp.bindings.frameworks import not_compiled
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import ConfigurationError
from hvdcomp.specs.described import is_whole


@dataclass(frozen=True)
class Momentum:
    """The momentum that is added to a gradient before the exchange. For a gradient g and a first moment m, the sum g +
    b1 / (1 - b1) m is the new momentum divided by 1 - b1.

    Attributes:
        mean: m, the first moment before this step. The mean is the same on all ranks.
        weight: b1 / (1 - b1), the factor by which `mean` is multiplied when it is added to the gradient.

    Class attributes:
        sent_always: whether the momentum is added even if the exchange is lossless.
    """

    mean: torch.Tensor
    weight: float
    sent_always: ClassVar[bool] = False

    def add_to(self, gradient: torch.Tensor, scale: float) -> None:
        """Adds the momentum to a gradient before the exchange."""
        gradient.add_(self.mean, alpha=self.weight * scale)

    def take_from(self, mean: torch.Tensor, scale: float) -> None:
        """Subtracts the momentum from the mean after the exchange."""
        mean.sub_(self.mean, alpha=self.weight * scale)


@dataclass(frozen=True)
class LocalMomenta:
    """The tensor that is sent instead of a gradient after local steps. The tensor is the mean of the momenta since the
    last exchange, weighted by their learning rates and divided by 1 - b1. The optimizer gets the mean of these tensors
    over the ranks.

    Attributes:
        mean: m, this rank's first moment before this step.
        weight: b1 / (1 - b1), the factor by which `mean` is multiplied.
        moved: the sum of the learning rate times m, over the earlier steps since the last exchange.
        share: the learning rate of this step, as a share of the sum of the learning rates since the last exchange.
        of_moved: the factor by which `moved` is multiplied.
    """

    mean: torch.Tensor
    weight: float
    moved: torch.Tensor
    share: float
    of_moved: float
    sent_always: ClassVar[bool] = True

    def add_to(self, gradient: torch.Tensor, scale: float) -> None:
        """Turns a gradient into the mean momentum since the last exchange, in place."""
        gradient.mul_(self.share).add_(self.mean, alpha=self.weight * self.share * scale)
        gradient.add_(self.moved, alpha=self.of_moved * scale)

    def take_from(self, mean: torch.Tensor, scale: float) -> None:
        """Does nothing, because the optimizer gets the mean momentum itself."""


# The options of a parameter group that AdamW does not have.
_OWN = ("freeze_after", "warm_up", "local_steps", "floor", "refreshes_per_gap")


class CompressedAdam(torch.optim.AdamW):
    """AdamW that freezes its second moment, so that the ranks can exchange momenta instead of gradients.

    An ordinary Adam trains badly with error feedback, because Adam squares the residuals for its second moment. In this
    optimizer, the first `freeze_after` steps are steps of AdamW. Then the second moment is frozen, and the ranks
    compress and exchange the momentum b1 m + (1 - b1) g, with any compressor and its memory. With one bit per element
    this is 1-bit Adam (Tang et al. 2021, arXiv:2102.02888, algorithm 1).

        optimizer = hvdcomp.torch.CompressedAdam(model.parameters(), lr=6e-4, freeze_after=1500)
        compression = hvdcomp.Compression(hvdcomp.EFSignSGD())
        hvdcomp.ddp.register(model, compression, optimizer=optimizer)   # or hvd.DistributedOptimizer(optimizer, ...)

    `param.grad` still contains gradients. The ranks send g + b1 / (1 - b1) m, which is the momentum divided by 1 - b1,
    and subtract the second term from the mean. On a single rank, or with a lossless compressor, the result is the same
    as if only g were exchanged. Clip gradients only before the second moment is frozen, with `if not optimizer.frozen`.
    After that, `clip_grad_norm_` would measure the noise of the compression, which is larger than the gradient.

    With `local_steps` above 1, each rank makes this number of steps with its own momentum. Then the ranks exchange the
    mean of the momenta since the last exchange, and all ranks apply this mean to the weights of the last exchange. Such
    steps are the local steps of 0/1 Adam (Lu et al. 2023, arXiv:2202.06009, algorithm 1), with a fixed number of local
    steps between exchanges. Between two exchanges, weights differ between ranks. Therefore save and evaluate only when
    `in_sync` is true. To accumulate the gradients of several backward passes, run all passes except the last inside
    DistributedDataParallel's `no_sync()`.

    If the second moment of an element is zero when it is frozen, the element has never had a gradient. Such an element
    never changes afterwards, and its second moment in the state becomes infinite. So freeze only after even rare rows
    of embeddings have had a gradient.

    Args:
        params, lr, betas, eps, weight_decay: the arguments of `torch.optim.AdamW`.
        freeze_after: the number of steps of a parameter after which its second moment is frozen. Use 15 to 25 % of the
            steps of the training run. If you load a state of `torch.optim.AdamW`, the steps in this state count.
        warm_up: the spec of the compressor that is used before freezing. Use a compressor with which AdamW trains well,
            such as "int8", "int4", "powersgd:rank=4" or "none".
        local_steps: after freezing, the ranks exchange only in steps whose number is a multiple of `local_steps`.
        floor: the smallest frozen second moment, as a share of the mean of its tensor. The noise of the compression is
            equally large for all elements. Without a floor, elements with a small second moment would therefore make
            large random steps. 0 means no floor, as in the paper.
        refreshes_per_gap: a refresh is a step that exchanges uncompressed gradients and adds their squares to the
            frozen second moments. After this number of refreshes, the gap between refreshes doubles, as in 0/1 Adam
            (where the number is called kappa, and is 16). Gaps are counted from the first step of the training run, but
            refreshes begin only after `freeze_after`. None for no refresh. Refreshes are not allowed with local steps,
            because 0/1 Adam ends its refreshes before its local steps.

    Attributes:
        frozen: whether second moments are frozen in the next step. If a parameter began to train later than others, its
            second moment may be frozen later.
        refreshes: whether the next step refreshes frozen second moments.
        in_sync: whether all ranks have the same weights now.
        exchanges: whether gradients are exchanged in the next step.

    Raises:
        ConfigurationError: if `freeze_after` is missing, or if a number is invalid.
        SpecError: if `warm_up` is not a compressor.
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
        local_steps: int = 1,
        floor: float = 0.01,
        refreshes_per_gap: int | None = None,
    ) -> None:
        self._sums: dict[torch.Tensor, float] = {}  # the sum of rates for each momentum that is sent in this step
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        spec = str(parse_compressor(warm_up))
        own = (freeze_after, spec, local_steps, floor, refreshes_per_gap)
        self.defaults |= dict(zip(_OWN, own, strict=True))
        self._complete()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._sums = {}  # sums of an exchange that has failed are dropped
        super().__setstate__(state)
        self._complete()
        self._complete_states(parameter for group in self.param_groups for parameter in group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as `torch.optim.Optimizer` does."""
        super().add_param_group(param_group)
        if "freeze_after" in self.defaults:  # it is missing during __init__
            self._complete()

    def _complete(self) -> None:
        """Adds missing options to all parameter groups. Parameter groups from Horovod's wrapper, or from a state of
        AdamW, may lack some options."""
        for group in self.param_groups:
            for option in _OWN:
                group.setdefault(option, self.defaults[option])
            check_freezing(group["freeze_after"], group["floor"], group["refreshes_per_gap"])
            for option in ("maximize", "amsgrad"):
                if group.get(option):
                    raise ConfigurationError(
                        f"CompressedAdam: {option}=True is not allowed, because frozen steps would ignore this option; "
                        f"omit {option}, also in a state of torch.optim.AdamW that you load"
                    )
            if not is_whole(group["local_steps"], 1):
                raise ConfigurationError(
                    f"CompressedAdam: local_steps={group['local_steps']!r} is not allowed; give the number of steps "
                    "from one exchange to the next, or 1 to exchange in every step"
                )
            if group["local_steps"] > 1 and group["refreshes_per_gap"] is not None:
                raise ConfigurationError(
                    f"CompressedAdam: refreshes_per_gap={group['refreshes_per_gap']} does not work with "
                    f"local_steps={group['local_steps']}, because ranks do not exchange gradients after local steps; "
                    "leave out one of the two"
                )
        if len(lengths := {group["local_steps"] for group in self.param_groups}) > 1:
            raise ConfigurationError(
                f"CompressedAdam: its parameter groups have local_steps={sorted(lengths)}, but all groups must "
                "exchange in the same steps; give all parameter groups the same number"
            )

    def _complete_states(self, parameters: Iterable[torch.Tensor]) -> None:
        """Adds missing entries to states of AdamW. All ranks must have the same entries, because Horovod broadcasts
        entry by entry."""
        for parameter in parameters:
            if not (state := self.state.get(parameter)):
                continue
            state.setdefault("frozen_at", 0)
            state.setdefault("refreshes", 0)
            if self.local_steps > 1 and "anchor" not in state:
                state["anchor"], state["moved"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["rates"] = 0.0

    # Properties that bindings read before each exchange.

    @property
    def compressor_before(self) -> str:
        """The compressor that is used before freezing: `warm_up`."""
        return str(self.param_groups[0]["warm_up"])

    @property
    def local_steps(self) -> int:
        """The value of the setting `local_steps`."""
        return int(self.param_groups[0]["local_steps"])

    @property
    def frozen(self) -> bool:
        for group in self.param_groups:
            states = [self.state[parameter] for parameter in group["params"] if parameter in self.state]
            if any(state.get("frozen_at") for state in states):  # reading `step` is slower, because it is a tensor
                continue
            if states and max(int(state["step"]) for state in states) < group["freeze_after"]:
                return False
        return bool(self.state)

    @property
    def refreshes(self) -> bool:
        group = self.param_groups[0]
        if group["refreshes_per_gap"] is None or not self.frozen:
            return False
        return is_refresh(self._steps, group["freeze_after"], group["refreshes_per_gap"])

    @property
    def in_sync(self) -> bool:
        return self.local_steps == 1 or not self.frozen or self._steps % self.local_steps == 0

    @property
    def exchanges(self) -> bool:
        return self.local_steps == 1 or not self.frozen or (self._steps + 1) % self.local_steps == 0

    @property
    def _steps(self) -> int:
        return max((int(state["step"]) for state in self.state.values()), default=0)

    def at_latest_exchange(self, parameter: torch.Tensor) -> torch.Tensor:
        """The value of a parameter at the latest exchange. The value is the same on all ranks."""
        return self.state[parameter].get("anchor", parameter) if self._is_frozen(parameter) else parameter

    def momenta(self) -> dict[torch.Tensor, Momentum | LocalMomenta]:
        """The momentum to add to each gradient in the next step, by parameter. Only parameters with a frozen second
        moment are included."""
        self._freeze()
        return {
            parameter: self._momentum(parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if self._is_frozen(parameter)
        }

    def _momentum(self, parameter: torch.Tensor, group: dict[str, Any]) -> Momentum | LocalMomenta:
        state, b1 = self.state[parameter], group["betas"][0]
        if group["local_steps"] == 1:
            return Momentum(state["exp_avg"], b1 / (1 - b1))
        rate = _corrected(float(group["lr"]), group, state)
        self._sums[parameter] = total = state["rates"] + rate
        share, of_moved = (rate / total, 1 / (total * (1 - b1))) if total else (1.0, 0.0)
        return LocalMomenta(state["exp_avg"], b1 / (1 - b1), state["moved"], share, of_moved)

    def _is_frozen(self, parameter: torch.Tensor) -> bool:
        return bool(self.state.get(parameter, {}).get("frozen_at"))

    @torch.no_grad()
    def _freeze(self) -> None:
        """Freezes second moments after `freeze_after` steps."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter)
                if state and not state.get("frozen_at") and (step := int(state["step"])) >= group["freeze_after"]:
                    state["frozen_at"] = step
                    _apply_floor(state["exp_avg_sq"], group["floor"])
                    if group["local_steps"] > 1:
                        self._begin_locally([parameter])

    # A step.

    @not_compiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step of the optimizer, as `torch.optim.AdamW` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._freeze()
        alone = not self.exchanges  # parameters that are not frozen yet are only updated in a step with an exchange
        refreshes = self.refreshes
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        frozen = {parameter for parameter in gradients if self._is_frozen(parameter)}
        for parameter in gradients if alone else frozen:
            parameter.grad = None
        # A policy may multiply the rates by a factor, and this factor may be removed at the end of AdamW's part of the
        # step.
        rates = [float(group["lr"]) for group in self.param_groups]
        try:
            super().step()
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
        self._complete_states(gradients.keys() - frozen)
        for group, rate in zip(self.param_groups, rates, strict=True):
            if refreshes:
                for parameter in frozen.intersection(group["params"]):
                    _refresh(self.state[parameter], gradients[parameter], group)
            self._step_frozen(group, rate, [parameter for parameter in group["params"] if parameter in frozen])
            if group["local_steps"] > 1 and not alone:
                self._begin_locally([parameter for parameter in group["params"] if parameter in frozen])
        self._sums.clear()
        return loss

    def _step_frozen(self, group: dict[str, Any], rate: float, parameters: list[torch.Tensor]) -> None:
        """Updates the parameters whose second moments are frozen. `rate` is the learning rate."""
        if not parameters:
            return
        (b1, b2), kept = group["betas"], 1 - rate * group["weight_decay"]
        states = [self.state[parameter] for parameter in parameters]
        rates = [_corrected(rate, group, state) for state in states]
        torch._foreach_add_([state["step"] for state in states], 1)
        scales = torch._foreach_sqrt([state["exp_avg_sq"] for state in states])
        torch._foreach_div_(scales, [math.sqrt(1 - b2 ** _adaptations(state)) for state in states])
        torch._foreach_add_(scales, group["eps"])
        if group["local_steps"] > 1:
            torch._foreach_mul_([state["anchor"] for state in states], kept)
            met = [parameter in self._sums for parameter in parameters]
            for parameter, state, scale, rate, meets in zip(parameters, states, scales, rates, met, strict=True):
                move = self._meet if meets else _move_alone
                move(parameter, state, scale, rate, b1, kept)
            return
        means = [state["exp_avg"] for state in states]
        torch._foreach_lerp_(means, [parameter.grad for parameter in parameters if parameter.grad is not None], 1 - b1)
        torch._foreach_mul_(parameters, kept)
        torch._foreach_addcdiv_(parameters, means, scales, [-rate for rate in rates])

    def _meet(
        self, parameter: torch.Tensor, state: dict[str, Any], scale: torch.Tensor, rate: float, b1: float, kept: float
    ) -> None:
        """Updates a parameter after an exchange of momenta, starting from its value at the previous exchange."""
        assert parameter.grad is not None
        torch.mul(parameter.grad, 1 - b1, out=state["exp_avg"])
        parameter.copy_(state["anchor"].addcdiv_(state["exp_avg"], scale, value=-self._sums[parameter]))

    def _begin_locally(self, parameters: list[torch.Tensor]) -> None:
        """Begins local steps from the current parameters, which are the same on all ranks."""
        for parameter in parameters:
            state = self.state[parameter]
            state["anchor"].copy_(parameter)  # even if there was no exchange, as on a single rank
            state["moved"].zero_()
            state["rates"] = 0.0


def _corrected(rate: float, group: dict[str, Any], state: dict[str, Any]) -> float:
    """The learning rate of the next step, multiplied by the bias correction of the first moment."""
    return rate / (1 - float(group["betas"][0]) ** (int(state["step"]) + 1))


def _move_alone(
    parameter: torch.Tensor, state: dict[str, Any], scale: torch.Tensor, rate: float, b1: float, kept: float
) -> None:
    """Makes a local step with this rank's own momentum."""
    assert parameter.grad is not None
    state["exp_avg"].lerp_(parameter.grad, 1 - b1)
    parameter.mul_(kept).addcdiv_(state["exp_avg"], scale, value=-rate)
    state["moved"].add_(state["exp_avg"], alpha=rate)
    state["rates"] += rate


def _apply_floor(v: torch.Tensor, floor: float) -> None:
    """Applies the floor to a second moment, in place, before it is frozen."""
    unused = v == 0
    v.clamp_(min=v.mean() * floor)
    # an element that has had no gradient must not be changed by the noise of compression
    v.masked_fill_(unused, math.inf)


def _refresh(state: dict[str, Any], gradient: torch.Tensor, group: dict[str, Any]) -> None:
    """Adds the mean gradient of a step to a frozen second moment, as AdamW does."""
    v, b2 = state["exp_avg_sq"], group["betas"][1]
    v.masked_fill_(v.isinf(), 0).mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
    _apply_floor(v, group["floor"])
    state["refreshes"] += 1


def _adaptations(state: dict[str, Any]) -> int:
    """The number of gradients that are included in a frozen second moment."""
    return int(state["frozen_at"]) + int(state["refreshes"])
