"""Names of variables that are the same in every process, and in every model made anew."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from hvdcomp.errors import ConfigurationError


def stable_names(names: Sequence[str]) -> list[str]:
    """Names without what Keras counts up in each process, unique, in the order given.

    Keras calls the first dense layer that a process makes `dense`, the second `dense_1`, whichever model they are in.
    State that is kept by such names would not be found again by a model that was built twice. So the numbers are given
    anew: the first `dense_7` becomes `dense`, the next layer of that kind `dense_1`.

    >>> stable_names(["dense_7/kernel:0", "dense_7/bias:0", "dense_9/kernel:0"])
    ['dense/kernel', 'dense/bias', 'dense_1/kernel']
    """
    numbers: dict[str, dict[str, int]] = {}  # of the parts that differ by nothing but a number

    def renumbered(part: str) -> str:
        base = re.sub(r"_\d+$", "", part)
        known = numbers.setdefault(base, {})
        number = known.setdefault(part, len(known))
        return f"{base}_{number}" if number else base

    result: dict[str, None] = {}
    for name in names:
        plain = "/".join(renumbered(part) for part in name.removesuffix(":0").split("/"))
        unique, count = plain, 1
        while unique in result:
            count += 1
            unique = f"{plain}#{count}"
        result[unique] = None
    return list(result)


def by_name(variables: Iterable[Any]) -> dict[str, Any]:
    """Variables by their stable names, in the order given.

    Raises:
        ConfigurationError: if there are none, or if one is no tf.Variable, as those of Keras 3.
    """
    variables = list(variables)
    for variable in variables:
        if not hasattr(variable, "ref"):
            raise ConfigurationError(
                f"{type(variable).__module__}.{type(variable).__qualname__} in variables is no tf.Variable. Horovod "
                "does not distribute models of Keras 3: set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported, "
                "with tf_keras installed, or build the model with tf_keras"
            )
    if not variables:
        raise ConfigurationError(
            "variables is empty: the model has none before it is built. Leave variables= out, or give a function, "
            "variables=lambda: model.trainable_variables, which is called when they are needed"
        )
    return dict(zip(stable_names([variable.name for variable in variables]), variables, strict=True))
