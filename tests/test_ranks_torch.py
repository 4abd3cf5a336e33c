"""The PyTorch cases of `tests.multirank`, on 2 and 4 real ranks, with MPI and with Gloo."""

from __future__ import annotations

from functools import cache

import pytest

from tests.multirank.outcomes import EACH_ONCE, EVERY_SETTING, Outcomes, cases, check, names_of, run, run_once

pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")

pytestmark = pytest.mark.alone

# After a join Horovod's background thread now and then ends some collectives later, with or without compression. The
# cases of this module are given another chance where a rank was lost to that, and nowhere else.
_JOIN = "cases_join"
_LOST = "Horovod has been shut down"
_MODULES = {
    "cases_torch": EVERY_SETTING,
    "cases_horovod": EACH_ONCE,
    "cases_mismatch": EACH_ONCE,
    "cases_policies": ((2, "gloo"), (4, "gloo"), (4, "mpi")),
    _JOIN: EACH_ONCE,
}


@cache
def _run_join(count: int, controller: str) -> Outcomes:
    outcomes = run(_JOIN, count, controller)
    expected = len(names_of(_JOIN))
    for _ in range(4):
        if all(len(outcome) == expected and _LOST not in str(outcome) for outcome in outcomes[0]):
            break
        outcomes = run(_JOIN, count, controller)
    return outcomes


@pytest.mark.parametrize(("module", "case", "count", "controller"), cases(_MODULES))
def test_on_real_ranks(module: str, case: str, count: int, controller: str) -> None:
    check(_run_join(count, controller) if module == _JOIN else run_once(module, count, controller), case)
