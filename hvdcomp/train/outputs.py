"""The files of a run, written by rank 0: steps.jsonl, epochs.jsonl, summary.json, and TensorBoard's if wanted.

Lines are flushed as they are written, so that a run that is killed leaves all it did; summary.json appears
when the run is over. JSON is strict: what is not a finite number is null.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from hvdcomp.train.settings import SetupError

STEPS, EPOCHS, SUMMARY, TENSORBOARD = "steps.jsonl", "epochs.jsonl", "summary.json", "tensorboard"
DECISIONS = "decisions.jsonl"  # written by the compression


def check_output(folder: Path, overwrite: bool) -> None:
    """See that a run can be written to `folder`, before any training. Changes nothing.

    Raises:
        SetupError: it holds a run already, or cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise SetupError(f"--output {folder} is a file; name a folder")
    held = [name for name in (STEPS, EPOCHS, SUMMARY, DECISIONS, TENSORBOARD) if (folder / name).exists()]
    if held and not overwrite:
        raise SetupError(f"--output {folder} holds a run already ({held[0]}): name another, or add --overwrite")
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise SetupError(f"--output {folder}: no permission to write in {existing}")


def check_tensorboard() -> None:
    """Raises SetupError if TensorBoard is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise SetupError("--tensorboard needs TensorBoard: pip install 'hvdcomp[train]'") from None


class RunWriter:
    """Writes one run to a folder, in place of one that is there."""

    def __init__(self, folder: Path, tensorboard: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (STEPS, EPOCHS, SUMMARY, DECISIONS):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / TENSORBOARD, ignore_errors=True)
        self._folder = folder
        self._steps = (folder / STEPS).open("w", encoding="utf-8")
        self._epochs = (folder / EPOCHS).open("w", encoding="utf-8")
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / TENSORBOARD))

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
                    self._board.add_scalar(f"{kind}/{key}", value, record["step"])

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json, whole or not at all, and close everything."""
        part = self._folder / (SUMMARY + ".part")
        part.write_text(json.dumps(strict(summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        part.replace(self._folder / SUMMARY)
        self._steps.close()
        self._epochs.close()
        if self._board is not None:
            self._board.close()


def strict(value: Any) -> Any:
    """`value` with None for every number that JSON cannot hold (infinities, not-a-number)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value
