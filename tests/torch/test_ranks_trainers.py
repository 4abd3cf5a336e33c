"""The cases of trainers of `tests.multirank`, on ranks under torchrun. Each needs its trainer's library."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.multirank.outcomes import asked_for, cases, check, run_once

pytest.importorskip("torch")
_LIBRARIES = ("accelerate", "lightning", "transformers")
if not any(map(find_spec, _LIBRARIES)):
    pytest.skip(f"no trainer is installed: pip install 'hvdcomp[{','.join(_LIBRARIES)}]'", allow_module_level=True)

# The first case waits for all.
pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]

# In a start of their own: these libraries keep state for the whole process.
_MODULES = {"cases_trainers": ((2, "torchrun"),), "cases_trainers_meshes": ((4, "torchrun"),)}


@pytest.mark.parametrize(("module", "case", "count", "controller"), cases(_MODULES))
def test_on_real_ranks(request: pytest.FixtureRequest, module: str, case: str, count: int, controller: str) -> None:
    check(run_once(asked_for(request), count, controller), module, case)
