"""Gives variables names that are the same in every process, even if a model is built again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from hvdcomp.errors import ConfigurationError


def stable_names(names: Sequence[str]) -> list[str]:
    """Replaces names of Keras's variables by unique names that do not depend on Keras's counters. The order does not
    change.

    Keras names the first dense layer of a process `dense`, and the second `dense_1`, even if they belong to different
    models. If a model is built a second time, its variables would have different names, and the model would not find
    its state. Therefore the layers are counted again. The first dense layer, for example `dense_7`, becomes `dense`,
    and the next dense layer becomes `dense_1`.

    >>> stable_names(["dense_7/kernel:0", "dense_7/bias:0", "dense_9/kernel:0"])
    ['dense/kernel', 'dense/bias', 'dense_1/kernel']
    """
    numbers: dict[str, dict[str, int]] = {}  # for each base name, the new number of each old name

    def renumbered(part: str) -> str:
        base = re.sub(r"_\d+$", "", part)
        parts = numbers.setdefault(base, {})
        number = parts.setdefault(part, len(parts))
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
    """The variables, by their stable names, in the same order.

    Raises:
        ConfigurationError: if there are no variables, or if one of them is not a tf.Variable, as in Keras 3.
    """
    variables = list(variables)
    for variable in variables:
        if not hasattr(variable, "ref"):
            raise ConfigurationError(
                f"variables contains a {type(variable).__module__}.{type(variable).__qualname__}, which is not a "
                "tf.Variable. Horovod does not work with models of Keras 3. Install tf_keras, and set "
                "TF_USE_LEGACY_KERAS=1 before you import TensorFlow, or build the model with tf_keras"
            )
    if not variables:
        raise ConfigurationError(
            "variables is empty, because a model has no variables before it is built. Leave variables= out, or give a "
            "function, variables=lambda: model.trainable_variables, which hvdcomp calls when it needs the variables"
        )
    return dict(zip(stable_names([variable.name for variable in variables]), variables, strict=True))
