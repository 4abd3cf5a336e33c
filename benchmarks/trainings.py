"""Runs the training behind the figures of the benchmarks. Each training run is a separate process of `hvdcomp train`,
with its own folder.

A complete training run with the same options is not repeated, so an interrupted series of runs can be continued. The
benchmarks also store the figures for their pages in `trainings.csv`, which is part of the repository. A training run in
this file is not repeated on any machine, and its folder is not needed.
"""

from __future__ import annotations

import csv
import hashlib
import json
import multiprocessing
import os
import re
import shlex
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, cached_property
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

from hvdcomp.files import commit, csv_of, parse_json, replace_files, replace_text
from hvdcomp.tools.options import flag_of

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Run:
    """A training run. Subclasses set its options.

    Attributes:
        workload: name of the model and of the way to train it.
        seed: the seed of the training run.
        runs: the folder that contains all training runs, and the file of their records.
    """

    workload: str
    seed: int
    runs: Path

    @property
    def label(self) -> str:
        """The label that distinguishes this training run from others with the same workload and seed."""
        raise NotImplementedError

    @cached_property
    def options(self) -> dict[str, Any]:
        """Options of `hvdcomp train`, without the options for the output."""
        raise NotImplementedError

    @property
    def environment(self) -> Mapping[str, str]:
        return {}

    @property
    def folder(self) -> Path:
        return Path(self._folder)

    @property
    def _folder(self) -> str:
        """The folder as a text. A plan asks for the folders of thousands of runs, and creating a `Path` takes longer
        than finding out that there is no such folder."""
        return os.path.join(self.runs, self.workload, _as_file_name(self.label), f"seed{self.seed}")

    def __str__(self) -> str:
        return f"{self.workload} {self.label} seed {self.seed}"

    @property
    def words(self) -> list[str]:
        """The arguments of `hvdcomp`."""
        words = ["train"]
        for name, value in self.options.items():
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [flag_of(name), *([] if value is True else [text])]
        return [*words, "--output", str(self.folder), "--overwrite", "--no-progress"]

    @property
    def command(self) -> str:
        """The command line of the training run."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*settings, "hvdcomp", shlex.join(self.words)])

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary of the run in the folder; None if the run is incomplete or has different options."""
        summary = _json(os.path.join(self._folder, "summary.json"))
        if not summary:
            return None
        options = json.loads(json.dumps(self.options))
        same = all(summary.get("options", {}).get(name) == value for name, value in options.items())
        return summary if same and summary.get("status") in ("finished", "diverged") else None

    def figures(self) -> dict[str, Any]:
        """The figures of the complete training run in the folder, for the file of records."""
        return {}

    @property
    def target(self) -> str:
        """The target on the validation data until which the figures count. Empty if there is no target, or if an option
        of the training run already sets the target."""
        return ""

    @property
    def settings(self) -> str:
        """A hash of everything that the training run's figures depend on, except the code."""
        everything = json.dumps([self.options, dict(self.environment), self.target], sort_keys=True)
        return hashlib.sha256(everything.encode()).hexdigest()[:12]

    @property
    def record(self) -> dict[str, Any] | None:
        """The training run's figures, commit and seconds; None if it is neither in its folder nor in the records."""
        if self.summary is None:
            stored = kept_records(self.runs).get((self.workload, self.label, self.seed))
            return stored if stored is not None and stored["settings"] == self.settings else None
        head = {"workload": self.workload, "label": self.label, "seed": self.seed, "settings": self.settings}
        origin = {"commit": self.about.get("commit", "unknown"), "seconds": self.about.get("seconds")}
        return {**head, **origin, **self.figures()}

    @property
    def about(self) -> dict[str, Any]:
        """What is known about the run: its command, commit, seconds and error."""
        return _json(self.folder / "run.json") or {}

    def begin(self) -> None:
        """Creates the folder, and removes the results of an earlier training run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("summary.json", "run.json"):
            (self.folder / name).unlink(missing_ok=True)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that are added for the process of the training run."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **self.environment}

    def end(self, at_commit: str, seconds: float, code: int) -> dict[str, Any]:
        """Writes and returns what is known about the run (`about`), with the error from log.txt if the training run
        failed."""
        error = None
        if self.summary is None:
            lines = (self.folder / "log.txt").read_text(errors="replace").split("\n")
            error = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")
        about = {"command": self.command, "commit": at_commit, "seconds": seconds, "error": error}
        replace_text(self.folder / "run.json", json.dumps(about, indent=2) + "\n")
        return about

    def records(self, name: str) -> list[dict[str, Any]]:
        return [parse_json(line) for line in (self.folder / name).read_text().splitlines()]


@cache
def _as_file_name(label: str) -> str:
    return re.sub(r"[^\w.=]+", "-", label).strip("-")


RECORDS = "trainings.csv"


def kept_records(runs: Path) -> Mapping[tuple[str, str, int], dict[str, Any]]:
    """The stored records of all training runs in a folder, by workload, label and seed."""
    file = os.path.join(runs, RECORDS)
    try:
        changed = os.stat(file).st_mtime_ns
    except FileNotFoundError:
        return {}
    return _records(file, changed)


@cache
def _records(file: str, changed: int) -> Mapping[tuple[str, str, int], dict[str, Any]]:
    texts = ("workload", "label", "settings", "commit")
    with open(file, newline="") as lines:
        rows: list[dict[str, Any]] = [
            {name: value if name in texts else json.loads(value or "null") for name, value in row.items()}
            for row in csv.DictReader(lines)
        ]
    return {(row["workload"], row["label"], row["seed"]): row for row in rows}


def keep_records(runs: Iterable[Run], folder: Path) -> None:
    """Adds the records of runs to the file of records. They replace older records of the same runs."""
    records = dict(kept_records(folder))
    for run in runs:
        record = run.record
        if record is not None:
            records[run.workload, run.label, run.seed] = record
    if records:
        replace_files({folder / RECORDS: csv_of([row for _, row in sorted(records.items())])})


def seeds_there(runs: Path) -> list[int]:
    """The seeds of all training runs whose results are in a folder or in its file of records."""
    in_folders = {int(folder.name.removeprefix("seed")) for folder in runs.glob("*/*/seed*")}
    return sorted(in_folders | {seed for _, _, seed in kept_records(runs)})


def _json(file: str | Path) -> Any:
    try:
        with open(file) as lines:
            return parse_json(lines.read())
    except (OSError, ValueError):
        return None


class Trainer:
    """Starts training runs, several at a time, each in a separate process.

    Args:
        workers: number of training runs at a time.
        say: function that shows a line of text.
    """

    def __init__(self, workers: int, say: Callable[[str], None]) -> None:
        self._workers = workers
        self._say = say
        self._processes: set[ForkServerProcess] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self._commit = commit()
        self._server = _server()

    def train(self, todo: Sequence[Run], took: Mapping[str, Sequence[float]]) -> list[Run]:
        """Runs all training runs, and returns those that failed.

        Args:
            todo: the training runs that are missing.
            took: seconds of earlier training runs, by workload.
        """
        seconds = {name: list(values) for name, values in took.items()}
        failed, waiting = [], list(todo)
        with ThreadPoolExecutor(self._workers) as pool:
            futures = {pool.submit(self._train, run): run for run in todo}
            try:
                for number, future in enumerate(as_completed(futures), 1):
                    run, about = futures[future], future.result()
                    waiting.remove(run)
                    seconds.setdefault(run.workload, []).append(about["seconds"])
                    if about["error"] is not None:
                        failed.append(run)
                    line = f"[{number}/{len(todo)}] {run}: {_outcome(run, about)}, {about['seconds']:.0f} s"
                    self._say(f"{line}; {_remaining_time(waiting, seconds, self._workers)}")
            except BaseException:
                self._stop()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return failed

    def _train(self, run: Run) -> dict[str, Any]:
        """Runs one training run, and returns what is known about it (`about`). A training run that was stopped counts
        as unfinished."""
        run.begin()
        start = time.monotonic()
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            process = self._server.Process(target=_run, args=(run.words, run.variables, run.folder / "log.txt"))
            process.start()
            self._processes.add(process)
        process.join()
        with self._lock:
            self._processes.remove(process)
        if self._stopped:
            raise KeyboardInterrupt
        return run.end(self._commit, time.monotonic() - start, process.exitcode or 0)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._processes:
                process.terminate()


@cache
def _server() -> ForkServerContext:
    """Starts processes that have imported PyTorch, because the imports take longer than half of a quick training."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch._dynamo"])
    # Libraries read the number of threads when they are imported. The server imports them, so its environment must have
    # this number.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        ensure_running()
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
    return server


