"""Kubernetes quantities."""

from __future__ import annotations

import re
from decimal import Decimal

from hvdcomp.errors import ConfigurationError

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_SCALES = {"": Decimal(1), "m": Decimal("0.001")}
_SCALES |= {unit: Decimal(1000) ** (power + 1) for power, unit in enumerate("kMGTPE")}
_SCALES |= {f"{unit}i": Decimal(1024) ** (power + 1) for power, unit in enumerate("KMGTPE")}


def quantity(name: str, text: str) -> Decimal:
    """A Kubernetes quantity as a number. For example, "1500m" is 1.5, and "1Ki" is 1024.

    Raises:
        ConfigurationError: if the text is not a quantity. The message begins with the `name` of the setting.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"{name}: {text!r} is not a quantity: write a number and, if needed, a unit, such as 500m, 4 or 16Gi"
        )
    return Decimal(match[1]) * _SCALES[match[2] or ""]
