"""The cases of `tests.multirank`, on 2 and 4 real ranks, with MPI and with Gloo."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.launch import run_ranks

pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")

_MODULES = ("cases_torch", "cases_horovod", "cases_policies")
_SETTINGS = [(2, "gloo"), (2, "mpi"), (4, "gloo"), (4, "mpi")]


def _cases() -> list[tuple[str, str]]:
    """Names of modules and cases, read from the source: the modules themselves need a started Horovod."""
    here = Path(__file__).parent / "multirank"
    return [
        (module, line.partition("(")[0].removeprefix("def "))
        for module in _MODULES
        for line in (here / f"{module}.py").read_text().splitlines()
        if line.startswith("def case_")
    ]


@cache
def _outcomes(module: str, count: int, controller: str) -> tuple[list[dict[str, str]], str]:
    """What each rank says of each case, and the launcher's output; run once for all tests."""
    folder = Path(mkdtemp(prefix="hvdcomp-ranks-"))
    finished = run_ranks(
        count,
        controller,
        ["-m", "tests.multirank.worker", f"tests.multirank.{module}", str(folder)],
        {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"},
        timeout=240,
    )
    files = [folder / f"rank{rank}.json" for rank in range(count)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files], finished.stdout


@pytest.mark.parametrize(("count", "controller"), _SETTINGS)
@pytest.mark.parametrize(("module", "case"), _cases())
def test_on_real_ranks(module: str, case: str, count: int, controller: str) -> None:
    outcomes, output = _outcomes(module, count, controller)
    for rank, outcome in enumerate(outcomes):
        result = outcome.get(case, f"did not get this far; the launcher said:\n{output[-3000:]}")
        if result.startswith("skipped: "):
            pytest.skip(result.removeprefix("skipped: "))
        assert result == "passed", f"rank {rank}: {result}"
