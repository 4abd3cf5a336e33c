"""The PyTorch cases of `tests.multirank`, on 2 and 4 real ranks, with MPI and with Gloo."""

from __future__ import annotations

from functools import cache

import pytest

from tests.multirank.outcomes import SETTINGS, Outcomes, cases, check, run, run_once

pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")

# After a join Horovod's background thread now and then ends some collectives later, with or without compression. The
# cases of this module are given another chance where a rank was lost to that, and nowhere else.
_JOIN = "cases_join"
_LOST = "Horovod has been shut down"
_CASES = cases(("cases_torch", "cases_horovod", "cases_policies", _JOIN))


@cache
def _run_join(count: int, controller: str) -> Outcomes:
    outcomes = run(_JOIN, count, controller)
    for _ in range(4):
        expected = sum(module == _JOIN for module, _ in _CASES)
        if all(len(outcome) == expected and _LOST not in str(outcome) for outcome in outcomes[0]):
            break
        outcomes = run(_JOIN, count, controller)
    return outcomes


@pytest.mark.parametrize(("count", "controller"), SETTINGS)
@pytest.mark.parametrize(("module", "case"), _CASES)
def test_on_real_ranks(module: str, case: str, count: int, controller: str) -> None:
    check(_run_join(count, controller) if module == _JOIN else run_once(module, count, controller), case)
