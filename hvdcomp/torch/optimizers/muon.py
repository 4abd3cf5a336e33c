"""`MuonWithAdamW`: a single optimizer that uses Muon for the hidden matrices of a model, and AdamW for all other
parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hvdcomp.bindings.frameworks import not_compiled
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.parameters import unique

_WITH_MATRICES = (nn.Linear, nn.RNNBase, nn.MultiheadAttention)
_WAYS = (
    "give it the model itself, or parameter groups such as "
    '[{"params": matrices, "use_muon": True}, {"params": others}], '
    "with matrices of hvdcomp.torch.hidden_matrices(model) or of your own choice"
)


def hidden_matrices(model: nn.Module, head: nn.Module | Iterable[nn.Module] | None = None) -> dict[str, nn.Parameter]:
    """The hidden matrices of a model, which Muon should train. The hidden matrices are the two-dimensional parameters
    of all layers of the kinds `Linear`, `LSTM` (`GRU`, `RNN`) and `MultiheadAttention`, except the head.

    AdamW should train all other parameters: the head, embeddings (even if a linear layer shares the weight), kernels of
    convolutions, norms, biases, and parameters of other kinds of modules.

    Args:
        model: a model, which may be wrapped in DistributedDataParallel or torch.compile.
        head: the layer that computes the model's outputs, or several layers. Pass `()` if no separate layer computes
            the outputs, as in a GPT that multiplies by the weight of its embedding. Default: the linear layer that was
            defined last.

    Returns:
        The matrices, by name, in the order of the model; empty if there are none.

    Raises:
        ConfigurationError: if `head` is not a layer of the model.

    Example:
        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 9))
        >>> list(hidden_matrices(model))
        ['1.weight', '3.weight']
        >>> list(hidden_matrices(model, head=()))
        ['1.weight', '3.weight', '4.weight']
    """
    modules = list(model.modules())
    if head is None:
        head = [module for module in modules if isinstance(module, nn.Linear)][-1:]
    # If the user passes a layer's name, an error follows.
    heads: list[Any] = [head] if isinstance(head, nn.Module | str) else list(head)
    if strangers := [one for one in heads if one not in modules]:
        raise ConfigurationError(
            f"head={strangers[0]!r} is not a layer of this {type(model).__name__}; give the layer that computes the "
            "outputs, such as head=model.head, or head=() if no separate layer computes them"
        )
    layers = [module for module in modules if isinstance(module, _WITH_MATRICES)]
    not_hidden = heads + [module for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    excluded = {parameter for module in not_hidden for parameter in module.parameters()}
    own = (parameter for layer in layers for parameter in layer.parameters(recurse=False))
    hidden = {parameter for parameter in own if parameter.ndim == 2} - excluded
    return {name: parameter for name, parameter in unique(model.named_parameters()).items() if parameter in hidden}


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for the hidden matrices of a model, and `torch.optim.AdamW` for its other parameters.

        optimizer = hvdcomp.torch.MuonWithAdamW(model, lr=8e-3)

    `MuonWithAdamW` is a single optimizer, because Horovod, `LocalSteps`, schedulers, a GradScaler and checkpoints
    expect a single optimizer. Inside `MuonWithAdamW`, PyTorch's two optimizers share the parameter groups and the state
    of `MuonWithAdamW`. So the weights are the same, bit for bit, as with two separate optimizers. Muon's steps are
    scaled to the size of AdamW's steps (`adjust_lr_fn="match_rms_adamw"`; Liu et al. 2025, arXiv:2502.16982, section
    2.2), so that both can use the same learning rate.

    `hidden_matrices` determines which parameters of a model Muon trains. To choose these parameters yourself, pass
    parameter groups:

        optimizer = hvdcomp.torch.MuonWithAdamW(
            [{"params": matrices, "use_muon": True}, {"params": others, "weight_decay": 0.0}], lr=8e-3
        )

    Args:
        params: a model, or parameter groups. The parameters of a model are divided into two parameter groups with
            names. Muon trains the parameter groups with `use_muon=True`. A parameter group may set options of the
            optimizer that trains it.
        lr: the learning rate of parameter groups that do not set `lr`.
        head: the head of a model, as in `hidden_matrices`.
        muon, adamw: the options of `torch.optim.Muon` and of `torch.optim.AdamW` for parameter groups that do not set
            these options, such as `adamw={"betas": (0.9, 0.95), "lr": 2e-3}`. Defaults: PyTorch's own defaults, except
            for `adjust_lr_fn`.

    Raises:
        ConfigurationError: if PyTorch is older than 2.9, which has no Muon; if there is no hidden matrix; if a
            parameter for Muon is not a matrix; or if a state belongs to other parameter groups.
        TypeError: if an option does not exist in PyTorch's optimizer.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        *,
        head: nn.Module | Iterable[nn.Module] | None = None,
        muon: Mapping[str, Any] | None = None,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ConfigurationError(
                f"MuonWithAdamW needs PyTorch 2.9 or later, but this is PyTorch {torch.__version__}; use "
                "torch.optim.AdamW"
            )
        if isinstance(params, nn.Module):
            params = _sorted_groups(params, head)
        elif head is not None:
            raise ConfigurationError(
                "MuonWithAdamW: head= works only with a model, but MuonWithAdamW was given parameter groups; "
                "leave head out"
            )
        # The key is whether a parameter group uses Muon.
        self._options = {True: {"adjust_lr_fn": "match_rms_adamw", **(muon or {})}, False: dict(adamw or {})}
        super().__init__(params, {"lr": lr, "use_muon": False})
        if not any(group["use_muon"] for group in self.param_groups):
            raise ConfigurationError(f"MuonWithAdamW was not told which parameters are hidden matrices; {_WAYS}")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as `torch.optim.Optimizer` does. If the optimizer was created with a model, the
        parameters also need names."""
        for option, default in self._options[bool(param_group.get("use_muon"))].items():
            param_group.setdefault(option, default)
        super().add_param_group(param_group)
        self._share()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state, as `torch.optim.Optimizer` does. A parameter group of the state must have the same
        `use_muon` as the parameter group of this optimizer."""
        own, loaded = (
            [bool(group.get("use_muon")) for group in groups]
            for groups in (self.param_groups, state_dict["param_groups"])
        )
        if own != loaded:
            raise ConfigurationError(
                f"the state has parameter groups with use_muon={loaded}, but this optimizer has parameter groups with "
                f"use_muon={own}; give the state of a MuonWithAdamW with the same parameter groups"
            )
        super().load_state_dict(state_dict)

    def _share(self) -> None:
        """Creates PyTorch's two optimizers with the current parameter groups and the current state."""
        self._parts: list[torch.optim.Optimizer] = []
        for uses_muon, options in self._options.items():
            groups = [group for group in self.param_groups if bool(group["use_muon"]) == uses_muon]
            if groups:
                if uses_muon:
                    _require_matrices(groups)
                part = (torch.optim.Muon if uses_muon else torch.optim.AdamW)(groups, **options)
                part.state = self.state
                self._parts.append(part)

    @not_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step of the optimizer, as `torch.optim.Optimizer` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def _sorted_groups(model: nn.Module, head: nn.Module | Iterable[nn.Module] | None) -> list[dict[str, Any]]:
    """The parameter group of a model's hidden matrices, and the parameter group of its other parameters if there are
    any."""
    hidden = hidden_matrices(model, head)
    if not hidden:
        raise ConfigurationError(
            f"MuonWithAdamW found no hidden matrix in this {type(model).__name__}: it has no linear, recurrent or "
            "attention layer except the head. Use head=() if the last linear layer is not the head, pass parameter "
            "groups of your own choice, or use torch.optim.AdamW"
        )
    others = [pair for pair in unique(model.named_parameters()).items() if pair[0] not in hidden]
    groups = [{"params": list(hidden.items()), "use_muon": True}, {"params": others, "use_muon": False}]
    return [group for group in groups if group["params"]]


def _require_matrices(groups: Iterable[dict[str, Any]]) -> None:
    """Raises ConfigurationError if a parameter group for Muon has a parameter that is not a matrix."""
    for group in groups:
        for place, parameter in enumerate(group["params"]):
            if parameter.ndim != 2:
                names = group.get("param_names")
                name = f"parameter {place} of its parameter group" if names is None else names[place]
                raise ConfigurationError(
                    f"MuonWithAdamW: {name} has the shape {tuple(parameter.shape)}, but Muon works only on matrices; "
                    "put it into a parameter group without use_muon, which AdamW trains"
                )
