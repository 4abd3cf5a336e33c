"""Saving a run in the middle and going on from there, as if it had never stopped.

A checkpoint is a folder `step-N` of files from all ranks: what the learner writes of the model, the optimizer and the
compression, and where the run was. It is written under another name and renamed when all ranks have written their part,
so that a folder of this name is complete; only then is the one before it removed.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hvdcomp.errors import ConfigurationError
from hvdcomp.train.learner import Learner
from hvdcomp.train.ranks import Ranks
from hvdcomp.train.settings import Settings, SetupError

EXIT_SAVED = 213
"""The exit code of a rank that saved a checkpoint and stopped because it was told to: none that means anything else.

A launcher may kill the last ranks while they end, and srun returns the largest code of all: this one is above those of
signals, which are 128 and the signal's number.
"""

_FORMAT = 1
_COMPLETE = re.compile(r"step-(\d+)")
_PART = ".part"
# What a run may go on with changed: where things are and are shown, how long it is.
_MAY_CHANGE = {"epochs", "overwrite", "progress", "tensorboard", "checkpoint_every"}


class Warnings:
    """Notes, while it is entered, that this process was told to stop: SIGUSR1 or SIGTERM no longer end it.

    Attributes:
        told: whether it was.
    """

    SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

    def __init__(self) -> None:
        self.told = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Warnings:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread do this
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.told = True


class Checkpoints:
    """The checkpoints of one run.

    Args:
        settings: which name the folder, the same on all hosts.
        facts: in which a run that goes on must agree with the one that was saved, as JSON.
    """

    def __init__(self, settings: Settings, facts: Mapping[str, Any], ranks: Ranks) -> None:
        assert settings.checkpoint_folder is not None
        self.folder = settings.checkpoint_folder
        self._every = settings.checkpoint_every
        self._ranks = ranks
        kept = {name: value for name, value in facts.items() if name not in _MAY_CHANGE}
        self._facts = json.loads(json.dumps({**kept, "ranks": ranks.size}))
        self._saved = -1  # the step of the newest

    def due(self, step: int) -> bool:
        """Whether there is to be one after this step."""
        return self._every is not None and step % self._every == 0

    @property
    def due_each_epoch(self) -> bool:
        """Whether there is to be one at the end of each epoch."""
        return self._every is None

    def find(self) -> dict[str, Any] | None:
        """What `save` was given for the newest checkpoint; None if there is none. Call it on every rank.

        Raises:
            RunRefused: on every rank, if it is of another run, or cannot be read.
        """
        ranks = self._ranks
        newest = ranks.together(self._newest)
        if len(set(ranks.gather(newest, "checkpoint"))) > 1:
            ranks.together(self._refuse_different)
        self._saved = newest
        return None if newest < 0 else ranks.together(lambda: self._read(newest))

    def _newest(self) -> int:
        """The step of the newest checkpoint, or -1."""
        try:
            if self._ranks.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                for left in self.folder.glob(f"step-*{_PART}"):
                    shutil.rmtree(left)
            names = os.listdir(self.folder) if self.folder.is_dir() else []
        except OSError as error:
            raise SetupError(f"--checkpoint-folder {self.folder}: {error.strerror or error}; name another") from None
        return max((int(match[1]) for match in map(_COMPLETE.fullmatch, names) if match), default=-1)

    def _refuse_different(self) -> bool:
        raise SetupError(
            f"--checkpoint-folder {self.folder} holds different checkpoints on different hosts: name a folder that all "
            "of them share"
        )

    def _read(self, step: int) -> dict[str, Any]:
        place = self._place(step)
        file = place / self._run_file(self._ranks.rank)
        if not file.exists():  # the run had fewer ranks, as rank 0's file says
            file = place / self._run_file(0)
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SetupError(f"{file} cannot be read: {error}; remove {place}, or name another folder") from None
        if record.get("format") != _FORMAT:
            raise SetupError(f"{place} is of another version of hvdcomp; name another --checkpoint-folder")
        for name in sorted({*record["facts"], *self._facts}):
            then, now = record["facts"].get(name), self._facts.get(name)
            if then != now:
                raise SetupError(
                    f"{place} is of a run with {name}={then!r}, and this one has {now!r}: start it as that one was, or "
                    "name another --checkpoint-folder"
                )
        return record["run"]

    def restore(self, learner: Learner) -> None:
        """Puts the checkpoint that was found into the learner. Call it on every rank.

        Raises:
            RunRefused: on every rank, if any cannot read it.
        """
        place = self._place(self._saved)

        def restored() -> bool:
            try:
                learner.restore(place)
            except (OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError) as error:
                raise SetupError(f"{place} cannot be read: {error!r}; remove it, or name another folder") from None
            return True

        self._ranks.together(restored)

    def save(self, step: int, learner: Learner, run: Callable[[], dict[str, Any]]) -> None:
        """Saves all ranks after this step; returns on each when it is complete. Call it on every rank.

        A step that was saved before is not saved again.

        Args:
            run: tells, as JSON and after the learner was saved, what `find` is to return on this rank.

        Raises:
            ConfigurationError: on every rank, if any could not write. The checkpoint before it is still there.
        """
        if step == self._saved:
            return
        place = self._place(step)
        part = place.with_name(place.name + _PART)

        def write() -> None:
            part.mkdir(parents=True, exist_ok=True)
            learner.save(part)
            record = {"format": _FORMAT, "facts": self._facts, "run": run()}
            (part / self._run_file(self._ranks.rank)).write_text(json.dumps(record), encoding="utf-8")

        def complete() -> None:
            if self._ranks.rank == 0:
                self._complete(part, place)

        self._on_all(write)
        self._on_all(complete)
        self._saved = step

    def _complete(self, part: Path, place: Path) -> None:
        missing = [rank for rank in range(self._ranks.size) if not (part / self._run_file(rank)).exists()]
        if missing:
            raise OSError(f"rank {missing[0]} wrote to another folder: name one that all hosts share")
        for file in (*part.iterdir(), part):
            _to_disk(file)
        part.rename(place)
        _to_disk(self.folder)
        for name in os.listdir(self.folder):
            if _COMPLETE.fullmatch(name) and name != place.name:
                shutil.rmtree(self.folder / name)

    def _on_all(self, do: Callable[[], None]) -> None:
        """Like `Ranks.together`, for what can go wrong in the middle of a run."""
        problem = None
        try:
            do()
        except (OSError, RuntimeError) as error:  # PyTorch's writer raises RuntimeError for a full disk
            problem = str(error)
        for rank, found in enumerate(self._ranks.gather(problem, "checkpoint")):
            if found is not None:
                raise ConfigurationError(
                    f"the checkpoint in {self.folder} cannot be written on rank {rank}: {found}; the one before it, if "
                    "any, is complete"
                )

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    @staticmethod
    def _run_file(rank: int) -> str:
        return f"run-{rank}.json"


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
