"""A pytest plugin that runs Horovod's own tests on this rank, stock or with gradients compressed.

    pytest -p tests.multirank.horovods_own --outcomes FOLDER [--compressed] HOROVOD/test/parallel/test_torch.py

Of each file it keeps the tests that make an optimizer or a tape of Horovod's. With `--compressed`, each of these gets
an `hvdcomp.Compression(TopK(ratio=1.0))` where the test asks for no compression: everything is sent, the way that
compressed gradients go.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODULES = ("horovod.torch", "horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras")
MAKERS = (
    "DistributedOptimizer",
    "DistributedGradientTape",
    "PartialDistributedOptimizer",
    "PartialDistributedGradientTape",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="the folder to write rankN.json to")
    parser.addoption("--compressed", action="store_true", help="compress with TopK(1.0)")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if _makes_one(item)]
    if torch := sys.modules.get("torch"):
        _hide_newer_optimizers(torch)
    if config.getoption("--compressed"):
        _compress_all()


def _makes_one(item: pytest.Item) -> bool:
    """Whether the test's source does. It is read from the file: parameterized tests hide theirs."""
    tests = _sources(item.path)
    name = max((name for name in tests if item.name.startswith(name)), key=len, default=None)
    return name is not None and any(f".{maker}(" in tests[name] for maker in MAKERS)


@functools.cache
def _sources(path: Path) -> dict[str, str]:
    """The source of each test of a file, by name."""
    text = path.read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in functions if node.name.startswith("test")}


def _hide_newer_optimizers(torch: Any) -> None:
    """Some tests take every optimizer of torch.optim. One is newer than they are, and refuses what is no matrix."""
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "hidden"


def _same_weights() -> None:
    """Makes all ranks start with the same weights: many tests do not broadcast any, and hvdcomp insists on it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(1)
    if tensorflow := sys.modules.get("tensorflow"):
        tensorflow.random.set_seed(1)


class _Outcomes:
    """Writes after each test what became of it, and how many steps were compressed; another rank may end this one."""

    def __init__(self, folder: Path) -> None:
        rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"]
        self._file = folder / f"rank{rank}.json"
        self._outcomes: dict[str, dict[str, Any]] = {}

    def pytest_runtest_setup(self) -> None:
        _made.clear()
        _same_weights()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """pytest calls this for a test and for each of its subtests."""
        if report.when == "call" or report.outcome != "passed":
            known = self._outcomes.setdefault(report.nodeid.rpartition("/")[2], {"outcomes": [], "texts": []})
            known["outcomes"].append(report.outcome)
            known["texts"].append(report.longreprtext)
            known["steps"] = sum(compression.ledger.steps for compression in _made)
            self._file.write_text(json.dumps(self._outcomes))


_made: list[Any] = []  # the compressions of the test that runs


def _compress_all() -> None:
    """Wraps whatever makes optimizers and tapes in those of Horovod's modules that the tests have imported."""
    for module in filter(None, map(sys.modules.get, MODULES)):
        for name in MAKERS:
            if hasattr(module, name):
                setattr(module, name, _compressed(getattr(module, name), module))


def _compressed(make: Callable[..., Any], hvd: Any) -> Callable[..., Any]:
    from hvdcomp import Compression, TopK

    topk = functools.partial(Compression, TopK(ratio=1.0), min_numel=0, min_ndim=0)
    spare = topk()  # for tests that wrap a tape in a tf.function, where no Compression can be made
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("compression", hvd.Compression.none) is hvd.Compression.none:
            compression = copy.deepcopy(spare) if _is_traced() else topk(process_set=bound.arguments.get("process_set"))
            bound.arguments["compression"] = compression
            _made.append(compression)
        return make(*bound.args, **bound.kwargs)

    made.autograph_info__ = {}  # type: ignore[attr-defined] # AutoGraph is to leave it as it is
    return made


def _is_traced() -> bool:
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and tensorflow.inside_function()
