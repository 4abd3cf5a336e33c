"""Horovod's own tests of its optimizers and tapes give with TopK(1.0) what they give without.

They are in Horovod's repository, in neither its wheel nor its source distribution; how to run them: docs/testing.md.
Where one fails with today's frameworks, it has to fail with compression too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tests.launched import run_ranks

_FOLDER = os.environ.get("HOROVOD_TESTS")
_MISSING = [package for package in ("mock", "parameterized") if find_spec(package) is None]

pytestmark = [
    pytest.mark.alone,
    pytest.mark.thorough,
    pytest.mark.skipif(not _FOLDER, reason="HOROVOD_TESTS does not name Horovod's tests: see docs/testing.md"),
    pytest.mark.skipif(bool(_MISSING), reason=f"Horovod's tests need {' and '.join(_MISSING)}, not installed here"),
]


class Run(NamedTuple):
    """Files of tests, and on what ranks they are run.

    Attributes:
        framework: whose Horovod they need.
        files: in Horovod's folder `test/parallel`.
        ranks, controller: as for `run_ranks`.
        no_step: tests that make an optimizer and no step with it, so that nothing is compressed.
        refused: tests that do what hvdcomp refuses, and the reason.
    """

    framework: str
    files: tuple[str, ...]
    ranks: int
    controller: str
    no_step: frozenset[str] = frozenset()
    refused: Mapping[str, str] = MappingProxyType({})


# Process sets are those of even and of odd ranks: only with three is one of them more than a rank alone.
RUNS = [
    Run(
        "torch",
        ("test_torch.py",),
        3,
        "mpi",
        frozenset(
            {
                "test_broadcast_state_no_grad",
                "test_duplicate_names",
                "test_missing_named_parameters",
                "test_optimizer_no_named_parameters",
            }
        ),
    ),
    Run(
        "tensorflow",
        ("test_tensorflow.py", "test_tensorflow2_keras.py"),
        2,
        "gloo",
        frozenset({"test_from_config"}),
        # It gives each rank other weights, and makes two steps with them.
        {"test_partial_distributed_gradient_tape": "their weights differ"},
    ),
    Run("tensorflow", ("test_tensorflow_process_sets.py",), 3, "mpi"),
    Run("tensorflow", ("test_tensorflow2_keras_process_sets.py",), 3, "mpi"),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.files[0])
def test_compressed_as_stock(run: Run, tmp_path: Path) -> None:
    pytest.importorskip(f"horovod.{run.framework}", reason="Horovod is not built here: run `hvdcomp build-horovod`")
    stock = _outcomes(run, tmp_path / "stock")
    compressed = _outcomes(run, tmp_path / "compressed", "--compressed")
    for test, reason in run.refused.items():
        for one, other in zip(_take(stock, test), _take(compressed, test), strict=True):
            assert set(one["outcomes"]) == {"passed"}
            assert [reason in text for text in other["texts"]] == [said == "failed" for said in other["outcomes"]]
            assert "failed" in other["outcomes"]
    assert _short(compressed) == _short(stock), _texts(compressed)
    steps = {name: sum(rank[name]["steps"] for rank in compressed) for name in compressed[0]}
    passed = {name for name in steps if all(set(rank[name]["outcomes"]) == {"passed"} for rank in compressed)}
    assert {_test(name) for name in passed if steps[name] == 0} == run.no_step
    assert passed


def _outcomes(run: Run, folder: Path, *options: str) -> list[dict[str, dict[str, Any]]]:
    """What became of each test, by rank."""
    folder.mkdir()
    assert _FOLDER
    root = Path(_FOLDER).resolve()
    files = [str(root / "parallel" / file) for file in run.files]
    plugins = ["-p", "tests.multirank.horovods_own", "-p", "no:cacheprovider"]
    where = ["-c", os.devnull, "--rootdir", str(root), "--outcomes", str(folder), "--timeout", "240"]
    finished = run_ranks(
        run.ranks,
        run.controller,
        ["-m", "pytest", "--quiet", "--tb=short", *plugins, *where, *options, *files],
        {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"},
        timeout=550,
    )
    written = [folder / f"rank{rank}.json" for rank in range(run.ranks)]
    assert all(file.exists() for file in written), finished.stdout[-5000:]
    return [json.loads(file.read_text()) for file in written]


def _take(outcomes: list[dict[str, dict[str, Any]]], test: str) -> list[dict[str, Any]]:
    """Takes what became of one test out of the ranks' outcomes."""
    return [rank.pop(next(name for name in rank if _test(name) == test)) for rank in outcomes]


def _short(outcomes: list[dict[str, dict[str, Any]]]) -> list[dict[str, list[tuple[str, list[str]]]]]:
    """By rank, the outcomes of each test and of its subtests, each with the error or the reason to skip."""
    return [
        {
            name: [(said, text.splitlines()[-1:]) for said, text in zip(one["outcomes"], one["texts"], strict=True)]
            for name, one in rank.items()
        }
        for rank in outcomes
    ]


def _texts(outcomes: list[dict[str, dict[str, Any]]]) -> str:
    """What pytest said of the tests that did not pass."""
    said = [(rank, name, text) for rank, of in enumerate(outcomes) for name, one in of.items() for text in one["texts"]]
    return "\n".join(f"rank {rank}, {name}:\n{text}" for rank, name, text in said if text)


def _test(name: str) -> str:
    return name.rpartition("::")[2]
