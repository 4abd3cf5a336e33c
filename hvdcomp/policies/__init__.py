"""Policies: when, and how hard, to compress. Pure objects that know no framework, no Horovod and no clock."""

from __future__ import annotations

from hvdcomp.policies.schedules import DENSE, LevelSchedule, WarmUp

SCHEDULES: dict[str, type[LevelSchedule]] = {kind.name: kind for kind in (WarmUp,)}

__all__ = ["DENSE", "SCHEDULES", "LevelSchedule", "WarmUp"]
