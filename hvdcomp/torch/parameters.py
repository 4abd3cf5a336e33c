"""Parameters by name, as a user or Horovod's optimizer gives them. Imports no PyTorch."""

from __future__ import annotations

from typing import Any

from hvdcomp.errors import ConfigurationError


def by_name(named_parameters: Any, optimizer: Any) -> dict[str, Any]:
    """Parameters by name.

    Args:
        named_parameters: what `unique` returned, or a function that returns pairs; None for the names that Horovod's
            optimizer has.
        optimizer: that of Horovod, or None.

    Raises:
        ConfigurationError: if they are not unique pairs, or if there are none and no optimizer either.
    """
    if named_parameters is None:
        if optimizer is None:
            raise ConfigurationError(
                "hvdcomp.Compression has no named_parameters, and was not called by hvd.DistributedOptimizer, which "
                "would have them: give it named_parameters=model.named_parameters()"
            )
        return {name: parameter for parameter, name in optimizer._parameter_names.items()}
    return unique(named_parameters()) if callable(named_parameters) else dict(named_parameters)


def unique(named_parameters: Any) -> dict[str, Any]:
    """Pairs of name and parameter as a dictionary.

    Raises:
        ConfigurationError: if they are not pairs, or a name occurs twice.
    """
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ConfigurationError("named_parameters must be pairs of name and parameter, as model.named_parameters()")
    parameters = dict(pairs)
    if len(parameters) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigurationError(f"names in named_parameters must be unique; given twice: {', '.join(twice)}")
    return parameters
