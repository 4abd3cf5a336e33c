"""Parses rates of links in the notation of Linux's `tc`, such as "100mbit" for 100 megabits per second."""

from __future__ import annotations

import math
import re

GBPS = 1.25e8
"""The number of bytes per second that are one gigabit per second."""
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_RATE = re.compile(rf"(\d+(?:\.\d*)?|\.\d+)({'|'.join(_UNITS)})")


def parse_rate(text: str) -> float:
    """The number of bits per second of a rate such as "100mbit" or "2.5gbit".

    Raises:
        ValueError: if the text is not a rate, or if the rate is 0.
    """
    match = _RATE.fullmatch(text.strip().lower())
    bits = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if bits <= 0:
        raise ValueError(f"{text!r} is not a rate; write it as tc does, in bits per second: 100mbit, 1gbit, 10gbit")
    return bits


def parse_gbps(text: str) -> float:
    """The number of gigabits per second of a text: either a rate with a unit, as in `parse_rate`, or a number in Gb/s.

    Raises:
        ValueError: if the text is neither a rate nor a number, or if the number is not above 0.
    """
    try:
        number = float(text)
    except ValueError:
        return parse_rate(text) / 1e9
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{text} is not a bandwidth; write a number of Gb/s above 0, or a rate such as 100mbit")
    return number
