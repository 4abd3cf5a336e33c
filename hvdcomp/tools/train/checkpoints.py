"""Saving a run in the middle and going on from there, as if it had never stopped.

A checkpoint is a folder `step-N` of files from all ranks: what the learner writes of the model, the optimizer and the
compression, and where the run was. It is written under another name and renamed when all ranks have written their part,
so that a folder of this name is complete; only then is all but it and the one before it removed. A file SHA256SUMS, as
`sha256sum` writes and checks it, holds the digests of all others. They are checked before a run goes on: if the newest
checkpoint is damaged, all ranks go on from the one before it.

A run may go on with another number of ranks. Each then goes on from the files of the old ranks that `sources` names.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from hvdcomp.errors import ConfigurationError
from hvdcomp.files import parse_json, write_file
from hvdcomp.tools.train.learner import Learner
from hvdcomp.tools.train.options import SetupError, TrainingOptions
from hvdcomp.tools.train.ranks import Ranks

_FORMAT = 2
_FORMATS = (1, _FORMAT)  # the first one had no digests
_COMPLETE = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
_PART = ".part"  # after such a name: of one that is not complete
_DIGESTS = "SHA256SUMS"
# What a run may go on with changed: where things are and are shown, how long it is and waits, when gradients are sent,
# and what becomes of residuals. So may the number of ranks, which is among the facts.
_MAY_CHANGE = {
    *("epochs", "overwrite", "progress", "tensorboard", "checkpoint_every", "overlap", "bucket_bytes", "residuals"),
    *("elastic", "metrics_port", "metrics_address", "timeout", "steps", "until", "evaluate_every"),
    *("simulate_ranks", "link"),
}
_RANKS = "ranks"
# Options that earlier versions did not have, and what they did.
_BEFORE = {
    **{"optimizer": "sgd", "schedule": "step", "betas": [0.9, 0.95], "validation_samples": 0},
    **{"freeze_after": None, "freeze_compression": "int4", "local_steps": 1, "refreshes_per_gap": None},
    **{"outer_lr": None, "outer_momentum": None, "fragments": 1, "delay": 0, "local_share": 0.0, "fsdp": False},
}

KEPT = ("step", "epoch", "taken", "losses", "times", "epochs")
"""What of a run a checkpoint keeps as it is."""

_POSITION = {*KEPT, "augmenting", "resumed_at", "seconds", "epoch_seconds", "sizes"}  # all that a run goes on from

# What reading a file raises that is damaged, of another program, or made to do harm.
_UNREADABLE = (
    OSError,
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    pickle.UnpicklingError,
)

Done = TypeVar("Done")


class Warnings:
    """Notes, while it is entered, that this process was told to stop: SIGUSR1, SIGTERM or SIGUSR2 no longer end it.

    Attributes:
        told: whether it was.
        all_told: whether that is meant for all ranks, by SIGUSR2; else the others of an elastic job go on.
    """

    SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2)

    def __init__(self) -> None:
        self.told = self.all_told = False
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

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.told = True
        self.all_told |= number == signal.SIGUSR2


class Checkpoints:
    """The checkpoints of one run.

    Args:
        options: which name the folder, the same on all hosts.
        facts: in which a run that goes on must agree with the one that was saved, as JSON.

    Attributes:
        damaged: what is wrong with checkpoints newer than the one that was found, the same on all ranks.
        old_ranks: how many ranks saved the one that was found.
    """

    def __init__(self, options: TrainingOptions, facts: Mapping[str, Any], ranks: Ranks) -> None:
        assert options.checkpoint_folder is not None
        self.folder = options.checkpoint_folder
        self._every = options.checkpoint_every
        self._residuals = options.residuals
        self._ranks = ranks
        kept = {name: value for name, value in facts.items() if name not in _MAY_CHANGE}
        self._facts = json.loads(json.dumps({**kept, _RANKS: ranks.size}))
        self._saved = -1  # the step of the newest that is not damaged
        self.damaged: list[str] = []
        self.old_ranks = ranks.size

    def due(self, step: int) -> bool:
        """Whether there is to be one after this step."""
        return self._every is not None and step % self._every == 0

    @property
    def due_each_epoch(self) -> bool:
        """Whether there is to be one at the end of each epoch."""
        return self._every is None

    def find(self) -> dict[str, Any] | None:
        """What `save` was given for the newest checkpoint that is not damaged; None if there is no checkpoint.

        A rank that the run did not have gets what another one saved. Call it on every rank.

        Raises:
            RunRefused: on every rank, if it is of another run, or all are damaged, or none could be written.
        """
        ranks = self._ranks
        steps = ranks.together(self._steps)
        ranks.together(self._check_writable)
        if any(others != steps for others in ranks.gather(steps, "checkpoint")):
            ranks.together(self._refuse_different)
        for step in steps:
            # Each rank looks at a part of the files; all hear of the same damage.
            damages = [damage for damage in ranks.gather(self._damage(step), "checkpoint") if damage is not None]
            if not damages:
                self._saved = step
                return ranks.together(self._read)
            self.damaged.append(damages[0])
        if self.damaged:
            ranks.together(self._refuse_damaged)
        return None

    def _steps(self) -> list[int]:
        """The steps of all checkpoints, the newest first."""
        try:
            if self._ranks.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                for left in self.folder.glob(f"*{_PART}"):
                    if _COMPLETE.fullmatch(left.stem):
                        _remove(left)
            names = os.listdir(self.folder) if self.folder.is_dir() else []
        except OSError as error:
            raise self._cannot_use(error) from None
        return sorted((int(match[1]) for match in map(_COMPLETE.fullmatch, names) if match), reverse=True)

    def _check_writable(self) -> None:
        """Sees that this rank can write to the folder, which rank 0 has made where all hosts share it."""
        if self.folder.is_dir():
            try:
                tempfile.TemporaryFile(dir=self.folder).close()
            except OSError as error:
                raise self._cannot_use(error) from None

    def _cannot_use(self, error: OSError) -> SetupError:
        return SetupError(f"--checkpoint-folder {self.folder}: {error.strerror or error}; name another")

    def _refuse_different(self) -> bool:
        raise SetupError(
            f"--checkpoint-folder {self.folder} holds different checkpoints on different hosts: name a folder that all "
            "of them share"
        )

    def _refuse_damaged(self) -> None:
        raise SetupError(
            f"--checkpoint-folder {self.folder} holds no checkpoint that can be read: {'; '.join(self.damaged)}; "
            "remove what it holds to start anew, or name another folder"
        )

    def _damage(self, step: int) -> str | None:
        """What is wrong with this rank's share of the files of a checkpoint, or None."""
        place, ranks = self._place(step), self._ranks
        try:
            digests = _read_digests(place)
            for name in sorted(digests)[ranks.rank :: ranks.size]:
                if _sha256(place / name) != digests[name]:
                    return f"{place / name} is not what was written (its SHA-256 differs from that in {_DIGESTS})"
            if self._record(place)["format"] == _FORMAT and not digests:
                return f"{place} is damaged: it has no {_DIGESTS}"
        except (OSError, ValueError) as error:
            return f"{place} is damaged: {error}"
        return None

    def _record(self, place: Path) -> dict[str, Any]:
        """What `save` wrote of this rank's run, or of rank 0's, where the run had fewer ranks.

        Raises:
            OSError, ValueError: if it cannot be read, or is something else.
        """
        file = place / self._run_file(self._ranks.rank)
        if not file.exists():
            file = place / self._run_file(0)
        try:
            record = parse_json(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file.name} cannot be read: {error}") from None
        if not isinstance(record, dict) or "format" not in record:
            raise ValueError(f"{file.name} is not as hvdcomp writes it")
        if record["format"] in _FORMATS and not all(isinstance(record.get(key), dict) for key in ("facts", "run")):
            raise ValueError(f"{file.name} is not as hvdcomp writes it: it lacks the facts of a run")
        if record["format"] in _FORMATS and (missing := _POSITION - record["run"].keys()):
            raise ValueError(f"{file.name} is not as hvdcomp writes it: it lacks {', '.join(sorted(missing))}")
        return record

    def _read(self) -> dict[str, Any]:
        place = self._place(self._saved)
        record = self._record(place)
        if record["format"] not in _FORMATS:
            raise SetupError(f"{place} is of another version of hvdcomp; name another --checkpoint-folder")
        self.old_ranks = record["facts"].get(_RANKS, self._ranks.size)
        facts = _BEFORE | record["facts"]
        names = sorted({*facts, *self._facts} - {_RANKS})
        # All of them: where the user asked for another model, its own learning rate is another one too.
        if others := [name for name in names if facts.get(name) != self._facts.get(name)]:
            then = " and ".join(f"{name}={facts.get(name)!r}" for name in others)
            now = " and ".join(repr(self._facts.get(name)) for name in others)
            raise SetupError(
                f"{place} is of a run with {then}, and this one has {now}: start it as that one was, or name another "
                "--checkpoint-folder"
            )
        return record["run"]

    @property
    def sources(self) -> Sequence[int]:
        """The old ranks whose files this rank goes on from; the first is this rank itself, if it was there."""
        rank = self._ranks.rank
        return range(rank, self.old_ranks, self._ranks.size) or [rank % self.old_ranks]

    @property
    def change(self) -> str | None:
        """What happens to what the ranks had left to send, for the user; None if nothing does."""
        then, now = self.old_ranks, self._ranks.size
        if self._residuals == "drop":
            kept = "is dropped, as --residuals drop says"
        elif then == now:
            return None
        elif then < now:
            kept = f"is kept, by rank{' 0' if then == 1 else f's 0 to {then - 1}'}"
        else:
            most = -(-then // now)
            kept = f"is kept, {'' if then % now == 0 else 'up to '}{most} old ranks in each"
        return f"checkpoint of {_counted(then)}, this run has {_counted(now)}: what was left to be sent {kept}"

    def restore(self, learner: Learner) -> None:
        """Puts the checkpoint that was found into the learner. Call it on every rank.

        Raises:
            RunRefused: on every rank, if any cannot read it.
        """
        place = self._place(self._saved)

        def restored() -> bool:
            try:
                learner.restore(place, self.sources, self._ranks.size)
            except _UNREADABLE as error:
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

        def write() -> dict[str, str]:
            part.mkdir(parents=True, exist_ok=True)
            if part.is_symlink():
                raise OSError(f"{part} is a link now")
            files = learner.save(part)
            record = {"format": _FORMAT, "facts": self._facts, "run": run()}
            file = part / self._run_file(self._ranks.rank)
            write_file(file, json.dumps(record).encode())
            return {each.name: _sha256(each) for each in (*files, file)}

        def complete() -> None:
            if self._ranks.rank == 0:
                self._complete(part, place, {name: text for each in digests for name, text in each.items()})

        try:
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
        if os.path.lexists(place):  # damaged, or the run would have gone on from there
            _remove(place)
        part.rename(place)
        _to_disk(self.folder)
        kept = {place.name, self._place(self._saved).name}
        for name in os.listdir(self.folder):
            if _COMPLETE.fullmatch(name) and name not in kept:
                _remove(self.folder / name)

    def _on_all(self, do: Callable[[], Done]) -> list[Done]:
        """Like `Ranks.together`, for what can go wrong in the middle of a run. Returns what it gave on each rank."""
        done: Any = None
        problem = None
        try:
            done = do()
        except (OSError, RuntimeError) as error:
            problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        answers = self._ranks.gather((problem, done), "checkpoint")
        for rank, (failure, _) in enumerate(answers):
            if failure is not None:
                raise ConfigurationError(
                    f"the checkpoint in {self.folder} cannot be written on rank {rank}: {failure}; the one before it, "
                    "if any, is complete"
                )
        return [each for _, each in answers]

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    @staticmethod
    def _run_file(rank: int) -> str:
        return f"run-{rank}.json"


def _counted(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _remove(place: Path) -> None:
    """Removes what has the name of a folder of ours, whatever it is; of a link not what it leads to."""
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
    """The digests of a checkpoint's files, by name; none if a version of hvdcomp without them wrote it.

    Raises:
        OSError, ValueError: if they cannot be read.
    """
    file = place / _DIGESTS
    if not file.exists():
        return {}
    lines = [line.partition("  ") for line in file.read_text(encoding="utf-8").splitlines()]
    if not lines or not all(name and "/" not in name for _, _, name in lines):
        raise ValueError(f"{_DIGESTS} is not as hvdcomp writes it")
    return {name: digest for digest, _, name in lines}
