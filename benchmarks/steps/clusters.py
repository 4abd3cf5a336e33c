"""Calibrates and measures steps on the emulated cluster, in one run for each setting."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.steps.places import Hosts, Place, place_of
from hvdcomp.compressors import needs_nodes
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.files import commit, parse_json
from hvdcomp.tools.bench.cluster import Cluster, ClusterError

_WORKER = "hvdcomp.tools.bench.compare_worker"
_PROGRESS = "PROGRESS "  # prefix of the worker's lines of progress
_STARTED_FOR = {"horovod": "horovod", "ddp": "torch"}  # for each backend, how the cluster starts ranks
# The numbers of lines that are shown from the output of a failed run. The rank that fails first writes first.
_FIRST_LINES, _LAST_LINES = 30, 15


class StepsError(Exception):
    """The requested steps cannot be measured. The message explains why, and what to do."""


@dataclass(frozen=True)
class Options:
    """What to measure in each cluster.

    Attributes:
        models, compressors: names of the models, and specs of the compressors.
        overlap: "on" to measure compressors with their default overlap, "off" to measure compressors that send after
            the backward pass, "both" to measure each compressor in both ways.
        batch_size: batch size of one rank.
        seconds: approximate seconds for the calibration of each model. The other measurements take a multiple of this
            time.
        backend: "horovod", or "ddp" for DistributedDataParallel.
    """

    models: tuple[str, ...]
    compressors: tuple[str, ...]
    batch_size: int
    seconds: float
    overlap: str = "on"
    backend: str = "horovod"

    def compressors_on(self, hosts: Hosts) -> tuple[str, ...]:
        """The compressors that are measured on these hosts. Two-level compressors are left out if each host has only
        one rank."""
        several = hosts.ranks > 1
        return tuple(spec for spec in self.compressors if several or not needs_nodes(parse_compressor(spec)))


def left_out(hosts: Sequence[Hosts], options: Options) -> str:
    """A sentence about the requested compressors that cannot be measured on some hosts; empty if there are none."""
    affected = [host for host in hosts if options.compressors_on(host) != options.compressors]
    if not affected:
        return ""
    specs = [spec for spec in options.compressors if spec not in options.compressors_on(affected[0])]
    places = " and ".join(host.in_words() for host in affected)
    return (
        f"Two-level compressors are left out on {places}, because these clusters have only one rank per host: "
        f"{', '.join(specs)}."
    )


def check(hosts: Sequence[Hosts], rates: Sequence[str]) -> None:
    """Checks that all clusters can be created, before the first one is created.

    Raises:
        StepsError: if a cluster cannot be created. The message gives the reason.
    """
    try:
        for rate in rates:
            for host in hosts:
                Cluster(host.number, rate)
    except ClusterError as error:
        raise StepsError(str(error)) from None


def earlier(file: Path, command: str) -> list[dict[str, Any]]:
    """The results of an earlier, interrupted run of the same command.

    Args:
        file: the results file of that run.
        command: the command with all its options.

    Raises:
        StepsError: if a different command wrote the file, or if the file cannot be read. The message explains how to
            start again.
    """
    if not file.exists():
        return []
    anew = "Leave out --resume to start again, which replaces the file, or name another folder with --output"
    try:
        results = parse_json(file.read_text())
        written, runs = results["command"], list(results["runs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StepsError(
            f"{file} is not a file of python -m benchmarks.steps ({type(error).__name__}: {error}). {anew}"
        ) from None
    if written != command:
        raise StepsError(f"{file} was made by another command:\n  {written}\nbut this command is\n  {command}\n{anew}")
    return runs


def measure(
    hosts: Sequence[Hosts],
    rates: Sequence[str],
    options: Options,
    show: Callable[[str], None],
    done: Sequence[dict[str, Any]] = (),
) -> Iterator[dict[str, Any]]:
    """Measures cluster by cluster, and on each cluster model by model.

    The calibration of a model alternates with its steps, because a machine's speed changes with time.

    Yields:
        The results of the ranks, with the fields of `Place`, and the commit of the sources.

    Args:
        show: function that is called with the name of the next measurement, in another thread.
        done: results of settings that were already measured, and are not measured again.

    Raises:
        StepsError: if a run failed. The message contains the first and the last lines of its output.
    """
    measured = {place_of(result) for result in done}
    try:
        for host, rate in itertools.product(hosts, rates):
            places = [Place(host.number, host.ranks, rate, model) for model in options.models]
            places = [place for place in places if place not in measured]
            if not places:
                continue
            with Cluster(host.number, rate) as cluster:
                for place in places:
                    found = _run(cluster, place, options, show)
                    yield found | asdict(place) | {"commit": commit()}  # the worker does not know the rate
    except ClusterError as error:
        raise StepsError(str(error)) from None


def _run(cluster: Cluster, place: Place, options: Options, show: Callable[[str], None]) -> dict[str, Any]:
    name, hosts = place.in_words(), place.cluster
    env = {"OMP_NUM_THREADS": "1"}
    if options.backend == "horovod":
        # Horovod's cache must have room for the names of all tensors in all methods. By default, Horovod keeps only the
        # newest 1,024 names, and negotiates all older names again in every turn.
        env["HOROVOD_CACHE_CAPACITY"] = "16384"
        if hosts.ranks > 1:
            env["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # two-level exchanges need this
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{hosts.in_words()}, {place.rate}.json"
        arguments = ["--model", place.model, *_arguments(options, hosts), "--output", str(file)]
        lines: list[str] = []
        take = _taker(lines, lambda line: show(f"{name}: {line}"))
        ranks = hosts.number * hosts.ranks
        command = [sys.executable, "-m", _WORKER, *arguments]
        code = cluster.run(command, ranks=ranks, output=take, env=env, backend=_STARTED_FOR[options.backend])
        if code != 0 or not file.exists():
            raise StepsError(f"the run of {name} ended with code {code}:\n{_shortened(lines)}")
        return json.loads(file.read_text())


def _arguments(options: Options, hosts: Hosts) -> list[str]:
    words = [word for spec in options.compressors_on(hosts) for word in ("--compressor", spec)]
    words += ["--backend", options.backend, "--batch-size", str(options.batch_size), "--overlap", options.overlap]
    return [*words, "--seconds", str(options.seconds)]


def _taker(lines: list[str], show: Callable[[str], None]) -> Callable[[str], None]:
    def take(line: str) -> None:
        if line.startswith(_PROGRESS):
            show(line.removeprefix(_PROGRESS).strip())
        else:
            lines.append(line)

    return take


def _shortened(lines: Sequence[str]) -> str:
    left_out = len(lines) - _FIRST_LINES - _LAST_LINES
    if left_out <= 0:
        return "".join(lines)
    middle = f"... {left_out} lines left out ...\n"
    return "".join([*lines[:_FIRST_LINES], middle, *lines[-_LAST_LINES:]])


def environment_facts() -> dict[str, Any]:
    """The properties of the machine that influence all results."""
    return {"cores": os.cpu_count(), "python": sys.version.split()[0]}
