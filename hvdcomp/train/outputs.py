"""The files of a run, written by rank 0: steps.jsonl, epochs.jsonl, summary.json, and TensorBoard's if wanted.

Lines are flushed as they are written, so that a run that is killed leaves all it did; summary.json appears
when the run is over. JSON is strict: what is not a finite number is null.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdcomp.train.settings import SetupError

STEPS, EPOCHS, SUMMARY, TENSORBOARD = "steps.jsonl", "epochs.jsonl", "summary.json", "tensorboard"
DECISIONS = "decisions.jsonl"  # written by the compression


def check_output(folder: Path, overwrite: bool, sizes: Mapping[str, int] | None = None) -> None:
    """See that a run can be written to `folder`, before any training. Changes nothing.

    Args:
        sizes: of the files that a checkpoint goes on with, as `RunWriter.sizes` told; None for a run from its start.

    Raises:
        SetupError: it holds a run already, or not the one of the checkpoint, or cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise SetupError(f"--output {folder} is a file; name a folder")
    if sizes is not None:
        for name, size in sizes.items():
            if not (folder / name).is_file() or (folder / name).stat().st_size < size:
                raise SetupError(
                    f"--output {folder}: {name} is not that of the run that was saved in --checkpoint-folder; name the "
                    "same --output as before, or another --checkpoint-folder"
                )
        return
    held = [name for name in (STEPS, EPOCHS, SUMMARY, DECISIONS, TENSORBOARD) if (folder / name).exists()]
    if held and not overwrite:
        raise SetupError(f"--output {folder} holds a run already ({held[0]}): name another, or add --overwrite")
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise SetupError(f"--output {folder}: no permission to write in {existing}")


def check_tensorboard() -> None:
    """Raises SetupError if TensorBoard is not installed."""
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        raise SetupError("--tensorboard needs TensorBoard: pip install 'hvdcomp[train]'") from None


class RunWriter:
    """Writes one run to a folder, in place of one that is there, or going on with it.

    Args:
        sizes: None for a new run; else of the files at the step `done`: what was written after it goes.
        done: steps.
    """

    def __init__(self, folder: Path, tensorboard: bool, sizes: Mapping[str, int] | None = None, done: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (STEPS, EPOCHS, DECISIONS):
            if sizes is not None and name in sizes:
                os.truncate(folder / name, sizes[name])
            else:
                (folder / name).unlink(missing_ok=True)
        (folder / SUMMARY).unlink(missing_ok=True)
        if sizes is None:
            shutil.rmtree(folder / TENSORBOARD, ignore_errors=True)
        self._folder = folder
        self._steps = (folder / STEPS).open("a", encoding="utf-8")
        self._epochs = (folder / EPOCHS).open("a", encoding="utf-8")
        self._board: _Board | None = None
        if tensorboard:
            self._board = _Board(folder / TENSORBOARD, done)

    def step(self, record: dict[str, Any]) -> None:
        """Add a line to steps.jsonl; its `step` is TensorBoard's step too."""
        self._write(self._steps, record, "step")

    def epoch(self, record: dict[str, Any]) -> None:
        """Add a line to epochs.jsonl."""
        self._write(self._epochs, record, "epoch")

    def _write(self, file: Any, record: dict[str, Any], kind: str) -> None:
        file.write(json.dumps(strict(record), allow_nan=False) + "\n")
        file.flush()
        if self._board is not None:
            for key, value in record.items():
                if key not in ("step", "epoch") and value is not None:
                    self._board.scalar(f"{kind}/{key}", value, record["step"])

    def sizes(self) -> dict[str, int]:
        """Bytes of the files so far, which are then on the disk, as TensorBoard's are."""
        if self._board is not None:
            self._board.flush()
        sizes = {}
        for name in (STEPS, EPOCHS, DECISIONS):
            if (self._folder / name).exists():
                with (self._folder / name).open("rb") as file:
                    os.fsync(file.fileno())
                    sizes[name] = os.fstat(file.fileno()).st_size
        return sizes

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json, whole or not at all, and close everything."""
        part = self._folder / (SUMMARY + ".part")
        part.write_text(json.dumps(strict(summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        part.replace(self._folder / SUMMARY)
        self._steps.close()
        self._epochs.close()
        if self._board is not None:
            self._board.close()


class _Board:
    """Writes scalars for TensorBoard, with TensorBoard's own writer: no framework is needed."""

    def __init__(self, folder: Path, done: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._file = EventFileWriter(str(folder))
        if done:  # TensorBoard forgets what earlier files hold from this step on
            start = SessionLog(status=SessionLog.START)
            self._file.add_event(Event(wall_time=time.time(), step=done + 1, session_log=start))

    def scalar(self, name: str, value: float, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        self._file.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def strict(value: Any) -> Any:
    """`value` with None for every number that JSON cannot hold (infinities, not-a-number)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value
