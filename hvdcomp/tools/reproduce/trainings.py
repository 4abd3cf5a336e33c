"""Trainings for figures: each a process of `hvdcomp train`, with a folder of its own.

A training that is there already, complete and with the same options, is not trained again, so that what was interrupted
goes on where it stopped. Benchmarks keep the figures that their pages are made of in one file too, `trainings.csv`,
which is a part of the repository: a training in it counts as there, on any machine, and the folders can go.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from hvdcomp.files import VERSION, csv_of, parse_json, replace_files, replace_text

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Run:
    """One training. A subclass says with which options, and where.

    Attributes:
        workload: name of the model with its training.
        seed: of it.
        runs: the folder of all trainings, with the file of their records.
    """

    workload: str
    seed: int
    runs: Path

    @property
    def label(self) -> str:
        """What tells this training from others of the same workload and seed."""
        raise NotImplementedError

    @cached_property
    def options(self) -> dict[str, Any]:
        """Of `hvdcomp train`, but for where it writes."""
        raise NotImplementedError

    @property
    def environment(self) -> Mapping[str, str]:
        return {}

    @property
    def folder(self) -> Path:
        return self.runs / self.workload / re.sub(r"[^\w.=]+", "-", self.label).strip("-") / f"seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.workload} {self.label} seed {self.seed}"

    @property
    def words(self) -> list[str]:
        """The arguments of `hvdcomp`."""
        words = ["train"]
        for name, value in self.options.items():
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
        return [*words, "--output", str(self.folder), "--overwrite", "--no-progress"]

    @property
    def command(self) -> str:
        """What a user would write."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*settings, "hvdcomp", shlex.join(self.words)])

    @property
    def summary(self) -> dict[str, Any] | None:
        """Of the run in the folder, if it is complete and was trained with these options."""
        found = _json(self.folder / "summary.json") or {}
        wanted = json.loads(json.dumps(self.options))
        same = all(found.get("options", {}).get(name) == value for name, value in wanted.items())
        return found if same and found.get("status") in ("finished", "diverged") else None

    def figures(self) -> dict[str, Any]:
        """Numbers of the complete training in the folder that are to be kept in the file of records."""
        return {}

    @property
    def target(self) -> str:
        """Of the validation part, to which figures count; none if it is an option of the training, or there is none."""
        return ""

    @property
    def settings(self) -> str:
        """A digest of all that the training's figures depend on, but for the code."""
        everything = json.dumps([self.options, dict(self.environment), self.target], sort_keys=True)
        return hashlib.sha256(everything.encode()).hexdigest()[:12]

    @property
    def record(self) -> dict[str, Any] | None:
        """What the training came to: its figures, commit and seconds; None if it is neither in its folder nor kept."""
        if self.summary is None:
            kept = kept_records(self.runs).get((self.workload, self.label, self.seed))
            return kept if kept is not None and kept["settings"] == self.settings else None
        head = {"workload": self.workload, "label": self.label, "seed": self.seed, "settings": self.settings}
        noted = {"commit": self.about.get("commit", "unknown"), "seconds": self.about.get("seconds")}
        return {**head, **noted, **self.figures()}

    @property
    def about(self) -> dict[str, Any]:
        """What was noted beside the run: its commit, its seconds, and what went wrong."""
        return _json(self.folder / "run.json") or {}

    def begin(self) -> None:
        """Makes the folder, without what an earlier training left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("summary.json", "run.json"):
            (self.folder / name).unlink(missing_ok=True)

    @property
    def variables(self) -> dict[str, str]:
        """What its process has in its environment beside this one's."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **self.environment}

    def end(self, at_commit: str, seconds: float, code: int) -> dict[str, Any]:
        """Notes how it went, whose output is in log.txt, as `about`, and returns that."""
        error = None
        if self.summary is None:
            lines = (self.folder / "log.txt").read_text(errors="replace").split("\n")
            error = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")
        about = {"command": self.command, "commit": at_commit, "seconds": seconds, "error": error}
        replace_text(self.folder / "run.json", json.dumps(about, indent=2) + "\n")
        return about

    def records(self, name: str) -> list[dict[str, Any]]:
        return [parse_json(line) for line in (self.folder / name).read_text().splitlines()]


RECORDS = "trainings.csv"


def kept_records(runs: Path) -> Mapping[tuple[str, str, int], dict[str, Any]]:
    """Records that are kept in the folder of all trainings, by workload, label and seed."""
    file = runs / RECORDS
    return _records(file, file.stat().st_mtime_ns) if file.exists() else {}


@cache
def _records(file: Path, changed: int) -> Mapping[tuple[str, str, int], dict[str, Any]]:
    texts = ("workload", "label", "settings", "commit")
    with file.open(newline="") as lines:
        rows: list[dict[str, Any]] = [
            {name: value if name in texts else json.loads(value or "null") for name, value in row.items()}
            for row in csv.DictReader(lines)
        ]
    return {(row["workload"], row["label"], row["seed"]): row for row in rows}


