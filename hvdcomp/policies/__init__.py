"""Policies decide in which steps gradients are compressed, and how strongly. Policies do not use a framework, Horovod
or a clock, so the same input always gives the same decision.

Each class in this folder that has a `name` is found automatically.
"""

from __future__ import annotations

from typing import Any

from hvdcomp.policies.accordion import finite, is_critical
from hvdcomp.policies.base import Policy
from hvdcomp.policies.decisions import decision_from_json
from hvdcomp.policies.median import median_with_error
from hvdcomp.policies.removed import refuse_removed
from hvdcomp.policies.schedules import LevelSchedule
from hvdcomp.specs.described import is_number, is_whole
from hvdcomp.specs.levels import DENSE
from hvdcomp.specs.parsing import parse
from hvdcomp.specs.plugins import Plugins
from hvdcomp.specs.registry import classes_by_name

POLICIES: dict[str, type[LevelSchedule] | type[Policy[Any]]] = {
    **classes_by_name(__name__, LevelSchedule),
    **classes_by_name(__name__, Policy),
}
"""Schedules and policies, by their name in a spec string. Every rank follows a schedule by itself. With a policy, rank
0 makes the decisions."""


POLICY_PLUGINS = Plugins("policy", "hvdcomp.policies", (LevelSchedule, Policy), POLICIES)
"""Finds policies and schedules in other packages and in the user's modules."""


def changes_batch_size(policy: LevelSchedule | Policy[Any] | None) -> bool:
    """Whether a policy sets the batch size instead of levels."""
    return isinstance(policy, Policy) and policy.first_decision.sets_batch_size


def parse_policy(spec: str) -> LevelSchedule | Policy[Any]:
    """The policy or schedule that a spec string describes, such as `warmup:levels=0.25|0.0625,epochs=1`,
    `accordion:low=4,high=1` or `gravac`.

    Raises:
        SpecError: if a name or setting is unknown, a setting is missing, or a value has the wrong kind. The message
            lists the names or settings that exist. For a policy that was removed, the message names its replacement.
    """
    if isinstance(spec, str):
        refuse_removed(spec)
    return parse(spec, POLICIES, "policy", POLICY_PLUGINS)


__all__ = [
    "DENSE",
    "POLICIES",
    "POLICY_PLUGINS",
    "LevelSchedule",
    "Policy",
    "changes_batch_size",
    "decision_from_json",
    "finite",
    "is_critical",
    "is_number",
    "is_whole",
    "median_with_error",
    "parse_policy",
    "refuse_removed",
]
