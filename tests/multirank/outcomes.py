"""Runs the modules of cases on real ranks, once per setting, and tells what each rank says of each case."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.launch import run_ranks

# With PyTorch, what is sent is tested in every setting. Most other modules see each number of ranks and each controller
# once: a compressor knows of neither. Four ranks on two cores took six times as long with Gloo.
EVERY_SETTING = ((2, "gloo"), (2, "mpi"), (4, "gloo"), (4, "mpi"))
EACH_ONCE = ((2, "gloo"), (4, "mpi"))

Setting = tuple[int, str]  # ranks and controller
Outcomes = tuple[list[dict[str, str]], str]  # per rank, what became of each case; and the launcher's output


def names_of(module: str) -> list[str]:
    """The cases of a module, read from its source: the module itself needs a started Horovod."""
    source = Path(__file__).with_name(f"{module}.py").read_text()
    return [line.partition("(")[0].removeprefix("def ") for line in source.splitlines() if line.startswith("def case_")]


def cases(modules: Mapping[str, Iterable[Setting]]) -> list[tuple[str, str, int, str]]:
    """Module, case, number of ranks and controller of all that is to be run."""
    return [
        (module, case, *setting)
        for module, settings in modules.items()
        for setting in settings
        for case in names_of(module)
    ]


def run(module: str, count: int, controller: str, timeout: float = 400) -> Outcomes:
    """Runs all cases of a module on real ranks.

    Args:
        timeout: seconds, after which the ranks are killed and the test fails.
    """
    folder = Path(mkdtemp(prefix="hvdcomp-ranks-"))
    finished = run_ranks(
        count,
        controller,
        ["-m", "tests.multirank.worker", f"tests.multirank.{module}", str(folder)],
        {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"},
        timeout=timeout,
    )
    files = [folder / f"rank{rank}.json" for rank in range(count)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files], finished.stdout


run_once = cache(run)


def check(outcomes: Outcomes, case: str) -> None:
    """Fails if the case failed on any rank, and skips if it was skipped."""
    ranks, output = outcomes
    for rank, outcome in enumerate(ranks):
        result = outcome.get(case, f"did not get this far; the launcher said:\n{output[-3000:]}")
        if result.startswith("skipped: "):
            pytest.skip(result.removeprefix("skipped: "))
        assert result == "passed", f"rank {rank}: {result}"
