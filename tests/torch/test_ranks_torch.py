"""The PyTorch cases of `tests.multirank`, on 2 and 4 real ranks, with MPI and with Gloo."""

from __future__ import annotations

from functools import cache

import pytest

from tests.multirank.outcomes import EACH_ONCE, EVERY_SETTING, Case, Outcomes, asked_for, cases, check, run, run_once

pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")

# The first case of a setting waits for all cases of that setting.
pytestmark = [pytest.mark.alone, pytest.mark.timeout(3600)]

# After a join Horovod's background thread now and then ends some collectives later, with or without compression. The
# cases of this module are given another chance where a rank was lost to that, and nowhere else.
_JOIN = "cases_join"
_LOST = "Horovod has been shut down"
_MODULES = {
    "cases_torch": EACH_ONCE,
    "cases_horovod": EACH_ONCE,
    "cases_mismatch": EACH_ONCE,
    "cases_policies": EACH_ONCE,
    "cases_collectives": EVERY_SETTING,
    "cases_dgc": ((2, "gloo"),),
    "cases_overlap": EVERY_SETTING,
    "cases_local_steps_streaming": EACH_ONCE,
    "cases_local_steps_elastic": EACH_ONCE,
    "cases_ddp_and_horovod": EACH_ONCE,
    "cases_look_ahead_horovod": ((2, "gloo"),),
    _JOIN: EACH_ONCE,
}


@cache
def _run_join(wanted: tuple[Case, ...], count: int, controller: str) -> Outcomes:
    for _ in range(5):
        outcomes = run(wanted, count, controller)
        if _LOST not in str(outcomes):
            break
    return outcomes


@pytest.mark.parametrize(("module", "case", "count", "controller"), cases(_MODULES))
def test_on_real_ranks(request: pytest.FixtureRequest, module: str, case: str, count: int, controller: str) -> None:
    once = _run_join if module == _JOIN else run_once
    check(once(asked_for(request, apart=(_JOIN,)), count, controller), module, case)
