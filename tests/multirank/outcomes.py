"""Runs cases on real ranks, many in one start, and tells what each rank says of each."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.launched import run_forked_ranks, run_ranks
from tests.multirank.requests import first_difference
from tests.multirank.worker import is_in_tensorflow, requests_of

# The first of a module's settings is that of the quick tests. Collectives, and exchanges during the backward pass, are
# tested in every setting. Other modules see each number of ranks and each controller once: what they test depends on
# neither. Four ranks on two cores took six times as long with Gloo.
EVERY_SETTING = ((2, "gloo"), (2, "mpi"), (4, "gloo"), (4, "mpi"))
EACH_ONCE = ((2, "gloo"), (4, "mpi"))

# torch.distributed keeps three threads for each process group, and the thorough cases make about six groups each. The
# threads wake up so often that 600 groups on each of four ranks left nothing of two cores. Horovod has no such threads.
CASES_UNDER_TORCHRUN = 30

Setting = tuple[int, str]  # ranks and controller
Case = tuple[str, str]  # module and function
Outcomes = dict[Case, str]  # what became of each case: "passed", "skipped: ..." or what went wrong

# How long rank 0 was in each case. pytest can not tell: the first case of a setting waits for all of that setting.
SECONDS: dict[str, float] = {}


def cases_of(module: str) -> dict[str, bool]:
    """The cases of a module, and whether each is thorough, read from its source: it needs a started Horovod itself.

    A case with the decorator `tests.multirank.worker.thorough` is not among the quick tests.
    """
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text())
    return {
        node.name: any(ast.unparse(decorator) == "thorough" for decorator in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
    }


def cases(modules: Mapping[str, Iterable[Setting]]) -> list[Any]:
    """Module, case, number of ranks and controller of all that is to be run, as parameters of a test."""
    return [
        pytest.param(module, case, *setting, marks=[pytest.mark.thorough] * (thorough or place > 0))
        for module, settings in modules.items()
        for place, setting in enumerate(settings)
        for case, thorough in cases_of(module).items()
    ]


def asked_for(request: pytest.FixtureRequest, apart: Sequence[str] = ()) -> tuple[Case, ...]:
    """The cases of this session that can share a start with the one of this test: same test, ranks and controller.

    Args:
        apart: modules whose cases share a start with no others.
    """
    mine = request.node.callspec.params
    found = []
    for item in request.session.items:
        if item.path != request.node.path or item.originalname != request.node.originalname:
            continue
        theirs = item.callspec.params
        if (theirs["count"], theirs["controller"]) != (mine["count"], mine["controller"]):
            continue
        if theirs["module"] == mine["module"] or not {theirs["module"], mine["module"]} & set(apart):
            found.append((theirs["module"], theirs["case"]))
    return tuple(found)


def run(wanted: Sequence[Case], count: int, controller: str, timeout: float = 400) -> Outcomes:
    """Runs cases on real ranks, in few starts of whole modules.

    A case that fails ends the start, and with it the rest of its module; what comes after the module gets another.

    Args:
        timeout: seconds for each module, after which the ranks are killed.
    """
    outcomes: Outcomes = {}
    while rest := _next_start([case for case in wanted if case not in outcomes], controller):
        modules = dict.fromkeys(module for module, _ in rest)
        results, output, requests = _start(rest, count, controller, timeout * len(modules))
        for case in rest:
            said = [f"rank {rank}: {result[case]}" for rank, result in enumerate(results) if case in result]
            bad = [line for line in said if not line.endswith(": passed") and ": skipped: " not in line]
            if len(said) == count and not bad:
                outcomes[case] = said[0].partition(": ")[2]
                continue
            for other in (other for other in rest if other[0] == case[0] and other not in outcomes):
                outcomes[other] = f"{case[1]} ended the ranks first; the launcher said:\n{output[-3000:]}"
            outcomes[case] = "\n".join([*bad, requests]) if bad else f"{outcomes[case]}\n{requests}"
            break
    return outcomes


def _next_start(waiting: Sequence[Case], controller: str) -> list[Case]:
    """The cases of the first modules: under torchrun, of as many modules as have few cases together, but at least of
    one; otherwise of all."""
    if controller != "torchrun":
        return list(waiting)
    chosen: list[Case] = []
    for module in dict.fromkeys(module for module, _ in waiting):
        more = [case for case in waiting if case[0] == module]
        if chosen and len(chosen) + len(more) > CASES_UNDER_TORCHRUN:
            break
        chosen += more
    return chosen


def _start(
    wanted: Sequence[Case], count: int, controller: str, timeout: float
) -> tuple[list[dict[Case, str]], str, str]:
    """What each rank says of the cases that it came to, the launcher's output, and how the last requests differ."""
    folder = Path(mkdtemp(prefix="hvdcomp-ranks-"))
    start = run_ranks if is_in_tensorflow(".".join(wanted[0])) else run_forked_ranks
    finished = start(
        count,
        controller,
        ["-m", "tests.multirank.worker", str(folder), *(f"{module}.{case}" for module, case in wanted)],
        {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"},
        timeout=timeout,
    )
    results = []
    for rank in range(count):
        file = folder / f"rank{rank}.json"
        said = json.loads(file.read_text()) if file.exists() else {}
        results.append({tuple(name.split(".")): result for name, (result, _) in said.items()})
        if rank == 0:
            SECONDS.update((f"{name}-{count}-{controller}", seconds) for name, (_, seconds) in said.items())
    return results, finished.stdout, first_difference([requests_of(folder, rank) for rank in range(count)])


run_once = cache(run)


def check(outcomes: Outcomes, module: str, case: str) -> None:
    """Fails if the case failed on any rank, and skips if it was skipped."""
    result = outcomes[module, case]
    if result.startswith("skipped: "):
        pytest.skip(result.removeprefix("skipped: "))
    assert result == "passed", result
