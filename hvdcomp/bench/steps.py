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
from hvdcomp.bench.compare import place_of

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
        seconds: for calibrating, again for steps, and again for auto alone, of each model; about.
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
) -> Iterator[dict[str, Any]]:
    """Measures cluster by cluster, and on each model by model.

    Each model is calibrated and measured in turns: machines are not equally fast all the time.

    Yields:
        What the ranks wrote, with `hosts`, `rate` and `model`.

    Args:
        show: called with what comes next, in another thread.

    Raises:
        StepsError: if a run failed; with the end of what it said.
    """
    package = cluster_package()
    try:
        for number in hosts:
            for rate in rates:
                with package.Cluster(number, rate) as cluster:
                    for model in options.models:
                        place = {"hosts": number, "rate": rate, "model": model}
                        yield place | _run(cluster, place, options, show)
    except package.ClusterError as error:
        raise StepsError(str(error)) from None


def _run(cluster: Any, place: dict[str, Any], options: Options, show: Callable[[str], None]) -> dict[str, Any]:
    name = place_of(place)
    worker = Path(cluster_package().__file__).with_name("compare_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{place['hosts']} hosts, {place['rate']}.json"
        command = [sys.executable, str(worker), "--model", place["model"], *_arguments(options), "--output", str(file)]
        said: list[str] = []
        take = _taker(said, lambda what: show(f"{name}: {what}"))
        code = cluster.run(command, output=take, env={"OMP_NUM_THREADS": "1"})
        if code != 0 or not file.exists():
            raise StepsError(f"the run of {name} ended with code {code}:\n{''.join(said[-_KEPT_LINES:])}")
        return json.loads(file.read_text())


def _arguments(options: Options) -> list[str]:
    words = [word for spec in options.compressors for word in ("--compressor", spec)]
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
