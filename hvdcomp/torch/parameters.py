"""Finds parameters by name, from the user or from Horovod's optimizer. This file does not import PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hvdcomp.errors import ConfigurationError

# The wrappers torch.compile, activation checkpointing and FSDP1 add these parts to names. DistributedDataParallel and
# DataParallel prepend `_WHOLE`, which may also be the name of a user's inner module.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_WHOLE = "module."


def plain_names(names: Iterable[str]) -> list[str]:
    """The names of a model's parameters without the parts from wrappers, in the same order.

    Routing, random numbers and checkpoints depend on names, and must not depend on wrappers.

    >>> plain_names(["module._orig_mod.head.weight", "module._orig_mod.head.bias"])
    ['head.weight', 'head.bias']
    """
    plain = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names]
    while plain and all(name.startswith(_WHOLE) for name in plain):
        plain = [name.removeprefix(_WHOLE) for name in plain]
    return plain


def with_plain_names(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A valid state of `Compression.state_dict`, converted to `plain_names`. Version 0.1.0 saved names with the parts
    from wrappers.
    """
    names = list(state["shared"]["tensors"])
    new = {old: name for old, name in zip(names, plain_names(names), strict=True) if old != name}

    def renamed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {new.get(key, key): renamed(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [renamed(item) for item in value]
        return new.get(value, value) if isinstance(value, str) else value

    return {part: renamed(value) for part, value in state.items()} if new else state


def by_name(named_parameters: Any, optimizer: Any) -> dict[str, Any]:
    """The parameters, by their `plain_names`.

    Args:
        named_parameters: a result of `unique`, or a function that returns pairs of name and parameter; None to use the
            names of Horovod's optimizer.
        optimizer: Horovod's optimizer, or None.

    Raises:
        ConfigurationError: if names are not unique, or if both arguments are None.
    """
    if named_parameters is None:
        if optimizer is None:
            raise ConfigurationError(
                "hvdcomp.Compression has no named_parameters, and cannot find them, because hvd.DistributedOptimizer "
                "did not call it; use hvdcomp.Compression(..., named_parameters=model.named_parameters())"
            )
        return unique((name, parameter) for parameter, name in optimizer._parameter_names.items())
    return unique(named_parameters()) if callable(named_parameters) else dict(named_parameters)


def unique(named_parameters: Any) -> dict[str, Any]:
    """Converts pairs of name and parameter to a dictionary by `plain_names`.

    Raises:
        ConfigurationError: if the argument does not consist of pairs, or a name occurs twice.
    """
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ConfigurationError(
            "named_parameters must be pairs of name and parameter, such as model.named_parameters()"
        )
    names = plain_names(name for name, _ in pairs)
    parameters = {name: parameter for name, (_, parameter) in zip(names, pairs, strict=True)}
    if len(parameters) < len(pairs):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigurationError(
            f"names in named_parameters must be unique, but these were given twice: {', '.join(twice)}"
        )
    return parameters
