"""The cases of torch.distributed, DistributedDataParallel and FSDP of `tests.multirank`, on ranks under torchrun."""

from __future__ import annotations

import pytest

from tests.multirank.outcomes import asked_for, cases, check, run_once

pytest.importorskip("torch")

# The first case of a setting waits for all cases of that setting.
pytestmark = [pytest.mark.alone, pytest.mark.timeout(3600)]

_SETTINGS = ((2, "torchrun"), (4, "torchrun"))
_MODULES = {
    "cases_torch_distributed": _SETTINGS,
    "cases_compiled": _SETTINGS,
    "cases_ddp": _SETTINGS,
    "cases_ddp_compiled": _SETTINGS,
    "cases_ddp_policies": _SETTINGS,
    "cases_ddp_torch_hooks": _SETTINGS,
    "cases_fsdp": _SETTINGS,
    "cases_fsdp_meshes": _SETTINGS,
    "cases_fsdp_shards": _SETTINGS,
    "cases_local_steps": _SETTINGS,
    "cases_local_steps_changed": _SETTINGS[1:],
    "cases_local_steps_shards": _SETTINGS,
    "cases_local_steps_streaming": _SETTINGS,
    "cases_rows": _SETTINGS,
    "cases_look_ahead": _SETTINGS,
    "cases_sharded_tables": _SETTINGS,
    "cases_bench_ddp": _SETTINGS,
    "cases_eight_ranks": ((8, "torchrun"),),
    "cases_simple": _SETTINGS[:1],
}


@pytest.mark.parametrize(("module", "case", "count", "controller"), cases(_MODULES))
def test_on_real_ranks(request: pytest.FixtureRequest, module: str, case: str, count: int, controller: str) -> None:
    check(run_once(asked_for(request), count, controller), module, case)
