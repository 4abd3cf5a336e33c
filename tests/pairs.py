"""Policies and compressors that go together. Imports no framework, so that real ranks may use it."""

from __future__ import annotations

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import SpecError
from hvdcomp.policies import parse_policy


def compressor_for(policy: str) -> str:
    """The spec of a compressor that a policy can work with: its levels may be ratios or ranks."""

    def suits(compressor: str) -> bool:
        try:
            parse_policy(policy).check(512, parse_compressor(compressor))
        except SpecError:
            return False
        return True

    return next(filter(suits, ("topk:ratio=0.1", "powersgd:rank=4")))


def lags_of(policy: str) -> tuple[int, ...]:
    """The lags that a policy allows, for a spec without a lag."""

    def may_have(lag: int) -> bool:
        try:
            parse_policy(f"{policy},lag={lag}")
        except SpecError:
            return False
        return True

    return tuple(filter(may_have, (0, 1)))