def _run(words: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
    """Runs `hvdcomp` with these arguments in this process. All output of the process goes to the file `log`."""
    os.setsid()  # Ctrl-C reaches only the benchmark, which then ends its training runs
    with log.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ.update(variables)
    from hvdcomp.tools.cli import main

    main(words, prog_name="hvdcomp")


def _outcome(run: Run, about: Mapping[str, Any]) -> str:
    if about["error"] is not None:
        return f"failed: {about['error']}"
    assert run.summary is not None
    loss = run.summary.get("validation_loss")
    return f"{run.summary['status']}, loss {'-' if loss is None else format(loss, '.4f')}"


def _remaining_time(waiting: Sequence[Run], seconds: Mapping[str, Sequence[float]], workers: int) -> str:
    """The approximate remaining time, estimated from earlier runs of the same workload, or of all workloads."""
    everything = statistics.mean(value for values in seconds.values() for value in values)
    total = sum(statistics.mean(seconds.get(run.workload) or [everything]) for run in waiting)
    minutes = total / max(1, min(workers, len(waiting))) / 60
    return f"about {minutes:.0f} min left" if minutes < 90 else f"about {minutes / 60:.1f} h left"


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def train_missing(runs: Sequence[Run], console: Any, *, workers: int | None = None, dry_run: bool = False) -> list[Run]:
    """Performs the training runs that have no record, and returns those that failed. Ends the process if the user stops
    it.

    Args:
        runs: the training runs, of any workloads.
        console: console of `rich`, on which the progress is shown.
        workers: number of training runs at a time; None for one run on each core.
        dry_run: whether to only print the commands.
    """
    todo = [run for run in runs if run.record is None]
    workers = workers or len(os.sched_getaffinity(0))
    took: dict[str, list[float]] = {}
    for run in runs:
        if (record := run.record) is not None and record["seconds"] is not None:
            took.setdefault(run.workload, []).append(record["seconds"])
    if dry_run:
        for run in todo:
            console.print(run.command)
    remaining_time = f"; {_remaining_time(todo, took, workers)}" if todo and took else ""
    console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are complete, {len(todo)} to train{remaining_time}")
    if dry_run or not todo:
        return []
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, for example, makes a program ignore a signal
            signal.signal(number, _interrupt)
    try:
        return Trainer(workers, console.print).train(todo, took)
    except KeyboardInterrupt:
        console.print("stopped; finished trainings are kept: continue with the same command")
        sys.exit(130)