def keep_records(runs: Iterable[Run], folder: Path) -> None:
    """Adds the records of runs to the file of records, in place of older records of the same training."""
    records = dict(kept_records(folder))
    for run in runs:
        record = run.record
        if record is not None:
            records[run.workload, run.label, run.seed] = record
    if records:
        replace_files({folder / RECORDS: csv_of([row for _, row in sorted(records.items())])})


def seeds_there(runs: Path) -> list[int]:
    """Seeds of all trainings in a folder, or in its file of records."""
    in_folders = {int(folder.name.removeprefix("seed")) for folder in runs.glob("*/*/seed*")}
    return sorted(in_folders | {seed for _, _, seed in kept_records(runs)})


def _json(file: Path) -> Any:
    try:
        return parse_json(file.read_text())
    except (OSError, ValueError):
        return None


class Trainer:
    """Trains runs, some at a time, each in a process of its own.

    Args:
        say: shows a line.
    """

    def __init__(self, workers: int, say: Callable[[str], None]) -> None:
        self._workers = workers
        self._say = say
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self._commit = commit()

    def train(self, todo: Sequence[Run], took: Mapping[str, Sequence[float]]) -> list[Run]:
        """Trains them all; returns those that failed.

        Args:
            took: seconds of runs that are there already, by workload.
        """
        seconds = {name: list(values) for name, values in took.items()}
        failed, left = [], list(todo)
        with ThreadPoolExecutor(self._workers) as pool:
            futures = {pool.submit(self._one, run): run for run in todo}
            try:
                for number, future in enumerate(as_completed(futures), 1):
                    run, about = futures[future], future.result()
                    left.remove(run)
                    seconds.setdefault(run.workload, []).append(about["seconds"])
                    if about["error"] is not None:
                        failed.append(run)
                    line = f"[{number}/{len(todo)}] {run}: {_outcome(run, about)}, {about['seconds']:.0f} s"
                    self._say(f"{line}; {_left(left, seconds, self._workers)}")
            except BaseException:
                self._stop()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return failed

    def _one(self, run: Run) -> dict[str, Any]:
        """Trains one run, and notes how that went. What a stopped one leaves counts as unfinished."""
        run.begin()
        start = time.monotonic()
        with (run.folder / "log.txt").open("wb") as log:
            with self._lock:
                if self._stopped:
                    raise KeyboardInterrupt
                process = subprocess.Popen(
                    [sys.executable, "-m", "hvdcomp", *run.words],
                    env={**os.environ, **run.variables},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for this process, which ends the others
                )
                self._processes.add(process)
            code = process.wait()
            with self._lock:
                self._processes.remove(process)
        if self._stopped:
            raise KeyboardInterrupt
        return run.end(self._commit, time.monotonic() - start, code)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._processes:
                process.terminate()


def commit() -> str:
    """The commit of the sources, with a plus sign if they differ from it; the version of a package without them."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        if (ROOT / ".git").exists():  # else it is below another checkout
            changed = git("status", "--porcelain", "--", "hvdcomp", "benchmarks", ":!benchmarks/measured")
            return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    return f"hvdcomp {VERSION}"


def _outcome(run: Run, about: Mapping[str, Any]) -> str:
    if about["error"] is not None:
        return f"failed: {about['error']}"
    assert run.summary is not None
    loss = run.summary.get("validation_loss")
    return f"{run.summary['status']}, loss {'-' if loss is None else format(loss, '.4f')}"


def _left(left: Sequence[Run], seconds: Mapping[str, Sequence[float]], workers: int) -> str:
    """About how long the rest takes, by the runs of the same workload so far, or of all."""
    everything = statistics.mean(value for values in seconds.values() for value in values)
    total = sum(statistics.mean(seconds.get(run.workload) or [everything]) for run in left)
    minutes = total / max(1, min(workers, len(left))) / 60
    return f"about {minutes:.0f} min left" if minutes < 90 else f"about {minutes / 60:.1f} h left"


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def train_missing(
    runs: Sequence[Run], console: Any, *, workers: int | None = None, dry_run: bool = False
) -> list[Run]:
    """Trains those that are not there yet; returns those that failed. Ends the process if it is stopped.

    Args:
        console: of `rich`, that shows how it goes.
        workers: trainings at a time; None for as many as there are cores.
        dry_run: show the commands instead.
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
    left = f"; {_left(todo, took, workers)}" if todo and took else ""
    console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are there already, {len(todo)} to train{left}")
    if dry_run or not todo:
        return []
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)
    try:
        return Trainer(workers, console.print).train(todo, took)
    except KeyboardInterrupt:
        console.print("stopped; what is finished is kept, and the same command goes on from there")
        sys.exit(130)
