"""Saves a run, and resumes the run in the same state.

A checkpoint is a folder `step-N` with files from all ranks. The files contain the model, the optimizer, the
compression, and the position of the run. The folder is first written under a different name. It is renamed when all
ranks have written their parts, so a folder `step-N` is always complete. Older checkpoints are removed afterwards,
except for the previous checkpoint. The file SHA256SUMS, in the format of `sha256sum`, contains the digests of all other
files. The digests are checked before a run resumes. If the newest checkpoint is damaged, all ranks use the previous
one.

A run may resume with a different number of ranks. Each rank then uses the files of several old ranks (`sources`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.files import parse_json, write_file
from hvdcomp.tools.options import may_change, of_older_runs
from hvdcomp.tools.train.learner import Learner, UnreadableError
from hvdcomp.tools.train.options import SetupError, TrainingOptions
from hvdcomp.tools.train.ranks import Ranks

_FORMAT = 2
_FORMATS = (1, _FORMAT)  # format 1 had no digests
_COMPLETE = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
_PART = ".part"  # the suffix of an incomplete checkpoint
_DIGESTS = "SHA256SUMS"
_RANKS = "ranks"  # the name of a fact: the number of ranks, which a resumed run may change

KEPT = ("step", "epoch", "taken", "losses", "times", "epochs")
"""The fields of a run that a checkpoint stores unchanged."""

# all fields of the position of a run
_POSITION = {*KEPT, "augmenting", "resumed_at", "seconds", "epoch_seconds", "sizes"}

Result = TypeVar("Result")


class Warnings:
    """A context manager that records signals to stop. In its block, SIGUSR1, SIGTERM and SIGUSR2 do not end this
    process.

    Attributes:
        warned: whether a signal was received.
        all_warned: whether SIGUSR2 was received, which stops all ranks. In an elastic job, other signals stop only this
            rank.
    """

    SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2)

    def __init__(self) -> None:
        self.warned = self.all_warned = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Warnings:
        if threading.current_thread() is threading.main_thread():  # Python allows this only in the main thread
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.warned = True
        self.all_warned |= number == signal.SIGUSR2


class Checkpoints:
    """Saves the checkpoints of a run, and finds the newest one.

    Args:
        options: the options of the run. They name the folder of the checkpoints, which all hosts must share.
        facts: values, as JSON data, that must be the same in a resumed run and in the saved run.
        ranks: the ranks of the run.

    Attributes:
        damaged: the errors of damaged checkpoints. These checkpoints are newer than the checkpoint that was found. The
            list is the same on all ranks.
        old_ranks: the number of ranks that saved the checkpoint that was found.
    """

    def __init__(self, options: TrainingOptions, facts: Mapping[str, Any], ranks: Ranks) -> None:
        assert options.checkpoint_folder is not None
        self.folder = options.checkpoint_folder
        self._every = options.checkpoint_every
        self._residuals = options.residuals
        self._fsdp = options.fsdp
        self._ranks = ranks
        compared = {name: value for name, value in facts.items() if name not in may_change(TrainingOptions)}
        self._facts = json.loads(json.dumps({**compared, _RANKS: ranks.size}))
        self._saved = -1  # the step of the newest checkpoint that is not damaged
        self.damaged: list[str] = []
        self.old_ranks = ranks.size

    def due(self, step: int) -> bool:
        """Whether a checkpoint must be saved after this step."""
        return self._every is not None and step % self._every == 0

    @property
    def due_each_epoch(self) -> bool:
        """Whether to save at the end of each epoch."""
        return self._every is None

    def find(self) -> dict[str, Any] | None:
        """The position that was saved in the newest undamaged checkpoint; None if there is no checkpoint.

        If the saved run did not have this rank, the rank gets the position of a different rank. Call this on every
        rank.

        Raises:
            RunRefused: on every rank, if the checkpoint belongs to a different run, all checkpoints are damaged, or the
                folder is not writable.
        """
        ranks = self._ranks
        steps = ranks.together(self._steps)
        ranks.together(self._check_writable)
        if any(other_steps != steps for other_steps in ranks.gather(steps, "checkpoint")):
            ranks.together(self._refuse_different)
        for step in steps:
            # Each rank checks a part of the files, and all ranks get the same errors.
            damages = [damage for damage in ranks.gather(self._damage(step), "checkpoint") if damage is not None]
            if not damages:
                self._saved = step
                return ranks.together(self._read)
            self.damaged.append(damages[0])
        if self.damaged:
            ranks.together(self._refuse_damaged)
        return None

    def _steps(self) -> list[int]:
        """The steps of all checkpoints, newest first."""
        try:
            if self._ranks.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                for leftover in self.folder.glob(f"*{_PART}"):
                    if _COMPLETE.fullmatch(leftover.stem):
                        _remove(leftover)
            names = os.listdir(self.folder) if self.folder.is_dir() else []
        except OSError as error:
            raise self._cannot_use(error) from None
        return sorted((int(match[1]) for match in map(_COMPLETE.fullmatch, names) if match), reverse=True)

    def _check_writable(self) -> None:
        """Checks that this rank can write to the folder that rank 0 has created."""
        if self.folder.is_dir():
            try:
                tempfile.TemporaryFile(dir=self.folder).close()
            except OSError as error:
                raise self._cannot_use(error) from None

    def _cannot_use(self, error: OSError) -> SetupError:
        return SetupError(
            f"--checkpoint-folder {self.folder} cannot be used: {error.strerror or error}; name another folder"
        )

    def _refuse_different(self) -> bool:
        raise SetupError(
            f"--checkpoint-folder {self.folder} contains different checkpoints on different hosts: name a folder that "
            "all hosts share"
        )

    def _refuse_damaged(self) -> None:
        raise SetupError(
            f"--checkpoint-folder {self.folder} contains no checkpoint that can be read: {'; '.join(self.damaged)}; "
            "remove its content to start from the beginning, or name another folder"
        )

    def _damage(self, step: int) -> str | None:
        """The error in this rank's share of the files of a checkpoint; None if there is no error."""
        place, ranks = self._place(step), self._ranks
        try:
            digests = _read_digests(place)
            for name in sorted(digests)[ranks.rank :: ranks.size]:
                if _sha256(place / name) != digests[name]:
                    return f"{place / name} is damaged: its SHA-256 differs from the one in {_DIGESTS}"
            if self._record(place)["format"] == _FORMAT and not digests:
                return f"{place} is damaged: it has no {_DIGESTS}"
        except (OSError, ValueError) as error:
            return f"{place} is damaged: {error}"
        return None

    def _record(self, place: Path) -> dict[str, Any]:
        """The record that `save` wrote for this rank, or for rank 0 if the saved run did not have this rank.

        Raises:
            OSError, ValueError: if the file cannot be read, or has a different format.
        """
        file = place / self._run_file(self._ranks.rank)
        if not file.exists():
            file = place / self._run_file(0)
        try:
            record = parse_json(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file.name} cannot be read: {error}") from None
        if not isinstance(record, dict) or "format" not in record:
            raise ValueError(f"{file.name} does not have the format that hvdcomp writes")
        if record["format"] in _FORMATS and not all(isinstance(record.get(key), dict) for key in ("facts", "run")):
            raise ValueError(
                f"{file.name} does not have the format that hvdcomp writes: the facts of the run are missing"
            )
        if record["format"] in _FORMATS and (missing := _POSITION - record["run"].keys()):
            raise ValueError(
                f"{file.name} does not have the format that hvdcomp writes: these values are missing: "
                f"{', '.join(sorted(missing))}"
            )
        return record

    def _read(self) -> dict[str, Any]:
        place = self._place(self._saved)
        record = self._record(place)
        if record["format"] not in _FORMATS:
            raise SetupError(f"{place} was written by another version of hvdcomp; name another --checkpoint-folder")
        self.old_ranks = record["facts"].get(_RANKS, self._ranks.size)
        older = {name: value for name, value in of_older_runs(TrainingOptions).items() if name in self._facts}
        facts = json.loads(json.dumps(older)) | record["facts"]
        names = sorted({*facts, *self._facts} - {_RANKS})
        # All differences are listed, because they may be related: for example, a different model has a different
        # default learning rate.
        if differing := [name for name in names if facts.get(name) != self._facts.get(name)]:
            then = " and ".join(f"{name}={facts.get(name)!r}" for name in differing)
            now = " and ".join(repr(self._facts.get(name)) for name in differing)
            raise SetupError(
                f"{place} was saved by a run with {then}, but this run has {now}: use the same options as the saved "
                "run, or name another --checkpoint-folder"
            )
        return record["run"]

    @property
    def sources(self) -> Sequence[int]:
        """The old ranks whose files this rank uses. The first one is this rank itself, if the saved run had this
        rank."""
        rank = self._ranks.rank
        return range(rank, self.old_ranks, self._ranks.size) or [rank % self.old_ranks]

    @property
    def change(self) -> str | None:
        """A message that explains what happens to the saved residuals; None if each rank keeps its own residuals."""
        then, now = self.old_ranks, self._ranks.size
        if self._residuals == "drop":
            fate = "are dropped, because of --residuals drop"
        elif then == now:
            return None
        elif self._fsdp:
            fate = "are kept, and cut to fit the new shards"
        elif then < now:
            fate = f"are kept, on rank{' 0' if then == 1 else f's 0 to {then - 1}'}"
        else:
            most = -(-then // now)
            fate = (
                f"are kept; each new rank continues with the residuals of {'' if then % now == 0 else 'up to '}{most} "
                "old ranks"
            )
        return f"the checkpoint has {_counted(then)}, but this run has {_counted(now)}: the residuals {fate}"

    def restore(self, learner: Learner) -> None:
        """Loads the checkpoint that was found into the learner. Call this on every rank.

        Raises:
            RunRefused: on every rank, if any rank cannot read or load the checkpoint.
        """
        place = self._place(self._saved)

        def restored() -> bool:
            try:
                learner.restore(place, self.sources, self._ranks.size)
            except UnreadableError as error:
                raise SetupError(f"{place} cannot be read: {error}; remove it, or name another folder") from None
            except (SetupError, SpecError, ConfigurationError):
                raise
            except Exception as error:  # Every error is caught, because no rank may end here alone.
                traceback.print_exc()
                raise SetupError(
                    f"{place} could be read, but not loaded: {error!r} (see the traceback above). Keep the checkpoint, "
                    "because this is an error in hvdcomp or in the framework. Continue with the versions that wrote "
                    "it, or name another --checkpoint-folder to start from the beginning"
                ) from None
            return True

        self._ranks.together(restored)

    def save(self, step: int, learner: Learner, run: Callable[[], dict[str, Any]]) -> None:
        """Saves the state of all ranks after this step. Returns when the checkpoint is complete. Call this on every
        rank.

        If this step is already saved, it is not saved again.

        Args:
            step: number of completed steps.
            learner: the learner of this rank.
            run: a function that returns this rank's position as JSON data, which `find` returns later. It is called
                after the learner was saved.

        Raises:
            ConfigurationError: on every rank, if any rank could not write. The previous checkpoint still exists.
        """
        if step == self._saved:
            return
        place = self._place(step)
        part = place.with_name(place.name + _PART)

        def begin() -> None:
            part.mkdir(parents=True, exist_ok=True)
            if part.is_symlink():
                raise OSError(f"{part} is now a link")

        def write() -> dict[str, str]:
            files = learner.save(part)
            record = {"format": _FORMAT, "facts": self._facts, "run": run()}
            file = part / self._run_file(self._ranks.rank)
            write_file(file, json.dumps(record).encode())
            return {path.name: _sha256(path) for path in (*files, file)}

        def complete() -> None:
            if self._ranks.rank == 0:
                self._complete(part, place, {name: text for of_rank in digests for name, text in of_rank.items()})

        try:
            # If a single rank failed here, the other ranks would wait in the learner's collectives.
            self._on_all(begin)
            digests = self._on_all(write)
            self._on_all(complete)
        except ConfigurationError:
            if self._ranks.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            raise
        self._saved = step

    def _complete(self, part: Path, place: Path, digests: Mapping[str, str]) -> None:
        missing = [name for name in digests if not (part / name).exists()]
        if missing:
            raise OSError(f"{missing[0]} is not in the folder of rank 0: name a folder that all hosts share")
        lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
        write_file(part / _DIGESTS, "".join(lines).encode())
        for file in (*part.iterdir(), part):
            _to_disk(file)
        # If a checkpoint of this step exists, it is damaged; otherwise, the run would have resumed from it.
        if os.path.lexists(place):
            _remove(place)
        part.rename(place)
        _to_disk(self.folder)
        kept_names = {place.name, self._place(self._saved).name}
        for name in os.listdir(self.folder):
            if _COMPLETE.fullmatch(name) and name not in kept_names:
                _remove(self.folder / name)

    def _on_all(self, do: Callable[[], Result]) -> list[Result]:
        """Raises an error of one rank on all ranks, like `Ranks.together`, but for errors in the middle of a run.
        Returns the results of all ranks."""
        result: Any = None
        problem = None
        try:
            result = do()
        except (OSError, RuntimeError) as error:
            problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        answers = self._ranks.gather((problem, result), "checkpoint")
        for rank, (failure, _) in enumerate(answers):
            if failure is not None:
                raise ConfigurationError(
                    f"the checkpoint in {self.folder} cannot be written on rank {rank}: {failure}; the previous "
                    "checkpoint, if there is one, is complete"
                )
        return [of_rank for _, of_rank in answers]

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    @staticmethod
    def _run_file(rank: int) -> str:
        return f"run-{rank}.json"


def _counted(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _remove(place: Path) -> None:
    """Removes a folder, a file or a link. The target of a link is not removed."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink()


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _read_digests(place: Path) -> dict[str, str]:
    """The digests of a checkpoint's files, by name; empty if the checkpoint was written by a version without digests.

    Raises:
        OSError, ValueError: if the digests cannot be read.
    """
    file = place / _DIGESTS
    if not file.exists():
        return {}
    lines = [line.partition("  ") for line in file.read_text(encoding="utf-8").splitlines()]
    if not lines or not all(name and "/" not in name for _, _, name in lines):
        raise ValueError(f"{_DIGESTS} does not have the format that hvdcomp writes")
    return {name: digest for digest, _, name in lines}
