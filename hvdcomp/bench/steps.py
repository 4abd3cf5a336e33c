"""Runs of the emulated cluster in which calibration and steps are measured: one for each number of hosts and rate."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hvdcomp

_PROGRESS = "PROGRESS "  # what lines of benchmarks/cluster/compare_worker.py begin with
_KEPT_LINES = 30


class StepsError(Exception):
    """Steps cannot be measured as asked; the message says why and what to do."""


@dataclass(frozen=True)
class Options:
    """What to measure in each cluster.

    Attributes:
        models, compressors: names and specs.
        batch_size: of one rank.
        seconds: for calibrating, and again for steps, of each model; about.
    """

    models: tuple[str, ...]
    compressors: tuple[str, ...]
    batch_size: int
    seconds: float


def cluster_package() -> Any:
    """The package of the emulated cluster, which is in the repository and not installed.

    Raises:
        StepsError: if it is not there.
    """
    root = Path(hvdcomp.__file__).parents[1]
    if not (root / "benchmarks" / "cluster" / "compare_worker.py").is_file():
        raise StepsError(
            "the emulated cluster is in the folder benchmarks/ of hvdcomp's repository, which is not installed with "
            f"the package; it is not in {root}. Clone the repository and install from there: make setup"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks.cluster")


def check(hosts: Sequence[int], rates: Sequence[str]) -> None:
    """Sees that all clusters can be made, before the first is.

    Raises:
        StepsError: says what is wrong.
    """
    package = cluster_package()
    try:
        for rate in rates:
            for number in hosts:
                package.Cluster(number, rate)
    except package.ClusterError as error:
        raise StepsError(str(error)) from None


def measure(
    hosts: Sequence[int], rates: Sequence[str], options: Options, show: Callable[[str], None]
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Measures cluster by cluster; yields hosts, rate and what its ranks wrote.

    Args:
        show: called with what comes next, in another thread.

    Raises:
        StepsError: if a run failed; with the end of what it said.
    """
    package = cluster_package()
    worker = Path(package.__file__).with_name("compare_worker.py")
    for number in hosts:
        for rate in rates:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / f"{number} hosts, {rate}.json"
                command = [sys.executable, str(worker), *_arguments(options), "--output", str(file)]
                said: list[str] = []
                take = _taker(said, lambda what, place=f"{number} hosts, {rate}": show(f"{place}: {what}"))  # type: ignore[misc]
                try:
                    with package.Cluster(number, rate) as cluster:
                        code = cluster.run(command, output=take, env={"OMP_NUM_THREADS": "1"})
                except package.ClusterError as error:
                    raise StepsError(str(error)) from None
                if code != 0 or not file.exists():
                    end = "".join(said[-_KEPT_LINES:])
                    raise StepsError(f"the run on {number} hosts at {rate} ended with code {code}:\n{end}")
                yield number, rate, json.loads(file.read_text())


def _arguments(options: Options) -> list[str]:
    words = [word for model in options.models for word in ("--model", model)]
    words += [word for spec in options.compressors for word in ("--compressor", spec)]
    return [*words, "--batch-size", str(options.batch_size), "--seconds", str(options.seconds)]


def _taker(said: list[str], show: Callable[[str], None]) -> Callable[[str], None]:
    def take(line: str) -> None:
        if line.startswith(_PROGRESS):
            show(line.removeprefix(_PROGRESS).strip())
        else:
            said.append(line)

    return take


def environment_facts() -> dict[str, Any]:
    """What all results depend on beside the options."""
    return {"cores": os.cpu_count(), "python": sys.version.split()[0]}
