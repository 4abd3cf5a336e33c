"""Writes the files of a run on rank 0: steps.jsonl, evaluations.jsonl, epochs.jsonl, summary.json, and optionally
TensorBoard's files.

Each line is written immediately and completely, so the records of all steps exist even if the run is killed or the disk
is full. summary.json is written at the end of the run. The JSON is strict, so numbers that are not finite are null.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvdcomp.files import RecordFile, aside, bring_back, put_aside_before, replace_text
from hvdcomp.tools.train.options import DECISIONS, SetupError

STEPS, EPOCHS, SUMMARY, TENSORBOARD = "steps.jsonl", "epochs.jsonl", "summary.json", "tensorboard"
EVALUATIONS = "evaluations.jsonl"
RECORDS = (STEPS, EVALUATIONS, EPOCHS)
# The key in `sizes` for the number of the newest full file of decisions. When a file of decisions is full, it is
# renamed and gets a number, and a new file is started.
_ASIDE = f"{DECISIONS} put aside"


def check_output(folder: Path, overwrite: bool, sizes: Mapping[str, int] | None = None) -> None:
    """Checks, before any training, that a run can be written to `folder`. Does not change anything.

    Args:
        folder: folder of the run.
        overwrite: whether an earlier run may be replaced.
        sizes: if the run resumes from a checkpoint, the sizes of its files (`RunWriter.sizes`); None for a new run.

    Raises:
        SetupError: if the folder contains a different run, or is not writable.
    """
    try:
        _check_output(folder, overwrite, sizes)
    except OSError as error:
        raise _cannot_write(folder, error) from None


def _check_output(folder: Path, overwrite: bool, sizes: Mapping[str, int] | None) -> None:
    if folder.exists() and not folder.is_dir():
        raise SetupError(f"--output {folder} is a file; name a folder")
    if sizes is not None:
        for name in filter(sizes.__contains__, (*RECORDS, DECISIONS)):
            file = folder / name
            if name == DECISIONS and put_aside_before(file).keys() - range(sizes.get(_ASIDE, 0) + 1):
                file = aside(file, sizes.get(_ASIDE, 0) + 1)  # the file was renamed after the checkpoint
            if not file.is_file() or file.stat().st_size < sizes[name]:
                raise SetupError(
                    f"--output {folder}: {name} does not belong to the run that was saved in --checkpoint-folder; name "
                    "the same --output as before, or a different --checkpoint-folder"
                )
        return
    files = [name for name in (*RECORDS, SUMMARY, DECISIONS, TENSORBOARD) if (folder / name).exists()]
    files += [file.name for file in put_aside_before(folder / DECISIONS).values()]
    if files and not overwrite:
        raise SetupError(
            f"--output {folder} already contains a run ({files[0]}): name another folder, or add --overwrite"
        )
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise SetupError(f"--output {folder}: {existing} is a file; name another folder")
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        error.filename = str(existing)
        raise


def _cannot_write(folder: Path, error: OSError) -> SetupError:
    place = folder if error.filename is None else error.filename
    return SetupError(f"--output {folder} cannot be written: {error.strerror or error}: {place}; name another folder")


def check_tensorboard() -> None:
    """Raises SetupError if TensorBoard is not installed."""
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        raise SetupError("--tensorboard needs TensorBoard: pip install 'hvdcomp[train]'") from None


class RunWriter:
    """Writes a run to a folder. The run either replaces or continues an earlier run.

    If writing fails during the run, no exception is raised, because the other ranks would wait for this rank. Instead,
    the error is stored in `problem`, which all ranks check. Nothing is written after an error.

    Args:
        folder: folder of the run.
        tensorboard: whether to write TensorBoard's files.
        sizes: None for a new run. Otherwise the sizes of the files after `steps_done` steps. The files are cut to these
            sizes.
        steps_done: number of completed steps of a resumed run; 0 for a new run.

    Attributes:
        problem: the first error of writing; None if there was no error.

    Raises:
        SetupError: if the files cannot be created.
    """

    def __init__(
        self, folder: Path, tensorboard: bool, sizes: Mapping[str, int] | None = None, steps_done: int = 0
    ) -> None:
        self.problem: str | None = None
        self._folder = folder
        self._board: _Board | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            bring_back(folder / DECISIONS, 0 if sizes is None else sizes.get(_ASIDE, 0))
            for name in (*RECORDS, DECISIONS):
                if sizes is not None and name in sizes:
                    os.truncate(folder / name, sizes[name])
                else:
                    (folder / name).unlink(missing_ok=True)
            (folder / SUMMARY).unlink(missing_ok=True)
            if sizes is None:
                shutil.rmtree(folder / TENSORBOARD, ignore_errors=True)
            self._files = {name: RecordFile(folder / name) for name in RECORDS}
            if tensorboard:
                self._board = _Board(folder / TENSORBOARD, steps_done)
        except OSError as error:
            raise _cannot_write(folder, error) from None

    def step(
        self, record: dict[str, Any], cost: dict[str, float | None], metrics: Callable[[], Mapping[str, float]]
    ) -> None:
        """Adds a line to steps.jsonl. The `step` of the record is also the step in TensorBoard.

        Args:
            record: the values of the step, by column.
            cost: the bytes and times of the step, for the line.
            metrics: a function that returns the bytes and times of the step, for TensorBoard.
        """
        scalars = {} if self._board is None else {**_tagged("step", record), **metrics()}
        self._write(STEPS, {**record, **cost}, scalars)

    def evaluation(self, record: dict[str, Any]) -> None:
        """Adds a line to evaluations.jsonl."""
        self._write(EVALUATIONS, record, {})

    def epoch(self, record: dict[str, Any]) -> None:
        """Adds a line to epochs.jsonl."""
        self._write(EPOCHS, record, _tagged("epoch", record))

    def _write(self, name: str, record: dict[str, Any], scalars: Mapping[str, float | None]) -> None:
        if self.problem is not None:
            return
        try:
            self._files[name].write(json.dumps(strict(record), allow_nan=False).encode() + b"\n")
        except OSError as error:
            self._note(name, error)
        if self._board is not None:
            try:
                self._board.scalars(record["step"], scalars)
            except OSError as error:
                self._note(TENSORBOARD, error)

    def _note(self, name: str, error: OSError) -> None:
        if self.problem is None:  # only the first error is kept, because it causes the others
            self.problem = f"{self._folder / name} cannot be written: {error.strerror or error}"

    def sizes(self) -> dict[str, int]:
        """Flushes the files to the disk. Returns the sizes of the files in bytes, and the number of the newest full
        file of decisions (0 if there is none).

        Raises:
            OSError: if the files cannot be written to the disk.
        """
        sizes = {_ASIDE: max(put_aside_before(self._folder / DECISIONS), default=0)}
        for name in (*RECORDS, DECISIONS):
            if (self._folder / name).exists():
                with (self._folder / name).open("rb") as file:
                    os.fsync(file.fileno())
                    sizes[name] = os.fstat(file.fileno()).st_size
        return sizes

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes summary.json atomically, and closes all files."""
        text = json.dumps(strict(summary), indent=2, allow_nan=False) + "\n"
        try:
            replace_text(self._folder / SUMMARY, text)
        except OSError as error:
            self._note(SUMMARY, error)
        for file in self._files.values():
            file.close()
        if self._board is not None:
            self._board.close()


class _Board:
    """Writes scalars in TensorBoard's record format, without a framework.

    TensorBoard's `EventFileWriter` is not used, because it writes in a thread, which ends with a traceback if the disk
    is full.
    """

    def __init__(self, folder: Path, steps_done: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        # TensorBoard reads files with names of this form, in the order of the times in their names.
        self._file = RecordFile(folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}")
        self._records = RecordWriter(self._file)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if steps_done:  # tells TensorBoard to drop the scalars of earlier files from this step on
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=steps_done + 1, session_log=start))

    def scalars(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Writes the scalars of a step that are not None."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items() if value is not None]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()


def _tagged(kind: str, record: Mapping[str, Any]) -> dict[str, float | None]:
    """The values of a line as scalars for TensorBoard."""
    return {f"{kind}/{key}": value for key, value in record.items() if key not in ("step", "epoch")}


def strict(value: Any) -> Any:
    """Replaces every number in `value` that is not finite with None, because strict JSON cannot represent such
    numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value
