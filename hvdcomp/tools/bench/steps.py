"""Runs of the emulated cluster in which calibration and steps are measured: one for each kind of cluster and rate."""

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

from hvdcomp.compressors import needs_nodes
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.files import parse_json
from hvdcomp.tools.bench.cluster import Cluster, ClusterError
from hvdcomp.tools.bench.places import Hosts, Place, place_of

_WORKER = "hvdcomp.tools.bench.compare_worker"
_PROGRESS = "PROGRESS "  # the beginning of its lines of progress
_STARTED_FOR = {"horovod": "horovod", "ddp": "torch"}  # by backend, how a cluster starts its ranks
_FIRST_LINES, _LAST_LINES = 30, 15  # of what a failed run said: the first rank to fail speaks first


class StepsError(Exception):
    """Steps cannot be measured as asked; the message says why and what to do."""


@dataclass(frozen=True)
class Options:
    """What to measure in each cluster.

    Attributes:
        models, compressors: names and specs.
        overlap: "on" for compressors as they are by themselves, "off" for none that sends before the end of the
            backward pass, "both" for each in both ways.
        batch_size: of one rank.
        seconds: for calibrating each model, about; all else takes a multiple of it.
        backend: "horovod", or "ddp" for DistributedDataParallel.
    """

    models: tuple[str, ...]
    compressors: tuple[str, ...]
    batch_size: int
    seconds: float
    overlap: str = "on"
    backend: str = "horovod"

    def compressors_on(self, hosts: Hosts) -> tuple[str, ...]:
        """Those that are measured there: where hosts have one rank each, two levels would be one."""
        several = hosts.ranks > 1
        return tuple(spec for spec in self.compressors if several or not needs_nodes(parse_compressor(spec)))


def left_out(hosts: Sequence[Hosts], options: Options) -> str:
    """What is not measured somewhere although it was asked for, in a sentence; empty if nothing is."""
    where = [host for host in hosts if options.compressors_on(host) != options.compressors]
    if not where:
        return ""
    found = [spec for spec in options.compressors if spec not in options.compressors_on(where[0])]
    places = " and ".join(one.in_words() for one in where)
    return f"Left out on {places}, where hosts have one rank each and two levels would be one: {', '.join(found)}."


def check(hosts: Sequence[Hosts], rates: Sequence[str]) -> None:
    """Sees that all clusters can be made, before the first is.

    Raises:
        StepsError: says what is wrong.
    """
    try:
        for rate in rates:
            for host in hosts:
                Cluster(host.number, rate)
    except ClusterError as error:
        raise StepsError(str(error)) from None


def earlier(file: Path, command: str) -> list[dict[str, Any]]:
    """What an earlier run of the same command measured before it ended.

    Args:
        file: that it wrote.
        command: with all options.

    Raises:
        StepsError: if another command wrote the file, or it cannot be read; says how to begin anew.
    """
    if not file.exists():
        return []
    anew = "Leave out --resume to begin anew, which replaces the file, or name another folder with --output"
    try:
        found = parse_json(file.read_text())
        written, runs = found["command"], list(found["runs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StepsError(
            f"{file} is not a file of hvdcomp bench steps ({type(error).__name__}: {error}). {anew}"
        ) from None
    if written != command:
        raise StepsError(f"{file} was made by another command:\n  {written}\nand not by\n  {command}\n{anew}")
    return runs


def measure(
    hosts: Sequence[Hosts],
    rates: Sequence[str],
    options: Options,
    show: Callable[[str], None],
    done: Sequence[dict[str, Any]] = (),
) -> Iterator[dict[str, Any]]:
    """Measures cluster by cluster, and on each model by model.

    Each model is calibrated and measured in turns: machines are not equally fast all the time.

    Yields:
        What the ranks wrote, with the fields of `Place`.

    Args:
        show: called with what comes next, in another thread.
        done: results of settings that need not be measured again.

    Raises:
        StepsError: if a run failed; with what it said first and last.
    """
    known = {place_of(result) for result in done}
    try:
        for one, rate in itertools.product(hosts, rates):
            places = [Place(one.number, one.ranks, rate, model) for model in options.models]
            places = [place for place in places if place not in known]
            if not places:
                continue
            with Cluster(one.number, rate) as cluster:
                for place in places:
                    yield _run(cluster, place, options, show) | asdict(place)  # the worker knows no rate
    except ClusterError as error:
        raise StepsError(str(error)) from None


def _run(cluster: Cluster, place: Place, options: Options, show: Callable[[str], None]) -> dict[str, Any]:
    name, hosts = place.in_words(), place.cluster
    env = {"OMP_NUM_THREADS": "1"}
    if options.backend == "horovod":
        # All methods' names of all tensors are to stay known to Horovod: it forgets the oldest of more than 1,024, and
        # then negotiates them again in every turn.
        env["HOROVOD_CACHE_CAPACITY"] = "16384"
        if hosts.ranks > 1:
            env["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # without which there are no two levels
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{hosts.in_words()}, {place.rate}.json"
        words = ["--model", place.model, *_arguments(options, hosts), "--output", str(file)]
        said: list[str] = []
        take = _taker(said, lambda what: show(f"{name}: {what}"))
        ranks = hosts.number * hosts.ranks
        command = [sys.executable, "-m", _WORKER, *words]
        code = cluster.run(command, ranks=ranks, output=take, env=env, backend=_STARTED_FOR[options.backend])
        if code != 0 or not file.exists():
            raise StepsError(f"the run of {name} ended with code {code}:\n{_shortened(said)}")
        return json.loads(file.read_text())


def _arguments(options: Options, hosts: Hosts) -> list[str]:
    words = [word for spec in options.compressors_on(hosts) for word in ("--compressor", spec)]
    words += ["--backend", options.backend, "--batch-size", str(options.batch_size), "--overlap", options.overlap]
    return [*words, "--seconds", str(options.seconds)]


def _taker(said: list[str], show: Callable[[str], None]) -> Callable[[str], None]:
    def take(line: str) -> None:
        if line.startswith(_PROGRESS):
            show(line.removeprefix(_PROGRESS).strip())
        else:
            said.append(line)

    return take


def _shortened(said: Sequence[str]) -> str:
    left_out = len(said) - _FIRST_LINES - _LAST_LINES
    if left_out <= 0:
        return "".join(said)
    middle = f"... {left_out} lines left out ...\n"
    return "".join([*said[:_FIRST_LINES], middle, *said[-_LAST_LINES:]])


def environment_facts() -> dict[str, Any]:
    """What all results depend on beside the options."""
    return {"cores": os.cpu_count(), "python": sys.version.split()[0]}
