"""Names of variables that are the same in every process, and in every model made anew."""

from __future__ import annotations

import re
from collections.abc import Sequence


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
