"""`CompressedAdam`: AdamW whose momentum can be sent compressed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hvdcomp.bindings.adam import check_freezing, is_refresh
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import ConfigurationError
from hvdcomp.specs.described import is_whole


@dataclass(frozen=True)
class Momentum:
    """The momentum that a gradient is sent with: g + b1 / (1 - b1) m, the momentum divided by 1 - b1.

    Attributes:
        mean: m, the first moment before this step; the same on all ranks.
        weight: b1 / (1 - b1).

    Class attributes:
        sent_always: whether it is sent also where nothing is lost.
    """

    mean: torch.Tensor
    weight: float
    sent_always: ClassVar[bool] = False

    def add_to(self, gradient: torch.Tensor, scale: float) -> None:
        """Makes of a gradient, in place, what is sent. scale: by which the gradient is multiplied."""
        gradient.add_(self.mean, alpha=self.weight * scale)

    def take_from(self, mean: torch.Tensor, scale: float) -> None:
        """Makes of the mean of what the ranks sent, in place, what the optimizer gets."""
        mean.sub_(self.mean, alpha=self.weight * scale)


@dataclass(frozen=True)
class LocalMomenta:
    """The tensor sent in place of a gradient after local steps: the mean of the momenta since the last exchange, by
    their rates, divided by 1 - b1. The optimizer gets the mean of it.

    Attributes:
        mean: m of this rank, before this step.
        weight: b1 / (1 - b1).
        moved: the sum of rate times m over the steps since the last exchange, without this one.
        share: this step's part of the sum of the rates.
        of_moved: the factor of `moved`.
    """

    mean: torch.Tensor
    weight: float
    moved: torch.Tensor
    share: float
    of_moved: float
    sent_always: ClassVar[bool] = True

    def add_to(self, gradient: torch.Tensor, scale: float) -> None:
        """As of `Momentum`."""
        gradient.mul_(self.share).add_(self.mean, alpha=self.weight * self.share * scale)
        gradient.add_(self.moved, alpha=self.of_moved * scale)

    def take_from(self, mean: torch.Tensor, scale: float) -> None:
        """As of `Momentum`."""


# Options of a group that AdamW does not have.
_OWN = ("freeze_after", "warm_up", "local_steps", "floor", "refreshes_per_gap")


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

    With `local_steps` above 1 each rank makes that number of steps with its own momentum, and the ranks then exchange
    the mean of the momenta since the last exchange, by which all of them move from where they were equal: the local
    steps of 0/1 Adam (Lu et al. 2023, arXiv:2202.06009, algorithm 1), in a fixed number. In between the ranks' weights
    differ: save and evaluate when `in_sync`.

    Where the second moment is zero when it is frozen, the element never had a gradient, and stays as it is: its moment
    becomes infinite in the state. Let rare rows of embeddings have a gradient before.

    Args:
        params, lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.
        freeze_after: steps of a parameter before its second moment is frozen; 15 to 25 % of the training. A state of
            `torch.optim.AdamW` can be loaded, whose steps count.
        warm_up: the compressor of the steps before, as a spec: one that does no harm to AdamW, such as "int8", "int4",
            "powersgd:rank=4" or "none".
        local_steps: after that, the ranks exchange in steps whose number is a multiple of this.
        floor: the least second moment that is frozen, as a share of the mean of its tensor. Without one, compression's
            noise, which is as large everywhere, throws elements far whose second moment is small; 0 for none, as
            published.
        refreshes_per_gap: refreshes of the frozen second moments before the gap between two of them doubles, as in 0/1
            Adam (kappa there, and 16): from the training's first step on, steps of these gaps that come after
            `freeze_after` exchange their gradients uncompressed, and add their squares. None for no refresh. It does
            not go with local steps, before which 0/1 Adam has ended its refreshes.

    Attributes:
        frozen: whether the next step is one with frozen second moments. Those of parameters that have begun later than
            others may follow later.
        refreshes: whether the next step refreshes frozen second moments.
        in_sync: whether all ranks have the same weights now.
        exchanges: whether gradients are exchanged in the next step.

    Raises:
        ConfigurationError: without `freeze_after`, or for numbers of steps that are none.
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
        local_steps: int = 1,
        floor: float = 0.01,
        refreshes_per_gap: int | None = None,
    ) -> None:
        self._sums: dict[torch.Tensor, float] = {}  # of the rates that momenta were sent with in this step
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        spec = str(parse_compressor(warm_up))
        own = (freeze_after, spec, local_steps, floor, refreshes_per_gap)
        self.defaults |= dict(zip(_OWN, own, strict=True))
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
            for option in _OWN:
                group.setdefault(option, self.defaults[option])
            check_freezing(group["freeze_after"], group["floor"], group["refreshes_per_gap"])
            if not is_whole(group["local_steps"], 1):
                raise ConfigurationError(
                    f"CompressedAdam: local_steps={group['local_steps']!r} is not possible; give the number of steps "
                    "from one exchange to the next, 1 for an exchange in each"
                )
            if group["local_steps"] > 1 and group["refreshes_per_gap"] is not None:
                raise ConfigurationError(
                    f"CompressedAdam: refreshes_per_gap={group['refreshes_per_gap']} does not go with local_steps="
                    f"{group['local_steps']}, whose exchanges have no gradient of all ranks; leave one of the two out"
                )

    # What the binding of a `hvdcomp.Compression` asks, before each exchange.

    @property
    def compressor_before(self) -> str:
        """`warm_up`."""
        return str(self.param_groups[0]["warm_up"])

    @property
    def local_steps(self) -> int:
        """As given."""
        return int(self.param_groups[0]["local_steps"])

    @property
    def frozen(self) -> bool:
        for group in self.param_groups:
            states = [self.state[parameter] for parameter in group["params"] if parameter in self.state]
            if any("frozen_at" in state for state in states):  # asked before each step, and steps are tensors
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

    def momenta(self) -> dict[torch.Tensor, Momentum | LocalMomenta]:
        """The momentum that each gradient is sent with in the next step, by parameter; none for those sent alone."""
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
        rate = self._rate(group, state)
        self._sums[parameter] = total = state["rates"] + rate
        share, of_moved = (rate / total, 1 / (total * (1 - b1))) if total else (1.0, 0.0)
        return LocalMomenta(state["exp_avg"], b1 / (1 - b1), state["moved"], share, of_moved)

    @staticmethod
    def _rate(group: dict[str, Any], state: dict[str, Any]) -> float:
        """By what the next first moment is multiplied, with the correction of its bias."""
        return float(group["lr"]) / (1 - float(group["betas"][0]) ** (int(state["step"]) + 1))

    def _is_frozen(self, parameter: torch.Tensor) -> bool:
        return "frozen_at" in self.state.get(parameter, ())

    @torch.no_grad()
    def _freeze(self) -> None:
        """Freezes the second moments that are due."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter)
                if state and "frozen_at" not in state and (step := int(state["step"])) >= group["freeze_after"]:
                    state["frozen_at"] = step
                    _put_on_floor(state["exp_avg_sq"], group["floor"])
                    if group["local_steps"] > 1:
                        state["anchor"], state["moved"] = torch.empty_like(parameter), torch.empty_like(parameter)
                        self._begin_locally([parameter])

    # A step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As of `torch.optim.AdamW`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._freeze()
        alone = not self.exchanges  # what is not frozen yet waits for a step in which it is exchanged
        refreshes = self.refreshes
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        given = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        frozen = {parameter for parameter in given if self._is_frozen(parameter)}
        for parameter in given if alone else frozen:
            parameter.grad = None
        try:
            super().step()
        finally:
            for parameter, gradient in given.items():
                parameter.grad = gradient
        for group in self.param_groups:
            if refreshes:
                for parameter in (each for each in group["params"] if each in frozen):
                    _refresh(self.state[parameter], given[parameter], group)
            self._step_frozen(group, [parameter for parameter in group["params"] if parameter in frozen])
            if group["local_steps"] > 1 and not alone:
                self._begin_locally([parameter for parameter in group["params"] if parameter in frozen])
        self._sums.clear()
        return loss

    def _step_frozen(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """The step of parameters whose second moment is frozen."""
        if not parameters:
            return
        (b1, b2), kept = group["betas"], 1 - float(group["lr"]) * group["weight_decay"]
        states = [self.state[parameter] for parameter in parameters]
        rates = [self._rate(group, state) for state in states]
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
        """The step in which the ranks have exchanged their momenta: from where they last were equal."""
        assert parameter.grad is not None
        torch.mul(parameter.grad, 1 - b1, out=state["exp_avg"])
        parameter.copy_(state["anchor"].addcdiv_(state["exp_avg"], scale, value=-self._sums[parameter]))

    def _begin_locally(self, parameters: list[torch.Tensor]) -> None:
        """Lets local steps begin from where parameters are, which is the same on all ranks."""
        for parameter in parameters:
            state = self.state[parameter]
            state["anchor"].copy_(parameter)  # also where nobody has exchanged, as on a single rank
            state["moved"].zero_()
            state["rates"] = 0.0


def _move_alone(
    parameter: torch.Tensor, state: dict[str, Any], scale: torch.Tensor, rate: float, b1: float, kept: float
) -> None:
    """The step of one rank by its own momentum."""
    assert parameter.grad is not None
    state["exp_avg"].lerp_(parameter.grad, 1 - b1)
    parameter.mul_(kept).addcdiv_(state["exp_avg"], scale, value=-rate)
    state["moved"].add_(state["exp_avg"], alpha=rate)
    state["rates"] += rate


def _put_on_floor(v: torch.Tensor, floor: float) -> None:
    """Makes of a second moment, in place, what is frozen."""
    unused = v == 0
    v.clamp_(min=v.mean() * floor)
    v.masked_fill_(unused, math.inf)  # without a gradient so far: no step, whatever noise compression makes of it


def _refresh(state: dict[str, Any], gradient: torch.Tensor, group: dict[str, Any]) -> None:
    """Adds the mean gradient of a step to a frozen second moment, as AdamW does."""
    v, b2 = state["exp_avg_sq"], group["betas"][1]
    v.masked_fill_(v.isinf(), 0).mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
    _put_on_floor(v, group["floor"])
    state["refreshes"] = state.get("refreshes", 0) + 1


def _adaptations(state: dict[str, Any]) -> int:
    """The number of gradients in a second moment that is frozen."""
    return int(state["frozen_at"]) + int(state.get("refreshes", 0))
